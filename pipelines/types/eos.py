"""What ends a sequence besides its length: ids, id sequences, strings.

Ids and sequences are looked for where tokens are sampled; strings on decoded text, where text exists.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(kw_only=True)
class EOSTracker:
    eos_token_ids: set[int] = field(default_factory=set)
    """Each ends the sequence alone; masked by the sampler while fewer than `min_new_tokens` are out."""
    eos_sequences: list[list[int]] = field(default_factory=list)
    """Stop strings as tokens; never masked."""
    eos_stop_strings: list[str] = field(default_factory=list)

    @classmethod
    def build(
        cls, ids: Iterable[int], sequences: Iterable[Sequence[int]], strings: Iterable[str], ignore_eos: bool
    ) -> "EOSTracker":
        """With `ignore_eos` ids and sequences go, those that the user asked for too; strings still work."""
        if ignore_eos:
            return cls(eos_stop_strings=list(strings))
        return cls(
            eos_token_ids=set(ids), eos_sequences=[list(s) for s in sequences if s], eos_stop_strings=list(strings)
        )

    def is_eos(self, generated: NDArray[np.int64]) -> bool:
        """Whether the newest of `generated` (int64, [n]) ends the sequence. The prompt never takes part."""
        if len(generated) == 0:
            return False
        if int(generated[-1]) in self.eos_token_ids:
            return True
        return any(
            len(sequence) <= len(generated) and generated[-len(sequence) :].tolist() == sequence
            for sequence in self.eos_sequences
        )
