import numpy as np
import pytest
import torch

from pipelines.runtime.linear import multiply_panel, pack_into, padded, page_array, panels_of
from pipelines.runtime.simd import MAX_ROWS, PANEL


def product(x: np.ndarray, weight: torch.Tensor, out: np.ndarray, *, accumulate: bool, stored: type) -> np.ndarray:
    columns, depth = weight.shape
    packed = page_array((1, panels_of(columns), depth, PANEL), stored)
    pack_into(packed[0], weight)
    for panel in range(packed.shape[1]):
        multiply_panel(x, packed, 0, panel, len(x), out, panel * PANEL, accumulate)
    return out[:, :columns]


@pytest.mark.parametrize("rows", [*range(1, 2 * MAX_ROWS + 3), 100])
@pytest.mark.parametrize(("columns", "depth"), [(PANEL, 8), (3 * PANEL, 57), (PANEL + 5, 1), (7, 64)])
def test_products_of_any_number_of_rows(rows: int, columns: int, depth: int) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, depth), torch.randn(columns, depth)
    out = np.full((rows, padded(columns)), np.nan, dtype=np.float32)
    found = product(x.numpy(), weight, out, accumulate=False, stored=np.float32)
    np.testing.assert_allclose(found, (x @ weight.T).numpy(), atol=1e-4)


def test_accumulating_adds_to_what_is_there() -> None:
    x, weight = torch.randn(9, 40), torch.randn(2 * PANEL, 40)
    out = np.random.default_rng(0).standard_normal((9, 2 * PANEL)).astype(np.float32)
    wanted = out + (x @ weight.T).numpy()
    found = product(x.numpy(), weight, out, accumulate=True, stored=np.float32)
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_bfloat16_weights_are_rounded_once_and_multiplied_in_float32() -> None:
    x, weight = torch.randn(5, 40), torch.randn(PANEL + 3, 40)
    out = np.zeros((5, padded(PANEL + 3)), dtype=np.float32)
    found = product(x.numpy(), weight, out, accumulate=False, stored=np.uint16)
    np.testing.assert_allclose(found, (x @ weight.bfloat16().float().T).numpy(), atol=1e-4)


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    x, weight = torch.randn(31, 64).numpy(), torch.randn(PANEL, 64)
    together = np.zeros((31, PANEL), dtype=np.float32)
    product(x, weight, together, accumulate=False, stored=np.float32)
    for row in range(31):
        alone = np.zeros((1, PANEL), dtype=np.float32)
        product(x[row : row + 1], weight, alone, accumulate=False, stored=np.float32)
        np.testing.assert_array_equal(alone[0], together[row])


def test_nan_and_infinity_are_not_lost() -> None:
    weight = torch.zeros(PANEL, 4)
    weight[0, 0], weight[1, 1] = float("nan"), float("inf")
    out = np.zeros((1, PANEL), dtype=np.float32)
    product(np.ones((1, 4), dtype=np.float32), weight, out, accumulate=False, stored=np.float32)
    assert np.isnan(out[0, 0])
    assert np.isinf(out[0, 1])
    assert np.isfinite(out[0, 2:]).all()
