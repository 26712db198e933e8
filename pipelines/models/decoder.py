"""The Llama-family decoder in plain torch: what is right, and what runs on a GPU.

    hidden = embedding; each layer: hidden += attention(norm(hidden)); hidden += mlp(norm(hidden)); logits = head(norm)

Weights and keys are stored in the dtype asked for; arithmetic is float32. `runtime/compiled_decoder.py` is the CPU's
own version of the same.
"""

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from pipelines.models.config import DecoderConfig
from pipelines.models.rope import rope_tables
from pipelines.models.weights import Weights, expected_names
from pipelines.runtime.attention import Attention
from pipelines.runtime.step import Step


class PlainDecoder:
    """Holds the weights on `device`, in `dtype`."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        attention: Attention,
        *,
        device: str,
        dtype: torch.dtype,
        max_length: int,
    ) -> None:
        self._config = config
        self._attention = attention
        self._device = torch.device(device)
        self._weights = {name: weights.tensor(name).to(self._device, dtype) for name in expected_names(config)}
        self._cosines, self._sines = (table.to(self._device) for table in rope_tables(config, max_length))

    @torch.inference_mode()
    def logits(self, step: Step) -> NDArray[np.float32]:
        """[rows sampled, vocab] float32. Writes the step's keys and values into the attention's pool."""
        token_ids = torch.from_numpy(step.token_ids).to(self._device)
        hidden = self._weights["model.embed_tokens.weight"][token_ids].float()  # [T, hidden]
        for layer in range(self._config.num_layers):
            name = f"model.layers.{layer}"
            normed = self._norm(hidden, f"{name}.input_layernorm")
            hidden = hidden + self._attend(layer, normed, step)
            normed = self._norm(hidden, f"{name}.post_attention_layernorm")
            gated = F.silu(self._project(normed, f"{name}.mlp.gate_proj")) * self._project(
                normed, f"{name}.mlp.up_proj"
            )
            hidden = hidden + self._project(gated, f"{name}.mlp.down_proj")
        sampled = hidden[torch.from_numpy(step.sample_rows).to(self._device)]
        head = "model.embed_tokens" if self._config.tied_embeddings else "lm_head"
        logits: NDArray[np.float32] = self._project(self._norm(sampled, "model.norm"), head).cpu().numpy()
        return logits

    def close(self) -> None:
        """Nothing runs in the background."""

    def _attend(self, layer: int, normed: torch.Tensor, step: Step) -> torch.Tensor:
        name, dim = f"model.layers.{layer}.self_attn", self._config.head_dim
        positions = torch.from_numpy(step.positions).to(self._device)
        query, key, value = (self._project(normed, f"{name}.{p}_proj").view(len(normed), -1, dim) for p in "qkv")
        if self._config.qk_norm:
            query, key = self._norm(query, f"{name}.q_norm"), self._norm(key, f"{name}.k_norm")
        if self._config.rotary[layer]:
            query, key = (_rotate(x, self._cosines[positions], self._sines[positions]) for x in (query, key))
        attended = self._attention.attend(layer, query, key, value, step)
        return self._project(attended.flatten(1), f"{name}.o_proj")

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self._weights[f"{name}.weight"].float(), self._config.rms_norm_eps)

    def _project(self, x: torch.Tensor, name: str) -> torch.Tensor:
        bias = self._weights.get(f"{name}.bias")
        return F.linear(x, self._weights[f"{name}.weight"].float(), None if bias is None else bias.float())


def _rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """x [T, heads, head_dim] by tables [T, head_dim / 2]: halves, not pairs, turn together."""
    low, high = x.chunk(2, dim=-1)
    cosine, sine = cosines[:, None], sines[:, None]
    return torch.cat([low * cosine - high * sine, high * cosine + low * sine], dim=-1)
