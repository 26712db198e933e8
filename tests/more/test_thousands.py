"""The simulated cluster at a size that takes its time: thousands of answers in a row, thousands of streams at once.

Each answer is compared, token by token, with what the prompt has when one process computes it; the canary that answers
reads every block that it attends to, so that a wrong one gives wrong tokens. Some 15 s each on a core of their own.
"""

from random import Random

import pytest

from cluster.simulator.canary import VOCAB_SIZE
from tests.fakes.simulated_cluster import holds, node, plan, request

SEED = 20261

pytestmark = pytest.mark.timeout(1800)


@pytest.mark.field("sglang#23020")
def test_two_thousand_answers_in_a_row_are_those_of_one_process() -> None:
    """sglang#23020: after about a hundred requests the answers were gibberish."""
    random = Random(SEED)
    heads = [[random.randrange(VOCAB_SIZE) for _ in range(24)] for _ in range(6)]
    requests = [
        request(
            i,
            at_s=0.02 * i,
            prompt=[
                *random.choice(heads)[: random.choice((0, 8, 16, 24))],
                *(random.randrange(VOCAB_SIZE) for _ in range(random.randint(1, 24))),
            ],
            new_tokens=random.randint(1, 20),
            salt=random.choice((None, None, "salt")),
        )
        for i in range(2000)
    ]
    verdict = holds(plan(requests=requests, directory=True))
    assert verdict.endings == {"finished": 2000 + 1}
    kept = [verdict.records[each.name] for each in requests if each.name in verdict.records]
    assert len(kept) >= 500
    for first in range(0, 500, 100):
        handed_over = sum(record.attempts[-1].moved_bytes > 0 for record in kept[first : first + 100])
        assert handed_over >= 50, "they were not computed apart"


@pytest.mark.field("production-stack#448")
def test_two_thousand_streams_at_once_end_right_and_nobody_is_started_again() -> None:
    """production-stack#448: a router crashed with a thousand streams open."""
    wide = {"max_waiting": 2048, "max_in_flight": 4096}
    nodes = [node(f"prefill-{i}", num_blocks=1024, max_batch_size=64, **wide) for i in range(2)]
    nodes += [node(f"decode-{i}", num_blocks=8192, max_batch_size=1024, **wide) for i in range(2)]
    requests = [request(i, at_s=0.0002 * i, new_tokens=20, budget_s=60.0) for i in range(2000)]
    room = {"max_in_flight": 4096, "max_queue": 4096, "link_bytes_per_s": 1e8, "window_bytes": 65536}
    verdict = holds(plan(requests=requests, nodes=nodes, **room))
    assert verdict.endings == {"finished": 2000 + 1}
    assert not any("replaced" in line for line in verdict.story)
    up, *ends = [line for line in verdict.story if line.endswith("up") or " finished after " in line]
    assert float(ends[0].split()[0]) - float(up.split()[0]) > requests[-1].at_s, "they were not open at once"
