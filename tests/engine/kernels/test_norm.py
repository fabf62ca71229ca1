"""The norm of rows, and the draft's input, against the formula in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

norm = pytest.importorskip("engine.kernels.norm", reason="Triton is not installed")

EPS = 1e-6
DTYPES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Largest relative error: a rounding to the dtype."""


def randn(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


def expected(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * weight.double()


def assert_close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted, rtol=DTYPES[found.dtype], atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 24, 100, 256, 2048])
def test_rms_norm_of_a_slice_of_wider_rows(device: torch.device, dtype: torch.dtype, size: int) -> None:
    wide = randn(device, 5, size + 37, dtype=dtype)
    weight = randn(device, size, dtype=dtype, seed=1)
    x = wide[:, 3 : 3 + size]
    found = norm.rms_norm(x, weight, EPS)
    assert found.is_contiguous() and found.dtype == dtype
    assert_close(found, expected(x, weight))


def test_rms_norm_of_extreme_and_of_bad_rows(device: torch.device) -> None:
    """Zero stays zero, and what is not finite spoils its own row only."""
    x = randn(device, 5, 40) * torch.tensor([1e-9, 1.0, 1e9, 0.0, 1.0], device=device)[:, None]
    x[4, 7] = torch.nan
    weight = randn(device, 40, seed=1)
    found = norm.rms_norm(x, weight, EPS)
    assert_close(found[:4], expected(x[:4], weight))
    assert torch.isnan(found[4]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [20, 64])
def test_merge_inputs_gathers_and_norms_both_halves(
    device: torch.device, dtype: torch.dtype, size: int
) -> None:
    embedding = randn(device, 11, size, dtype=dtype)
    hidden = randn(device, 4, size + 5, dtype=dtype, seed=1)[:, :size]
    weights = [randn(device, size, dtype=dtype, seed=seed) for seed in (2, 3)]
    token_ids = torch.tensor([10, 0, 3, 3], device=device)
    found = norm.merge_inputs(token_ids, embedding, weights[0], hidden, weights[1], EPS)
    assert_close(found[:, :size], expected(embedding[token_ids], weights[0]))
    assert_close(found[:, size:], expected(hidden, weights[1]))
