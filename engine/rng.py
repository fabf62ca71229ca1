"""Counter-based uniforms: a pure function of (request seed, absolute token position, purpose).

Nothing is consumed: a draw can be repeated after a preemption, in another slot or beside other requests and gives
the same number. The mixer is the finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom
number generators", 2014) over a Weyl sequence, in wrapping int64 arithmetic.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor


class Purpose(IntEnum):
    """What a draw decides; draws of one position are independent across purposes."""

    ACCEPT = 0
    """Whether the draft at this position is accepted."""
    TOKEN = 1
    """The token at this position from the target's distribution, or from the residual after a rejection."""
    DRAFT = 2
    """The draft token at this position."""


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_POSITION: Final = _signed(0x9E3779B97F4A7C15)
_PURPOSE: Final = 0xD1B54A32D192ED03
_MIX_1: Final = _signed(0xBF58476D1CE4E5B9)
_MIX_2: Final = _signed(0x94D049BB133111EB)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical (zero-filling) right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def purpose_offset(purpose: Purpose) -> int:
    """What ``purpose`` adds to a key, as an unsigned number of 64 bits."""
    return purpose * _PURPOSE & ((1 << 64) - 1)


def seed_key(seed: int) -> int:
    """The int64 state that ``uniforms`` takes for a request's seed (any int64); mixed so that near seeds part."""
    mask = (1 << 64) - 1
    x = (seed + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return _signed(x ^ (x >> 31))


@lru_cache(maxsize=512)
def place_weights(count: int) -> tuple[int, ...]:
    """An int64 for each of ``count`` places, as good as random: ``device_weights`` on the host."""
    return tuple(device_weights(count, torch.device("cpu")).tolist())


def device_weights(count: int, device: torch.device) -> Tensor:
    """``[count]`` int64, as good as random and always the same."""
    return _mix(torch.arange(1, count + 1, device=device) * _POSITION)


def check_word(values: Tensor) -> Tensor:
    """``[]`` int64: a word that any likely change of int64 ``values`` changes, in wrapping arithmetic."""
    weights = device_weights(values.numel(), values.device).view(values.shape)
    return (weights * (values + 1)).sum()


def uniforms(keys: Tensor, positions: Tensor, purpose: Purpose) -> Tensor:
    """Uniform float64 in [0, 1) of the shape of ``positions``.

    Args:
        keys: int64 ``seed_key`` values, broadcastable to ``positions``.
        positions: int64 absolute positions of the tokens that the draws decide.
    """
    x = _mix(keys + positions * _POSITION + _signed(purpose_offset(purpose)))
    return _shift_right(x, 11).to(torch.float64) * 2.0**-53
