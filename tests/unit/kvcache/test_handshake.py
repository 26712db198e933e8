import msgspec
import pytest

from kvcache.handshake import Identity, check_peer
from pronghorn.errors import HandshakeRefused
from protos.node_pb2 import Hello

OURS = Identity("decode", "decode-1", "aa", "smol", {"dtype": "float32", "block_tokens": "16"}, "5eed")
THEIRS = msgspec.structs.replace(OURS, role="prefill", name="prefill-1", incarnation="bb")


def changed(**fields):
    return msgspec.structs.replace(THEIRS, **fields)


def test_an_identity_survives_the_wire():
    hello = Hello.FromString(OURS.to_hello().SerializeToString())
    assert Identity.from_hello(hello) == OURS


def test_nodes_that_agree_may_speak():
    check_peer(OURS, THEIRS)
    check_peer(OURS, THEIRS, expect_incarnation="bb")


@pytest.mark.field("vllm#42895")
@pytest.mark.conformance(42)
@pytest.mark.parametrize(
    ("theirs", "field", "values"),
    [
        (changed(model="other"), "model", ("'other'", "'smol'")),
        (changed(seed_digest="beef"), "seed_digest", ("'beef'", "'5eed'")),
        (changed(layout=OURS.layout | {"dtype": "bfloat16"}), "layout.dtype", ("'bfloat16'", "'float32'")),
        (changed(layout={"dtype": "float32"}), "layout.block_tokens", ("None", "'16'")),
        (changed(layout=OURS.layout | {"order": "x"}), "layout.order", ("'x'", "None")),
        (changed(protocol_version=3, oldest_protocol_version=2), "protocol_version", ("2..3", "1..1")),
    ],
)
def test_a_difference_is_refused_by_name_with_both_values(theirs, field, values):
    with pytest.raises(HandshakeRefused) as error:
        check_peer(OURS, theirs)
    assert error.value.param == field
    assert all(value in error.value.message for value in (field, *values))


def test_neighbouring_versions_speak():
    newer = changed(protocol_version=2, oldest_protocol_version=1)
    check_peer(OURS, newer)
    check_peer(newer, OURS)


def test_another_life_behind_the_same_address_is_refused():
    with pytest.raises(HandshakeRefused, match="incarnation is 'bb' there and 'cc' here"):
        check_peer(OURS, THEIRS, expect_incarnation="cc")


@pytest.mark.conformance(42)
def test_layout_and_seed_matter_only_between_peers_that_exchange_blocks():
    orchestrator = Identity("orchestrator", "orchestrator-1", "dd", "smol")
    check_peer(orchestrator, THEIRS, compare_layout=False)
    with pytest.raises(HandshakeRefused):
        check_peer(orchestrator, THEIRS)


@pytest.mark.parametrize("field", ["role", "name", "incarnation", "model"])
def test_a_hello_without_a_name_is_refused(field):
    hello = OURS.to_hello()
    hello.ClearField(field)
    with pytest.raises(HandshakeRefused, match=f"no {field}"):
        Identity.from_hello(hello)
