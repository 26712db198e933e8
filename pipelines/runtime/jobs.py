"""Requests that one output answers: those that wait, those that are being computed, and what is said of them.

Knows fences, deadlines and contexts of any type; not what is computed. Pure: time is passed in, answers are taken out.

    (new) --> WAITING --start--> RUNNING --answer--> ANSWERED
                 '----------- answer -------------------^

Invariants, seen to by `check`: every fence that is submitted is answered once, by its output or by an error; at most
`max_waiting` wait; a request is answered the moment that it is cancelled or its deadline passes, and where the device
is at work on it already, what comes out is dropped. Attempts replace each other as in the text schedulers: a higher
one ends the one before with `Cancelled`, a lower one is refused, the same fence again is ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Generic

from typing_extensions import TypeVar

from pipelines.runtime.attempts import Attempts
from pipelines.runtime.messages import Failed
from pronghorn.deadline import Deadline
from pronghorn.errors import Cancelled, DeadlineExceeded, InternalError, Overloaded, PronghornError
from pronghorn.ids import Fence, RequestID

ContextT = TypeVar("ContextT", default=Any)
OutputT = TypeVar("OutputT", default=Any)

RETRY_AFTER_S = 1.0


class State(Enum):
    WAITING = auto()
    RUNNING = auto()
    ANSWERED = auto()


class Event(Enum):
    START = auto()
    ANSWER = auto()


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.WAITING, Event.START): State.RUNNING,
    (State.WAITING, Event.ANSWER): State.ANSWERED,
    (State.RUNNING, Event.ANSWER): State.ANSWERED,
}


@dataclass(eq=False)
class Job(Generic[ContextT]):
    fence: Fence
    context: ContextT
    deadline: Deadline
    state: State = State.WAITING

    def apply(self, event: Event) -> None:
        self.state = TRANSITIONS[self.state, event]


@dataclass(frozen=True)
class Done(Generic[OutputT]):
    """The fence's last word, its output."""

    fence: Fence
    output: OutputT


class Jobs(Generic[ContextT, OutputT]):
    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._attempts: Attempts[Job[ContextT]] = Attempts()
        """Those that have no answer yet."""
        self._waiting: list[Job[ContextT]] = []
        self._started: list[Job[ContextT]] = []
        """What the device has in hand, answered or not."""
        self._answers: list[Done[OutputT] | Failed] = []

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, fence: Fence, context: ContextT, budget_s: float, now_s: float) -> None:
        live = self._attempts.live(fence.request_id)
        if live is not None and live.fence == fence:
            return
        if live is not None and fence.attempt < live.fence.attempt:
            self._refuse(fence, Cancelled(f"attempt {fence.attempt} is older than attempt {live.fence.attempt}"))
            return
        if live is not None:
            self._fail(live, Cancelled(f"attempt {live.fence.attempt} was replaced by attempt {fence.attempt}"))
        if len(self._waiting) >= self._max_waiting:
            text = f"{len(self._waiting)} requests wait for this node already (bound {self._max_waiting})"
            self._refuse(fence, Overloaded(text, retry_after_s=RETRY_AFTER_S))
            return
        job = Job(fence, context, Deadline.after(now_s, budget_s))
        self._attempts.add(job)
        self._waiting.append(job)

    def cancel(self, fence: Fence) -> None:
        """Whether it waits or runs, it is over now. Unknown fences are harmless: the word may be late."""
        if (job := self._attempts.get(fence)) is not None:
            self._fail(job, Cancelled(f"the request was cancelled while {job.state.name.lower()}"))

    def sweep(self, now_s: float) -> None:
        for job in self._attempts:
            if job.deadline.passed(now_s):
                self._fail(job, DeadlineExceeded(f"the request's deadline passed while {job.state.name.lower()}"))

    def start(self, count: int) -> list[Job[ContextT]]:
        """Hand the oldest `count` at most to the device, which has nothing in hand."""
        assert not self._started, f"{len(self._started)} requests are being computed already"
        self._started, self._waiting = self._waiting[:count], self._waiting[count:]
        for job in self._started:
            job.apply(Event.START)
        return list(self._started)

    def settle(self, outputs: Mapping[RequestID, OutputT], failures: Mapping[RequestID, PronghornError]) -> None:
        """The device is done with what it had in hand; who has neither an output nor a failure is told so."""
        started, self._started = self._started, []
        for job in started:
            request_id = job.fence.request_id
            if job.state is State.ANSWERED:
                continue
            if (error := failures.get(request_id)) is not None:
                self._fail(job, error)
            elif request_id not in outputs:
                self._fail(job, InternalError(f"the model gave no output for request {request_id}"))
            else:
                self._end(job)
                self._answers.append(Done(job.fence, outputs[request_id]))

    def take_answers(self) -> list[Done[OutputT] | Failed]:
        answers, self._answers = self._answers, []
        return answers

    def check(self) -> None:
        assert len(self._waiting) <= self._max_waiting
        assert all(job.state is State.WAITING for job in self._waiting)
        assert all(job.state is not State.WAITING for job in self._started)
        unanswered = {job.fence for job in (*self._waiting, *self._started) if job.state is not State.ANSWERED}
        assert {job.fence for job in self._attempts} == unanswered

    def _fail(self, job: Job[ContextT], error: PronghornError) -> None:
        self._end(job)
        self._refuse(job.fence, error)

    def _end(self, job: Job[ContextT]) -> None:
        if job.state is State.WAITING:
            self._waiting.remove(job)
        self._attempts.discard(job)
        job.apply(Event.ANSWER)

    def _refuse(self, fence: Fence, error: PronghornError) -> None:
        self._answers.append(Failed(fence, error.record()))
