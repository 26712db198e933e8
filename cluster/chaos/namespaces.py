"""Namespaces of the cluster's own: a network on whose loopback packets can be lost, and a small disk that can be full.

The command starts itself anew where there is nothing but a loopback, and where a file system in memory lies over one
folder. Both end with the last process in them, and nothing of them is left on the host. Needs root and some programs.
What is lost there is lost by the kernel: of every connection, Ray's and Redis's as well, to be sent again by TCP.
"""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from cluster import config
from pronghorn.errors import Unavailable

PROGRAMS = {"unshare": "util-linux", "mount": "mount", "ip": "iproute2", "nft": "nftables"}
"""Those it takes, and how their packages are called."""
DISK_BYTES = 64 << 20
TABLE = "inet pronghorn_chaos"
PARTS = 10_000
"""Of a chance, as the kernel draws it."""
_VARIABLE = "CHAOS_NETWORK"
"""In the environment: the namespace that was entered. Whoever is in another is in none of its own."""
_NAMESPACE = Path("/proc/self/ns/net")
_ENTER = f"""
disk=$1 && shift && ip link set lo up && mount -t tmpfs -o size={DISK_BYTES} pronghorn "$disk" &&
export {_VARIABLE}="$(readlink {_NAMESPACE})" && exec "$@"
"""


def why_not() -> str | None:
    """Why this machine grants none; None where it does."""
    missing = [f"{program} ({package})" for program, package in PROGRAMS.items() if shutil.which(program) is None]
    if os.geteuid() != 0:
        return "namespaces of its own need root"
    return f"namespaces of its own need {', '.join(missing)}" if missing else None


def is_entered() -> bool:
    return config.environment().get(_VARIABLE) == os.readlink(_NAMESPACE)


def enter(arguments: list[str]) -> None:
    """This process becomes `pronghorn` with these arguments, in namespaces of its own."""
    disk = disk_folder()
    disk.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-P", "-m", "cluster.cli", *arguments]
    os.execvp("unshare", ["unshare", "--net", "--mount", "--", "sh", "-c", _ENTER, "sh", str(disk), *command])


def disk_folder() -> Path:
    """Where the small disk lies, for those in the namespaces; an empty folder for everybody else."""
    return config.home(config.environment()) / ".chaos-disk"


class SmallDisk:
    """The disk that was entered."""

    def __init__(self, folder: Path) -> None:
        self._filler = folder / "filler"

    def fill(self) -> int:
        """Returns how many bytes that took."""
        with self._filler.open("wb", buffering=0) as filler:
            try:
                while True:
                    filler.write(bytes(1 << 20))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
            return filler.tell()

    def free(self) -> None:
        self._filler.unlink(missing_ok=True)


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
        told = _nft("-j", "list", "table", *TABLE.split())
        _nft("delete", "table", *TABLE.split())
        parts = (part for item in json.loads(told)["nftables"] for part in item.get("rule", {}).get("expr", []))
        return sum(part["counter"]["packets"] for part in parts if "counter" in part)


def _nft(*arguments: str, text: str = "") -> str:
    done = subprocess.run(["nft", *arguments], input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unavailable(f"nft refuses: {done.stderr.strip()}")
    return done.stdout
