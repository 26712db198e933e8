"""Python's cyclic collector, set so that it never holds up a process that serves.

What lives since the start is frozen: a whole collection walks only what came later. The index of blocks holds its
entries where the collector does not look (`block_index.py`). With CPython's own thresholds, a few thousand objects of
running requests had the young generations walked dozens of times a second.
"""

import gc

YOUNG, MIDDLE, OLD = 20_000, 20, 100


def settle() -> None:
    """Once, when everything that stays has been made. It is of the process: only a process's own start calls it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, OLD)
