"""The product of few rows against double precision. (The interpreter cannot multiply bf16 blocks; a GPU does.)"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

linear = pytest.importorskip("engine.kernels.linear", reason="Triton is not installed")

EPS = 1e-6
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = [*TOLERANCE] if torch.cuda.is_available() else [torch.float32, torch.float16]
TILES = [linear.NORMED, linear.PLAIN, linear.WIDE, linear.Tile(outputs=32, inputs=64, warps=2, stages=2)]


def randn(device: torch.device, *shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("inputs", [16, 100, 256, 600])
@pytest.mark.parametrize(("rows", "outputs"), [(1, 1), (3, 70), (16, 129)])
def test_products_with_norm_and_residual(
    device: torch.device, dtype: torch.dtype, tile: linear.Tile, inputs: int, rows: int, outputs: int
) -> None:
    x = randn(device, rows, inputs + 11, dtype=dtype, seed=0)[:, 4 : 4 + inputs]
    weight = randn(device, outputs, inputs, dtype=dtype, seed=1)
    scale = randn(device, inputs, dtype=dtype, seed=2)
    residual = randn(device, rows, outputs + 3, dtype=dtype, seed=3)[:, 1 : 1 + outputs]
    wide = x.double()
    normed = wide / (wide.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * scale.double()
    for norm in (None, (scale, EPS)):
        product = (wide if norm is None else normed) @ weight.double().t()
        for added in (None, residual):
            found = linear.skinny_linear(x, weight, added, norm, tile)
            assert found.shape == (rows, outputs) and found.is_contiguous() and found.dtype == dtype
            wanted = product if added is None else product + added.double()
            assert relative_error(found, wanted) < TOLERANCE[dtype]


def test_a_row_does_not_depend_on_the_others(device: torch.device) -> None:
    """Bit for bit, for every number of rows, and with a bad neighbour."""
    x = randn(device, 16, 300, dtype=torch.float16, seed=0)
    weight = randn(device, 40, 300, dtype=torch.float16, seed=1)
    norm = (randn(device, 300, dtype=torch.float16, seed=2), EPS)
    residual = randn(device, 16, 40, dtype=torch.float16, seed=3)
    whole = linear.skinny_linear(x, weight, residual, norm)
    for start, end in ((0, 1), (7, 8), (4, 12), (15, 16)):
        assert torch.equal(
            linear.skinny_linear(x[start:end], weight, residual[start:end], norm), whole[start:end]
        )
    x[3] = torch.nan
    spoilt = linear.skinny_linear(x, weight, residual, norm)
    assert torch.isnan(spoilt[3]).all()
    others = [row for row in range(16) if row != 3]
    assert torch.equal(spoilt[others], whole[others])


def test_served_are_few_rows_of_narrow_products() -> None:
    bf16, rows = torch.bfloat16, linear.MAX_ROWS
    assert linear.serves(rows, 2048, 2048, bf16, normed=False)
    assert linear.serves(rows, 256, 2048, bf16, normed=True)
    assert not linear.serves(rows, 2048, 2048, bf16, normed=True)
    assert not linear.serves(rows + 1, 256, 256, bf16, normed=False)
    assert not linear.serves(1, 256, linear.SERVED_OUTPUTS + 1, bf16, normed=False)
    assert not linear.serves(1, linear.SERVED_INPUTS + 1, 256, bf16, normed=False)
    assert not linear.serves(1, 256, 256, torch.float32, normed=False)
