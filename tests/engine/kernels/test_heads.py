"""The heads' products against double precision, and what they leave alone."""

from __future__ import annotations

import pytest
import torch

heads = pytest.importorskip("engine.kernels.heads", reason="Triton is not installed")

POISON = -77.0
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
DTYPES = [*TOLERANCE] if torch.cuda.is_available() else [torch.float32, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "count", "inputs", "outputs"),
    [(1, 1, 1, 1), (5, 3, 24, 33), (16, 2, 130, 70), (3, 16, 512, 128)],
)
def test_products_into_a_slice(
    device: torch.device, dtype: torch.dtype, rows: int, count: int, inputs: int, outputs: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, count, inputs + 3, generator=generator).to(device, dtype)[..., 2 : 2 + inputs]
    weight = (torch.randn(count, inputs, outputs, generator=generator) / inputs**0.5).to(device, dtype)
    whole = torch.full((rows, count, outputs + 5), POISON, dtype=dtype, device=device)
    out = whole[..., 1 : 1 + outputs]
    heads.head_linear(x, weight, out)
    wanted = torch.einsum("nhi,hio->nho", x.double(), weight.double())
    assert (out.double() - wanted).norm() / wanted.norm() < TOLERANCE[dtype]
    assert (whole[..., 0] == POISON).all() and (whole[..., 1 + outputs :] == POISON).all()


def test_a_row_does_not_depend_on_the_others(device: torch.device) -> None:
    """Bit for bit, for every number of rows, and with a bad neighbour."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 2, 200, generator=generator).to(device, torch.float16)
    weight = torch.randn(2, 200, 48, generator=generator).to(device, torch.float16)

    def run(start: int, end: int) -> torch.Tensor:
        out = torch.empty(end - start, 2, 48, dtype=x.dtype, device=device)
        heads.head_linear(x[start:end], weight, out)
        return out

    whole = run(0, 16)
    for start, end in ((0, 1), (3, 7), (8, 16)):
        assert torch.equal(run(start, end), whole[start:end])
    x[3] = torch.nan
    others = [row for row in range(16) if row != 3]
    assert torch.equal(run(0, 16)[others], whole[others])
