"""The operator's own functions on logits, by the names that requests give them.

A configuration says where each is found, as `package.module:attribute`; an engine imports them when it starts. A
request only names them: no function crosses a process.
"""

import pkgutil
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from pronghorn.errors import ConfigurationError

LogitsProcessor = Callable[[NDArray[np.int64], int, NDArray[np.float32]], None]
"""(tokens so far, of which so many are the prompt's; logits [vocab]) -> None. Changes the logits in place, leaves one
at least finite, and depends on nothing but its arguments: so a text is the same on every node."""


def load_processors(places: Mapping[str, str]) -> dict[str, LogitsProcessor]:
    """Raises ConfigurationError naming the processor that cannot be had."""
    return {name: _load(name, place) for name, place in places.items()}


def _load(name: str, place: str) -> LogitsProcessor:
    try:
        found = pkgutil.resolve_name(place)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"logits_processors: {name!r} is {place!r}, which cannot be imported: {error}", param="logits_processors"
        ) from error
    if not callable(found):
        raise ConfigurationError(
            f"logits_processors: {name!r} is {place!r}, a {type(found).__name__}; it must be a function",
            param="logits_processors",
        )
    processor: LogitsProcessor = found
    return processor
