from cluster.chaos.injector import Fired
from cluster.chaos.recorder import Verdict
from cluster.chaos.runner import Outcome, failures
from cluster.chaos.scenario import Checks, Kill, Scenario, When

KILL = Kill(at=When(s=0.0), process="decode", count=2)
STRICT = Checks()
FIRED = Fired("kill", "decode-1", 1.0, "gone")


def judged(checks: Checks = STRICT, fired: int = 2, **found: object) -> list[str]:
    outcome = Outcome(scenario="x", seed=0, fired=[FIRED] * fired, **found)  # type: ignore[arg-type]
    return failures(Scenario("x", "about", [KILL], checks=checks), outcome)


def test_nothing_is_wrong_where_all_fired_and_all_were_answered_or_left() -> None:
    assert judged(requests={Verdict.ANSWERED: 30, Verdict.LEFT: 2}, longest_gap_s=9.0) == []


def test_a_fault_that_did_not_fire_at_every_victim_is_a_failure() -> None:
    assert judged(fired=1) == ["1 of 2 faults fired"]


def test_what_is_lost_duplicated_or_wrong_fails_in_the_faults_own_loads_too() -> None:
    found = judged(requests={Verdict.LOST: 1}, extra_requests={Verdict.LOST: 1, Verdict.WRONG: 1})
    assert found == ["2 requests were lost", "1 requests were wrong"]


def test_errors_count_in_the_load_alone_and_as_far_as_they_are_not_allowed() -> None:
    errors = {"requests": {Verdict.ERROR: 2}, "extra_requests": {Verdict.ERROR: 9}}
    assert judged(**errors) == ["2 requests ended in an error, 0 may"]
    assert judged(Checks(errors=2), **errors) == []
    assert judged(Checks(errors=None), **errors) == []


def test_a_silence_beyond_its_bound_and_what_is_left_over_are_failures() -> None:
    found = judged(Checks(longest_gap_s=3.0), longest_gap_s=3.5, leftovers=["decode-1: blocks (3)"])
    assert found == ["a stream said nothing for 3.50 s, 3 s are allowed", "left over: decode-1: blocks (3)"]
