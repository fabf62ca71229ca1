"""The least time of a speculative step: the bytes that it must read, over the read bandwidth of the device.

Bytes of one step of B rows with K drafts, W = K + 1, over L target layers and one draft (MTP) layer:

    verify       attention, norms and dense MLP, or router and touched experts, of L layers; head
    extend       the draft layer with its merge projection and touched experts     (K > 0)
    K - 1 drafts the draft layer again, each with its own touched experts
    head         once more for each of the K drafts
    KV           of each layer and phase: the latent rows of every live position of the B rows

Each weight of a phase counts once however many rows use it, an expert only if a row chose it (measured, not
assumed; shared experts always). What a later phase reads again counts again: in between more is read than a cache
holds, except in small models, whose step can be faster than this floor. Activations, sampling state, the few rows
of the embedding and all writes are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import msgspec
import torch

from engine.config import ModelConfig

_READ_BYTES = {"cuda": 2 << 30, "cpu": 256 << 20}
"""Read at once to measure bandwidth: many times any cache."""
_READS = 10


class Touched(msgspec.Struct, frozen=True, kw_only=True):
    """Distinct routed experts that one MoE layer's rows choose in one forward, on average."""

    verify: float
    """Over the target's MoE layers."""
    extend: float = 0.0
    draft: float = 0.0
    """Of one single-token draft step."""


class StepBytes(msgspec.Struct, frozen=True, kw_only=True):
    """What one step must read."""

    dense: int
    """Attention, norms, dense MLP, routers, merge."""
    experts: int
    """Touched ones, shared ones included."""
    head: int
    kv: int

    @property
    def total(self) -> int:
        return self.dense + self.experts + self.head + self.kv


def step_bytes(
    config: ModelConfig, k: int, live_positions: float, touched: Touched, kv_dtype: torch.dtype
) -> StepBytes:
    """The bytes of one step, as the module says.

    Weights count in the checkpoint's type, routers in fp32.

    Args:
        k: Drafts a step.
        live_positions: Positions with KV, of all rows together, that a forward attends to.
        touched: Experts of each phase; meaningless for a model without MoE layers.
    """
    size, layers, hidden = config.dtype.itemsize, config.num_hidden_layers, config.hidden_size
    drafts = max(0, k - 1)
    moe_layers = sum(map(config.is_moe, range(layers)))
    draft_is_moe = config.is_moe(layers)
    attention = _attention_weights(config) * size
    router = config.n_routed_experts * hidden * 4
    mlp = 3 * hidden * config.intermediate_size * size
    expert = 3 * hidden * config.moe_intermediate_size * size
    dense = layers * attention + moe_layers * router + (layers - moe_layers) * mlp + hidden * size
    draft_layer = attention + (router if draft_is_moe else mlp) + (2 * hidden + 3) * hidden * size
    experts = moe_layers * (touched.verify + config.n_shared_experts) * expert
    if k:
        dense += (1 + drafts) * draft_layer
        chosen = touched.extend + drafts * touched.draft
        experts += draft_is_moe * (chosen + (1 + drafts) * config.n_shared_experts) * expert
    planes = layers + (1 + drafts if k else 0)
    return StepBytes(
        dense=dense,
        experts=round(experts),
        head=(1 + k) * hidden * config.vocab_size * size,
        kv=round(planes * live_positions * config.latent_dim * kv_dtype.itemsize),
    )


def _attention_weights(config: ModelConfig) -> int:
    """Elements of one layer's attention block and its two norms."""
    hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.q_lora_rank
    query_width = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    query = hidden * query_width if rank is None else hidden * rank + rank + rank * query_width
    down = hidden * config.latent_dim + config.kv_lora_rank
    up = config.kv_lora_rank * heads * (config.qk_nope_head_dim + config.v_head_dim)
    return query + down + up + heads * config.v_head_dim * hidden + 2 * hidden


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second that a large read reaches: the best of several kernels and repetitions."""
    size = _READ_BYTES[device.type]
    values = torch.ones(size // 4, dtype=torch.float32, device=device)
    half = values.view(torch.bfloat16).view(-1, 1 << 14)
    vector = torch.ones(half.shape[1], dtype=torch.bfloat16, device=device)
    kernels: list[Callable[[], object]] = [values.sum, values.max]
    if device.type == "cuda":
        kernels.append(lambda: torch.mv(half, vector))
    return size / min(_seconds(kernel, device) for kernel in kernels)


def _seconds(kernel: Callable[[], object], device: torch.device) -> float:
    """The shortest of several calls, after one that is not measured."""
    kernel()
    if device.type != "cuda":
        times = []
        for _ in range(_READS):
            start = time.perf_counter()
            kernel()
            times.append(time.perf_counter() - start)
        return min(times)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_READS + 1)]
    for event in events[:-1]:
        event.record()
        kernel()
    events[-1].record()
    torch.cuda.synchronize(device)
    return float(min(before.elapsed_time(after) for before, after in pairwise(events))) / 1e3
