import pytest

from kvcache.handshake import Identity
from pipelines.node.prefill_request import PrefillRequest, check_wanted
from pronghorn.errors import HandshakeRefused, InvalidRequest
from pronghorn.ids import Fence, Incarnation
from tests.fakes.canary_engine import canary_context

ASKER = Identity(
    role="decode", name="decode-1", incarnation="d" * 32, model="m", layout={"dtype": "float32"}, seed_digest="s"
)


def test_a_request_survives_its_bytes() -> None:
    context = canary_context([1, 2, 3, 4, 5], 7)
    fence = Fence(context.request_id, 3, Incarnation(ASKER.incarnation))
    request = PrefillRequest(ASKER, fence, "p" * 32, context, [1, 2], 4.5)
    assert PrefillRequest.from_bytes(request.to_bytes()) == request


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"{}"])
def test_bytes_that_are_no_request_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="PrefillRequest"):
        PrefillRequest.from_bytes(data)


def test_a_request_without_a_hello_is_refused_by_name() -> None:
    with pytest.raises(HandshakeRefused, match="role"):
        PrefillRequest.from_bytes(b"")


@pytest.mark.parametrize(
    ("wanted", "said"), [([], "no block"), ([1, 1], "ascend"), ([2, 1], "ascend"), ([0, 4], "position 4")]
)
def test_positions_that_make_no_sense_are_refused(wanted: list[int], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        check_wanted(wanted, 4)


def test_any_ascending_positions_within_the_prompt_are_fine() -> None:
    check_wanted([0, 3], 4)
