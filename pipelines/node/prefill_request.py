"""The question that opens a hand-over, between its protobuf bytes and our own types.

Both rooms of nodes speak through this file, so that neither knows the other. Knows nothing of sockets.
"""

import msgspec
from google.protobuf.message import DecodeError

from kvcache.handshake import Identity
from pipelines.types import wire
from pipelines.types.text_context import TextContext
from pronghorn.errors import InvalidRequest
from pronghorn.ids import Fence, Incarnation, RequestID
from protos import node_pb2


class PrefillRequest(msgspec.Struct, frozen=True):
    """Compute `context`'s prompt and stream back its first token and the blocks at `wanted`."""

    asker: Identity
    fence: Fence
    prefill_incarnation: str
    """The life of the prefill node that was chosen; another life refuses."""
    context: TextContext
    wanted: list[int]
    """Block positions in the prompt, ascending."""
    budget_s: float

    def to_bytes(self) -> bytes:
        message = node_pb2.PrefillRequest(
            hello=self.asker.to_hello(),
            fence=node_pb2.FenceMessage(
                request_id=self.fence.request_id.value,
                attempt=self.fence.attempt,
                incarnation=self.fence.incarnation,
            ),
            prefill_incarnation=self.prefill_incarnation,
            context=wire.encode(self.context),
            wanted=self.wanted,
            budget_s=self.budget_s,
        )
        return message.SerializeToString()

    @classmethod
    def from_bytes(cls, data: bytes) -> "PrefillRequest":
        """Raises InvalidRequest for bytes that are no such message, InternalError for a context that is none."""
        try:
            message = node_pb2.PrefillRequest.FromString(data)
        except DecodeError as error:
            raise InvalidRequest(f"{len(data)} bytes are not a PrefillRequest", param="request") from error
        return cls(
            asker=Identity.from_hello(message.hello),
            fence=Fence(
                RequestID(message.fence.request_id), message.fence.attempt, Incarnation(message.fence.incarnation)
            ),
            prefill_incarnation=message.prefill_incarnation,
            context=wire.decode(message.context, TextContext),
            wanted=list(message.wanted),
            budget_s=message.budget_s,
        )


def check_wanted(wanted: list[int], prompt_blocks: int) -> None:
    """Raises InvalidRequest unless `wanted` is a non-empty ascending list of positions below `prompt_blocks`."""
    if not wanted:
        raise InvalidRequest("wanted: no block position is asked for", param="wanted")
    if any(later <= earlier for earlier, later in zip(wanted, wanted[1:], strict=False)):
        raise InvalidRequest(f"wanted: positions must ascend without repeats, got {wanted}", param="wanted")
    if wanted[-1] >= prompt_blocks:
        raise InvalidRequest(
            f"wanted: position {wanted[-1]} is not below the prompt's {prompt_blocks} blocks", param="wanted"
        )
