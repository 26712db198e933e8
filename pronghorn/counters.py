"""Named counts of things that happened, kept in memory and shown by `status`.

A name is a lower-case noun phrase, with an optional bounded reason: `transfer_refused{reason="digest"}` is
`count("transfer_refused", "digest")`. Request ids and hashes are never names.
"""

from collections import Counter


class Counters:
    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def count(self, name: str, reason: str | None = None, n: int = 1) -> None:
        self._counts[name if reason is None else f"{name}.{reason}"] += n

    def value(self, name: str, reason: str | None = None) -> int:
        return self._counts[name if reason is None else f"{name}.{reason}"]

    def snapshot(self) -> dict[str, int]:
        return dict(self._counts)
