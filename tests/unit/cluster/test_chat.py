import httpx
import pytest

from cluster.chat import _only_model, _pieces
from pronghorn.errors import ConfigurationError, Unavailable


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


def client(*models: str) -> httpx.Client:
    answer = {"data": [{"id": model} for model in models]}
    return httpx.Client(base_url="http://c", transport=httpx.MockTransport(lambda _: httpx.Response(200, json=answer)))


def test_the_only_model_need_not_be_named_and_one_of_several_must() -> None:
    with client("a") as one, client("a", "b") as several:
        assert _only_model(one) == "a"
        with pytest.raises(ConfigurationError, match="serves a, b; say which with --model"):
            _only_model(several)
