from orchestrator.local_prefill import with_room
from orchestrator.nodes import NodeView
from pronghorn.ids import Incarnation, NodeName


def node(name: str, room_tokens: int | None = None, unusable: str | None = None) -> NodeView:
    return NodeView(
        name=NodeName(name),
        role=name.split("-")[0],
        model="tiny",
        address="h:1",
        incarnation=Incarnation(name),
        unusable=unusable,
        in_flight=0,
        waiting=0,
        free_blocks=0,
        local_prefill_room_tokens=room_tokens,
    )


def test_with_a_usable_prefill_node_room_on_decode_does_not_matter() -> None:
    nodes = [node("prefill-1"), node("decode-1", room_tokens=0)]
    assert with_room(nodes, 100) == nodes


def test_without_one_only_decode_nodes_with_room_are_left() -> None:
    nodes = [
        node("prefill-1", unusable="breaker open"),
        node("decode-1", room_tokens=99),
        node("decode-2", room_tokens=100),
        node("decode-3", room_tokens=0, unusable="draining"),
        node("decode-4"),
    ]
    full = "no prefill node is usable, and it has room to compute 99 prompt tokens, the request needs 100"
    assert [view.unusable for view in with_room(nodes, 100)] == ["breaker open", full, None, "draining", None]
