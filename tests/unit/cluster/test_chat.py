import pytest

from cluster.chat import _pieces
from pronghorn.errors import Unavailable


def lines(*chunks: str) -> list[str]:
    return [line for chunk in chunks for line in (f"data: {chunk}", "")]


def test_the_pieces_come_in_order_and_comments_are_skipped() -> None:
    said = [": heartbeat", *lines('{"choices": [{"delta": {"role": "assistant"}}]}')]
    said += lines(
        '{"choices": [{"delta": {"content": "He"}}]}', '{"choices": [{"delta": {"content": "llo"}}]}', "[DONE]"
    )
    assert list(_pieces(iter(said))) == ["He", "llo"]


def test_an_error_amid_the_stream_is_raised() -> None:
    said = lines(
        '{"choices": [{"delta": {"content": "He"}}]}', '{"error": {"message": "node lost", "code": "node_lost"}}'
    )
    pieces = _pieces(iter(said))
    assert next(pieces) == "He"
    with pytest.raises(Unavailable, match="node lost"):
        next(pieces)


def test_a_stream_without_an_end_is_an_error() -> None:
    with pytest.raises(Unavailable, match="broke off"):
        list(_pieces(iter(lines('{"choices": []}'))))
