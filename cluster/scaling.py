"""Changing a cluster of this machine while it serves: the sizes of its pools, or every replica for a new one.

Serve does it, and is asked by a driver of our own in the run's environment; the supervisor has no part in it.
"""

from collections.abc import Mapping
from pathlib import Path

import psutil

from cluster.announce import Announce, detail, stage
from cluster.config import ServiceConfig
from cluster.driver import Change, Driver
from cluster.model_config import pool
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


def sizes(
    service: ServiceConfig, model: str | None, asked: Mapping[str, int], orchestrators: int | None
) -> dict[str, int]:
    """By deployment. `asked` are a model's pools by role; None: those of the only one. Raises ConfigurationError."""
    names = [one.model_name for one in service.each]
    if model is None and asked and len(names) > 1:
        raise ConfigurationError(f"the cluster serves {', '.join(names)}; say which with --model", param="model")
    if model is not None and model not in names:
        raise ConfigurationError(f"the cluster serves no {model!r}; it serves {', '.join(names)}", param="model")
    whose = (model or names[0]) if service.models else None
    pools = {pool(role, whose): size for role, size in asked.items()}
    return pools if orchestrators is None else {**pools, "orchestrator": orchestrators}


def limit_s(run: Run) -> float:
    """What a change may take: new replicas start, and old ones drain, one after another."""
    service = run.config.service
    replicas = service.orchestrators + sum(model.prefill + model.decode for model in service.each)
    return run.config.startup_timeout_s + replicas * (service.drain_timeout_s + REPLACE_S)
