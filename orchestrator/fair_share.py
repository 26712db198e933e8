"""Who has had how much of the service: one virtual counter of tokens for each key (Sheng et al., "Fairness in Serving
Large Language Models", OSDI 2024: VTC).

Pure. A key's counter rises by what was spent on it; the key with the lowest one is next. A key that comes back to
wait is lifted to the lowest counter of those that wait, so that having been away saves nothing up. Then, of two keys
that both wait, neither gets ahead of the other by more than about twice what one grant can cost.

Bounded: a key that holds nothing is forgotten as soon as its counter means nothing any more (it would be lifted above
it), and where `max_idle` are left, those that owe least.
"""

from dataclasses import dataclass

PROMPT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
"""As the paper has them: what a generated token costs beside one of a prompt."""


@dataclass(slots=True)
class _Account:
    spent: float
    waiting: int = 0
    held: int = 0
    """Waiting ones and running ones."""


class FairShare:
    def __init__(self, max_idle: int) -> None:
        self._max_idle = max_idle
        self._accounts: dict[str, _Account] = {}
        self._idle = 0
        self._floor = 0.0
        """The counter of whoever was let in last: what a key is lifted to where nobody waits."""

    def __len__(self) -> int:
        return len(self._accounts)

    def holds(self, key: str, *, waits: bool) -> None:
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = _Account(self._floor)
        elif not account.held:
            self._idle -= 1
        if waits:
            if not account.waiting:
                account.spent = max(account.spent, self._lowest())
            account.waiting += 1
        account.held += 1

    def let_in(self, key: str) -> None:
        """One that waited runs now."""
        account = self._accounts[key]
        account.waiting -= 1
        self._floor = max(self._floor, account.spent)

    def spend(self, key: str, tokens: float) -> None:
        if (account := self._accounts.get(key)) is not None:
            account.spent += tokens

    def leaves(self, key: str, *, waited: bool) -> None:
        account = self._accounts[key]
        account.waiting -= waited
        account.held -= 1
        if not account.held:
            self._idle += 1
            if self._idle > self._max_idle:
                self._forget()

    def spent(self, key: str) -> float:
        return self._accounts[key].spent

    def waiting(self, key: str) -> int:
        account = self._accounts.get(key)
        return 0 if account is None else account.waiting

    def _lowest(self) -> float:
        return min((each.spent for each in self._accounts.values() if each.waiting), default=self._floor)

    def _forget(self) -> None:
        lowest = self._lowest()
        idle = sorted((a.spent, key) for key, a in self._accounts.items() if not a.held)
        meaningless = sum(spent <= lowest for spent, _ in idle)
        for _, key in idle[: max(meaningless, len(idle) - self._max_idle // 2)]:
            del self._accounts[key]
            self._idle -= 1

    def check(self) -> None:
        assert self._idle == sum(not account.held for account in self._accounts.values()) <= self._max_idle
        assert all(0 <= account.waiting <= account.held for account in self._accounts.values())
