"""A whole step of the Llama-family decoder on the CPU as one kernel, which every member of a team runs.

The phases of a layer are separated by barriers; inside a phase members take panels, tokens or heads by ticket. Nothing
in a step is Python, so neither its overhead nor the GIL shows, and other threads of the process go on meanwhile. The
last layer computes only the rows that are sampled. `models/decoder.py` is the plain version of the same thing.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pipelines.models.config import DecoderConfig
from pipelines.models.rope import rope_tables
from pipelines.models.weights import Weights
from pipelines.runtime.cell_values import STORED_AS
from pipelines.runtime.jit import compiled
from pipelines.runtime.linear import Packed, multiply_panel, pack_into, padded, page_array, panels_of
from pipelines.runtime.paged_attention import Cells, Plan, attend_all, cells_of, plan_of, store_all
from pipelines.runtime.simd import MAX_ROWS, PANEL
from pipelines.runtime.step import Step
from pipelines.runtime.team import Sync, Team, meet, take_ticket
from pipelines.runtime.vector_math import gated


class PackedWeights(NamedTuple):
    norms: NDArray[np.float32]  # [2 L + 1, hidden] before attention and before the MLP of each layer, and the final one
    qkv: Packed  # [L, panels, hidden, PANEL]
    qkv_bias: NDArray[np.float32]  # [L, padded columns]; this and every bias below: [0, 0] where there is none
    head_norms: NDArray[np.float32]  # [L, 2, head_dim] of queries and of keys, or [0, 0, 0]
    output: Packed  # [L, panels, heads * head_dim, PANEL]
    output_bias: NDArray[np.float32]  # [L, padded hidden]
    gate_up: Packed  # [L, 2 * panels, hidden, PANEL] a panel of gate, then the same columns of up, and so on
    gate_up_bias: NDArray[np.float32]  # [L, 2 * padded intermediate] in the order of the panels
    down: Packed  # [L, panels, intermediate, PANEL]
    down_bias: NDArray[np.float32]  # [L, padded hidden]
    head: Packed  # [1, panels, hidden, PANEL]
    epsilon: float


class Rows(NamedTuple):
    """Room for the activations of a step; T is the most rows so far."""

    hidden: NDArray[np.float32]  # [T, padded hidden] the residual stream
    normed: NDArray[np.float32]  # [T, hidden]
    qkv: NDArray[np.float32]  # [T, padded columns]
    attended: NDArray[np.float32]  # [T, heads * head_dim]
    gate: NDArray[np.float32]  # [members * T, PANEL]
    up: NDArray[np.float32]  # [members * T, PANEL]
    inner: NDArray[np.float32]  # [T, padded intermediate]


@compiled
def _normalise(
    member: int, members: int, rows: int, weights: PackedWeights, norm: int, hidden: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:  # fmt: skip
    """RMS norm of the first `rows` rows (Zhang and Sennrich 2019)."""
    width = out.shape[1]
    for row in range(member, rows, members):
        squares = np.float32(0.0)
        for i in range(width):
            squares += hidden[row, i] * hidden[row, i]
        factor = np.float32(1.0) / np.sqrt(squares / np.float32(width) + np.float32(weights.epsilon))
        for i in range(width):
            out[row, i] = hidden[row, i] * factor * weights.norms[norm, i]


@compiled
def _set_bias(
    member: int, members: int, rows: int, bias: NDArray[np.float32], layer: int, out: NDArray[np.float32]
) -> bool:
    """Begin the first `rows` rows with the layer's bias, where there is one. Returns whether there is."""
    if bias.shape[0] == 0:
        return False
    for row in range(member, rows, members):
        out[row] = bias[layer]
    return True


@compiled
def _add_bias(
    member: int, members: int, rows: int, bias: NDArray[np.float32], layer: int, out: NDArray[np.float32]
) -> None:
    if bias.shape[0] > 0:
        for row in range(member, rows, members):
            out[row] += bias[layer]


@compiled
def _normalise_heads(
    member: int, members: int, rows: int, weights: PackedWeights, cells: Cells, layer: int, qkv: NDArray[np.float32]
) -> None:
    """RMS norm of each head of the queries and keys, of the rows that the same member stores afterwards."""
    if weights.head_norms.shape[0] == 0:
        return
    dim = cells.head_dim
    for row in range(member, rows, members):
        for head in range(cells.num_heads + cells.num_kv_heads):
            of_keys = 1 if head >= cells.num_heads else 0
            squares = np.float32(0.0)
            for d in range(head * dim, (head + 1) * dim):
                squares += qkv[row, d] * qkv[row, d]
            factor = np.float32(1.0) / np.sqrt(squares / np.float32(dim) + np.float32(weights.epsilon))
            for d in range(dim):
                qkv[row, head * dim + d] *= factor * weights.head_norms[layer, of_keys, d]


@compiled
def _panels_a_ticket(panels: int, members: int, rows: int) -> int:
    """With few rows memory is what counts, and panels that follow each other are read, and prefetched, as one stream.
    With many it is that members end together."""
    return max(1, panels // (4 * members)) if rows <= MAX_ROWS else 1


@compiled
def _multiply(
    members: int, sync: Sync, rows: int, x: NDArray[np.float32], weights: Packed, layer: int,
    out: NDArray[np.float32], accumulate: bool,
) -> None:  # fmt: skip
    """out (+)= x @ weights[layer], for the first `rows` rows."""
    panels = weights.shape[1]
    share = _panels_a_ticket(panels, members, rows)
    first = take_ticket(sync) * share
    while first < panels:
        for panel in range(first, min(panels, first + share)):
            multiply_panel(x, weights, layer, panel, rows, out, panel * PANEL, accumulate)
        first = take_ticket(sync) * share


@compiled
def _gate_and_up(
    member: int, members: int, sync: Sync, rows: int, weights: PackedWeights, layer: int, room: Rows
) -> None:  # fmt: skip
    """inner = silu(x @ gate) * (x @ up)."""
    own = member * room.hidden.shape[0]
    gate, up = room.gate[own : own + rows], room.up[own : own + rows]
    biased = weights.gate_up_bias.shape[0] > 0
    panels = weights.gate_up.shape[1] // 2
    share = _panels_a_ticket(panels, members, rows)
    first = take_ticket(sync) * share
    while first < panels:
        for panel in range(first, min(panels, first + share)):
            if biased:
                for r in range(rows):
                    for c in range(PANEL):
                        gate[r, c] = weights.gate_up_bias[layer, 2 * panel * PANEL + c]
                        up[r, c] = weights.gate_up_bias[layer, (2 * panel + 1) * PANEL + c]
            multiply_panel(room.normed, weights.gate_up, layer, 2 * panel, rows, gate, 0, biased)
            multiply_panel(room.normed, weights.gate_up, layer, 2 * panel + 1, rows, up, 0, biased)
            for r in range(rows):
                at = (own + r) * PANEL
                gated(room.gate, at, room.up, at, room.inner, r * room.inner.shape[1] + panel * PANEL, PANEL)
        first = take_ticket(sync) * share


@compiled
def _keep_rows(room: Rows, rows: NDArray[np.int64]) -> None:
    """Move `rows` (ascending) of what the rest of the last layer needs to the front."""
    for to in range(rows.shape[0]):
        room.hidden[to] = room.hidden[rows[to]]
        room.attended[to] = room.attended[rows[to]]


@compiled
def compute_step(
    member: int, members: int, sync: Sync, weights: PackedWeights, cells: Cells, plan: Plan,
    samples: NDArray[np.int64], room: Rows, logits: NDArray[np.float32],
) -> None:  # fmt: skip
    """From embeddings in `room.hidden` to `logits` [samples, padded vocabulary]; keys and values into the cells."""
    rows = plan.positions.shape[0]
    for layer in range(cells.num_layers):
        last = layer == cells.num_layers - 1
        _normalise(member, members, rows, weights, 2 * layer, room.hidden, room.normed)
        biased = _set_bias(member, members, rows, weights.qkv_bias, layer, room.qkv)
        meet(sync, members)
        _multiply(members, sync, rows, room.normed, weights.qkv, layer, room.qkv, biased)
        meet(sync, members)
        _normalise_heads(member, members, rows, weights, cells, layer, room.qkv)
        store_all(member, members, cells, plan, layer, room.qkv)
        meet(sync, members)
        if last and samples.shape[0] == 0:
            return
        _add_bias(member, members, rows, weights.output_bias, layer, room.hidden)
        attend_all(member, members, sync, cells, plan, layer, room.qkv, room.attended)
        if last:
            if member == 0:
                _keep_rows(room, samples)
            rows = samples.shape[0]
            meet(sync, members)
        _multiply(members, sync, rows, room.attended, weights.output, layer, room.hidden, True)
        meet(sync, members)
        _normalise(member, members, rows, weights, 2 * layer + 1, room.hidden, room.normed)
        _add_bias(member, members, rows, weights.down_bias, layer, room.hidden)
        meet(sync, members)
        _gate_and_up(member, members, sync, rows, weights, layer, room)
        meet(sync, members)
        _multiply(members, sync, rows, room.inner, weights.down, layer, room.hidden, True)
        meet(sync, members)
    _normalise(member, members, rows, weights, 2 * cells.num_layers, room.hidden, room.normed)
    meet(sync, members)
    _multiply(members, sync, rows, room.normed, weights.head, 0, logits, False)


class CompiledDecoder:
    """Owns packed weights and a team of threads. One thread calls it."""

    def __init__(
        self, config: DecoderConfig, weights: Weights, pool: torch.Tensor, threads: int, max_length: int
    ) -> None:
        """`pool` [num_blocks, layers, 2, kv_heads, block_tokens, head_dim]; its type is also that of the weights."""
        self._config = config
        self._weights = _packed(config, weights, pool.dtype)
        self._embeddings = weights.tensor("model.embed_tokens.weight").to(pool.dtype)
        cosines, sines = (table.numpy() for table in rope_tables(config, max_length))
        self._cells = cells_of(pool, config.num_heads, (cosines, sines), config.windows, config.rotary)
        self._team = Team(threads)
        self._room = self._room_for(1)

    def logits(self, step: Step) -> NDArray[np.float32]:
        """[rows sampled, vocab] float32. Writes the step's keys and values into the pool."""
        tokens = step.num_tokens
        assert step.contexts.max() <= len(self._cells.cosines), "a context is longer than max_length"
        if tokens > self._room.hidden.shape[0]:
            self._room = self._room_for(tokens)
        embedded = self._embeddings[torch.from_numpy(step.token_ids)]
        self._room.hidden[:tokens, : self._config.hidden_size] = embedded.float().numpy()
        logits = np.empty((len(step.sample_rows), padded(self._config.vocab_size)), dtype=np.float32)
        plan = plan_of(step, self._cells, self._team.members)
        self._team.run(compute_step, self._weights, self._cells, plan, step.sample_rows, self._room, logits)
        return logits[:, : self._config.vocab_size]

    def close(self) -> None:
        self._team.close()

    def _room_for(self, tokens: int) -> Rows:
        config = self._config
        attention_width = config.num_heads * config.head_dim

        def rows(count: int, width: int) -> NDArray[np.float32]:
            return np.zeros((count, width), dtype=np.float32)

        return Rows(
            hidden=rows(tokens, padded(config.hidden_size)),
            normed=rows(tokens, config.hidden_size),
            qkv=rows(tokens, padded(attention_width + 2 * config.num_kv_heads * config.head_dim)),
            attended=rows(tokens, attention_width),
            gate=rows(self._team.members * tokens, PANEL),
            up=rows(self._team.members * tokens, PANEL),
            inner=rows(tokens, padded(config.intermediate_size)),
        )


def _packed(config: DecoderConfig, weights: Weights, dtype: torch.dtype) -> PackedWeights:
    layers, hidden, inner = config.num_layers, config.hidden_size, config.intermediate_size
    attention_width = config.num_heads * config.head_dim
    qkv_columns = attention_width + 2 * config.num_kv_heads * config.head_dim

    def room(count: int, columns: int, depth: int) -> Packed:
        return page_array((count, panels_of(columns), depth, PANEL), STORED_AS[dtype])  # type: ignore[return-value]  # of dtype

    def bias(there: bool, columns: int) -> NDArray[np.float32]:
        return np.zeros((layers, padded(columns)) if there else (0, 0), dtype=np.float32)

    packed = PackedWeights(
        norms=np.empty((2 * layers + 1, hidden), dtype=np.float32),
        qkv=room(layers, qkv_columns, hidden),
        qkv_bias=bias(config.qkv_bias, qkv_columns),
        head_norms=np.empty((layers, 2, config.head_dim) if config.qk_norm else (0, 0, 0), dtype=np.float32),
        output=room(layers, hidden, attention_width),
        output_bias=bias(config.output_bias, hidden),
        gate_up=room(layers, 2 * padded(inner), hidden),
        gate_up_bias=bias(config.mlp_bias, 2 * padded(inner)),
        down=room(layers, hidden, inner),
        down_bias=bias(config.mlp_bias, hidden),
        head=room(1, config.vocab_size, hidden),
        epsilon=config.rms_norm_eps,
    )
    for layer in range(layers):
        _pack_layer(packed, layer, weights, config)
    packed.norms[2 * layers] = _values(weights, "model.norm.weight")
    head = "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"
    pack_into(packed.head[0], weights.tensor(head))
    return packed


def _pack_layer(packed: PackedWeights, layer: int, weights: Weights, config: DecoderConfig) -> None:
    name = f"model.layers.{layer}"
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    packed.norms[2 * layer] = _values(weights, f"{name}.input_layernorm.weight")
    packed.norms[2 * layer + 1] = _values(weights, f"{name}.post_attention_layernorm.weight")
    pack_into(packed.qkv[layer], torch.cat([weights.tensor(f"{attention}.{p}_proj.weight") for p in "qkv"]))
    pack_into(packed.output[layer], weights.tensor(f"{attention}.o_proj.weight"))
    pack_into(packed.gate_up[layer, 0::2], weights.tensor(f"{mlp}.gate_proj.weight"))
    pack_into(packed.gate_up[layer, 1::2], weights.tensor(f"{mlp}.up_proj.weight"))
    pack_into(packed.down[layer], weights.tensor(f"{mlp}.down_proj.weight"))
    if config.qkv_bias:
        stated = np.concatenate([_values(weights, f"{attention}.{p}_proj.bias") for p in "qkv"])
        packed.qkv_bias[layer, : len(stated)] = stated
    if config.qk_norm:
        for row, kind in enumerate("qk"):
            packed.head_norms[layer, row] = _values(weights, f"{attention}.{kind}_norm.weight")
    if config.output_bias:
        packed.output_bias[layer, : config.hidden_size] = _values(weights, f"{attention}.o_proj.bias")
    if config.mlp_bias:
        panels = packed.gate_up_bias[layer].reshape(-1, 2, PANEL)  # a panel of gate, the same columns of up, and so on
        for row, kind in enumerate(("gate", "up")):
            stated = np.zeros(padded(config.intermediate_size), dtype=np.float32)
            stated[: config.intermediate_size] = _values(weights, f"{mlp}.{kind}_proj.bias")
            panels[:, row] = stated.reshape(-1, PANEL)
        packed.down_bias[layer, : config.hidden_size] = _values(weights, f"{mlp}.down_proj.bias")


def _values(weights: Weights, name: str) -> NDArray[np.float32]:
    values: NDArray[np.float32] = weights.tensor(name).float().numpy()
    return values
