"""The tokens of one sequence, and which of them are to be computed next.

    tokens    0 ........ processed ........ start+offset ........ end ........ len
              |  KV is there  | offset: skipped |     active      | later chunks |

Knows nothing of requests or models. Invariants: 0 <= start, start + offset < end <= len; end < len exactly while the
window is a chunk; every token from `prompt_length` on was generated; the completion range, what was generated and not
yet taken for streaming, ends at len.
"""

from typing import overload

import numpy as np
from numpy.typing import NDArray

PackedTokenBuffer = tuple[bytes, int, int, int, int, int]
"""Tokens as little-endian int64; processing start, end and offset; completion start; prompt length."""

_LITTLE_ENDIAN_INT64 = np.dtype("<i8")


class TokenBuffer:
    """Owns its array unless that is writable and int64 already: then it is taken over, not copied."""

    def __init__(self, tokens: NDArray[np.int64]) -> None:
        """`tokens` is int64, [n], n > 0: the prompt. Raises ValueError for anything else."""
        if tokens.ndim != 1 or tokens.dtype != np.int64 or tokens.size == 0:
            raise ValueError(
                f"a token buffer is made of a non-empty 1-D int64 array, not of {tokens.dtype} {tokens.shape}"
            )
        self._array = tokens if tokens.flags.writeable else tokens.copy()
        self._length = self._prompt_length = self._end = self._completion_start = tokens.size
        self._start = 0
        self._offset = 0

    # --- reading -----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return (
            f"TokenBuffer(length={self._length}, prompt={self._prompt_length}, "
            f"active={self._start + self._offset}:{self._end}, unstreamed={self.num_outstanding_generated_tokens})"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenBuffer) and self.pack() == other.pack()

    __hash__ = None  # type: ignore[assignment]  # mutable, as a list is

    @overload
    def __getitem__(self, key: int) -> int: ...
    @overload
    def __getitem__(self, key: slice) -> NDArray[np.int64]: ...
    def __getitem__(self, key: int | slice) -> int | NDArray[np.int64]:
        """A token, or a view; indices as in a list. IndexError out of bounds, TypeError for other kinds of index."""
        if isinstance(key, slice):
            return self.all[key]
        if not isinstance(key, int | np.integer) or isinstance(key, bool):
            raise TypeError(f"tokens are indexed by an int or a slice, not by {type(key).__name__}")
        if not -self._length <= key < self._length:
            raise IndexError(f"token {key} of {self._length}")
        return int(self.all[key])

    @property
    def all(self) -> NDArray[np.int64]:
        """Every token, int64, [len]. A view: valid until the buffer grows."""
        return self._array[: self._length]

    @property
    def prompt(self) -> NDArray[np.int64]:
        return self._array[: self._prompt_length]

    @property
    def prompt_length(self) -> int:
        """Tokens at construction, or at the last reset."""
        return self._prompt_length

    @property
    def generated(self) -> NDArray[np.int64]:
        return self._array[self._prompt_length : self._length]

    @property
    def generated_length(self) -> int:
        return self._length - self._prompt_length

    @property
    def processed_length(self) -> int:
        """Tokens before the window: their KV is there."""
        return self._start

    @property
    def active_length(self) -> int:
        return self._end - self._start - self._offset

    @property
    def active(self) -> NDArray[np.int64]:
        """What the next step computes, int64, [active_length]; its first position is `processed_length` + offset."""
        return self._array[self._start + self._offset : self._end]

    @property
    def processing_offset(self) -> int:
        return self._offset

    @property
    def current_position(self) -> int:
        return self._start + self.active_length

    @property
    def actively_chunked(self) -> bool:
        return self._end < self._length

    @property
    def num_outstanding_generated_tokens(self) -> int:
        """Generated and not yet taken for streaming."""
        return self._length - self._completion_start

    # --- the window --------------------------------------------------------------------------------------------------

    def chunk(self, num_tokens: int) -> None:
        """Compute only the first `num_tokens` of the window now. ValueError unless 0 < num_tokens < active_length."""
        if not 0 < num_tokens < self.active_length:
            raise ValueError(f"a chunk of {num_tokens} tokens is not a proper part of {self.active_length} active ones")
        self._end = self._start + self._offset + num_tokens

    def advance_chunk(self) -> None:
        """The chunk is computed; what is left of the sequence becomes the window. ValueError unless chunked."""
        if not self.actively_chunked:
            raise ValueError("the window is not a chunk")
        self._start, self._end, self._offset = self._end, self._length, 0

    def skip_processing(self, num_tokens: int) -> None:
        """The KV of the window's first `num_tokens` is there already. One token at least must stay to be computed."""
        if not 0 <= num_tokens < self.active_length:
            raise ValueError(f"cannot skip {num_tokens} of {self.active_length} active tokens: one must stay")
        self._start += num_tokens

    def rewind_processing(self, num_tokens: int) -> None:
        """Move the window's start back: these tokens are computed again."""
        if not 0 <= num_tokens <= self._start:
            raise ValueError(f"cannot rewind {num_tokens} tokens: {self._start} are processed")
        self._start -= num_tokens

    def apply_processing_offset(self, offset: int) -> None:
        """Leave out the window's first `offset` tokens in the next step, without counting them as processed."""
        if not 0 <= offset < self._end - self._start:
            raise ValueError(f"an offset of {offset} leaves nothing of {self._end - self._start} tokens")
        self._offset = offset

    # --- generating --------------------------------------------------------------------------------------------------

    def advance_with_token(self, token: int) -> None:
        """The window is computed and gave `token`, which becomes the next window. ValueError while chunked."""
        if self.actively_chunked:
            raise ValueError("the window is a chunk: its last token is not the sequence's last")
        if self._length == self._array.size:
            self._grow()
        self._array[self._length] = token
        self._length += 1
        self._start, self._end, self._offset = self._end, self._length, 0

    def _grow(self) -> None:
        grown = np.empty(2 * self._array.size, dtype=np.int64)
        grown[: self._length] = self.all
        self._array = grown

    def overwrite_last_token(self, token: int) -> None:
        self.overwrite_token_at_offset_from_end(token, 1)

    def overwrite_token_at_offset_from_end(self, token: int, offset: int) -> None:
        """Replace the `offset`-th generated token from the end, 1 being the last. ValueError for any other token."""
        if not 1 <= offset <= self.generated_length:
            raise ValueError(f"token {offset} from the end is not one of {self.generated_length} generated")
        self._array[self._length - offset] = token

    def consume_recently_generated_tokens(self, num_trailing_to_exclude: int = 0) -> NDArray[np.int64]:
        """A copy of what was generated since the last call, without the last so many, which stay for the next one.

        ValueError where there is nothing to take.
        """
        end = self._length - num_trailing_to_exclude
        if num_trailing_to_exclude < 0 or end <= self._completion_start:
            raise ValueError(f"no generated tokens wait to be taken (leaving out the last {num_trailing_to_exclude})")
        taken = self._array[self._completion_start : end].copy()
        self._completion_start = end
        return taken

    def reset_as_new_prompt(self, num_trailing_to_drop: int = 0) -> None:
        """Everything so far becomes a prompt of which nothing is computed and nothing waits to be taken.

        The last so many tokens, placeholders of tokens that were never known, go.
        """
        if not 0 <= num_trailing_to_drop <= self.generated_length:
            raise ValueError(f"cannot drop {num_trailing_to_drop} of {self.generated_length} generated tokens")
        self._length -= num_trailing_to_drop
        self._prompt_length = self._end = self._completion_start = self._length
        self._start = self._offset = 0

    # --- crossing a process ------------------------------------------------------------------------------------------

    def pack(self) -> PackedTokenBuffer:
        """The whole state, with the valid tokens only."""
        tokens = self.all.astype(_LITTLE_ENDIAN_INT64).tobytes()
        return tokens, self._start, self._end, self._offset, self._completion_start, self._prompt_length

    @classmethod
    def unpack(cls, packed: PackedTokenBuffer) -> "TokenBuffer":
        """The reverse of `pack`. Raises ValueError where the numbers do not make a buffer."""
        data, start, end, offset, completion_start, prompt_length = packed
        buffer = cls(np.frombuffer(data, dtype=_LITTLE_ENDIAN_INT64).astype(np.int64))  # a copy that can be written
        length = len(buffer)
        if not (0 <= offset and 0 <= start and start + offset < end <= length):
            raise ValueError(f"window {start}+{offset}:{end} does not fit {length} tokens")
        if not 0 < prompt_length <= completion_start <= length:
            raise ValueError(f"prompt {prompt_length} and completion {completion_start} do not fit {length} tokens")
        buffer._start, buffer._end, buffer._offset = start, end, offset
        buffer._completion_start, buffer._prompt_length = completion_start, prompt_length
        return buffer
