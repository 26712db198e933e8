"""Tokens of one sequence to text, as they come.

Why not the tokenizers library's own DecodeStream: it has no way to flush an unfinished character at the end, and it
raises ("Invalid prefix encountered") for byte-fallback vocabularies when bytes that made a character are followed by
one that makes no sense. Otherwise this is the same algorithm.
"""

from collections.abc import Sequence

from pipelines.text.tokenizer import TextTokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class IncrementalDetokenizer:
    """What `push` and `finish` return, joined, is the tokens decoded at once without special tokens, however they were
    grouped. (Byte-fallback vocabularies: wherever the bytes are valid UTF-8. Their decoder revokes characters that it
    gave before, once a bad byte follows; what was shown stays shown.)

    Decodes a window: the tokens of the text shown last, as left context, and those after it. So a push costs the same
    at any length, but for tokens that go on and on without making a character.
    """

    def __init__(self, tokenizer: TextTokenizer, shown: frozenset[int] = frozenset()) -> None:
        """`shown`: special tokens that are text here: they write their names."""
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids - shown
        self._skip = not shown
        self._window: list[int] = []
        self._context = 0
        """How many tokens of the window were shown in full before."""
        self._shown = 0
        """Characters of the window's text that were shown."""

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete.

        An unfinished character is held back, and so are broken bytes until whole text follows: a byte-fallback decoder
        calls all bytes in a row broken while the last character is unfinished.
        """
        self._window += [token for token in tokens if token not in self._hidden]
        text = self._decode()
        whole = len(text.rstrip(_REPLACEMENT))
        fresh = self._show(text, whole)
        if fresh and whole == len(text):
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._shown = len(self._decode())
        return fresh

    def finish(self) -> str:
        """What was held back: an unfinished character becomes a replacement character."""
        text = self._decode()
        return self._show(text, len(text))

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip)

    def _show(self, text: str, end: int) -> str:
        fresh = text[self._shown : end]
        self._shown = max(self._shown, end)
        return fresh
