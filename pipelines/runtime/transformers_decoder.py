"""Any decoder that `transformers` computes with standard attention, on the paged cache: its modules do all else, and
attention comes here through transformers' attention interface.

A step's sequences lie end to end as one row of tokens with their own positions, as in the native decoders; only
attention tells them apart, so a model whose other parts mix tokens is none that this can run. Weights are float32.
"""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from pipelines.models.foreign_config import ForeignConfig
from pipelines.runtime.attention import PlainAttention
from pipelines.runtime.step import Step
from pronghorn.errors import ConfigurationError

_IGNORED = {
    "dropout", "is_causal", "position_ids", "output_attentions", "output_hidden_states", "output_router_logits",
    "use_cache", "cache_position", "deterministic",
}  # fmt: skip
"""What models hand to attention and needs no answer here: training, side outputs, and what the step says already.
Anything else would be left out of what is computed, so it is refused."""
_ANSWERED = {"scaling", "sliding_window", "softcap"}


class TransformersDecoder:
    """Implements `Decoder`. One thread calls it."""

    def __init__(self, config: ForeignConfig, folder: Path, pool: torch.Tensor, device: str) -> None:
        """Raises ConfigurationError where the model's parts are none that can be run so."""
        self._config = config
        self._device = torch.device(device)
        self._pool = pool
        self._step: Step | None = None
        # A name of its own: the interface is one table for the whole process, and several replicas may live in it.
        name = f"paged_{id(self)}"
        AttentionInterface.register(name, self._attend)
        self._model = _load(config, folder, name).to(self._device)
        self._attentions: dict[float | None, PlainAttention] = {}  # by soft cap
        self._keeps_some_logits = "logits_to_keep" in inspect.signature(self._model.forward).parameters

    @torch.inference_mode()
    def logits(self, step: Step) -> NDArray[np.float32]:
        """[rows sampled, vocab] float32. Writes the step's keys and values into the pool."""
        self._step = step
        rows = torch.from_numpy(step.sample_rows).to(self._device)
        kept = {"logits_to_keep": rows} if self._keeps_some_logits else {}
        found = self._model(
            input_ids=torch.from_numpy(step.token_ids)[None].to(self._device),
            position_ids=torch.from_numpy(step.positions)[None].to(self._device),
            use_cache=False,
            **kept,
        ).logits[0]
        self._step = None
        logits: NDArray[np.float32] = (found if kept else found[rows]).float().cpu().numpy()
        return logits

    def close(self) -> None:
        """Nothing runs in the background."""

    def _attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **said: Any
    ) -> tuple[torch.Tensor, None]:
        """query [1, heads, T, head_dim], key and value [1, kv_heads, T, head_dim]; gives [1, T, heads, head_dim]."""
        assert self._step is not None and mask is None
        unknown = {name for name, argument in said.items() if argument is not None} - _IGNORED - _ANSWERED
        if unknown:
            raise ConfigurationError(f"{self._config.architecture}: its attention wants {', '.join(sorted(unknown))}")
        layer, dim = module.layer_idx, query.shape[-1]
        self._check(layer, key, value, said.get("sliding_window"))
        scaling = said.get("scaling")
        if scaling is not None:
            query = query * (scaling * dim**0.5)
        attention = self._attention(said.get("softcap"))
        queries, keys, values = (x[0].transpose(0, 1).float() for x in (query, key, value))
        return attention.attend(layer, queries, keys, values, self._step)[None].to(query), None

    def _check(self, layer: int, key: torch.Tensor, value: torch.Tensor, window: int | None) -> None:
        """What config.json was understood to say is what the model does."""
        wanted = (self._config.num_kv_heads, self._config.head_dim)
        for kind, x in (("keys", key), ("values", value)):
            if (x.shape[1], x.shape[3]) != wanted:
                raise ConfigurationError(
                    f"{self._config.architecture}: layer {layer} has {kind} of {x.shape[1]} heads of {x.shape[3]}, "
                    f"and the cache is made for {wanted[0]} of {wanted[1]}"
                )
        if window is not None and window != self._config.windows[layer]:
            raise ConfigurationError(
                f"{self._config.architecture}: layer {layer} sees {window} tokens back, "
                f"and config.json was read as {self._config.windows[layer]}"
            )

    def _attention(self, softcap: float | None) -> PlainAttention:
        return self._attentions.setdefault(softcap, PlainAttention(self._pool, self._config.windows, softcap))


def _load(config: ForeignConfig, folder: Path, attention: str) -> PreTrainedModel:
    try:
        kind = AutoModelForCausalLM._model_mapping[type(AutoConfig.from_pretrained(folder))]
    except (KeyError, ValueError, OSError) as error:
        raise ConfigurationError(
            f"the model's architecture {config.architecture!r} is none that transformers knows: {_one_line(error)}"
        ) from None
    for why, it_is in _unfit(kind):
        if it_is:
            raise ConfigurationError(f"the model's architecture {config.architecture!r} is not supported: {why}")
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=attention
        )
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{folder} cannot be loaded: {_one_line(error)}") from None
    return model.eval()


def _unfit(kind: Any) -> Sequence[tuple[str, bool]]:
    return (
        ("it keeps a recurrent state", bool(getattr(kind, "_is_stateful", False))),
        ("its attention cannot be replaced", not kind._supports_attention_backend),
    )


def _one_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
