"""A network of the cluster's own, on whose loopback packets can be lost.

The command starts itself anew in a network namespace that has nothing but a loopback; the namespace ends with the last
process in it, and nothing of it is left on the host. Needs root and three programs. What is lost there is lost by the
kernel: of every connection, Ray's and Redis's as well, to be sent again by TCP.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from cluster import config
from pronghorn.errors import Unavailable

PROGRAMS = {"unshare": "util-linux", "ip": "iproute2", "nft": "nftables"}
"""Those it takes, and how their packages are called."""
TABLE = "inet pronghorn_chaos"
PARTS = 10_000
"""Of a chance, as the kernel draws it."""
_VARIABLE = "CHAOS_NETWORK"
"""In the environment: the namespace that was entered. Whoever is in another is not in one of its own."""
_NAMESPACE = Path("/proc/self/ns/net")
_ENTER = f'ip link set lo up && export {_VARIABLE}="$(readlink {_NAMESPACE})" && exec "$@"'


def why_not() -> str | None:
    """Why this machine grants none; None where it does."""
    missing = [f"{program} ({package})" for program, package in PROGRAMS.items() if shutil.which(program) is None]
    if os.geteuid() != 0:
        return "a network of its own needs root"
    return f"a network of its own needs {', '.join(missing)}" if missing else None


def is_entered() -> bool:
    return config.environment().get(_VARIABLE) == os.readlink(_NAMESPACE)


def enter(arguments: list[str]) -> None:
    """This process becomes `pronghorn` with these arguments, in a network of its own."""
    command = [sys.executable, "-P", "-m", "cluster.cli", *arguments]
    os.execvp("unshare", ["unshare", "--net", "--", "sh", "-c", _ENTER, "sh", *command])


class LossyNetwork:
    """The network that was entered. One loss at a time."""

    def lose(self, percent: float) -> None:
        """Of all packets that arrive, until `heal`. Raises Unavailable."""
        parts = round(percent * PARTS / 100)
        rule = f"meta iifname lo numgen random mod {PARTS} < {parts} counter drop"
        _nft(
            "-f", "-", text=f"table {TABLE} {{\nchain arriving {{\ntype filter hook input priority 0\n{rule}\n}}\n}}\n"
        )

    def heal(self) -> int:
        """Returns how many packets were lost. Raises Unavailable."""
        told = json.loads(_nft("-j", "list", "table", *TABLE.split()))
        _nft("delete", "table", *TABLE.split())
        parts = (part for item in told["nftables"] for part in item.get("rule", {}).get("expr", []))
        return sum(part["counter"]["packets"] for part in parts if "counter" in part)


def _nft(*arguments: str, text: str = "") -> str:
    done = subprocess.run(["nft", *arguments], input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unavailable(f"nft refuses: {done.stderr.strip()}")
    return done.stdout
