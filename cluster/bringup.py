"""Bringing one cluster up and taking it down: Redis, Ray, the application, in that order and back.

Whatever was begun is ended by `stop`, however far `start` came. What does not end when asked is killed, and then
nothing of the run is left: no process, no port, no folder.
"""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec

from cluster import processes
from cluster.announce import Announce, Announcement, detail, note, stage
from cluster.config import ServiceConfig
from cluster.ray_head import RayHead
from cluster.redis_server import RedisServer
from cluster.run_folder import Run, RunFolder, RunState
from cluster.serve_application import ServeApplication
from pronghorn.errors import ConfigurationError

log = logging.getLogger(__name__)

WATCH_PERIOD_S = 0.5
READY_POLL_S = 0.1
STOP_MARGIN_S = 30.0
"""What ending Serve and Ray may take beyond the drain."""
REDIS_RESTARTS = 5


class Cluster:
    def __init__(self, run: Run, folder: RunFolder, environ: dict[str, str], pid: int, announce: Announce) -> None:
        self._run = run
        self._folder = folder
        self._environ = environ
        self._announce = announce
        self._temp_dir = Path(run.temp_dir)
        self._config = run.config
        self._redis: RedisServer | None = None
        self._head: RayHead | None = None
        self._application: ServeApplication | None = None
        self._redis_restarts = 0
        self.state = RunState("starting", pid, edge=run.edge)

    # --- up ----------------------------------------------------------------------------------------------------------

    def start(self) -> RunState:
        """Returns once a request would be served. Raises ConfigurationError; call `stop` then too."""
        deadline_s = time.monotonic() + self._config.startup_timeout_s
        self._tell()
        if self._config.own_redis:
            self._start_redis()
        address = self._config.address or self._start_ray()
        self._start_application(address)
        self._wait_for_nodes(deadline_s)
        self._tell(phase="ready", url=self._url())
        return self.state

    def _start_redis(self) -> None:
        self._announce(stage("starting Redis"))
        self._redis = RedisServer(self._temp_dir / "d", self._environ)
        self._redis.start()
        service = msgspec.structs.replace(self._config.service, redis_url=self._redis.url)
        self._config = msgspec.structs.replace(self._config, service=service)

    def _start_ray(self) -> str:
        self._announce(stage("starting Ray"))
        assert self._config.dashboard_port is not None
        self._head = RayHead(self._temp_dir, self._config.dashboard_port, self._environ)
        return self._head.start()

    def _start_application(self, address: str) -> None:
        service = self._config.service
        self._tell(redis_url=service.redis_url, ray_address=address)
        self._announce(stage("starting Serve"))
        self._application = ServeApplication(self._config, msgspec.to_builtins(service))
        dashboard_url = self._application.connect(address)
        self._application.deploy()
        self._tell(dashboard_url=dashboard_url)

    def _wait_for_nodes(self, deadline_s: float) -> None:
        assert self._application is not None
        service = self._config.service
        self._announce(stage(f"starting {service.prefill} prefill and {service.decode} decode nodes"))
        self._application.wait_until_running(deadline_s, lambda text: self._announce(detail(text)))
        self._announce(detail("waiting until every node is known"))
        reason = "nothing answered yet"
        with httpx.Client(base_url=self._url(), trust_env=False, timeout=5.0) as client:
            while time.monotonic() < deadline_s:
                ready, reason = _readiness(client, service)
                if ready:
                    return
                time.sleep(READY_POLL_S)
        limit_s = self._config.startup_timeout_s
        raise ConfigurationError(f"the cluster started but is not ready after {limit_s:.0f} s: {reason}")

    def _url(self) -> str:
        host = self._config.host
        reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        return f"http://{reachable}:{self._config.port}"

    # --- while it runs -----------------------------------------------------------------------------------------------

    def watch(self) -> str:
        """Returns, with the reason, when the cluster cannot go on. A Redis server of ours that ended is restarted."""
        while True:
            time.sleep(WATCH_PERIOD_S)
            if self._head is not None and not self._head.is_alive():
                return "Ray has ended"
            if self._redis is not None and not self._redis.is_alive():
                log.warning("the Redis server has ended; starting it again")
                if self._redis_restarts >= REDIS_RESTARTS or not self._redis.restart():
                    return "the Redis server has ended and does not start again"
                self._redis_restarts += 1

    # --- down --------------------------------------------------------------------------------------------------------

    def stop(self, hurry: threading.Event) -> None:
        """Drain and end everything. Once `hurry` is set, nothing is waited for any more."""
        self._tell(phase="stopping")
        if self._application is not None and self._ray_answers():
            self._announce(stage("letting the requests in progress finish"))
            self._in_bounded_time(self._leave_ray, self._config.service.drain_timeout_s + STOP_MARGIN_S, hurry)
        self._announce(stage("ending every process"))
        if self._head is not None:
            self._head.stop()
        if self._redis is not None:
            self._redis.stop()
        for left in processes.end_run(self._run.run_id, self._temp_dir):
            self._announce(note(f"process {left.pid} did not end"))
        self._folder.remove()
        self._announce(Announcement("ended"))

    def _ray_answers(self) -> bool:
        return self._head is None or self._head.is_alive()

    def _leave_ray(self) -> None:
        assert self._application is not None
        self._application.delete(self._config.service.drain_timeout_s + STOP_MARGIN_S / 2)
        self._application.disconnect()

    def _in_bounded_time(self, work: Callable[[], None], limit_s: float, hurry: threading.Event) -> None:
        """Ray's calls wait for a cluster that may have gone: do them aside and give up on them in time."""
        done = threading.Event()

        def run() -> None:
            try:
                work()
            except Exception:
                log.exception("leaving Ray failed")
            finally:
                done.set()

        threading.Thread(target=run, name="leave-ray", daemon=True).start()
        give_up_s = time.monotonic() + limit_s
        while not done.wait(0.1) and not hurry.is_set():
            if time.monotonic() > give_up_s:
                self._announce(note(f"not drained after {limit_s:.0f} s; ending it as it is"))
                return

    def _tell(self, **changes: object) -> None:
        self.state = msgspec.structs.replace(self.state, **changes)
        self._folder.write(self.state)


def _readiness(client: httpx.Client, service: ServiceConfig) -> tuple[bool, str]:
    """Whether the orchestrator would serve and sees as many nodes of each kind as were asked for."""
    try:
        answer = client.get("/internal/status")
        status = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        return False, f"the HTTP edge does not answer ({type(error).__name__})"
    if answer.status_code != httpx.codes.OK:
        return False, f"the HTTP edge answers {answer.status_code}"
    healthy = [node["role"] for node in status["nodes"] if node["healthy"]]
    missing = [
        f"{wanted - healthy.count(role)} {role} nodes are missing"
        for role, wanted in (("prefill", service.prefill), ("decode", service.decode))
        if healthy.count(role) < wanted
    ]
    return bool(status["ready"]) and not missing, "; ".join(missing) or str(status["reason"])
