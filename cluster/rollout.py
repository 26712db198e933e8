"""What Serve runs of an application, what it is to run after a change, and what is missing until it does. Pure.

Knows Serve's details as plain data (`ServeInstanceDetails`), not how one asks for them. A pool's size stands in the
deployment's own options and not in the application's arguments, since Serve replaces every replica of an application
whose arguments change. Invariant: a plan names the size of every pool, for what it does not name Serve resets.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.driver import Change
from cluster.model_config import pool
from pronghorn.errors import ConfigurationError

ROLES = ("prefill", "decode")


@dataclass(frozen=True)
class Plan:
    args: dict[str, Any]
    """Of the application."""
    sizes: dict[str, int]
    """Replicas of each deployment."""


@dataclass(frozen=True)
class Deployed(Plan):
    states: dict[str, dict[str, str]]
    """State of each replica by its id, by deployment."""

    @property
    def replicas(self) -> set[str]:
        return {replica for states in self.states.values() for replica in states}

    def has_running(self, node: str) -> bool:
        deployment, _, replica = node.rpartition("-")
        return self.states.get(deployment, {}).get(replica) == "RUNNING"

    def missing(self, plan: Plan, old: set[str]) -> str:
        """What the plan still lacks, as "decode 1 of 2"; empty where nothing. `old` must be gone."""
        lacks = []
        for deployment, size in sorted(plan.sizes.items()):
            states = self.states.get(deployment, {})
            ready = sum(state == "RUNNING" and replica not in old for replica, state in states.items())
            going = len(states) - ready
            if ready != size or going:
                lacks.append(f"{deployment} {ready} of {size}" + (f" and {going} on their way" if going else ""))
        return ", ".join(lacks)


def sizes_at_start(args: Mapping[str, Any]) -> dict[str, int]:
    """Of each deployment, as the application's arguments tell it; what is 0 is not there."""
    models = args.get("models") or {None: {}}
    pools = {
        pool(role, model): args.get(role) if (own := settings.get(role)) is None else own
        for model, settings in models.items()
        for role in ROLES
    }
    return {name: size for name, size in {**pools, "orchestrator": args.get("orchestrators")}.items() if size}


def deployed(details: Mapping[str, Any], application: str) -> Deployed:
    """Raises ConfigurationError where Serve does not run it."""
    found = details.get("applications", {}).get(application)
    config = found and found.get("deployed_app_config")
    if not config:
        raise ConfigurationError(f"Serve does not run the application {application!r}")
    args = dict(config.get("args") or {})
    started = sizes_at_start(args)
    changed = {d["name"]: d["num_replicas"] for d in config.get("deployments") or [] if d.get("num_replicas")}
    states = {
        name: {replica["replica_id"]: str(getattr(replica["state"], "value", replica["state"])) for replica in replicas}
        for name, deployment in found.get("deployments", {}).items()
        if (replicas := deployment.get("replicas")) is not None
    }
    return Deployed(args, started | changed, states)


def planned(now: Deployed, change: Change) -> Plan:
    """Raises ConfigurationError naming the pool that cannot have such a size."""
    sizes = dict(change.sizes)
    if change.without is not None:
        smaller = change.without.rpartition("-")[0]
        sizes[smaller] = now.sizes.get(smaller, 0) - 1
    for name, size in sizes.items():
        if name not in now.sizes:
            raise ConfigurationError(
                f"the cluster was started without a {name} pool, and a pool that is not there cannot be scaled",
                param=name,
            )
        if size < 1:
            raise ConfigurationError(f"{name} is {size}; a pool cannot be scaled below 1", param=name)
    args = {**now.args, "revision": now.args.get("revision", 0) + 1} if change.redeploy else now.args
    return Plan(args, now.sizes | sizes)
