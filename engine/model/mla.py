"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) in the absorbed form.

Keys and values are never expanded: a token caches one latent row for all heads, ``W_UK`` is applied to the
query and ``W_UV`` to the attention's output.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine import kernels
from engine.attention.base import Attention
from engine.config import ModelConfig
from engine.model.layers import HeadProjection, Projection, RmsNorm
from engine.model.rope import Angles, rotate

LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms of compressed query and KV: DeepSeek's code ignores rms_norm_eps there."""


class LatentAttention(nn.Module):
    """One layer's attention block.

    ``down`` makes everything that comes from the hidden state in one product. Its columns, and those of
    ``query_up``, are ordered so that each consumer's are adjacent: all heads' no-rope parts, all heads' rope
    parts, then the shared rope key (so one rotation serves queries and key), then the compressed KV.
    """

    def __init__(self, config: ModelConfig, layer: int, *, dtype: torch.dtype, input_major: bool) -> None:
        super().__init__()
        self.layer = layer
        self.heads = config.num_attention_heads
        self.nope, self.rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.kv_lora_rank, self.v_dim = config.kv_lora_rank, config.v_head_dim
        self.query_widths = [self.heads * self.nope, self.heads * self.rope]
        self.kv_widths = [self.rope, self.kv_lora_rank]
        hidden, rank = config.hidden_size, config.q_lora_rank

        def projection(inputs: int, outputs: int) -> Projection:
            return Projection(inputs, outputs, dtype=dtype, input_major=input_major)

        if rank is None:
            self.down = projection(hidden, sum(self.query_widths) + sum(self.kv_widths))
            self.query_norm, self.query_up = None, None
        else:
            self.down = projection(hidden, rank + sum(self.kv_widths))
            self.query_norm = RmsNorm(rank, LATENT_NORM_EPS, dtype)
            self.query_up = projection(rank, sum(self.query_widths))
        self.kv_norm = RmsNorm(self.kv_lora_rank, LATENT_NORM_EPS, dtype)
        self.w_uk = HeadProjection(self.heads, self.nope, self.kv_lora_rank, dtype)
        self.w_uv = HeadProjection(self.heads, self.kv_lora_rank, self.v_dim, dtype)
        self.out = projection(self.heads * self.v_dim, hidden)

    def forward(self, x: Tensor, norm: RmsNorm, angles: Angles, attention: Attention) -> Tensor:
        """``x`` plus the block's output for ``norm(x)``.

        Args:
            x: ``[N, hidden]``, the residual stream; on CUDA it may be overwritten with the result.
            norm: In front of the block.
            angles: Of the rows' positions.
            attention: Writes the latent rows and attends.
        """
        if kernels.fused(x):
            return self._fused(x, norm, angles, attention)
        rows = x.shape[0]
        q_nope, rope_parts, compressed = self._project(x, norm)
        rotated = rotate(rope_parts.view(rows, self.heads + 1, self.rope), *angles.rows)
        latent = torch.cat((self.kv_norm(compressed), rotated[:, -1]), dim=-1)  # [N, lora + rope]
        absorbed = self.w_uk(q_nope.view(rows, self.heads, self.nope))
        query = torch.cat((absorbed, rotated[:, :-1]), dim=-1)  # [N, H, lora + rope]
        context = attention.attend(self.layer, query, latent)  # [N, H, lora]
        values = self.w_uv(context)  # [N, H, v]
        return self.out.add_to(x, values.reshape(rows, self.heads * self.v_dim))

    def _fused(self, x: Tensor, norm: RmsNorm, angles: Angles, attention: Attention) -> Tensor:
        """``forward`` in few kernels: each writes its part where the next one reads it, so nothing is copied."""
        from engine.kernels.latent import write_latent

        rows = x.shape[0]
        q_nope, q_rope, k_rope, compressed = self._slices(x, norm)
        query = x.new_empty(rows, self.heads, self.kv_lora_rank + self.rope)
        pool_rows, slots = attention.destination(self.layer)
        assert self.w_uk.weight is not None, "packed weights are for CPUs"
        absorbed = write_latent(
            q_nope,
            q_rope,
            k_rope,
            compressed,
            weight=self.kv_norm.weight,
            eps=self.kv_norm.eps,
            table=angles.table,
            positions=angles.positions,
            pool_rows=pool_rows,
            slots=slots,
            query=query,
            w_uk=self.w_uk.weight,
        )
        if not absorbed:
            self.w_uk.write(q_nope.view(rows, self.heads, self.nope), query[..., : self.kv_lora_rank])
        context = attention.read(self.layer, query)  # [N, H, lora]
        values = x.new_empty(rows, self.heads, self.v_dim)
        self.w_uv.write(context, values)
        return self.out.add_to(x, values.view(rows, self.heads * self.v_dim))

    def _project(self, x: Tensor, norm: RmsNorm) -> tuple[Tensor, Tensor, Tensor]:
        """No-rope queries ``[N, H * nope]``, rope parts ``[N, (H + 1) * rope]``, KV ``[N, lora]``."""
        if self.query_up is None:
            nope, rope = self.query_widths
            down = self.down(x, norm)
            q_nope, rope_parts, compressed = down.split([nope, rope + self.rope, self.kv_lora_rank], dim=-1)
            return q_nope, rope_parts, compressed
        q_nope, q_rope, k_rope, compressed = self._slices(x, norm)
        return q_nope, torch.cat((q_rope, k_rope), dim=-1), compressed

    def _slices(self, x: Tensor, norm: RmsNorm) -> tuple[Tensor, ...]:
        """As ``_project``, rope parts as queries and key, each a view of a product."""
        down = self.down(x, norm)
        if self.query_up is None or self.query_norm is None:
            return tuple(down.split([*self.query_widths, *self.kv_widths], dim=-1))
        rank = self.query_norm.size
        query = self.query_up(down[:, :rank], self.query_norm)
        return *query.split(self.query_widths, dim=-1), *down[:, rank:].split(self.kv_widths, dim=-1)
