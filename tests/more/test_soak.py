"""Two nodes of each kind and two orchestrators under load while one fault after another is done to them."""

import json

import pytest

from tests.fakes.running_cluster import CommandLine

pytestmark = pytest.mark.timeout(1200)

SEED = 1694
"""A decode node is killed, then Redis; a link flips a byte, Redis forgets, an engine and an orchestrator are killed."""
LIMIT_S = 1140.0
"""For the cluster's start, three minutes of faults, recovery, the audit and the cluster's end, on a busy machine."""


@pytest.mark.cells("F11 P10")
def test_in_three_minutes_of_faults_nothing_is_lost_wrong_or_left_over_and_all_is_registered_again(
    pronghorn: CommandLine,
) -> None:
    options = ("--minutes=3", "--every=8", f"--seed={SEED}", "--json")
    done = pronghorn("chaos", "soak", *options, timeout_s=LIMIT_S)
    soaked = json.loads(done.stdout)
    assert (soaked["failures"], done.returncode) == ([], 0), done.stderr
    assert soaked["requests"]["answered"] > 0
    struck = {(fired["kind"], fired["role"]) for fired in soaked["fired"]}
    assert {("kill", "decode"), ("redis-kill", "")} <= struck, done.stderr
    assert len(soaked["recovered_s"]) == len(soaked["fired"])
