from cluster.chaos.fired import Fired
from cluster.chaos.recorder import Verdict
from cluster.chaos.runner import Outcome, Runner, failures, shortage
from cluster.chaos.scenario import Checks, Cluster, ForgetPrefixes, Kill, Scenario, When
from cluster.chaos.site import Site
from pronghorn.errors import Unavailable

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


def test_a_cluster_is_short_of_the_pool_that_is_too_small() -> None:
    there = Cluster(prefill=1, decode=2)
    assert shortage(Cluster(prefill=1, decode=2), there) is None
    assert shortage(Cluster(prefill=2, decode=2), there) == "it needs 2 prefill nodes, and the cluster has 1"
    assert shortage(Cluster(orchestrators=2), there) == "it needs 2 orchestrators, and the cluster has 1"


class Deaf(Site):
    """A cluster of one node a pool that answers nothing but how large it is."""

    def __init__(self) -> None:
        super().__init__("http://nowhere")

    async def size(self) -> Cluster:
        return Cluster()

    async def status(self) -> object:  # type: ignore[override]  # it never returns
        raise Unavailable("nobody says how it is")


async def test_what_could_not_run_to_its_end_is_a_failure_and_no_refusal() -> None:
    small = Scenario("x", "about", [ForgetPrefixes(at=When(s=0.0))])
    outcome = await Runner(Deaf(), seed=0).run(small)
    assert (outcome.refused, outcome.ok, outcome.broken_off) == (None, False, True)
    assert outcome.failures == ["it did not come to its end: nobody says how it is"]


async def test_what_the_cluster_never_was_large_enough_for_is_refused() -> None:
    large = Scenario("x", "about", [ForgetPrefixes(at=When(s=0.0))], cluster=Cluster(decode=2))
    outcome = await Runner(Deaf(), seed=0).run(large)
    assert (outcome.refused, outcome.ok) == ("it needs 2 decode nodes, and the cluster has 1", True)
