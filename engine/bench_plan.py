"""What ``eyas bench gpu`` is to measure, and whether it can: known before there are weights."""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

import msgspec

from engine.bench_steady import LEAST_STEPS, SETTLE_STEPS
from engine.build import assemble, max_captured_prefill
from engine.config import ModelConfig
from engine.errors import ConfigError
from engine.kv.pool import pool_bytes_per_token
from engine.memory import check_fits
from engine.model.loader import LoadedModel
from engine.options import AttentionBackend, Device, EngineOptions, Graphs
from engine.resolve import Resolved, resolve
from engine.synthetic import weight_bytes

VariantName = Literal["greedy", "full"]

PAGE_SIZE = 64
MOST_PREFILL_TOKENS = 8192
"""Of one iteration, shared evenly by the rows, so that equal prompts end within an iteration of each other. Large,
so that few iterations pass before they decode."""


class BenchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure."""

    batch_sizes: list[int]
    variants: list[VariantName]
    depths: list[int]
    """Values of K."""
    accept_length: float | None
    """Tokens that each step with drafts is forced to emit, on average; ``None``: what the models agree on."""
    prompt_tokens: int
    output_tokens: int
    device: Device
    graphs: Graphs = "auto"
    attention_backend: AttentionBackend = "auto"
    overhead: bool = False
    first_tokens: list[int] = []
    """Lengths of prompts whose time to a first token is measured."""
    seed: int = 0

    @property
    def max_positions(self) -> int:
        """Positions that any forward of these engines can name: the longest request and three full steps."""
        return self.prompt_tokens + self.output_tokens + 3 * (2 * max(self.depths) + 1)

    @property
    def least_output_tokens(self) -> int:
        """Tokens that a request of any batch emits at least, however few drafts are accepted."""
        # The first: equal prompts share the prefill evenly, so that all rows may begin to decode at once
        steps = 1 + SETTLE_STEPS + LEAST_STEPS
        forced = self.accept_length is not None and max(self.depths) > 0
        return max(steps, int(steps * self.accept_length) - 1 if forced and self.accept_length else 0)

    def options(self, name: str, k: int) -> EngineOptions:
        """Options of an engine that holds the largest batch; ``name``: of the model, for the record.

        Prefills are part of no step that is measured, so they are captured only where first tokens are.
        """
        rows = max(self.batch_sizes)
        return EngineOptions(
            model=name,
            device=self.device,
            max_model_len=self.prompt_tokens + self.output_tokens,
            max_num_seqs=rows,
            num_speculative_tokens=k,
            kv_page_size=PAGE_SIZE,
            num_kv_pages=1 + rows * (1 + -(-self.max_positions // PAGE_SIZE)),
            prefill_chunk_size=min(MOST_PREFILL_TOKENS, rows * self.prompt_tokens),
            prefix_cache=False,
            attention_backend=self.attention_backend,
            graphs=self.graphs,
            max_graph_prefill_tokens=0,
            seed=self.seed,
        )

    def first_token_options(self, name: str, k: int) -> EngineOptions:
        """Those, but with prefills captured as a server has them."""
        return msgspec.structs.replace(self.options(name, k), max_graph_prefill_tokens=None)


class _Unloaded(Exception):
    """An engine was about to load its model: nothing before that refused its options."""


def check_plan(plan: BenchPlan, name: str, config: ModelConfig) -> Resolved:
    """Refuse a plan that no measurement of this model can follow, before there are weights.

    What depends on how many tokens the model accepts is found while measuring.

    Args:
        name: Of the model, for the record.

    Returns:
        What the engine of the largest K resolves to.

    Raises:
        ConfigError: Naming the option.
    """
    asked = plan.prompt_tokens + plan.output_tokens
    if asked > config.max_position_embeddings:
        raise ConfigError(
            f"--prompt-tokens {plan.prompt_tokens} and --output-tokens {plan.output_tokens}: the model has only "
            f"{config.max_position_embeddings} positions"
        )
    if max(plan.first_tokens, default=0) > plan.prompt_tokens:
        raise ConfigError(
            f"--first-token {max(plan.first_tokens)}: more than the {plan.prompt_tokens} of --prompt-tokens"
        )
    if plan.output_tokens <= plan.least_output_tokens:
        raise ConfigError(
            f"--output-tokens {plan.output_tokens}: a request emits {plan.least_output_tokens} before "
            f"{LEAST_STEPS} steps of all of them are measured, and must not end in them"
        )

    def stop(resolved: Resolved, max_positions: int) -> LoadedModel:
        raise _Unloaded

    for k in plan.depths:
        options = plan.options(name, k)
        options.validate()
        with suppress(_Unloaded):
            assemble(config, options, stop, lambda _: None)
    _check_first_tokens(plan, name, config)
    return resolve(plan.options(name, max(plan.depths)), config)


def _check_first_tokens(plan: BenchPlan, name: str, config: ModelConfig) -> None:
    """Refuse first tokens behind prefills that no engine of the plan captures."""
    if not plan.first_tokens:
        return
    options = plan.first_token_options(name, max(plan.depths))
    most = max_captured_prefill(config, options)
    if max(plan.first_tokens) - 1 > most:  # the last token of a prompt is its first step's
        raise ConfigError(
            f"--first-token {max(plan.first_tokens)}: --graphs {plan.graphs} and --attention-backend "
            f"{plan.attention_backend} capture prefills of up to {most} tokens here"
        )


def check_memory(plan: BenchPlan, preset: str, config: ModelConfig, resolved: Resolved) -> None:
    """Refuse a preset whose random weights and KV pool do not fit: a CPU's memory ends with the process killed.

    Args:
        resolved: What `check_plan` returned.

    Raises:
        ConfigError: Naming the preset.
    """
    num_pages = plan.options(preset, resolved.num_speculative_tokens).num_kv_pages or 0
    row_bytes = pool_bytes_per_token(config.num_hidden_layers + 1, config.latent_dim, resolved.dtype)
    needed = weight_bytes(config, resolved.dtype) + num_pages * PAGE_SIZE * row_bytes
    check_fits(f"--preset {preset}: weights and KV pool take", needed, resolved.device, resolved.dtype)
