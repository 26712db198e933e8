import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from pipelines.text.detokenizer import IncrementalDetokenizer
from pipelines.text.tokenizer import TextTokenizer
from pipelines.types.sampling import SamplingParamsGenerationConfigDefaults
from tests.fakes.tokenizer_folder import write_tokenizer_folder


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return TextTokenizer.from_folder(write_tokenizer_folder(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def byte_fallback() -> TextTokenizer:
    """As Llama 2's: words start with U+2581, bytes are tokens from 4 on, the first space of a text is stripped."""
    vocab = {"<unk>": 0, "▁": 1, "a": 2, "▁a": 3} | {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return TextTokenizer(
        tokenizer,
        vocab_size=300,
        eos_ids=frozenset(),
        template=None,
        generation_defaults=SamplingParamsGenerationConfigDefaults(),
    )


def test_a_character_of_several_tokens_comes_whole(byte_level: TextTokenizer) -> None:
    tokens = byte_level.encode("😀!")
    assert len(tokens) == 5
    detokenizer = IncrementalDetokenizer(byte_level)
    assert [detokenizer.push([token]) for token in tokens] == ["", "", "", "😀", "!"]
    assert detokenizer.finish() == ""


def test_an_unfinished_character_comes_at_the_end_as_a_replacement(byte_level: TextTokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_level)
    assert detokenizer.push(byte_level.encode("a😀")[:-1]) == "a"
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_broken_bytes_come_with_the_text_after_them(byte_level: TextTokenizer) -> None:
    broken = byte_level.encode("é")[-1]  # a continuation byte, alone
    detokenizer = IncrementalDetokenizer(byte_level)
    assert detokenizer.push([broken] * 10) == ""
    assert detokenizer.push(byte_level.encode("a")) == "\ufffd" * 10 + "a"


def test_special_tokens_are_not_text_and_do_not_split_it(byte_level: TextTokenizer) -> None:
    first, second = byte_level.encode("é")
    detokenizer = IncrementalDetokenizer(byte_level)
    assert [detokenizer.push([token]) for token in (1, first, 2, second, 2)] == ["", "", "", "é", ""]


def test_nothing_pushed_is_no_text(byte_level: TextTokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_level)
    assert detokenizer.push([]) == "" and detokenizer.finish() == ""


def test_spaces_between_words_are_kept_where_the_decoder_strips_the_first(byte_fallback: TextTokenizer) -> None:
    tokens = [3, 3, 260, 1, 1, 3, 2, 1]
    detokenizer = IncrementalDetokenizer(byte_fallback)
    pieces = [detokenizer.push([token]) for token in tokens]
    assert "".join(pieces) + detokenizer.finish() == byte_fallback.decode(tokens) == "a a   aa "


def test_bytes_of_a_fallback_vocabulary(byte_fallback: TextTokenizer) -> None:
    tokens = [3] + [4 + byte for byte in "你😀".encode()] + [2]
    detokenizer = IncrementalDetokenizer(byte_fallback)
    pieces = [detokenizer.push([token]) for token in tokens]
    assert pieces == ["a", "", "", "你", "", "", "", "😀", "a"]


def test_a_bad_byte_after_a_shown_character_raises_nothing(byte_fallback: TextTokenizer) -> None:
    tokens = [4 + byte for byte in "你".encode() + b"\xff"] + [2, 3]
    detokenizer = IncrementalDetokenizer(byte_fallback)
    text = "".join(detokenizer.push([token]) for token in tokens) + detokenizer.finish()
    assert text.startswith("你") and text.endswith("a a")
