"""From logits to distributions and tokens, on the device, without a synchronisation.

Shapes: B rows, R positions a row, V vocabulary. Everything here is a fixed sequence of operators whatever the
values, so that a graph can capture it; what a batch does not need is left out by its ``Variant``, which the host
chooses from the requests' parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from engine.state import SlotState, processes_logits
from engine.types import SamplingParams

TEMPERATURE, TOP_P, MIN_P, PRESENCE, FREQUENCY, REPETITION = range(6)
"""Columns of ``SlotState.floats``."""


@dataclass(frozen=True, slots=True)
class Variant:
    """Which parts of sampling a forward holds. A row's result is the same in every variant that serves it."""

    sampled: bool
    """Some row has a temperature: rejection sampling; else argmax comparison."""
    truncated: bool
    """Some row uses top_k, top_p or min_p: a sort."""
    processed: bool
    """Some row uses penalties, biases or min_tokens: vocabulary-wide tables."""
    constrained: bool = False
    """Some row has a grammar: the step reads a mask of allowed tokens. Only its verification does."""


GREEDY: Final = Variant(sampled=False, truncated=False, processed=False)
FULL: Final = Variant(sampled=True, truncated=True, processed=True)


def choose_variant(params: list[SamplingParams]) -> Variant:
    """The least variant that serves these requests."""
    sampled = [p for p in params if p.temperature > 0]
    return Variant(
        sampled=bool(sampled),
        truncated=any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in sampled),
        processed=any(processes_logits(p) for p in params),
    )


def mask_words(vocab_size: int) -> int:
    """int32 words of a mask with one bit for each token."""
    return -(-vocab_size // 32)


def mask_logits(logits: Tensor, allowed: Tensor) -> Tensor:
    """``logits`` with -inf where ``allowed`` has a 0.

    Args:
        logits: ``[B, R, V]`` float32.
        allowed: ``[B, R, ceil(V / 32)]`` int32: token ``v`` is bit ``v % 32`` of word ``v // 32``.
    """
    # By bytes: a wider type would need four times the memory. All supported machines are little-endian
    packed = allowed.view(torch.uint8)[..., None]  # [B, R, words * 4, 1]
    bits = (packed >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
    return logits.masked_fill(bits.flatten(2)[..., : logits.shape[-1]] == 0, float("-inf"))


def process_logits(
    logits: Tensor, state: SlotState, slots: Tensor, counts: Tensor, positions: Tensor
) -> Tensor:
    """Bias, min_tokens mask, then repetition, frequency and presence penalties, as vLLM orders them.

    Args:
        logits: ``[B, R, V]`` float32.
        slots: ``[B]`` int64.
        counts: ``[B, R, V]`` int32: output tokens before each position.
        positions: ``[B, R]`` int64: absolute position of the token that each row decides.
    """
    floats = state.floats.index_select(0, slots)[:, :, None, None]  # [B, 6, 1, 1]
    logits = logits + state.logit_bias.index_select(0, slots)[:, None]
    too_early = positions < state.min_position.index_select(0, slots)[:, None]  # [B, R]
    stops = state.stop_mask.index_select(0, slots)[:, None] & too_early[:, :, None]
    logits = logits.masked_fill(stops, float("-inf"))
    emitted = counts > 0
    seen = emitted | state.prompt_seen.index_select(0, slots)[:, None]
    repetition = torch.where(seen, floats[:, REPETITION], 1.0)
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    return logits - floats[:, FREQUENCY] * counts - floats[:, PRESENCE] * emitted


def distribution(logits: Tensor, state: SlotState, slots: Tensor, truncated: bool) -> Tensor:
    """The distribution to sample from: temperature, then min_p, top_k and top_p; one-hot where greedy.

    Ties at a top_k or top_p boundary are all kept.

    Args:
        logits: ``[B, R, V]`` float32, processed.

    Returns:
        ``[B, R, V]`` float32, each row summing to 1.
    """
    floats = state.floats.index_select(0, slots)[:, :, None, None]  # [B, 6, 1, 1]
    temperature = floats[:, TEMPERATURE]  # [B, 1, 1]
    greedy = temperature <= 0
    scaled = logits / torch.where(greedy, 1.0, temperature)
    if truncated:
        top_k = state.top_k.index_select(0, slots)[:, None, None]
        scaled = truncate(scaled, top_k, floats[:, TOP_P], floats[:, MIN_P])
    probs = scaled.softmax(dim=-1)
    best = logits.argmax(dim=-1, keepdim=True)  # [B, R, 1]
    one_hot = torch.zeros_like(probs).scatter_(-1, best, 1.0)
    return torch.where(greedy, one_hot, probs)


def truncate(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """``scaled`` ``[B, R, V]`` with -inf where min_p, then top_k, then top_p leave a token out.

    ``top_k`` int64, ``top_p`` and ``min_p`` float32, each ``[B, 1, 1]``.
    """
    ranked = scaled.sort(dim=-1, descending=True).values
    best = ranked[..., :1]
    # p / p_max >= min_p, compared in the log domain; log(0) = -inf keeps all
    ranked = ranked.masked_fill(ranked - best < min_p.log(), float("-inf"))
    last = (top_k - 1).expand(*ranked.shape[:-1], 1)
    ranked = ranked.masked_fill(ranked < ranked.gather(-1, last), float("-inf"))
    probs = ranked.softmax(dim=-1)
    mass_before = probs.cumsum(dim=-1) - probs
    kept = (mass_before < top_p) | (top_p >= 1)  # the first is always kept: its mass_before is 0
    threshold = ranked.masked_fill(~kept | ranked.isneginf(), float("inf")).amin(dim=-1, keepdim=True)
    return scaled.masked_fill(scaled < threshold, float("-inf"))


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """Tokens ``[B]`` int64 by inverse distribution function.

    Args:
        probs: ``[B, V]`` float32, non-negative, not necessarily normalised. A zero is never drawn.
        uniform: ``[B]`` float64 in [0, 1).
    """
    cumulative = probs.to(torch.float64).cumsum(dim=-1)
    total = cumulative[:, -1:]
    # A uniform just below 1 can round up to the total, which would point past the last possible token
    below = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniform[:, None] * total, below)
    index = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    # Only a NaN gets past the end; the guard halts the row, but until then the token must be a real one
    return index.clamp_max(probs.shape[-1] - 1)
