import pytest

from cluster.chaos.commands import by_cluster, find, largest, library
from cluster.chaos.scenario import KINDS, Kill, RedisPause, kind_of, read
from cluster.config_problems import Refused
from pronghorn.errors import ConfigurationError

GOOD = """
about: A node dies.
cluster: {decode: 2}
load: {streams: 4}
faults:
  - {kind: kill, process: decode, at: {pieces: 10}}
  - {kind: redis-pause, for_s: 2, at: {s: 1.5}}
checks: {errors: null}
"""


def test_a_scenario_is_read_with_its_faults_in_order() -> None:
    scenario = read(GOOD, "dies")
    assert (scenario.name, scenario.load.streams, scenario.checks.errors) == ("dies", 4, None)
    kill, pause = scenario.faults
    assert isinstance(kill, Kill) and (kill.process, kill.at.pieces) == ("decode", 10)
    assert isinstance(pause, RedisPause) and (pause.for_s, pause.at.s) == (2.0, 1.5)


def test_every_problem_is_said_at_once_with_its_path_value_and_bound() -> None:
    text = """
abuot: typo
load: {streams: 0, prompt_words: []}
faults:
  - {kind: kil, at: {s: 1}}
  - {kind: stop, process: dcode, for_s: -1, at: {s: 1}}
  - just text
"""
    with pytest.raises(ConfigurationError) as refused:
        read(text, "bad")
    said = refused.value.message.splitlines()
    for place, words in {
        "about": "is missing",
        "abuot": "did you mean about?",
        "load.streams": "is 0; it must be int >= 1",
        "load.prompt_words": "must be array of length >= 1",
        "faults[0].kind": "did you mean kill?",
        "faults[1].process": "'dcode'; it must be one of prefill, decode",
        "faults[1].for_s": "-1; it must be float > 0.0",
        "faults[2]": "a mapping with a kind",
    }.items():
        assert any(line.startswith(f"bad: {place} ") and words in line for line in said), (place, said)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("{kind: kill, process: decode, at: {}}", "faults[0].at is []; it must be exactly one of s, pieces"),
        ("{kind: kill, process: decode, at: {s: 1, ended: 2}}", "faults[0].at is ['s', 'ended']"),
        ("{kind: kill, process: decode, count: 2, at: {s: 1}}", "faults[0].count is 2; it must be at most 1"),
        ("{kind: redis-kill, at: {link_bytes: 1}}", "faults[0].at.link_bytes is 1; it must be absent"),
        ("{kind: gcs-kill, for_s: 1, at: {s: 1}}", "cluster.machines is 1; it must be at least 2 for gcs-kill"),
        ("{kind: cut, node: orchestrator, for_s: 1, at: {s: 1}}", "one of prefill, decode"),
    ],
)
def test_values_that_do_not_go_together_are_refused_by_name(fault: str, words: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        read(f"about: x\nfaults: [{fault}]", "x")
    assert words in refused.value.message


def test_machines_must_be_as_many_as_a_pool_has_nodes_beside_the_head() -> None:
    with pytest.raises(ConfigurationError) as refused:
        read("about: x\ncluster: {decode: 3, machines: 3}\nfaults: []", "x")
    assert "cluster.decode is 3; it must be at most 2: cluster.machines without the head" in refused.value.message


@pytest.mark.parametrize("text", ["- a list", "just words", "{", "about: x\nfaults: 3"])
def test_what_is_no_scenario_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        read(text, "x")


def test_every_scenario_of_the_library_can_be_read_and_found_by_its_name() -> None:
    scenarios = library()
    assert len({scenario.name for scenario in scenarios}) == len(scenarios) > 0
    assert [find(scenario.name) for scenario in scenarios] == scenarios
    size = largest(scenarios)
    assert all(scenario.cluster.decode <= size.decode for scenario in scenarios)


def test_there_is_one_edge_to_kill_and_it_has_no_link() -> None:
    with pytest.raises(Refused) as refused:
        read("about: x\nfaults: [{kind: kill, process: edge, count: 2, at: {link_bytes: 9}}]", "x")
    assert [problem.path for problem in refused.value.problems] == ["faults[0].at.link_bytes", "faults[0].count"]


def test_scenarios_share_a_cluster_where_they_need_the_same_kind_of_it() -> None:
    one, several = (read(f"about: x\ncluster: {{machines: {count}}}\nfaults: []", "x") for count in (1, 3))
    assert by_cluster([several, one, several, one]) == [[one, one], [several, several]]
    assert by_cluster([several]) == [[several]]
    on_disk = read("about: x\ncluster: {disks: 1}\nfaults: []", "x")
    assert by_cluster([on_disk, several, one]) == [[one], [on_disk], [several]]
    assert by_cluster([on_disk, several, one], disks_granted=False) == [[on_disk, one], [several]]
    assert largest([several, several]).machines == 3


def test_a_disk_is_filled_where_there_is_one() -> None:
    fault = "faults: [{kind: fill-disk, for_s: 1, at: {s: 0}}]"
    with pytest.raises(Refused) as refused:
        read(f"about: x\n{fault}", "x")
    assert [problem.path for problem in refused.value.problems] == ["cluster.disks"]
    read(f"about: x\ncluster: {{disks: 1}}\n{fault}", "x")


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    name = library()[0].name
    with pytest.raises(ConfigurationError, match=f"did you mean {name}"):
        find(name + "x")


def test_every_kind_of_fault_has_a_name() -> None:
    assert {kind_of(fault) for scenario in library() for fault in scenario.faults} <= set(KINDS)
