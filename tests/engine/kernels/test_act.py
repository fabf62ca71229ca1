"""The gated activation against the two torch operators that it replaces."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

act = pytest.importorskip("engine.kernels.act", reason="Triton is not installed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("inner", [1, 24, 129, 1500])
def test_silu_mul_is_within_a_last_place_of_silu(
    device: torch.device, dtype: torch.dtype, inner: int
) -> None:
    wide = 4 * torch.randn(3, 2 * inner + 9, generator=torch.Generator().manual_seed(0))
    gate_up = wide.to(device, dtype)[:, 5 : 5 + 2 * inner]
    found = act.silu_mul(gate_up)
    assert found.is_contiguous() and found.dtype == dtype
    wanted = F.silu(gate_up[:, :inner]) * gate_up[:, inner:]
    # silu is rounded before it is multiplied, so one place of it may be two of the product.
    torch.testing.assert_close(found, wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)


def test_silu_mul_of_large_and_of_bad_gates(device: torch.device) -> None:
    gates = torch.tensor([[-1e4, -90.0, 0.0, 90.0, 1e4, torch.inf, torch.nan]], device=device)
    found = act.silu_mul(torch.cat((gates, torch.full_like(gates, 2.0)), dim=1))
    wanted = 2 * F.silu(gates)
    torch.testing.assert_close(found, wanted, equal_nan=True, atol=1e-7, rtol=1e-6)
