"""Which nodes have died under one request, and whether it is poison.

Pure. A node whose engine died, or whose process is gone, while it worked on a request may have died of it. A second
one in a row is no chance: the request is refused before it takes a third. Every request on the node is under suspicion,
so that getting on clears one: a death counts no more once a later attempt has delivered `CLEARING_TOKENS` tokens; a
single one may be a prefill node's, and no decode node has got over the place where the last one died. A prefill node
that was gone before it said that it has the request did not die of it. Silence is nobody's death: neither ours, nor a
decode node's word that its prefill node answers no ping.

A machine that is lost takes all its nodes with it, though not in one moment: a request may lose its decode node, and
then the prefill node that it was sent to next. Whatever broke off on one machine of which nothing is left counts once.

A session that broke is a death only until that life of the node is heard of again. Where it takes such presumptions to
make a request poison, it is in doubt: time has to tell, since sessions also break by fives when a link does, or when
this process was held up for long.
"""

from collections import Counter

from pipelines.types.frames import POISONOUS_DEATHS
from pronghorn.ids import Incarnation

CLEARING_TOKENS = 2


class Casualties:
    def __init__(self) -> None:
        self._certain: dict[Incarnation, None] = {}  # dicts for their order
        self._presumed: dict[Incarnation, None] = {}
        self._suspected: dict[Incarnation, None] = {}
        self._lost_with: dict[Incarnation, frozenset[Incarnation]] = {}
        self._tokens: Counter[int] = Counter()

    @property
    def count(self) -> int:
        """Of what they died of, at most."""
        return len({self._lost_with.get(died, died) for died in (*self._certain, *self._presumed)})

    @property
    def poisonous(self) -> bool:
        return self.count >= POISONOUS_DEATHS

    @property
    def certain(self) -> int:
        return len(self._certain)

    @property
    def certainly_poisonous(self) -> bool:
        return self.certain >= POISONOUS_DEATHS

    @property
    def any_doubt(self) -> bool:
        """Whether hearing of a node, or losing it, could change anything here."""
        return bool(self._presumed or self._suspected)

    def any_of(self, lives: frozenset[Incarnation]) -> bool:
        return not lives.isdisjoint((*self._certain, *self._presumed, *self._suspected))

    def attempt_began(self) -> None:
        self._tokens.clear()

    def delivered(self, tokens: int, choice: int = 0) -> None:
        """Tokens that nobody had delivered before, of one sequence of the request."""
        self._tokens[choice] += tokens
        if self._tokens[choice] >= CLEARING_TOKENS and (self.count or self._suspected):
            self._certain.clear()
            self._presumed.clear()
            self._suspected.clear()

    def died(self, incarnation: Incarnation) -> None:
        """Its engine, as the node itself says."""
        self._suspected.pop(incarnation, None)
        self._presumed.pop(incarnation, None)
        self._certain[incarnation] = None

    def lost(self, incarnation: Incarnation) -> None:
        """The session with it broke."""
        self._suspected.pop(incarnation, None)
        if incarnation not in self._certain:
            self._presumed[incarnation] = None

    def machine_lost(self, lives: frozenset[Incarnation]) -> None:
        """All that ran there: whether they have broken off in the middle of the request, or are yet to."""
        self._lost_with |= dict.fromkeys(lives, lives)

    def suspect(self, incarnation: Incarnation) -> None:
        """Somebody else lost it in the middle of the request; where our session with it breaks too, it is `lost`."""
        if incarnation not in self._certain:
            self._suspected[incarnation] = None

    def suspects(self, incarnation: Incarnation) -> bool:
        return incarnation in self._suspected

    def heard(self, incarnation: Incarnation) -> None:
        """That life goes on."""
        self._presumed.pop(incarnation, None)
