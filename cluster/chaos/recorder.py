"""What every request of a load heard, and when; and what that is worth beside what it would have heard undisturbed.

Pure: times are passed in. A request may be asked more than once, where its client asks again after a broken connection
or a refusal; each try is kept. Judged by the last try, and by every text that was said on the way:

    answered     it ended as it must, with exactly the undisturbed text
    left         its client went; what it had heard until then was right
    error        it ended in an error that says why; what it had heard until then was right
    lost         it has no end that says so, or none within its deadline, or text is missing in it
    duplicated   what had been said was said again
    wrong        text that the undisturbed run does not have
"""

import asyncio
import enum
import os.path
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

ANSWERED, LEFT, LATE, BROKEN = "answered", "left", "late", "broken"
"""How a try ends, beside the code of the error that ended it."""


class Verdict(enum.StrEnum):
    ANSWERED = "answered"
    LEFT = "left"
    ERROR = "error"
    LOST = "lost"
    DUPLICATED = "duplicated"
    WRONG = "wrong"


class Piece(msgspec.Struct, frozen=True, array_like=True):
    at_s: float
    text: str


class Try(msgspec.Struct):
    """Times are seconds since the recorder was made."""

    sent_s: float
    pieces: list[Piece] = []
    end_s: float | None = None
    how: str = LATE
    status: int | None = None
    note: str = ""

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def first_s(self) -> float | None:
        return self.pieces[0].at_s if self.pieces else None

    @property
    def longest_gap_s(self) -> float:
        times = [piece.at_s for piece in self.pieces]
        return max((after - before for before, after in zip(times, times[1:], strict=False)), default=0.0)


class Request(msgspec.Struct):
    number: int
    body: int
    """Which of the load's bodies it sent."""
    expected: str | None
    """None: any text, since nobody has asked this before."""
    extra: bool = False
    """Of a fault's own load and not of the scenario's."""
    tries: list[Try] = []

    def verdict(self) -> Verdict:
        if (expected := self.expected) is not None:
            for one in self.tries:
                if unlike := unlikeness(expected, one.text, one.how == ANSWERED):
                    return unlike
        how = self.tries[-1].how if self.tries else LATE
        return {ANSWERED: Verdict.ANSWERED, LEFT: Verdict.LEFT, LATE: Verdict.LOST, BROKEN: Verdict.LOST}.get(
            how, Verdict.ERROR
        )


def unlikeness(expected: str, text: str, whole: bool) -> Verdict | None:
    """What is wrong with a text that should be `expected`, or where it is not `whole` the beginning of it."""
    if text == expected or (not whole and expected.startswith(text)):
        return None
    if expected.startswith(text):
        return Verdict.LOST
    common = len(os.path.commonprefix([expected, text]))
    rest = text[common:]
    if any(expected.startswith(rest, start) or rest.startswith(expected[start:]) for start in range(common)):
        return Verdict.DUPLICATED
    if any(expected.startswith(rest, start) for start in range(common + 1, len(expected))):
        return Verdict.LOST
    return Verdict.WRONG


GOOD = frozenset({Verdict.ANSWERED, Verdict.LEFT, Verdict.ERROR})
MOST_KEPT = 100


@dataclass
class Recorder:
    """`now_s` is any clock that does not go back."""

    now_s: Callable[[], float]
    forgets: bool = False
    """For a load without an end: what ended well is counted and forgotten, and so is what comes after so many
    others that it would tell nothing new. What is said of single requests is said of those that are kept."""
    requests: list[Request] = field(default_factory=list)
    pieces: int = 0
    ended: int = 0

    def __post_init__(self) -> None:
        self._began_s = self.now_s()
        self._waiting: list[tuple[Callable[[], bool], asyncio.Event]] = []
        self.errors: Counter[str] = Counter()
        """By the code that ended the request's last try."""
        self._opened = self._kept = 0
        self._forgotten: Counter[tuple[bool, Verdict]] = Counter()

    def since_s(self) -> float:
        return self.now_s() - self._began_s

    def open(self, body: int, expected: str | None, extra: bool = False) -> Request:
        request = Request(self._opened, body, expected, extra, [])
        self._opened += 1
        self.requests.append(request)
        return request

    def sent(self, request: Request) -> Try:
        one = Try(self.since_s(), [])
        request.tries.append(one)
        return one

    def heard(self, one: Try, text: str) -> None:
        one.pieces.append(Piece(self.since_s(), text))
        self.pieces += 1
        self._tell()

    def end_try(self, one: Try, how: str, status: int | None = None, note: str = "") -> None:
        one.end_s, one.how, one.status, one.note = self.since_s(), how, status, note

    def end(self, request: Request) -> None:
        self.ended += 1
        verdict = request.verdict()
        if verdict is Verdict.ERROR:
            self.errors[request.tries[-1].how] += 1
        if self.forgets:
            self._forget(request, verdict)
        self._tell()

    def _forget(self, request: Request, verdict: Verdict) -> None:
        if verdict not in GOOD and self._kept < MOST_KEPT:
            self._kept += 1
            return
        self.requests.remove(request)
        self._forgotten[request.extra, verdict] += 1

    async def until(self, holds: Callable[[], bool]) -> None:
        """Returns after what made it so was recorded."""
        if holds():
            return
        event = asyncio.Event()
        entry = (holds, event)
        self._waiting.append(entry)
        try:
            await event.wait()
        finally:
            self._waiting.remove(entry)

    def _tell(self) -> None:
        for holds, event in self._waiting:
            if holds():
                event.set()

    # --- what it came to ---

    def verdicts(self, extra: bool | None = None) -> Counter[Verdict]:
        """Of the load, of the faults' own loads, or of both."""
        found = Counter(request.verdict() for request in self.requests if extra in (None, request.extra))
        for (was_extra, verdict), count in self._forgotten.items():
            if extra in (None, was_extra):
                found[verdict] += count
        return found

    def longest_gap_s(self) -> float:
        return max((one.longest_gap_s for request in self.requests for one in request.tries), default=0.0)

    def first_token_s(self) -> list[float]:
        """From the first sending to the first piece, of every request that had one; sorted."""
        found = []
        for request in self.requests:
            first = next((one.first_s for one in request.tries if one.first_s is not None), None)
            if first is not None:
                found.append(first - request.tries[0].sent_s)
        return sorted(found)

    def told(self, verdict: Verdict, limit: int = 3) -> list[str]:
        """The first of them, for people."""
        found = [request for request in self.requests if request.verdict() is verdict]
        return [_told(request) for request in found[:limit]]


def _told(request: Request) -> str:
    last = request.tries[-1] if request.tries else Try(0.0)
    said = f"request {request.number} (prompt {request.body}), sent at {last.sent_s:.2f} s: {last.how} {last.note}"
    if request.verdict() in (Verdict.WRONG, Verdict.DUPLICATED) or last.how == ANSWERED:
        return f"{said}; it heard {last.text!r} where {request.expected!r} was due"
    first = request.tries[0].sent_s if request.tries else 0.0
    heard = f", the last of them at {last.pieces[-1].at_s:.2f} s" if last.pieces else ""
    text = f"{said} after {len(last.text)} of {len(request.expected or last.text)} characters{heard}"
    return f"{text}; try {len(request.tries)}, the first at {first:.2f} s"
