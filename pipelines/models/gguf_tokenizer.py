"""The tokenizer inside a GGUF file, written out as the files of a Hugging Face folder.

A GGUF stores the vocabulary, merges and special ids but not the tokenizer itself: how text is cut before merging is
only named (`tokenizer.ggml.pre`), and an unknown name is refused, since a guess would shift every prompt's tokens.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from pronghorn.errors import ConfigurationError

_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's token types

# The cuts of llama.cpp's names, spelled as the models' own tokenizer.json files spell them.
_LLAMA3_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_CUT = _LLAMA3_CUT.replace(r"\p{N}{1,3}", r"\p{N}")


def write_tokenizer(metadata: Mapping[str, Any], folder: Path, max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json into `folder`.

    Raises ConfigurationError for a kind of tokenizer that is not known here.
    """
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata, tokens)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata, tokens)
    else:
        raise ConfigurationError(f"the GGUF file's tokenizer {kind!r} is not supported; supported: gpt2, llama")
    types: Sequence[int] = metadata.get("tokenizer.ggml.token_type") or ()
    for kind_of_token, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        marked = [token for token, stated in zip(tokens, types, strict=bool(types)) if stated == kind_of_token]
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=special) for token in marked])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_settings(metadata, tokens, folder, max_length)


def _write_settings(metadata: Mapping[str, Any], tokens: list[str], folder: Path, max_length: int) -> None:
    ids = {
        name: metadata.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    settings: dict[str, Any] = {f"{name}_token": tokens[i] for name, i in ids.items() if i is not None}
    settings |= {
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        # The one class that transformers 4 and 5 both know.
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    generation = {f"{name}_token_id": ids[name] for name in ("bos", "eos", "pad") if ids[name] is not None}
    for name, content in (("tokenizer_config.json", settings), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    template = metadata.get("tokenizer.chat_template")
    if template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    cut = str(metadata.get("tokenizer.ggml.pre", "default"))
    tokenizer.pre_tokenizer = _cut(cut)
    if cut == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _cut(name: str) -> Any:
    prefix_space = {"add_prefix_space": False}
    match name:
        case "default" | "gpt-2":
            return pre_tokenizers.ByteLevel(**prefix_space)
        case "smollm" | "starcoder" | "refact" | "command-r":
            digits = pre_tokenizers.Digits(individual_digits=True)
            return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(**prefix_space)])
        case "llama-bpe" | "llama3" | "llama-v3" | "smaug-bpe":
            split = pre_tokenizers.Split(Regex(_LLAMA3_CUT), behavior="isolated")
            return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(use_regex=False, **prefix_space)])
        case "qwen2":
            split = pre_tokenizers.Split(Regex(_QWEN2_CUT), behavior="isolated")
            return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(use_regex=False, **prefix_space)])
        case _:
            raise ConfigurationError(f"the GGUF file's pre-tokenizer {name!r} is not supported")


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    """BPE over whole characters with byte fallback; the merges are implied by the scores of what they make."""
    vocab = {token: i for i, token in enumerate(tokens)}
    scores: Sequence[float] = metadata["tokenizer.ggml.scores"]
    splits = [
        (-scores[i], vocab[token[:cut]], vocab[token[cut:]], (token[:cut], token[cut:]))
        for token, i in vocab.items()
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    merges = [pair for *_, pair in sorted(splits)]
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    model = models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    blank = normalizers.Replace(" ", "▁")
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), blank])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = blank
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer
