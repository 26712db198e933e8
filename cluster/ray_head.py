"""The Ray cluster of one host that a local start brings up for itself, and the environment that shapes it.

One child process (`ray start --head --block`) owns every Ray process and ends them with it; it ends with us. Token
authentication with a token of the run's own; nothing is written to the user's home; `ray stop`, which reaches every
Ray on the machine, is never used.
"""

import os
import secrets
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cluster.die_with_parent import bound
from cluster.ports import free_ports
from cluster.processes import RUN_VARIABLE
from pronghorn.errors import ConfigurationError

START_TIMEOUT_S = 300.0
"""Two cores that ten others want have taken more than 90 s."""
STOP_GRACE_S = 5.0
OBJECT_STORE_BYTES = 100_000_000
"""Ray's object store carries no tokens and no blocks here; its least allowed size is 75 MiB."""

LOOPBACK_NODE_IP = "127.0.0.2"
"""How the one node is called. Ray replaces 127.0.0.1 by the machine's outward address, which a laptop changes."""

_FOREIGN = ("RAY_ADDRESS", "RAY_NAMESPACE", "RAY_TMPDIR", "RAY_AUTH_TOKEN", "RAY_JOB_CONFIG_JSON_ENV_VAR")
"""Settings of somebody else's Ray that a cluster of our own must not follow."""


def environment(
    base: dict[str, str], run_id: str, temp_dir: Path, token_path: Path, *, haproxy: bool, taken: set[int]
) -> dict[str, str]:
    """The environment of every process of a local run: Ray reads much of it at import. `taken`: ports not to use."""
    proxy_dir = temp_dir / "h"
    fallback_port, metrics_port, stats_port = free_ports(3, taken)
    kept = {name: value for name, value in base.items() if name not in _FOREIGN}
    return kept | {
        RUN_VARIABLE: run_id,
        "TMPDIR": str(temp_dir / "t"),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_path),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_START_HOOK": f"{__name__}.without_client_server",
        # Replicas otherwise run at nice 15, behind everything else on the machine.
        "RAY_worker_niceness": "0",
        # A killed Ray node is noticed in about 3 s, by default in 14 s. One that is only silent has 33 s: where it
        # is the only one, all ends with it, and a busy machine has kept a raylet from answering for three.
        "RAY_health_check_initial_delay_ms": "1000",
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "10000",
        "RAY_health_check_failure_threshold": "3",
        "RAY_DASHBOARD_STARTUP_TIMEOUT_S": f"{START_TIMEOUT_S:.0f}",
        "RAY_gcs_server_port_wait_time_s": f"{START_TIMEOUT_S:.0f}",
        "RAY_SERVE_ENABLE_HA_PROXY": "1" if haproxy else "0",
        # How long a leaving ingress replica is kept for load balancers that have not heard; 30 s by default.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_port),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics_port),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
        "RAY_SERVE_HAPROXY_NBTHREAD": "2",
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "1s",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(proxy_dir / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(proxy_dir / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(proxy_dir),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(proxy_dir / "state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(proxy_dir / "metrics.sock"),
    }


def without_client_server(ray_params: Any, _head: bool) -> None:
    """Called by `ray start` (RAY_START_HOOK): leave out the Ray Client server, a port that nobody here uses."""
    ray_params.ray_client_server_port = None


def write_token(path: Path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(secrets.token_hex(32))


class RayHead:
    def __init__(self, temp_dir: Path, dashboard_port: int, environ: dict[str, str]) -> None:
        self._temp_dir = temp_dir / "r"
        self._log_path = temp_dir / "ray-start.log"
        self._dashboard_port = dashboard_port
        self._environ = environ
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> str:
        """Returns the address at which to join it, once Ray has started. Raises ConfigurationError."""
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                bound(self._command()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environ,
                start_new_session=True,
            )
        address_file = self._temp_dir / "ray_current_cluster"
        give_up_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < give_up_s:
            if self._process.poll() is not None:
                raise ConfigurationError(f"Ray does not start: {self._last_words()}")
            if address_file.exists() and (address := address_file.read_text().strip()):
                return address
            time.sleep(0.05)
        raise ConfigurationError(f"Ray did not start within {START_TIMEOUT_S:.0f} s: {self._last_words()}")

    def _command(self) -> list[str]:
        options = [
            "--head",
            "--block",
            "--port=0",
            f"--temp-dir={self._temp_dir}",
            "--dashboard-host=127.0.0.1",
            f"--dashboard-port={self._dashboard_port}",
            "--dashboard-agent-listen-port=0",
            # Any free ports for workers, and not 10002 to 19999, where a user may want the API or the dashboard.
            "--min-worker-port=0",
            "--max-worker-port=0",
            "--include-log-monitor=false",
            f"--object-store-memory={OBJECT_STORE_BYTES}",
            "--disable-usage-stats",
        ]
        if sys.platform.startswith("linux"):
            options.append(f"--node-ip-address={LOOPBACK_NODE_IP}")
        return [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", *options]

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait(self) -> None:
        """Return when it has ended."""
        if self._process is not None:
            self._process.wait()

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_GRACE_S)

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._log_path.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line]
        return (errors or lines or ["it said nothing"])[-1]
