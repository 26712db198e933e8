"""A small real tokenizer in the folder of a Hugging Face model: byte-level BPE with a ChatML template."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CHATML = (
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' and not message.get('tool_call_id') %}"
    "{{ raise_exception('a tool message needs a tool_call_id') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

_CORPUS = ["the quick brown fox jumps over the lazy dog", "why is the sky blue?", "user assistant system", "END of it"]


def tiny_tokenizer() -> Tokenizer:
    """300 tokens at most: ids 0..2 are special, the 256 bytes and a few merges follow."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def ascii_tokenizer(vocab_size: int) -> Tokenizer:
    """Two special tokens, the second an end, then single bytes in the order of byte-level alphabets: ASCII and more."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda char: (ord(char) > 0x7F, char))
    alphabet = [char for char in alphabet if char not in "\u0120\u010a"]
    letters = ["\u0120", "\u010a", *alphabet][: vocab_size - 2]  # the blank and the newline stand far behind ASCII
    vocab = {"<begin>": 0, "<end>": 1} | {char: id for id, char in enumerate(letters, 2)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<begin>", special=True), AddedToken("<end>", special=True)])
    return tokenizer


def write_tokenizer_folder(folder: Path, *, template: str | None = CHATML) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    files = {
        "tokenizer_config.json": {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>"},
        "generation_config.json": {"eos_token_id": [2, 0], "temperature": 0.5, "transformers_version": "5"},
        "config.json": {"vocab_size": 320, "eos_token_id": 2},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
