"""A real TextTokenizer over the smallest vocabulary: token i is byte i, then two special tokens."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pipelines.text.chat_template import ChatTemplate
from pipelines.text.tokenizer import TextTokenizer
from pipelines.types.sampling import SamplingParamsGenerationConfigDefaults

END = 256
"""The token that ends a sequence."""
VOCAB_SIZE = 257

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def _alphabet() -> dict[str, int]:
    """The character that byte-level tokenizers write for each byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


def byte_tokenizer(template: str | None = TEMPLATE) -> TextTokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=_alphabet(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return TextTokenizer(
        tokenizer,
        vocab_size=VOCAB_SIZE,
        eos_ids=frozenset({END}),
        template=None if template is None else ChatTemplate(template, {"eos_token": "<end>"}),
        generation_defaults=SamplingParamsGenerationConfigDefaults(),
    )
