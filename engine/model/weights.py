"""Where each checkpoint tensor goes: the names of the Hugging Face layout against the fused parameters.

Everything here follows from the configuration alone, so a checkpoint can be refused before anything is
allocated. Names are without the leading ``model.``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.config import ModelConfig
from engine.model.decoder import Decoder, DecoderLayer, Embedding
from engine.model.draft import MtpDraft
from engine.model.layers import DenseMlp, Projection, RmsNorm
from engine.model.mla import LatentAttention
from engine.model.moe import Moe
from engine.model.rope import half_split_rows

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Target:
    """A checkpoint tensor's place in one parameter."""

    shape: Shape
    """The tensor's shape in the file."""
    owner: nn.Module
    attribute: str
    region: Callable[[Tensor], Tensor]
    """From the parameter to the view that is filled."""
    arrange: Callable[[Tensor], Tensor]
    """From the tensor to the shape and order of that view."""

    def parameter(self) -> nn.Parameter:
        parameter = getattr(self.owner, self.attribute)
        assert isinstance(parameter, nn.Parameter)
        return parameter

    def fill(self, tensor: Tensor) -> None:
        """Copy ``tensor`` into its place, converting to the parameter's dtype and device."""
        self.region(self.parameter().data).copy_(self.arrange(tensor))


Named = Iterator[tuple[str, Target]]


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.t()


def _columns(start: int, count: int) -> Callable[[Tensor], Tensor]:
    return lambda parameter: parameter[..., start : start + count]


def _vector(name: str, norm: RmsNorm) -> tuple[str, Target]:
    return f"{name}.weight", Target((norm.size,), norm, "weight", _same, _same)


def _matrix(
    name: str,
    projection: Projection,
    shape: Shape,
    start: int = 0,
    arrange: Callable[[Tensor], Tensor] = _transposed,
) -> tuple[str, Target]:
    """A ``[out, in]`` tensor at the output columns ``start`` and on."""
    return f"{name}.weight", Target(shape, projection, "weight", _columns(start, shape[0]), arrange)


def embedding_target(embedding: Embedding) -> Target:
    """Target of ``embed_tokens.weight``."""
    return Target(tuple(embedding.weight.shape), embedding, "weight", _same, _same)


def head_target(head: Projection) -> Target:
    """Target of ``lm_head.weight`` ``[vocab, hidden]``."""
    assert head.weight is not None
    hidden, vocab = head.weight.shape
    return Target((vocab, hidden), head, "weight", _same, _transposed)


def decoder_targets(config: ModelConfig, decoder: Decoder) -> Named:
    """Everything of the target model but embedding and head."""
    for index, layer in enumerate(decoder.layers):
        assert isinstance(layer, DecoderLayer)
        yield from _layer_targets(config, f"layers.{index}", layer)
    yield _vector("norm", decoder.norm)


def draft_targets(config: ModelConfig, layer_index: int, draft: MtpDraft) -> Named:
    """Everything of the MTP layer ``layer_index`` but its copies of embedding and head."""
    name, hidden = f"layers.{layer_index}", config.hidden_size
    yield _vector(f"{name}.enorm", draft.embedding_norm)
    yield _vector(f"{name}.hnorm", draft.hidden_norm)
    yield _matrix(f"{name}.eh_proj", draft.merge, (hidden, 2 * hidden))
    yield _vector(f"{name}.shared_head.norm", draft.norm)
    yield from _layer_targets(config, name, draft.layer)


def _layer_targets(config: ModelConfig, name: str, layer: DecoderLayer) -> Named:
    yield _vector(f"{name}.input_layernorm", layer.input_norm)
    yield _vector(f"{name}.post_attention_layernorm", layer.mlp_norm)
    yield from _attention_targets(config, f"{name}.self_attn", layer.attention)
    if isinstance(layer.mlp, Moe):
        yield from _moe_targets(config, f"{name}.mlp", layer.mlp)
    else:
        yield from _mlp_targets(config, f"{name}.mlp", layer.mlp)


def _attention_targets(config: ModelConfig, name: str, attention: LatentAttention) -> Named:
    hidden, rank = config.hidden_size, config.q_lora_rank
    down, query_width = attention.down, sum(attention.query_widths)
    if rank is None:
        yield from _query_targets(config, f"{name}.q_proj", down, hidden)
        kv_start = query_width
    else:
        assert attention.query_norm is not None and attention.query_up is not None
        yield _matrix(f"{name}.q_a_proj", down, (rank, hidden))
        yield _vector(f"{name}.q_a_layernorm", attention.query_norm)
        yield from _query_targets(config, f"{name}.q_b_proj", attention.query_up, rank)
        kv_start = rank
    shape = (config.latent_dim, hidden)
    yield _matrix(f"{name}.kv_a_proj_with_mqa", down, shape, kv_start, lambda t: _arrange_kv(config, t))
    yield _vector(f"{name}.kv_a_layernorm", attention.kv_norm)
    yield from _absorbed_targets(config, f"{name}.kv_b_proj", attention)
    yield _matrix(f"{name}.o_proj", attention.out, (hidden, attention.heads * attention.v_dim))


def _query_targets(config: ModelConfig, name: str, projection: Projection, inputs: int) -> Named:
    rows = config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    yield _matrix(name, projection, (rows, inputs), 0, lambda t: _arrange_query(config, t))


def _arrange_query(config: ModelConfig, tensor: Tensor) -> Tensor:
    """Rows by head ``[nope | rope]`` to columns: all heads' nope, then all their rope, half-split."""
    heads, nope, rope = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    by_head = tensor.view(heads, nope + rope, -1)
    rotary = _half_split(config, by_head[:, nope:])
    return torch.cat((by_head[:, :nope].flatten(0, 1), rotary.flatten(0, 1))).t()


def _arrange_kv(config: ModelConfig, tensor: Tensor) -> Tensor:
    """Rows ``[compressed | rope]`` to columns: rope in half-split order, then compressed."""
    compressed, rotary = tensor[: config.kv_lora_rank], tensor[config.kv_lora_rank :]
    return torch.cat((_half_split(config, rotary[None])[0], compressed)).t()


def _half_split(config: ModelConfig, rows: Tensor) -> Tensor:
    """``rows`` ``[..., rope, in]`` in half-split order."""
    return rows[..., half_split_rows(config.qk_rope_head_dim), :] if config.rope_interleave else rows


def _absorbed_targets(config: ModelConfig, name: str, attention: LatentAttention) -> Named:
    """``kv_b_proj`` by head ``[W_UK | W_UV]``, parted into the two absorbed products."""
    heads, nope, v_dim = attention.heads, attention.nope, attention.v_dim
    shape = (heads * (nope + v_dim), config.kv_lora_rank)

    def by_head(tensor: Tensor) -> Tensor:
        return tensor.view(heads, nope + v_dim, -1)

    yield f"{name}.weight", Target(shape, attention.w_uk, "weight", _same, lambda t: by_head(t)[:, :nope])
    yield (
        f"{name}.weight",
        Target(shape, attention.w_uv, "weight", _same, lambda t: by_head(t)[:, nope:].transpose(1, 2)),
    )


def _mlp_targets(config: ModelConfig, name: str, mlp: DenseMlp) -> Named:
    hidden, inner = config.hidden_size, config.intermediate_size
    yield _matrix(f"{name}.gate_proj", mlp.gate_up, (inner, hidden))
    yield _matrix(f"{name}.up_proj", mlp.gate_up, (inner, hidden), inner)
    yield _matrix(f"{name}.down_proj", mlp.down, (hidden, inner))


def _moe_targets(config: ModelConfig, name: str, moe: Moe) -> Named:
    hidden, router = config.hidden_size, moe.router
    yield _matrix(f"{name}.gate", router.projection, (moe.num_routed, hidden))
    if router.bias is not None:
        bias = Target((moe.num_routed,), router, "bias", _same, _same)
        yield f"{name}.gate.e_score_correction_bias", bias
    for expert in range(moe.num_routed):
        yield from _expert_targets(f"{name}.experts.{expert}", moe, expert, 1)
    if moe.num_shared:
        yield from _expert_targets(f"{name}.shared_experts", moe, moe.num_routed, moe.num_shared)


def _expert_targets(name: str, moe: Moe, first: int, count: int) -> Named:
    """An MLP of width ``count * inner``, as the ``count`` experts from ``first`` on that sum to it."""
    hidden, inner = moe.hidden, moe.inner

    def columns(tensor: Tensor) -> Tensor:  # [count * inner, hidden] to [count, hidden, inner]
        return tensor.view(count, inner, hidden).transpose(1, 2)

    def rows(tensor: Tensor) -> Tensor:  # [hidden, count * inner] to [count, inner, hidden]
        return tensor.t().reshape(count, inner, hidden)

    for kind, start in (("gate_proj", 0), ("up_proj", inner)):
        region = _expert_columns(first, count, start, inner)
        yield f"{name}.{kind}.weight", Target((count * inner, hidden), moe, "gate_up", region, columns)
    down = Target((hidden, count * inner), moe, "down", lambda p: p[first : first + count], rows)
    yield f"{name}.down_proj.weight", down


def _expert_columns(first: int, count: int, start: int, width: int) -> Callable[[Tensor], Tensor]:
    return lambda parameter: parameter[first : first + count, :, start : start + width]
