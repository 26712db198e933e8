import pytest

from cluster.drain import choose
from kvcache.registry import NodeRecord
from pronghorn.errors import ConfigurationError
from pronghorn.ids import Incarnation, NodeName


def row(name: str, address: str) -> NodeRecord:
    return NodeRecord(
        name=NodeName(name),
        role="decode" if name.startswith("decode") else "prefill",
        model="m",
        address=address,
        incarnation=Incarnation(f"life-of-{name}"),
        layout={},
        seed_digest="",
        load={},
        host="127.0.0.1",
        pid=1,
        registered_at_unix_s=0.0,
    )


ROWS = [
    row("decode-a1", "10.0.0.1:50001"),
    row("decode-a1b", "10.0.0.2:50001"),
    row("decode-b7", "10.0.0.2:50002"),
    row("prefill-c", "10.0.0.3:50001"),
]


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        ("decode-a1", "decode-a1"),  # a name that another one begins with
        ("decode-b", "decode-b7"),
        ("p", "prefill-c"),
        ("10.0.0.2:50002", "decode-b7"),
        ("10.0.0.3", "prefill-c"),
    ],
)
def test_a_node_is_found_by_its_name_its_address_or_the_beginning_of_either(wanted: str, name: str) -> None:
    assert choose(ROWS, wanted).name == name


def test_several_that_fit_are_refused_and_all_nodes_named() -> None:
    with pytest.raises(ConfigurationError, match=r"3 nodes begin with 'decode'.*prefill-c \(10\.0\.0\.3:50001\)"):
        choose(ROWS, "decode")


@pytest.mark.parametrize("wanted", ["nobody", ""])
def test_one_that_is_not_there_is_refused_with_those_that_are(wanted: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"no node is called .*; the nodes are: decode-a1 \(10\.0\.0\.1:50001\)"
    ):
        choose(ROWS, wanted)


def test_a_cluster_without_nodes_says_so() -> None:
    with pytest.raises(ConfigurationError, match="the nodes are: none"):
        choose([], "decode-a1")
