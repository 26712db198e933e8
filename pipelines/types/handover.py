"""What a prefill node says inside a hand-over stream, beside the blocks: payloads of the MESSAGE frames of
`kvcache/transfer.py`.

Order on the stream: one `Welcome` (or one `Refusal` and the end), then any number of `Progress` and block frames, one
`FirstToken` at any place between them, and a COMMIT frame; or a `Refusal` at any place, which ends the stream.
Knows nothing of frames or sockets.
"""

import msgspec

from pipelines.types.log_probabilities import LogProbabilities
from pipelines.types.sampled_token import SampledToken
from pronghorn.errors import ErrorRecord

NOT_BEGUN = "not_begun"
"""The code of a NodeLost whose hand-over broke before its welcome, and so before the prefill node did anything about
the request. Not of silence, of which nobody knows what it was."""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The hello was accepted; `hello` is the prefill node's own, as protobuf bytes, for the decode node to check."""

    hello: bytes


class Progress(msgspec.Struct, frozen=True, tag=True):
    """The request is queued or being computed by an engine that steps. Sent so that silence means a fault."""


class FirstToken(msgspec.Struct, frozen=True, tag=True):
    """The prompt's first output, sent the moment it was sampled; its blocks may still be on the way."""

    token: int
    log_probabilities: LogProbabilities | None = None
    siblings: list[SampledToken] = []
    """The first tokens of the request's other choices, in order."""
    prompt_log_probabilities: LogProbabilities | None = None
    """Of the prompt's tokens from the second on, where they were asked for."""
    num_cached_tokens: int = 0
    """Of the prompt, those that the prefill node did not compute: it had them, or fetched them."""
    fetched_bytes: dict[str, int] = {}
    """Of blocks that it fetched before, by source."""


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """The stream's last word: why there will be no commit."""

    error: ErrorRecord


HandOverMessage = Welcome | Progress | FirstToken | Refusal
