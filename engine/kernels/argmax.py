"""The best token of rows of logits, and whether a row is finite, in one reading and without a float32 copy.

A row's finding is one int64, so that findings of parts of the vocabulary combine by their maximum: the order of the
best logit in the high word (NaN above infinity), then the token's complement, so that the lower of equals wins, and
in the lowest bit whether the part holds a negative infinity.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from engine.kernels.jit import await_previous, check_rows, jit, jit_function, power_of_two

MAX_TILE = 1 << 15
"""Most logits of rows that one program reads whole."""
PROGRAMS = 512
"""Programs that a large vocabulary is spread over, where it has parts enough: some four for each SM."""
MIN_PART, MAX_PART = 1024, 8192
"""Least and most logits of one part."""

NO_PART = tl.constexpr(-(2**63))
"""Below every finding."""
_NAN = tl.constexpr(2**31 - 1)
_INF = tl.constexpr(0x7F800000)
_MINUS_INF = tl.constexpr(-0x7F800001)
_NOTHING = tl.constexpr(-(2**31))
"""Orders of the special values, and one below every order."""
_LAST = tl.constexpr(2**30 - 1)
"""The highest token that a finding can name."""


@jit_function
def find_best(logits: tl.tensor, token: tl.tensor, inside: tl.tensor, checks: tl.constexpr) -> tl.tensor:
    """Findings ``[R]`` int64 of the logits ``[R, C]`` at these addresses where ``inside``, of tokens ``[1, C]``."""
    value = tl.load(logits, mask=inside, other=0.0).to(tl.float32)
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)  # zeros of either sign are equal
    order = tl.where(value == value, bits ^ ((bits >> 31) & 0x7FFFFFFF), _NAN)
    order = tl.where(inside, order, _NOTHING)
    best = tl.max(order, axis=1)
    first = tl.min(tl.where(order == best[:, None], token, _LAST), axis=1)
    low = (_LAST - first) << 1
    if checks:
        low = low | tl.max((order == _MINUS_INF).to(tl.int32), axis=1)
    return (best.to(tl.int64) << 32) | low.to(tl.int64)


@jit_function
def combined(parts: tl.tensor) -> tl.tensor:
    """Findings ``[R]`` of rows from those of their parts ``[R, P]``, ``NO_PART`` where there is none."""
    return tl.max(parts, axis=1) | tl.max(parts & 1, axis=1)


@jit_function
def token_of(finding: tl.tensor) -> tl.tensor:
    """The best token, int64."""
    return _LAST - ((finding & 0xFFFFFFFF) >> 1)


@jit_function
def kind_of(finding: tl.tensor, nan: tl.constexpr, inf: tl.constexpr) -> tl.tensor:
    """``nan``, ``inf`` or 0 as ``engine.guard.classify`` says it, int64."""
    best = finding >> 32
    infinite = (best == _INF) | ((finding & 1) != 0)
    return tl.where(best == _NAN, nan, tl.where(infinite, inf, 0)).to(tl.int64)


@jit
def _find_parts(
    logits: tl.tensor,
    stride: tl.tensor,
    findings: tl.tensor,
    vocab: tl.constexpr,
    part: tl.constexpr,
    checks: tl.constexpr,
) -> None:
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    token = (tl.program_id(1) * part + tl.arange(0, part))[None, :]
    found = find_best(logits + row * stride + token, token, token < vocab, checks)
    place = row * tl.num_programs(1) + tl.program_id(1) + tl.arange(0, 1)
    tl.store(findings + place, found)


def find_parts(logits: Tensor, checks: bool) -> Tensor:
    """Findings ``[rows, parts]`` int64 of ``logits`` ``[rows, V]``, 16 or 32 bit floats, rows at any distance."""
    check_rows("logits", logits)
    rows, vocab = logits.shape
    part = min(MAX_PART, max(MIN_PART, power_of_two(-(-vocab * rows // PROGRAMS))))
    findings = torch.empty((rows, -(-vocab // part)), dtype=torch.int64, device=logits.device)
    _find_parts[findings.shape](
        logits,
        logits.stride(0),
        findings,
        vocab=vocab,
        part=part,
        checks=checks,
        num_warps=max(4, part // 1024),
    )
    return findings
