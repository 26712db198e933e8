"""Why a request went where it went, and what came of it: one record a request, kept for a while and logged at its end.

Knows choices, times and counts; no token and no text of a request. The last `KEPT` requests can be asked for, those
that run included; older ones are in the log alone (logger `pronghorn.requests`, one JSON object a line).
"""

import logging
from collections import OrderedDict
from collections.abc import Mapping

import msgspec

from orchestrator.routing.facts import Pair, Route
from pipelines.types.text_output import TextGenerationOutput
from pronghorn.ids import RequestID

log = logging.getLogger("pronghorn.requests")

KEPT = 1024


class Considered(msgspec.Struct, omit_defaults=True):
    """One way that was considered."""

    decode: str
    prefill: str | None
    """None: the prompt is computed on the decode node."""
    predicted_s: float | None
    """Until the answer flows, what that costs others reckoned in; only `kv_aware` predicts."""
    scores: dict[str, float]
    reuse_tokens: int
    """Of the prompt, what the node that would compute it is thought to have, in its pool or its tiers."""
    queued_tokens: int
    in_flight: int
    tier_tokens: dict[str, int] = {}
    """Of those, what it would have to bring back from its memory ("host") or its disk ("disk")."""


class AttemptRecord(msgspec.Struct, omit_defaults=True):
    routed_s: float
    policy: str
    considered: list[Considered]
    """The first was chosen."""
    predicted_bytes: int
    """Of blocks that the decode node was thought to lack and has to be sent."""
    moved_bytes: int = 0
    """Of blocks that prefill nodes sent it, as it counted them, those of hand-overs that failed included."""
    fetched_bytes: dict[str, int] = {}
    """Of blocks that whoever computed the prompt brought before, by source: a node's name, or a tier of its own."""
    ended: str | None = None
    """What ended the attempt before the request's end."""


class RequestRecord(msgspec.Struct, omit_defaults=True):
    """Times are seconds since the request was accepted."""

    request_id: str
    model: str
    prompt_tokens: int
    session: str | None = None
    target_endpoint: str | None = None
    attempts: list[AttemptRecord] = []
    predicted_reuse_tokens: int | None = None
    """Of the attempt that delivered the first token."""
    reused_tokens: int | None = None
    """As its node counted them."""
    first_token_s: float | None = None
    ended_s: float | None = None
    output_tokens: int = 0
    outcome: str = "running"
    error: str | None = None

    @property
    def retries(self) -> int:
        return max(0, len(self.attempts) - 1)


class Explanations:
    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._records: OrderedDict[RequestID, RequestRecord] = OrderedDict()
        self._began_s: dict[RequestID, float] = {}
        """Of those that run: bounded by admission."""

    def accepted(self, record: RequestRecord, now_s: float) -> None:
        request_id = RequestID(record.request_id)
        self._records[request_id] = record
        self._records.move_to_end(request_id)
        self._began_s[request_id] = now_s
        while len(self._records) > self._kept:
            self._records.popitem(last=False)

    def routed(self, request_id: RequestID, route: Route, kv_bytes_per_token: float, now_s: float) -> None:
        record = self._records.get(request_id)
        if record is None or route.choice is None:
            return
        pairs = route.choice.considered
        lacks = record.prompt_tokens - pairs[0].decode.reuse_tokens if pairs[0].prefill is not None else 0
        record.attempts.append(
            AttemptRecord(
                routed_s=self._since_s(request_id, now_s),
                policy=route.choice.policy,
                considered=[_considered(pair) for pair in pairs],
                predicted_bytes=int(lacks * kv_bytes_per_token),
            )
        )

    def moved(self, request_id: RequestID, moved_bytes: int) -> None:
        """A hand-over of the latest attempt has ended."""
        if (record := self._records.get(request_id)) is not None and record.attempts:
            record.attempts[-1].moved_bytes += moved_bytes

    def fetched(self, request_id: RequestID, size_bytes: Mapping[str, int]) -> None:
        """A node that computed the prompt for the latest attempt had brought so much of it, by source."""
        if (record := self._records.get(request_id)) is not None and record.attempts:
            found = record.attempts[-1].fetched_bytes
            record.attempts[-1].fetched_bytes = found | {
                source: found.get(source, 0) + n for source, n in size_bytes.items()
            }

    def attempt_ended(self, request_id: RequestID, why: str) -> None:
        if (record := self._records.get(request_id)) is not None and record.attempts:
            record.attempts[-1].ended = why

    def delivered(self, request_id: RequestID, output: TextGenerationOutput, now_s: float) -> None:
        record = self._records.get(request_id)
        if record is None:
            return
        record.output_tokens += len(output.tokens)
        if record.first_token_s is None:
            record.first_token_s = self._since_s(request_id, now_s)
            record.predicted_reuse_tokens = record.attempts[-1].considered[0].reuse_tokens if record.attempts else None
        if record.reused_tokens is None:
            record.reused_tokens = output.num_cached_tokens

    def ended(self, request_id: RequestID, outcome: str, error: str | None, now_s: float) -> None:
        record = self._records.get(request_id)
        if record is not None:
            record.ended_s = self._since_s(request_id, now_s)
            record.outcome, record.error = outcome, error
            if log.isEnabledFor(logging.INFO):
                log.info("%s", msgspec.json.encode(record).decode())
        self._began_s.pop(request_id, None)

    def find(self, request_id: str) -> RequestRecord | None:
        return self._records.get(RequestID(request_id))

    def _since_s(self, request_id: RequestID, now_s: float) -> float:
        return round(now_s - self._began_s.get(request_id, now_s), 6)


def _considered(pair: Pair) -> Considered:
    computes = pair.prefill or pair.decode
    return Considered(
        decode=pair.decode.node.name,
        prefill=None if pair.prefill is None else pair.prefill.node.name,
        predicted_s=None if pair.predicted_s is None else round(pair.predicted_s, 6),
        scores={name: round(score, 3) for name, score in pair.scores.items()},
        reuse_tokens=computes.found_tokens,
        queued_tokens=computes.node.queued_tokens,
        in_flight=pair.decode.node.in_flight,
        tier_tokens={t: n for t, n in (("host", computes.host_tokens), ("disk", computes.disk_tokens)) if n},
    )
