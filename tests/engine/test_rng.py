"""The counter-based generator: reproducible, independent of the batch, uniform."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from engine.rng import Purpose, seed_key, uniforms

POSITIONS = torch.arange(200_000)


def _reference(seed: int, position: int, purpose: Purpose) -> float:
    """SplitMix64's finaliser in numpy's unsigned arithmetic."""
    with np.errstate(over="ignore"):
        x = np.uint64(seed_key(seed) % 2**64)
        x += np.uint64(position) * np.uint64(0x9E3779B97F4A7C15)
        x += np.uint64(int(purpose)) * np.uint64(0xD1B54A32D192ED03)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
        return float(x >> np.uint64(11)) * 2.0**-53


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("purpose", list(Purpose))
def test_equals_the_reference(seed: int, purpose: Purpose) -> None:
    keys = torch.full((5,), seed_key(seed))
    got = uniforms(keys, torch.arange(5) * 1000, purpose)
    assert got.dtype == torch.float64
    assert got.tolist() == [_reference(seed, 1000 * i, purpose) for i in range(5)]


@pytest.mark.parametrize("seed", [0, 7])
def test_is_uniform_and_uncorrelated(seed: int) -> None:
    draws = {p: uniforms(torch.tensor(seed_key(seed)), POSITIONS, p).numpy() for p in Purpose}
    for values in draws.values():
        assert values.min() >= 0 and values.max() < 1
        assert stats.kstest(values, "uniform").pvalue > 1e-4
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.01
    assert abs(np.corrcoef(draws[Purpose.ACCEPT], draws[Purpose.TOKEN])[0, 1]) < 0.01
    assert abs(np.corrcoef(draws[Purpose.DRAFT], draws[Purpose.TOKEN])[0, 1]) < 0.01


def test_neighbouring_seeds_part() -> None:
    keys = torch.tensor([seed_key(seed) for seed in range(20_000)])
    values = uniforms(keys, torch.zeros(20_000, dtype=torch.int64), Purpose.TOKEN).numpy()
    assert len(np.unique(values)) == 20_000
    assert stats.kstest(values, "uniform").pvalue > 1e-4


def test_two_seeds_in_one_batch_then_rows_swapped() -> None:
    keys = torch.tensor([seed_key(1), seed_key(2)])[:, None]
    positions = torch.tensor([[5, 6], [5, 6]])
    straight = uniforms(keys, positions, Purpose.TOKEN)
    swapped = uniforms(keys.flip(0), positions, Purpose.TOKEN)
    assert torch.equal(straight, swapped.flip(0))
    assert not torch.equal(straight[0], straight[1])
