"""The same seed is the same story, in this process and in any other."""

import os
import subprocess
import sys

import msgspec

from cluster.simulator.plan import Plan
from cluster.simulator.scenario import plan_of
from cluster.simulator.simulation import run

SEEDS = (7, 33, 185, 421)
PROGRAM = (
    "from cluster.simulator.scenario import plan_of\n"
    "from cluster.simulator.simulation import run\n"
    f"print(*(run(plan_of(seed)).digest for seed in {SEEDS}))\n"
)


def test_a_seed_replays_exactly() -> None:
    first, second = run(plan_of(SEEDS[0])), run(plan_of(SEEDS[0]))
    assert first.story == second.story
    assert first.digest == second.digest


def test_a_seed_replays_in_another_process_under_another_hash_seed() -> None:
    said = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert said[0] == said[1]
    assert said[0].split() == [run(plan_of(seed)).digest for seed in SEEDS]


def test_a_plan_survives_being_written_down() -> None:
    plan = plan_of(421)
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan
