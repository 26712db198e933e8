import threading

import numpy as np
import pytest

from pipelines.runtime.jit import compiled
from pipelines.runtime.team import Sync, Team, meet, take_ticket


@compiled
def count_rounds(member: int, members: int, sync: Sync, taken: np.ndarray, seen: np.ndarray) -> None:
    """In each round every ticket is taken once; after the barrier everybody sees all of it."""
    rounds, tickets = taken.shape
    for r in range(rounds):
        ticket = take_ticket(sync)
        while ticket < tickets:
            taken[r, ticket] += 1
            ticket = take_ticket(sync)
        meet(sync, members)
        total = 0
        for t in range(tickets):
            total += taken[r, t]
        seen[r, member] = total
        meet(sync, members)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_each_ticket_goes_to_one_member_and_barriers_hold(threads: int) -> None:
    team = Team(threads)
    for _ in range(3):
        taken, seen = np.zeros((200, 37), dtype=np.int64), np.zeros((200, threads), dtype=np.int64)
        team.run(count_rounds, taken, seen)
        assert (taken == 1).all()
        assert (seen == 37).all()
    team.close()


@pytest.mark.parametrize("culprit", [0, 1])
def test_what_a_member_raises_is_raised_to_the_caller_and_the_team_goes_on(culprit: int) -> None:
    team = Team(2)

    def fails(member: int, members: int, sync: Sync) -> None:
        if member == culprit:
            raise ArithmeticError(f"member {member}")

    ran: list[int] = []
    with pytest.raises(ArithmeticError, match=f"member {culprit}"):
        team.run(fails)
    team.run(lambda member, members, sync: ran.append(member))
    assert sorted(ran) == [0, 1]
    team.close()


def test_close_ends_the_threads() -> None:
    before = set(threading.enumerate())
    team = Team(3)
    started = set(threading.enumerate()) - before
    assert len(started) == 2
    team.close()
    team.close()
    for thread in started:
        thread.join(timeout=10)
        assert not thread.is_alive()
