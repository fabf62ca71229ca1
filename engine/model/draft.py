"""The draft model: DeepSeek-V3's multi-token prediction layer (arXiv:2412.19437, section 2.2), chained."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from engine import kernels
from engine.attention.base import Attention
from engine.config import ModelConfig
from engine.model.decoder import DecoderLayer, Embedding
from engine.model.layers import Projection, RmsNorm
from engine.model.rope import RotaryTable


class Draft(Protocol):
    """What the speculative step needs of a draft model."""

    def __call__(self, hidden: Tensor, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """The draft's hidden states ``[N, hidden]``, as its own next input and as input of ``logits``.

        Args:
            hidden: ``[N, hidden]`` at position i: the target's after its final norm, or the draft's own.
            token_ids: ``[N]`` int64, the token at position i + 1.
            positions: ``[N]`` int64, i.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """``[M, hidden]`` to ``[M, vocab]``: scores of the token at position i + 2."""
        ...


class MtpDraft(nn.Module):
    """One MTP layer; longer chains reuse it with its own output.

    Its input is ``eh_proj([enorm(embedding), hnorm(hidden)])`` in this order, its output the state *after*
    ``shared_head.norm``, which is also what is recycled. Further MTP layers of a checkpoint are not used.

    Args:
        embedding: The target's, or the layer's own where a checkpoint holds a different one.
        head: Likewise.
    """

    def __init__(
        self,
        config: ModelConfig,
        rotary: RotaryTable,
        embedding: Embedding,
        head: Projection,
        *,
        dtype: torch.dtype,
        input_major: bool,
    ) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.embedding = embedding
        self.embedding_norm = RmsNorm(hidden, eps, dtype)
        self.hidden_norm = RmsNorm(hidden, eps, dtype)
        self.merge = Projection(2 * hidden, hidden, dtype=dtype, input_major=input_major)
        self.layer = DecoderLayer(config, config.num_hidden_layers, dtype=dtype, input_major=input_major)
        self.norm = RmsNorm(hidden, eps, dtype)
        self.head = head
        self.rotary = rotary

    def forward(self, hidden: Tensor, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """See ``Draft``."""
        x = self.merge(self._inputs(hidden, token_ids))
        out: Tensor = self.norm(self.layer(x, self.rotary.at(positions), attention))
        return out

    def _inputs(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """``[N, 2 * hidden]``: normed embeddings, then normed hidden states."""
        if kernels.fused(hidden):
            from engine.kernels.norm import merge_inputs

            return merge_inputs(
                token_ids,
                self.embedding.weight,
                self.embedding_norm.weight,
                hidden,
                self.hidden_norm.weight,
                self.hidden_norm.eps,
            )
        embedded = self.embedding_norm(self.embedding(token_ids))
        return torch.cat((embedded, self.hidden_norm(hidden)), dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        """See ``Draft``."""
        out: Tensor = self.head(hidden)
        return out
