"""Bringing one cluster up and taking it down: Redis, Ray, the application, in that order and back.

Whatever was begun is ended by `stop`, however far `start` came. What does not end when asked is killed, and then
nothing of the run is left: no process, no port, no folder.
"""

import logging
import queue
import threading
import time
from pathlib import Path

import httpx
import msgspec

from cluster import processes
from cluster.announce import Announce, Announcement, detail, note, stage
from cluster.config import REDIS_VARIABLE, ServiceConfig
from cluster.driver import Driver
from cluster.ray_head import RayHead
from cluster.redis_server import RedisServer
from cluster.run_folder import Run, RunFolder, RunState
from pronghorn.errors import ConfigurationError

log = logging.getLogger(__name__)

READY_POLL_S = 0.1
STOP_MARGIN_S = 30.0
"""What ending Serve and Ray may take beyond the drain."""
HURRIED_S = 5.0
REDIS_SETTLED_S = 30.0
"""A Redis server that ended sooner than this after its start has failed to start."""
REDIS_FAILURES = 3


class Cluster:
    def __init__(self, run: Run, folder: RunFolder, environ: dict[str, str], pid: int, announce: Announce) -> None:
        self._run = run
        self._folder = folder
        self._environ = environ
        self._announce = announce
        self._temp_dir = Path(run.temp_dir)
        self._config = run.config
        self._driver: Driver | None = None
        self._redis: RedisServer | None = None
        self._head: RayHead | None = None
        self._hurried = False
        self._ended: queue.SimpleQueue[RayHead | RedisServer] = queue.SimpleQueue()
        self.state = RunState("starting", pid, edge=run.edge)

    # --- up ----------------------------------------------------------------------------------------------------------

    def start(self) -> RunState:
        """Returns once a request would be served. Raises ConfigurationError; call `stop` then too."""
        deadline_s = time.monotonic() + self._config.startup_timeout_s
        self._tell()
        self._driver = Driver(self._temp_dir / "t", self._environ)
        if self._config.own_redis:
            self._start_redis()
        address = self._config.address or self._start_ray()
        self._deploy(address)
        self._wait_for_nodes(deadline_s)
        models = [model.model_name for model in self._config.service.each]
        self._tell(phase="ready", url=self._url(), models=models)
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
        environ = {**self._environ, REDIS_VARIABLE: self._config.service.redis_url}
        self._head = RayHead(self._temp_dir, self._config.dashboard_port, environ)
        return self._head.start()

    def _deploy(self, address: str) -> None:
        assert self._driver is not None
        self._announce(stage("joining Ray"))
        joined = self._driver.join(address, self._config)
        self._tell(ray_address=address, dashboard_url=joined.dashboard_url, redis_url=self._config.service.redis_url)
        self._announce(stage("starting Serve"))
        self._tell(serve_is_ours=self._driver.deploy().serve_is_ours)

    def _wait_for_nodes(self, deadline_s: float) -> None:
        assert self._driver is not None
        service = self._config.service
        prefill, decode = (sum(getattr(model, role) for model in service.each) for role in ("prefill", "decode"))
        self._announce(stage(f"starting {prefill} prefill and {decode} decode nodes"))
        left_s = max(0.0, deadline_s - time.monotonic())
        self._driver.wait_until_running(left_s, lambda text: self._announce(detail(text)))
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
        failures = 0
        for part in (self._head, self._redis):
            self._tell_when_ended(part)
        while True:
            ended = self._ended.get()
            if ended is self._head:
                return "Ray has ended"
            assert self._redis is not None
            failures = failures + 1 if self._redis.age_s < REDIS_SETTLED_S else 0
            log.warning("the Redis server has ended; starting it again")
            if failures >= REDIS_FAILURES or not self._redis.restart():
                return "the Redis server has ended and does not start again"
            self._tell_when_ended(self._redis)

    def _tell_when_ended(self, part: RayHead | RedisServer | None) -> None:
        if part is None:
            return

        def wait() -> None:
            part.wait()
            self._ended.put(part)

        threading.Thread(target=wait, name=f"wait-{type(part).__name__}", daemon=True).start()

    # --- down --------------------------------------------------------------------------------------------------------

    def hurry(self) -> None:
        """Wait for no request any more. Called from a signal handler."""
        self._hurried = True
        if self._driver is not None:
            self._driver.kill()

    def stop(self) -> None:
        """Drain and end everything."""
        self._tell(phase="stopping")
        if self._has_requests() and not self._hurried:
            self._announce(stage("letting the requests in progress finish"))
            self._withdraw(self._config.service.drain_timeout_s + STOP_MARGIN_S)
        if self._hurried and self._config.address is not None and self.state.ray_address is not None:
            self._withdraw(HURRIED_S)  # it must not stay in somebody else's Ray cluster
        self._announce(stage("ending every process"))
        for part in (self._driver, self._head, self._redis):
            if part is not None:
                part.stop()
        if left := processes.end_run(self._run.run_id, self._temp_dir):
            self._tell(phase="failed")
            pids = ", ".join(str(process.pid) for process in left)
            self._announce(note(f"these processes did not end: {pids}; try `pronghorn down` again"))
        else:
            self._folder.remove()
        self._announce(Announcement("ended"))

    def _has_requests(self) -> bool:
        """Whether clients or another's Ray cluster may still hold something of this one."""
        if self._config.address is not None:
            return self.state.ray_address is not None
        return self.state.url is not None and self._head is not None and self._head.is_alive()

    def _withdraw(self, limit_s: float) -> None:
        assert self.state.ray_address is not None
        try:
            if self._driver is None or not self._driver.idle:
                self._driver = self._new_driver()
                self._driver.join(self.state.ray_address, self._config)
            self._driver.withdraw(limit_s, self.state.serve_is_ours)
        except ConfigurationError as error:
            if not self._hurried:
                self._announce(note(f"not drained: {error.message}"))

    def _new_driver(self) -> Driver:
        if self._driver is not None:
            self._driver.stop()
        return Driver(self._temp_dir / "t", self._environ)

    def _tell(self, **changes: object) -> None:
        self.state = msgspec.structs.replace(self.state, **changes)
        self._folder.write(self.state)


def _readiness(client: httpx.Client, service: ServiceConfig) -> tuple[bool, str]:
    """Whether the orchestrator would serve every model and sees as many nodes of each kind as were asked for."""
    try:
        answer = client.get("/internal/status")
        status = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        return False, f"the HTTP edge does not answer ({type(error).__name__})"
    if answer.status_code != httpx.codes.OK:
        return False, f"the HTTP edge answers {answer.status_code}"
    healthy = [(node["model"], node["role"]) for node in status["nodes"] if node["healthy"]]
    missing = [
        f"{wanted - found} {role} nodes of {model.model_name} are missing"
        for model in service.each
        for role, wanted in (("prefill", model.prefill), ("decode", model.decode))
        if (found := healthy.count((model.model_name, role))) < wanted
    ]
    ready = all(model["ready"] for model in status["models"])
    return ready and not missing, "; ".join(missing) or str(status["reason"])
