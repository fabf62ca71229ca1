"""Mixture of experts of DeepSeek-V2/V3: routing in fp32, and the cheapest product for device and rows.

Shared experts are extra experts behind the routed ones that every token chooses with weight 1, so they run in
the same kernels and no routing factor can touch them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from engine import kernels
from engine.config import ModelConfig
from engine.model.half import HalfWeight, pack
from engine.model.layers import Projection, parameter

if TYPE_CHECKING:  # needs Triton, which a CPU has not
    from engine.kernels.blocks import Blocks
    from engine.kernels.router import Routing

BAG_ROWS = 16
"""Most rows for which a CPU sums the chosen experts' weight rows; above, grouping tokens by expert wins."""
GROUPED_BYTES = 16
"""A grouped product's rows are a multiple of these."""
MAX_PACKED_EXPERTS = 16
"""Most experts for which a CPU multiplies by all of them, packed, rather than only by the chosen ones."""


class Router(nn.Module):
    """Chooses experts and their weights; parameters and arithmetic are fp32 (a bf16 bias loses experts)."""

    bias: Tensor | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_experts, self.top_k = config.n_routed_experts, config.num_experts_per_tok
        self.num_groups, self.top_groups = config.n_group, config.topk_group
        self.method, self.scoring = config.topk_method, config.scoring_func
        self.normalise, self.scale = config.norm_topk_prob, config.routed_scaling_factor
        self.projection = Projection(
            config.hidden_size, config.n_routed_experts, dtype=torch.float32, input_major=True
        )
        has_bias = config.topk_method == "noaux_tc"
        self.bias = parameter(config.n_routed_experts, dtype=torch.float32) if has_bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Experts ``[N, top_k]`` int64 and their weights ``[N, top_k]`` fp32 for ``x`` ``[N, hidden]``.

        Scores choose the experts after the bias is added (noaux_tc) and weigh them without it. Weights are
        normalised to sum 1 where the configuration says so, then scaled.
        """
        if kernels.fused(x):
            from engine.kernels.router import route

            assert self.projection.weight is not None
            return route(x, self.projection.weight, self.bias, self._routing())
        logits = self.projection(x.float())
        scores = logits.sigmoid() if self.scoring == "sigmoid" else logits.softmax(dim=-1)
        preference = scores if self.bias is None else scores + self.bias
        if self.top_groups < self.num_groups:
            preference = self._only_best_groups(preference)
        best, chosen = preference.topk(self.top_k, dim=-1)
        weights = best if self.bias is None else scores.gather(1, chosen)
        if self.normalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return chosen, weights if self.scale == 1.0 else weights * self.scale

    def blocks(self, x: Tensor, *, block_rows: int, num_shared: int) -> tuple[Tensor, Blocks]:
        """As ``forward``, with the experts as the list that the streaming kernels work off."""
        from engine.kernels.router import route_blocks

        assert self.projection.weight is not None
        routing = self._routing()
        return route_blocks(
            x, self.projection.weight, self.bias, routing, block_rows=block_rows, num_shared=num_shared
        )

    def _routing(self) -> Routing:
        from engine.kernels.router import Routing

        return Routing(
            num_experts=self.num_experts,
            top_k=self.top_k,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
            best_of_group=2 if self.method == "noaux_tc" else 1,
            sigmoid=self.scoring == "sigmoid",
            normalise=self.normalise,
            scale=self.scale,
        )

    def _only_best_groups(self, preference: Tensor) -> Tensor:
        """Minus infinity outside each row's best groups.

        A group ranks by its best expert (group_limited_greedy) or by the sum of its best two (noaux_tc).
        """
        grouped = preference.view(preference.shape[0], self.num_groups, -1)
        best_of_group = grouped.topk(2 if self.method == "noaux_tc" else 1, dim=-1)[0]
        rank = best_of_group.sum(dim=-1)
        best = rank.topk(self.top_groups, dim=-1)[1]
        barrier = torch.full_like(rank, float("-inf")).scatter(1, best, 0.0)
        return (grouped + barrier[..., None]).flatten(1)


class Moe(nn.Module):
    """Routed and shared experts of one layer, weights ``[experts, in, out]``.

    Args:
        input_major: Memory order of each expert's weights, as in ``Projection``.
    """

    gate_up: nn.Parameter | None
    down: nn.Parameter | None
    no_weights: Tensor
    shared_ids: Tensor
    gate_up_rows: Tensor
    down_rows: Tensor
    bag_offsets: Tensor

    def __init__(self, config: ModelConfig, dtype: torch.dtype, *, input_major: bool = True) -> None:
        super().__init__()
        self.router = Router(config)
        self.num_routed, self.num_shared = config.n_routed_experts, config.n_shared_experts
        self.num_experts = self.num_routed + self.num_shared
        self.slots = config.num_experts_per_tok + self.num_shared
        self.hidden, self.inner = config.hidden_size, config.moe_intermediate_size
        self._groupable = not any(size * dtype.itemsize % GROUPED_BYTES for size in (self.hidden, self.inner))
        self.gate_up = self._weight(self.hidden, 2 * self.inner, dtype, input_major)
        self.down = self._weight(self.inner, self.hidden, dtype, input_major)
        self._half: tuple[HalfWeight, HalfWeight] | None = None

    def _weight(self, inputs: int, outputs: int, dtype: torch.dtype, input_major: bool) -> nn.Parameter:
        if input_major:
            return parameter(self.num_experts, inputs, outputs, dtype=dtype)
        weight = torch.empty(self.num_experts, outputs, inputs, dtype=dtype).transpose(1, 2)
        return nn.Parameter(weight, requires_grad=False)

    def prepare(self) -> None:
        """Packed weights or index tables, on the device of the weights."""
        assert self.gate_up is not None and self.down is not None
        device = self.down.device
        experts = torch.arange(self.num_experts, device=device)
        no_weights = (experts >= self.num_routed).to(self.down.dtype)[None]
        self.register_buffer("no_weights", no_weights, persistent=False)
        if device.type == "cpu" and self.num_experts <= MAX_PACKED_EXPERTS and self._pack():
            self.gate_up = self.down = None
            return
        self.register_buffer("shared_ids", experts[None, self.num_routed :], persistent=False)
        for name, size in (("gate_up_rows", self.hidden), ("down_rows", self.inner)):
            rows = torch.arange(self.num_experts * size, device=device).view(-1, size)
            self.register_buffer(name, rows, persistent=False)
        offsets = torch.arange(BAG_ROWS * self.slots, device=device)
        self.register_buffer("bag_offsets", offsets, persistent=False)

    def _pack(self) -> bool:
        """All experts as one wide MLP in fp16: its columns are all gates, then all ups."""
        assert self.gate_up is not None and self.down is not None
        by_part = self.gate_up.view(self.num_experts, self.hidden, 2, self.inner).permute(2, 0, 3, 1)
        gate_up = pack(by_part.reshape(-1, self.hidden))
        down = pack(self.down.view(-1, self.hidden).t())
        if gate_up is None or down is None:
            return False
        self._half = gate_up, down
        return True

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual`` plus the experts' weighted sum for ``x``, both ``[N, hidden]``."""
        if kernels.fused(x):
            return self._streamed(x, residual)
        chosen, weights = self.router(x)
        weights = weights.to(x.dtype)
        if self._half is not None:
            return self._wide(x, chosen, weights) + residual
        assert self.gate_up is not None and self.down is not None
        # Outside bf16, the grouped product has no fake form, which a trace needs
        grouped = x.dtype == torch.bfloat16 and self._groupable
        if isinstance(x, FakeTensor) and not grouped:
            return self._all_experts(x, chosen, weights, self.gate_up, self.down) + residual
        if self.num_shared:
            chosen = torch.cat((chosen, self.shared_ids.expand(x.shape[0], -1)), dim=-1)
            weights = F.pad(weights, (0, self.num_shared), value=1.0)
        if x.shape[0] > BAG_ROWS and self._groupable:
            return self._grouped(x, chosen, weights, self.gate_up, self.down) + residual
        parts = zip(x.split(BAG_ROWS), chosen.split(BAG_ROWS), weights.split(BAG_ROWS), strict=True)
        bags = [self._bags(*part, self.gate_up, self.down) for part in parts]
        return (bags[0] if len(bags) == 1 else torch.cat(bags)) + residual

    def _streamed(self, x: Tensor, residual: Tensor) -> Tensor:
        """Four or five kernels that read each chosen expert once, in any float dtype."""
        from engine.kernels.moe import mix, plan_for

        assert self.gate_up is not None and self.down is not None
        block_rows = plan_for(x.shape[0], x.dtype).block_rows
        weights, blocks = self.router.blocks(x, block_rows=block_rows, num_shared=self.num_shared)
        return mix(x, residual, weights, blocks, self.gate_up, self.down)

    def _dense_weights(self, chosen: Tensor, weights: Tensor) -> Tensor:
        """``[N, experts]``: the chosen ones' weights, 1 for the shared, 0 elsewhere."""
        return self.no_weights.expand(chosen.shape[0], -1).scatter(1, chosen, weights)

    def _wide(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Every expert on every row, as one MLP; the ones not chosen weigh nothing."""
        assert self._half is not None
        gate_up, down = self._half
        rows, dense = x.shape[0], self._dense_weights(chosen, weights)
        inner = _gated(gate_up(x), self.num_experts * self.inner)
        return down((inner.view(rows, -1, self.inner) * dense[..., None]).view(rows, -1))

    def _all_experts(
        self, x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        """As ``_wide``, as batched products over the experts."""
        dense = self._dense_weights(chosen, weights).t()[..., None]  # [experts, N, 1]
        inner = _gated(torch.bmm(x.expand(self.num_experts, -1, -1), gate_up), self.inner)
        return torch.bmm(inner * dense, down).sum(dim=0)

    def _bags(self, x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """Each product as a weighted sum of the chosen experts' weight rows, read in place.

        A row's result does not depend on the other rows, bit for bit.
        """
        rows, pairs, flat = x.shape[0], chosen.numel(), chosen.flatten()
        repeated = x[:, None].expand(rows, self.slots, self.hidden).reshape(-1)
        gated = torch.embedding_bag(
            gate_up.view(-1, 2 * self.inner),
            self.gate_up_rows.index_select(0, flat).view(-1),
            self.bag_offsets[:pairs] * self.hidden,
            per_sample_weights=repeated,
        )[0]
        inner = _gated(gated, self.inner) * weights.view(-1, 1)  # [N * slots, inner]
        return torch.embedding_bag(
            down.view(-1, self.hidden),
            self.down_rows.index_select(0, flat).view(-1),
            self.bag_offsets[:rows] * (self.slots * self.inner),
            per_sample_weights=inner.view(-1),
        )[0]

    def _grouped(self, x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """Rows sorted by expert, one grouped product each way; summed in slot order, so deterministic."""
        by_expert, order = chosen.flatten().sort(stable=True)
        experts = torch.arange(1, self.num_experts + 1, device=x.device)
        ends = torch.searchsorted(by_expert, experts).to(torch.int32)
        inner = _gated(torch._grouped_mm(x.index_select(0, order // self.slots), gate_up, ends), self.inner)
        out = torch._grouped_mm(inner, down, ends)
        unsorted = torch.empty_like(out).index_copy(0, order, out)
        return torch.bmm(weights[:, None], unsorted.view(-1, self.slots, self.hidden))[:, 0]


def _gated(gate_up: Tensor, inner: int) -> Tensor:
    """``silu(gate) * up`` over the last dimension's two halves."""
    return F.silu(gate_up[..., :inner]) * gate_up[..., inner:]
