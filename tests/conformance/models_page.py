"""`docs/models.md`, made from the table of families and of the random models that each is held to transformers on:
`python -m tests.conformance.models_page` writes it, a test compares it.
"""

from pathlib import Path

from cluster.random_models import FOREIGN_MODELS, RANDOM_MODELS
from cluster.verify_families import SHORT_STORAGE
from cluster.verify_logits import TOLERANCE
from pipelines.models.registry import FAMILIES, GGUF_ARCHITECTURES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
LINES = ", ".join(f"{dtype} {share:g}" for dtype, share in SHORT_STORAGE.items())
HEAD = f"""# Models

Which architectures are computed by the decoder of this project, in which types and from which files. Made by
`python -m tests.conformance.models_page`; a test compares it with the code.

- A model is a Hugging Face folder (`config.json`, one safetensors file or several, `tokenizer.json`, a chat template)
  or a GGUF file, whose tensors of any quantisation are dequantised when they are loaded.
- `--dtype` says in which type weights and keys and values are stored: float32, bfloat16 or float16. Arithmetic is
  float32 in each.
- Each shape in the last column has random weights. `tests/integration/cluster/test_verify_families.py`, and with more
  prompts `pronghorn verify parity --all-families`, hold its float32 logits to transformers' within {TOLERANCE:g}, those
  of short storage to a share of the logits' spread ({LINES}; root mean square), and the
  tokens that a prefill and a decode node give together to one process's, one by one.

| architecture | models | GGUF | shapes that are tested |
|---|---|---|---|
"""


def page() -> str:
    rows = []
    for architecture, family in FAMILIES.items():
        kinds = [name for name, kind in GGUF_ARCHITECTURES.items() if kind.name == architecture]
        if architecture == "MistralForCausalLM":
            kinds = ["llama"]  # as which Mistral's files name themselves
        shapes = [name for name, model in RANDOM_MODELS.items() if MODEL_TYPES[model.model_type] == architecture]
        rows.append(
            f"| `{architecture}` | {family.title} | {', '.join(f'`{k}`' for k in kinds)} | {'; '.join(shapes)} |"
        )
    return HEAD + "\n".join(rows) + "\n" + foreign()


def foreign() -> str:
    names = "\n".join(f"- {name}" for name in FOREIGN_MODELS)
    return f"""
## Others

A decoder-only architecture that is none of these is computed by `transformers`' own modules, with attention over the
same paged cache, prefill and decode apart as ever: right, and slower. Its weights are float32; `--dtype` is that of
keys and values. Held to transformers in the same way, each with random weights:

{names}

What keeps another state than the keys and values of standard attention is refused at start, by name: recurrent state,
compressed keys and values, encoders, attention that cannot be replaced, rope scalings that depend on the longest
sequence of a batch, quantised checkpoints.
"""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
