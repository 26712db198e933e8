import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from pipelines.text.token_bytes import TokenBytes
from tests.fakes.byte_tokenizer import END, byte_tokenizer


def test_byte_level_tokens_are_their_bytes() -> None:
    told = byte_tokenizer().token_bytes
    assert b"".join(told(byte) for byte in range(256)) == bytes(range(256))
    assert told(END) == b"<end>"
    assert told(100_000) == b""


@pytest.mark.parametrize(("token", "data"), [(0, b"\xe2"), (1, b" hi"), (2, b"x"), (3, b"<s>")])
def test_byte_fallback_tokens_are_their_bytes(token: int, data: bytes) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"<0xE2>": 0, "▁hi": 1, "x": 2}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    assert TokenBytes(tokenizer)(token) == data
