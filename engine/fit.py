"""What an engine's sizes come to, and refusing those that do not fit, before anything is made."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

from engine.config import ModelConfig
from engine.config_keys import tokenizer_eos_id
from engine.errors import ConfigError
from engine.memory import check_fits
from engine.model.rope import table_bytes
from engine.options import EngineOptions
from engine.resolve import CPU_POOL_BYTES, Resolved, page_bytes, pages_wanted, resolve_max_model_len

HOST_PAGE_BYTES: Final = 160
"""What keeping account of one page takes of the host's memory, at its most."""


def check_tokenizer(options: EngineOptions, config: ModelConfig) -> None:
    """Refuse a tokenizer whose end of sequence no request could stop at.

    Raises:
        ConfigError: Its id is not in the model's vocabulary, naming both.
    """
    token = None if options.tokenizer is None else tokenizer_eos_id(Path(options.tokenizer))
    if token is not None and token >= config.vocab_size:
        raise ConfigError(
            f"tokenizer={options.tokenizer!r}: its eos_token has id {token}, outside "
            f"vocab_size={config.vocab_size} of the checkpoint's config.json"
        )


def check_pool(options: EngineOptions, config: ModelConfig, resolved: Resolved) -> None:
    """Refuse a number of pages whose pool does not fit.

    Raises:
        ConfigError: Naming it.
    """
    if options.num_kv_pages is not None:
        beside = HOST_PAGE_BYTES if resolved.device.type == "cpu" else 0
        needed = options.num_kv_pages * (page_bytes(resolved, config) + beside)
        check_fits(f"num_kv_pages={options.num_kv_pages}: the KV pool takes", needed, resolved.device)


def pages_within(
    budget: int, limit: int, options: EngineOptions, config: ModelConfig, resolved: Resolved
) -> int:
    """Pages of a pool in ``budget`` bytes, no more than requests of ``limit`` tokens can fill.

    Raises:
        ConfigError: Not two.
    """
    pages = min(budget // page_bytes(resolved, config), pages_wanted(options, resolved, limit))
    if pages < 2:
        raise ConfigError(f"no memory is left for a KV pool: {budget} bytes do not hold two pages")
    return pages


def longest_context(options: EngineOptions, config: ModelConfig, resolved: Resolved) -> int:
    """The context length in the largest pool that there can be, which the rotary table is made for.

    Raises:
        ConfigError: An option or a value of the checkpoint that cannot be honoured, by name.
    """
    limit = resolve_max_model_len(options, config)
    most_pages = options.num_kv_pages
    if most_pages is None:
        cuda = resolved.device.type == "cuda"
        budget = torch.cuda.mem_get_info(resolved.device)[1] if cuda else CPU_POOL_BYTES
        most_pages = pages_within(budget, limit, options, config, resolved)
    longest = reachable(limit, most_pages, options, resolved)
    name = "max_position_embeddings" if options.max_model_len is None else "max_model_len"
    needed = table_bytes(config.qk_rope_head_dim, longest + resolved.overrun)
    check_fits(f"{name}={limit}: the rotary table of {longest} positions takes", needed, torch.device("cpu"))
    return longest


def reachable(limit: int, num_pages: int, options: EngineOptions, resolved: Resolved) -> int:
    """The context length that one request can reach in a pool of ``num_pages``.

    Raises:
        ConfigError: Less than was asked for, or none.
    """
    room = (num_pages - 1) * resolved.page_size
    if options.max_model_len is not None and options.max_model_len > room:
        raise ConfigError(
            f"max_model_len={options.max_model_len}: the KV pool of {num_pages - 1} pages of "
            f"{resolved.page_size} holds only {room} positions"
        )
    if room < 2:
        raise ConfigError(f"num_kv_pages={num_pages}: holds only {room} positions, no request can run in it")
    return min(limit, room)
