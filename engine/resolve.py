"""From options and a checkpoint's configuration to what will run; pure, except for looking at the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from engine.config import ModelConfig, require_draft
from engine.errors import ConfigError
from engine.kv.pool import pool_bytes_per_token
from engine.options import EngineOptions

GRAPH_PREFILL_TOKENS = 512
"""Most tokens of a captured prefill where nothing else is asked: more keep a GPU longer than they do the host."""
CPU_POOL_BYTES = 384 << 20
"""Largest KV pool on a CPU unless ``num_kv_pages`` says otherwise."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """What the engine will run with."""

    device: torch.device
    dtype: torch.dtype
    schedule: str
    graphs: Literal["cuda", "simulate", "off"]
    num_speculative_tokens: int
    page_size: int

    @property
    def stride(self) -> int:
        """W: query positions of a row in one step."""
        return self.num_speculative_tokens + 1

    @property
    def draft_reach(self) -> int:
        """Positions past the accepted tokens that the K - 1 draft steps write."""
        return max(0, self.num_speculative_tokens - 1)

    @property
    def steps_ahead(self) -> int:
        """Steps that can be launched before their predecessor's results are known, that one included."""
        return 2 if self.schedule == "overlap" else 1

    @property
    def overrun(self) -> int:
        """Positions past the context end that a step can touch; without a page, they land in the scratch page.

        A row one token short of the end runs a whole step, in overlap two, and the draft steps reach further.
        """
        return self.stride * self.steps_ahead + self.draft_reach


def resolve(options: EngineOptions, config: ModelConfig) -> Resolved:
    """Replace every ``auto``.

    Raises:
        ConfigError: A choice that this checkpoint or machine cannot honour, naming option and value.
    """
    name = options.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda': torch sees no CUDA device here")
    dtype = getattr(torch, options.dtype) if options.dtype != "auto" else None
    if dtype is None:
        dtype = torch.float32 if name == "cpu" else config.dtype
    schedule = options.schedule if options.schedule != "auto" else ("sync" if name == "cpu" else "overlap")
    require_draft(config, options.num_speculative_tokens)
    graphs = options.graphs if options.graphs != "auto" else ("cuda" if name == "cuda" else "off")
    if graphs == "cuda" and name != "cuda":
        raise ConfigError("graphs='cuda': needs a CUDA device, the engine runs on cpu; simulate traces there")
    if graphs == "simulate" and name != "cpu":
        raise ConfigError(
            "graphs='simulate': traces plain operators; a GPU runs fused kernels, take graphs='cuda'"
        )
    return Resolved(
        device=torch.device(name, 0) if name == "cuda" else torch.device("cpu"),
        dtype=dtype,
        schedule=schedule,
        graphs="off" if options.enforce_eager else graphs,
        num_speculative_tokens=options.num_speculative_tokens,
        page_size=options.kv_page_size,
    )


def resolve_max_model_len(options: EngineOptions, config: ModelConfig) -> int:
    """The context length before the pool's size is known.

    Raises:
        ConfigError: More than the checkpoint's positions.
    """
    limit = config.max_position_embeddings
    if options.max_model_len is not None and options.max_model_len > limit:
        raise ConfigError(f"max_model_len={options.max_model_len}: the checkpoint has only {limit} positions")
    return options.max_model_len or limit


def pages_wanted(options: EngineOptions, resolved: Resolved, max_model_len: int) -> int:
    """Pages that ``max_num_seqs`` requests of ``max_model_len`` can fill, the scratch page included."""
    return 1 + options.max_num_seqs * -(-max_model_len // resolved.page_size)


def page_bytes(resolved: Resolved, config: ModelConfig) -> int:
    """Bytes of one page of the pool, over all its planes."""
    planes = config.num_hidden_layers + (1 if resolved.num_speculative_tokens else 0)
    return resolved.page_size * pool_bytes_per_token(planes, config.latent_dim, resolved.dtype)
