"""What a soak draws, and what it is judged by."""

import random

from cluster.chaos.injector import Injector
from cluster.chaos.load import Asking, Body, Clients
from cluster.chaos.recorder import ANSWERED, BROKEN, Recorder, Verdict
from cluster.chaos.scenario import KINDS, Load, kind_of
from cluster.chaos.site import Site
from cluster.chaos.soak import MENU, Soak


def test_it_draws_faults_of_nearly_every_kind_and_the_same_ones_for_the_same_seed() -> None:
    def drawn(seed: int) -> list[str]:
        rng = random.Random(seed)
        return [str(rng.choice(MENU)(rng)) for _ in range(200)]

    assert drawn(1) == drawn(1) != drawn(2)
    kinds = {kind_of(make(random.Random(0))) for make in MENU}
    slow_or_not_everywhere = {
        "redeploy",
        "scale",
        "raylet-kill",
        "gcs-kill",
        "out-of-memory",
        "lose-packets",
        "fill-disk",
    }
    assert set(KINDS) - kinds == {"black-hole", "slow", *slow_or_not_everywhere}


async def test_what_is_lost_or_left_over_is_a_failure_and_is_told() -> None:
    recorder = Recorder(lambda: 0.0)
    for how, text in ((ANSWERED, "right"), (BROKEN, "rig")):
        request = recorder.open(0, "right")
        one = recorder.sent(request)
        recorder.heard(one, text)
        recorder.end_try(one, how)
    clients = Clients("http://nowhere", "m", 30.0)
    asking = Asking(clients, recorder, Load(), [Body("", 1, None)], {}, 0)
    site = Site("http://nowhere")
    soaked = Soak(site, 1.0, 20.0, 7, lambda _: None).came_to(
        recorder, Injector(site, asking), ["decode-1: blocks (3)"]
    )
    await clients.close()
    assert soaked.requests == {Verdict.ANSWERED: 1, Verdict.LOST: 1}
    assert soaked.failures[0] == "1 requests were lost"
    assert soaked.failures[-1] == "left over: decode-1: blocks (3)"
