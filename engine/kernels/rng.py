"""``engine.rng`` for kernels: the same draws from the same keys, positions and purposes."""

from __future__ import annotations

import triton.language as tl

from engine.kernels.jit import jit_function

_POSITION = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


@jit_function
def position_term(position: tl.tensor) -> tl.tensor:
    """What ``position`` (int64) adds to a key, uint64."""
    return position.to(tl.uint64, bitcast=True) * _POSITION


@jit_function
def mixed(x: tl.tensor) -> tl.tensor:
    """SplitMix64's finaliser, of uint64."""
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@jit_function
def random_bits(key: tl.tensor, position: tl.tensor, purpose: tl.constexpr) -> tl.tensor:
    """Uniform uint64, whose upper 53 bits are ``engine.rng.uniforms``; ``purpose``: its ``purpose_offset``."""
    return mixed(key.to(tl.uint64, bitcast=True) + position_term(position) + purpose)


@jit_function
def unit(bits: tl.tensor) -> tl.tensor:
    """Float64 in [0, 1) of uniform bits."""
    return (bits >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16
