"""`python -m cluster.doctor_machines ADDRESS`: what each machine of a Ray cluster says of itself, as one line of JSON
(`RayFacts`).

A process of its own, since Ray's client takes its process with it when it fails. On every machine an actor is placed
that holds no resource; it is defined here by value, so that nothing of ours must be installed there.
"""

import contextlib
import os
import platform
import socket
import sys
import time
from importlib import metadata
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.doctor import MachineFacts, RayFacts

ANSWER_S = 60.0
CONNECT_S = 2.0


def witness() -> Any:
    """An actor class that names no module of ours, since it is unpickled where there may be none."""

    class Witness:
        def versions(self) -> dict[str, str | None]:

            found: str | None = None
            with contextlib.suppress(metadata.PackageNotFoundError):
                found = metadata.version("torch")
            return {"python": platform.python_version(), "ray": ray.__version__, "torch": found}

        def now(self) -> float:
            return time.time()

        def unreachable(self, others: list[tuple[str, int]]) -> list[str]:
            found = []
            for host, port in others:
                try:
                    socket.create_connection((host, port), timeout=CONNECT_S).close()
                except OSError:
                    found.append(host)
            return found

    return Witness


def gather(address: str) -> RayFacts:
    version = str(ray.__version__)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        said = " ".join(str(error).split())
        return RayFacts(address=address, ray=version, error=f"the Ray cluster at {address} cannot be joined: {said}")
    known = ray.nodes()
    alive = [node for node in known if node["Alive"]]
    dead = [node["NodeManagerAddress"] for node in known if not node["Alive"]]
    dead = sorted(set(dead) - {node["NodeManagerAddress"] for node in alive})
    places = [(node["NodeManagerAddress"], int(node["NodeManagerPort"])) for node in alive]
    placed = ray.remote(num_cpus=0)(witness())
    machines, silent = [], []
    for node in alive:
        affinity = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        actor = placed.options(scheduling_strategy=affinity).remote()
        try:
            machines.append(_asked(node["NodeManagerAddress"], actor, places))
        except (RayError, TimeoutError):
            silent.append(node["NodeManagerAddress"])
    return RayFacts(address=address, ray=version, dead=dead, silent=silent, machines=machines)


def _asked(address: str, actor: Any, places: list[tuple[str, int]]) -> MachineFacts:
    versions = ray.get(actor.versions.remote(), timeout=ANSWER_S)
    before = time.time()
    there = ray.get(actor.now.remote(), timeout=ANSWER_S)
    after = time.time()
    nearest = min(max(there, before), after)  # 0 where its time lies within the call
    others = [place for place in places if place[0] != address]
    unreachable = ray.get(actor.unreachable.remote(others), timeout=ANSWER_S + CONNECT_S * len(others))
    return MachineFacts(address=address, clock_skew_s=there - nearest, unreachable=unreachable, **versions)


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what Ray prints is no answer
    answers.write(msgspec.json.encode(gather(sys.argv[1])) + b"\n")
    answers.flush()


if __name__ == "__main__":
    main()
