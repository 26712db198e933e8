"""Which architectures can be served, by the name that a checkpoint gives itself, and how each differs from Llama.

Pure data. A new family is a new row (and a decoder, where it is not a Llama underneath).
"""

from dataclasses import dataclass

from pronghorn.errors import ConfigurationError


@dataclass(frozen=True)
class Family:
    qkv_bias: bool = False
    """The Q, K and V projections add a bias whatever the checkpoint's `attention_bias` says."""


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(qkv_bias=True),
}

GGUF_ARCHITECTURES: dict[str, str] = {"llama": "LlamaForCausalLM"}
"""`general.architecture` of a GGUF file -> the name above. Mistral's files call themselves llama."""


def family_of(architecture: str) -> Family:
    """Raises ConfigurationError, naming the architecture and what there is, where it is not supported."""
    if architecture not in FAMILIES:
        raise ConfigurationError(
            f"the model's architecture {architecture!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    return FAMILIES[architecture]
