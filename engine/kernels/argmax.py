"""The best token of rows of logits, and whether a row is finite, in one reading and without a float32 copy.

A row's finding is one int64, so that findings of parts of the vocabulary combine by their maximum: the order of the
best logit in the high word (NaN above infinity), then the token's complement, so that the lower of equals wins, and
in the lowest bit whether the part holds a negative infinity.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from engine.guard import Flag
from engine.kernels.jit import await_previous, check_rows, jit, jit_function, power_of_two

MAX_TILE = 1 << 15
"""Most logits of rows that one program reads whole."""
PROGRAMS = 512
"""Programs that a large vocabulary is spread over, where it has parts enough: some four for each SM."""
MIN_PART, MAX_PART = 1024, 8192
"""Least and most logits of one part."""

NO_PART = tl.constexpr(-(2**63))
"""Below every finding."""
NAN = tl.constexpr(2**31 - 1)
INF = tl.constexpr(0x7F800000)
MINUS_INF = tl.constexpr(-0x7F800001)
NOTHING = tl.constexpr(-(2**31))
"""Orders of the special values, and one below every order."""
LAST = tl.constexpr(2**30 - 1)
"""The highest token that a finding can name."""
_IGNORED = tl.constexpr(int(Flag.IGNORED))
_TARGET_NAN, _TARGET_INF = tl.constexpr(int(Flag.TARGET_NAN)), tl.constexpr(int(Flag.TARGET_INF))
_DRAFT_NAN, _DRAFT_INF = tl.constexpr(int(Flag.DRAFT_NAN)), tl.constexpr(int(Flag.DRAFT_INF))
_NO_FLAG = tl.constexpr(1 << 30)
"""Above every flag."""


@jit_function
def order_of(value: tl.tensor) -> tl.tensor:
    """int32 in the order of float32, zeros of either sign equal and NaN above all."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return tl.where(value == value, bits ^ ((bits >> 31) & 0x7FFFFFFF), NAN)


@jit_function
def value_of(order: tl.tensor) -> tl.tensor:
    """The float32 of an order."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit_function
def finding_of(best: tl.tensor, first: tl.tensor, low: tl.tensor) -> tl.tensor:
    """A finding: the best order, the first token that has it, and 1 if there is a negative infinity; all int32."""
    return (best.to(tl.int64) << 32) | (((-first + LAST) << 1) | low).to(tl.int64)


@jit_function
def find_best(logits: tl.tensor, token: tl.tensor, inside: tl.tensor, checks: tl.constexpr) -> tl.tensor:
    """Findings ``[R]`` int64 of the logits ``[R, C]`` at these addresses where ``inside``, of tokens ``[1, C]``."""
    value = tl.load(logits, mask=inside, other=0.0).to(tl.float32)
    order = tl.where(inside, order_of(value), NOTHING)
    best = tl.max(order, axis=1)
    first = tl.min(tl.where(order == best[:, None], token, LAST), axis=1)
    low = first * 0
    if checks:
        low = tl.max((order == MINUS_INF).to(tl.int32), axis=1)
    return finding_of(best, first, low)


@jit_function
def combined(parts: tl.tensor) -> tl.tensor:
    """Findings ``[R]`` of rows from those of their parts ``[R, P]``, ``NO_PART`` where there is none."""
    return tl.max(parts, axis=1) | tl.max(parts & 1, axis=1)


@jit_function
def token_of(finding: tl.tensor) -> tl.tensor:
    """The best token, int64."""
    return -((finding & 0xFFFFFFFF) >> 1) + LAST


@jit_function
def kind_of(finding: tl.tensor, nan: tl.constexpr, inf: tl.constexpr) -> tl.tensor:
    """``nan``, ``inf`` or 0 as ``engine.guard.classify`` says it, int64."""
    best = finding >> 32
    infinite = (best == INF) | ((finding & 1) != 0)
    return tl.where(best == NAN, nan, tl.where(infinite, inf, 0)).to(tl.int64)


@jit_function
def run_flags(
    finding: tl.tensor, place: tl.tensor, inside: tl.tensor, count: tl.tensor, checks: tl.constexpr
) -> tl.tensor:
    """Flags ``[1]`` int64 of a target's findings at the places ``inside`` a run of which ``count`` drafts stand."""
    verdict = tl.zeros([1], dtype=tl.int64)
    if checks:
        kind = kind_of(finding, _TARGET_NAN, _TARGET_INF)
        bad = inside & (kind > 0)
        least = tl.min(tl.where(bad & (place <= count), kind, _NO_FLAG), axis=0)
        ignored = tl.max((bad & (place > count)).to(tl.int64), axis=0) * _IGNORED
        verdict += tl.where(least == _NO_FLAG, 0, least) | ignored
    return verdict


@jit_function
def draft_flags(finding: tl.tensor, checks: tl.constexpr) -> tl.tensor:
    """Flags of a draft's findings, int64."""
    flags = finding * 0
    if checks:
        flags = kind_of(finding, _DRAFT_NAN, _DRAFT_INF)
    return flags


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
