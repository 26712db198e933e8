"""The bytes that one token stands for: what log probabilities are told of, token by token.

A token may be part of a character, so that bytes are exact and its text alone need not be. Knows the three ways in
which vocabularies are written: byte-level (a character for each byte), byte fallback (`<0xE2>`, and a mark for spaces),
and anything else, which is decoded.
"""

import re

from tokenizers import Tokenizer

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {id: token.content for id, token in tokenizer.get_added_tokens_decoder().items()}
        decoder = b"" if tokenizer.decoder is None else tokenizer.decoder.__getstate__()
        self._byte_level = b'"ByteLevel"' in decoder
        self._fallback = b'"ByteFallback"' in decoder

    def __call__(self, token: int) -> bytes:
        """b"" for an id that the vocabulary does not use."""
        if (added := self._added.get(token)) is not None:
            return added.encode()
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if self._byte_level:
            return bytes(_BYTES[character] for character in piece if character in _BYTES)
        if not self._fallback:
            decoded: str = self._tokenizer.decode([token])
            return decoded.encode()
        if found := _FALLBACK.fullmatch(piece):
            return bytes.fromhex(found[1])
        return piece.replace(_SPACE, " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """The byte of each character of a byte-level vocabulary, as GPT-2 has them: those that print stand for
    themselves, the others for the characters from 256 on, in order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()
