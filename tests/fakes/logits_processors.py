"""Functions on logits, as an operator would configure them."""

import numpy as np
from numpy.typing import NDArray


def no_repeat(tokens: NDArray[np.int64], prompt_length: int, logits: NDArray[np.float32]) -> None:
    """Nothing that was generated comes again."""
    logits[tokens[prompt_length:]] = -np.inf


def forbid_everything(tokens: NDArray[np.int64], prompt_length: int, logits: NDArray[np.float32]) -> None:
    logits[:] = -np.inf


def fail(tokens: NDArray[np.int64], prompt_length: int, logits: NDArray[np.float32]) -> None:
    raise ZeroDivisionError("a processor's own fault")


NOT_A_FUNCTION = 3
