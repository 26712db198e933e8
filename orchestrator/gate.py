"""Admission with a clock: what a job asks for, how many places nodes have, and errors for those that are refused.

A thin shell around `admission.py`, which decides. Each orchestrator has one, and counts only its own requests: several
orchestrators together let as many times as much through, and a key's share is a share of each of them.
"""

from orchestrator.admission import Admission, Limits, Refusal, Ticket, Turn, Why
from orchestrator.config import OrchestratorConfig
from orchestrator.nodes import Nodes
from orchestrator.ports import GenerationJob
from orchestrator.routing.speeds import LearnedSpeeds
from pronghorn.clock import Clock
from pronghorn.counters import Counters
from pronghorn.errors import Overloaded, PronghornError, Unavailable
from pronghorn.ids import RequestID
from pronghorn.ledger import Held

FLIGHT_BYTES = 16 * 1024
"""What a waiting request holds beside its tokens: measured as 11 to 14 KiB for short prompts."""
TOKEN_BYTES = 16
"""Its tokens, and the text that they are of."""
LOOK_S = 0.25
"""Nodes are counted this often at most."""


class Gate:
    def __init__(
        self, config: OrchestratorConfig, nodes: Nodes, speeds: LearnedSpeeds, clock: Clock, counters: Counters
    ) -> None:
        self._config = config
        self._nodes = nodes
        self._speeds = speeds
        self._clock = clock
        self._counters = counters
        self._looked_at_s = float("-inf")
        self._admission = Admission(
            Limits(
                max_in_flight=config.max_in_flight,
                max_queue=config.max_queue,
                max_queue_bytes=config.max_queue_bytes,
                max_queue_wait_s=config.max_queue_wait_s,
            )
        )

    def enter(self, job: GenerationJob) -> Turn:
        """Raises Overloaded or Unavailable for one that is refused."""
        now_s = self._clock.now_s()
        answer = self._admission.enter(self._ticket(job), now_s)
        if isinstance(answer, Refusal):
            raise self.refused(answer)
        return answer

    def refused(self, refusal: Refusal) -> PronghornError:
        self._counters.count("request_shed", refusal.why.value)
        least_s = self._config.retry_after_s
        retry_after_s = least_s if refusal.retry_after_s is None else max(least_s, refusal.retry_after_s)
        if refusal.why is Why.DEADLINE:
            return Unavailable(refusal.message, code="deadline_out_of_reach", retry_after_s=retry_after_s)
        return Overloaded(refusal.message, retry_after_s=retry_after_s)

    def waits_s(self, job: GenerationJob) -> float:
        """How long it may wait at most from now on, before `overdue` is to be called for it."""
        if (start_by_s := self._start_by_s(job)) == job.deadline.expires_at_s:  # which has a timer of its own
            return self._config.max_queue_wait_s
        return max(0.0, min(start_by_s - self._clock.now_s(), self._config.max_queue_wait_s))

    def overdue(self, request_id: RequestID) -> Turn:
        return self._admission.overdue(request_id, self._clock.now_s())

    def started(self, request_id: RequestID) -> Turn:
        return self._admission.started(request_id, self._clock.now_s())

    def delivered(self, request_id: RequestID, tokens: int) -> None:
        self._admission.delivered(request_id, tokens)

    def leave(self, request_id: RequestID) -> Turn:
        return self._admission.leave(request_id, self._clock.now_s())

    def look(self) -> Turn:
        """Nodes were heard, or lost: count them, unless that was done just now. Without any, whoever has a slot is to
        be told so rather than wait."""
        now_s = self._clock.now_s()
        if now_s - self._looked_at_s < LOOK_S:
            return Turn()
        self._looked_at_s = now_s
        usable = sum(view.unusable is None for view in self._nodes.views(now_s))
        return self._admission.make_room(usable * self._config.starts_per_node or None, now_s)

    def _ticket(self, job: GenerationJob) -> Ticket:
        prompt_tokens = len(job.context.tokens)
        return Ticket(
            request_id=job.context.request_id,
            priority=job.priority,
            share=job.share,
            prompt_tokens=prompt_tokens,
            size_bytes=FLIGHT_BYTES + TOKEN_BYTES * prompt_tokens,
            start_by_s=self._start_by_s(job),
        )

    def _start_by_s(self, job: GenerationJob) -> float:
        context = job.context
        prompt_tokens = len(context.tokens)
        needed_s = self._speeds.least_s(prompt_tokens, context.max_length - prompt_tokens)
        return job.deadline.expires_at_s - needed_s

    # --- what is ---

    @property
    def here(self) -> int:
        admission = self._admission
        return admission.running + admission.waiting + admission.dismissed

    def gauges(self) -> dict[str, int]:
        return self._admission.gauges(self._clock.now_s())

    def held(self) -> list[Held]:
        return self._admission.held()

    def check(self) -> None:
        self._admission.check()
