import math

import numpy as np
import pytest

from pipelines.runtime.jit import compiled
from pipelines.runtime.simd import LANES
from pipelines.runtime.vector_math import dot, exponentials, gated, highest


@compiled
def run_exponentials(x: np.ndarray, at: int, count: int, less: np.floating) -> np.floating:
    return exponentials(x, at, count, less)


@compiled
def run_gated(gate: np.ndarray, up: np.ndarray, out: np.ndarray, count: int) -> None:
    gated(gate, 0, up, 0, out, 0, count)


@compiled
def run_highest(x: np.ndarray, at: int, count: int) -> np.floating:
    return highest(x, at, count)


@compiled
def run_dot(x: np.ndarray, y: np.ndarray, count: int) -> np.floating:
    return dot(x, 0, y, 0, count)


def test_exp_is_right_over_its_whole_range() -> None:
    x = np.linspace(-87, 87, 64 * LANES, dtype=np.float32)
    found = x.copy()
    half = len(x) // 2
    total = run_exponentials(found, 0, half, np.float32(0))
    run_exponentials(found, half, half, np.float32(0))
    wanted = np.exp(x.astype(np.float64))
    np.testing.assert_allclose(found, wanted, rtol=5e-7)
    np.testing.assert_allclose(total, wanted[:half].sum(), rtol=1e-6)


@pytest.mark.parametrize(("value", "result"), [(-math.inf, 0.0), (-1e4, 0.0), (math.nan, math.nan)])
def test_exp_beyond_its_range(value: float, result: float) -> None:
    x = np.full(LANES, value, dtype=np.float32)
    run_exponentials(x, 0, LANES, np.float32(0))
    np.testing.assert_allclose(x, result, atol=1e-37)


def test_only_the_given_part_is_touched_and_shifted() -> None:
    x = np.ones(3 * LANES, dtype=np.float32)
    assert run_exponentials(x, LANES, LANES, np.float32(1)) == LANES
    np.testing.assert_array_equal(x, np.ones(3 * LANES))
    assert run_exponentials(x, 0, 0, np.float32(1)) == 0


def test_gated_is_silu_times_up() -> None:
    gate = np.linspace(-100, 100, 8 * LANES, dtype=np.float32)
    up = np.linspace(3, -2, 8 * LANES, dtype=np.float32)
    out = np.zeros_like(gate)
    run_gated(gate, up, out, len(gate))
    wide = gate.astype(np.float64)
    np.testing.assert_allclose(out, wide / (1 + np.exp(-wide)) * up, rtol=2e-6, atol=1e-30)


def test_highest_passes_over_nan() -> None:
    x = np.arange(4 * LANES, dtype=np.float32)
    x[5], x[LANES] = np.nan, 1000.0
    assert run_highest(x, 0, 4 * LANES) == 1000.0
    assert run_highest(x, 2 * LANES, LANES) == 3 * LANES - 1


def test_dot_reads_float32_and_bfloat16() -> None:
    x = np.random.default_rng(0).standard_normal(4 * LANES).astype(np.float32)
    np.testing.assert_allclose(run_dot(x, x, 4 * LANES), x @ x, rtol=1e-6)
    bits = (x.view(np.uint32) >> 16).astype(np.uint16)
    cut = (bits.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_allclose(run_dot(x, bits, 4 * LANES), x @ cut, rtol=1e-6)
