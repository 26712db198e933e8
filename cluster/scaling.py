"""Changing a cluster of this machine while it serves: the sizes of its pools, or every replica for a new one.

Serve does it, and is asked by a driver of our own in the run's environment; the supervisor has no part in it.
"""

from pathlib import Path

import psutil

from cluster.announce import Announce, detail, stage
from cluster.driver import Change, Driver
from cluster.run_folder import Run, RunState
from pronghorn.errors import ConfigurationError

REPLACE_S = 60.0
"""What replacing one replica may take beside its drain."""


def change(run: Run, state: RunState, wanted: Change, what: str, announce: Announce) -> None:
    """Returns once it is so. Raises ConfigurationError with what Serve says; what it was asked for by then goes on."""
    try:
        environ = psutil.Process(state.pid).environ()
    except psutil.Error:
        raise ConfigurationError(f"the supervisor of {run.config.name!r} has ended: `pronghorn down`") from None
    assert state.ray_address is not None, "the cluster is ready"
    driver = Driver(Path(run.temp_dir) / "t", environ)
    try:
        announce(stage("joining Ray"))
        driver.join(state.ray_address, run.config)
        announce(stage(what))
        driver.change(wanted, lambda text: announce(detail(text)))
    finally:
        driver.stop()


def limit_s(run: Run) -> float:
    """What a change may take: new replicas start, and old ones drain, one after another."""
    service = run.config.service
    replicas = service.prefill + service.decode + service.orchestrators
    return run.config.startup_timeout_s + replicas * (service.drain_timeout_s + REPLACE_S)
