"""Finds stop strings in text that comes in pieces, and holds back what may be the beginning of one.

The match is the one that is complete first; of those complete at the same character, the longest. So where the text is
cut into pieces changes nothing.
"""

from collections.abc import Sequence


class StopStringScanner:
    """What `push` and `finish` return, joined, is the text up to the match, or all of it where there is none."""

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = list(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text. Everything pushed later is dropped."""

    def push(self, text: str) -> str:
        """The text that is safe to show by now: no stop string starts in it."""
        if self.matched is not None:
            return ""
        self._held += text
        start = self._find_match()
        end = len(self._held) - self._possible_beginning() if start is None else start
        safe = self._held[:end]
        self._held = self._held[end:] if self.matched is None else ""
        return safe

    def finish(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held

    def _find_match(self) -> int | None:
        """Sets `matched`; returns where it starts."""
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if not found:
            return None
        _, start, self.matched = min(found)
        return start

    def _possible_beginning(self) -> int:
        """Length of the longest end of the held text that a stop string starts with."""
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            ending = self._held[-length:]
            if any(stop.startswith(ending) for stop in self._stops):
                return length
        return 0
