"""Attention over one sequence without pages, and short cuts to load a checkpoint for a test."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.model.loader import LoadedModel, load_model

CPU = torch.device("cpu")


class SequenceAttention:
    """The whole history of one sequence, layer by layer; chunks follow each other."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.latents: dict[int, Tensor] = {}

    def attend(self, layer: int, query: Tensor, latent: Tensor) -> Tensor:
        before = self.latents.get(layer, latent[:0])
        self.latents[layer] = keys = torch.cat((before, latent))
        scores = torch.einsum("nhd,td->nht", query, keys).float() * self.config.softmax_scale
        positions = torch.arange(keys.shape[0])
        hidden = positions > positions[-query.shape[0] :, None]
        weights = scores.masked_fill(hidden[:, None], -torch.inf).softmax(dim=-1).to(keys.dtype)
        return torch.einsum("nht,td->nhd", weights, keys[:, : self.config.kv_lora_rank])


def load(
    path: Path, *, with_draft: bool = False, dtype: torch.dtype = torch.float32
) -> tuple[ModelConfig, LoadedModel]:
    """A checkpoint on the CPU with room for 300 positions."""
    config = ModelConfig.from_dir(path)
    model = load_model(path, config, dtype=dtype, device=CPU, max_positions=300, with_draft=with_draft)
    return config, model


def logits_of(
    config: ModelConfig, model: LoadedModel, token_ids: Tensor, cuts: tuple[int, ...] = ()
) -> Tensor:
    """[N, vocab] of one sequence, run in chunks that end at ``cuts``."""
    attention = SequenceAttention(config)
    edges = [0, *cuts, token_ids.shape[0]]
    parts = []
    for start, end in pairwise(edges):
        positions = torch.arange(start, end)
        parts.append(model.decoder(token_ids[start:end], positions, attention))
    return model.decoder.logits(torch.cat(parts))


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest magnitude expected."""
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())
