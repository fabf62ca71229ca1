"""The target model: embedding, decoder layers, final norm and head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.attention.base import Attention
from engine.config import ModelConfig
from engine.model.layers import DenseMlp, Projection, RmsNorm, parameter
from engine.model.mla import LatentAttention
from engine.model.moe import Moe
from engine.model.rope import Angles, RotaryTable


class Embedding(nn.Module):
    """Token ids ``[N]`` to rows ``[N, hidden]``."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(vocab_size, hidden_size, dtype=dtype)

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.weight.index_select(0, token_ids)


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP; MoE where the configuration says so."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: torch.dtype, input_major: bool) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.input_norm = RmsNorm(hidden, config.rms_norm_eps, dtype)
        self.attention = LatentAttention(config, layer, dtype=dtype, input_major=input_major)
        self.mlp_norm = RmsNorm(hidden, config.rms_norm_eps, dtype)
        self.mlp: Moe | DenseMlp = (
            Moe(config, dtype, input_major=input_major)
            if config.is_moe(layer)
            else DenseMlp(hidden, config.intermediate_size, dtype=dtype, input_major=input_major)
        )

    def forward(self, x: Tensor, angles: Angles, attention: Attention) -> Tensor:
        """``[N, hidden]`` to ``[N, hidden]``, the residual stream; on CUDA ``x`` may be overwritten."""
        x = self.attention(x, self.input_norm, angles, attention)
        out: Tensor = self.mlp(self.mlp_norm(x), x)
        return out


class Decoder(nn.Module):
    """A DeepSeek-V2/V3 target.

    Args:
        rotary: Table with room for every position that a forward can name.
        input_major: Memory order of the projections (see ``Projection``).
    """

    def __init__(
        self, config: ModelConfig, rotary: RotaryTable, *, dtype: torch.dtype, input_major: bool
    ) -> None:
        super().__init__()
        self.embedding = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, dtype=dtype, input_major=input_major)
            for layer in range(config.num_hidden_layers)
        )
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.head = Projection(config.hidden_size, config.vocab_size, dtype=dtype, input_major=input_major)
        self.rotary = rotary

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Hidden states ``[N, hidden]`` after the final norm.

        Args:
            token_ids: ``[N]`` int64.
            positions: ``[N]`` int64, each below the rotary table's length.
            attention: Holds the layout and the paged cache of these N tokens.
        """
        x: Tensor = self.embedding(token_ids)
        angles = self.rotary.at(positions)
        for layer in self.layers:
            x = layer(x, angles, attention)
        out: Tensor = self.norm(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """``[M, hidden]`` after the final norm to ``[M, vocab]``, in the weights' dtype."""
        out: Tensor = self.head(hidden)
        return out
