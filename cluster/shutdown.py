"""Ending a cluster from outside: ask its supervisor; where that is gone or deaf, end exactly the run's processes."""

import signal
import time

import psutil

from cluster import processes
from cluster.announce import Announce, note, stage
from cluster.launch import end_leftovers
from cluster.run_folder import RunFolder
from pronghorn.errors import ConfigurationError

SUPERVISOR_MARGIN_S = 75.0
"""What a supervisor may need beyond the drain to end Serve, Ray and Redis."""


def take_down(folder: RunFolder, announce: Announce) -> bool:
    """Whether there was anything to end. Raises ConfigurationError where something does not end."""
    run = folder.run()
    if run is None and not folder.is_supervised():
        return False
    if folder.is_supervised():
        drain_s = run.config.service.drain_timeout_s if run else 0.0
        _end_supervisor(folder, drain_s + SUPERVISOR_MARGIN_S, announce)
    if not folder.path.exists():
        return True
    folder.claim()
    end_leftovers(folder, announce)
    folder.remove()
    return True


def _end_supervisor(folder: RunFolder, limit_s: float, announce: Announce) -> None:
    pid = folder.holder_pid()
    if pid is None:
        raise ConfigurationError(f"nothing tells who holds {folder.path}; try again in a moment")
    announce(stage("waiting for the supervisor to drain and end the cluster"))
    state = folder.state()
    try:
        process = psutil.Process(pid)
        if state is None or state.phase != "stopping":  # a second signal would tell it not to wait
            process.send_signal(signal.SIGTERM)
    except psutil.NoSuchProcess:
        return
    give_up_s = time.monotonic() + limit_s
    while folder.is_supervised():
        if time.monotonic() > give_up_s:
            announce(note(f"the supervisor {pid} does not end; killing it"))
            processes.end([process], 0.0)
            return
        time.sleep(0.05)
