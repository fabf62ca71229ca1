"""Assembles an engine: configuration, weights, KV pool, backend, state, runner and scheduler."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch

from engine.attention import AttentionBackend, AttentionSpec, make_backend
from engine.config import ModelConfig
from engine.errors import ConfigError
from engine.fit import check_pool, check_tokenizer, longest_context, pages_within, reachable
from engine.grammar.compiler import GrammarCompiler
from engine.kv.pool import LatentPool
from engine.model.loader import LoadedModel, load_model
from engine.options import EngineOptions
from engine.resolve import CPU_POOL_BYTES, GRAPH_PREFILL_TOKENS, Resolved, resolve
from engine.runner import Runner
from engine.scheduler import Scheduler, SchedulerConfig
from engine.state import SlotState
from engine.types import EngineInfo, Progress


@dataclass(frozen=True, slots=True)
class Parts:
    """What an ``Engine`` is made of."""

    info: EngineInfo
    runner: Runner
    scheduler: Scheduler
    grammars: GrammarCompiler


Load = Callable[[Resolved, int], LoadedModel]
"""The model, given what was resolved and how many positions a forward can name."""


def build(path: Path, options: EngineOptions, progress: Callable[[Progress], None]) -> Parts:
    """Load ``path`` and assemble an engine as ``options`` say.

    Raises:
        ConfigError: An option or configuration value that cannot be honoured.
        CheckpointError: A damaged or incomplete checkpoint.
    """
    config = ModelConfig.from_dir(path)
    check_tokenizer(options, config)
    check_pool(options, config, resolve(options, config))

    def load(resolved: Resolved, max_positions: int) -> LoadedModel:
        return load_model(
            path,
            config,
            dtype=resolved.dtype,
            device=resolved.device,
            max_positions=max_positions,
            with_draft=resolved.num_speculative_tokens > 0,
        )

    return assemble(config, options, load, progress)


def assemble(
    config: ModelConfig,
    options: EngineOptions,
    load: Load,
    progress: Callable[[Progress], None],
    adjust: Callable[[Runner], None] = lambda runner: None,
) -> Parts:
    """An engine around the model that ``load`` gives, as ``options`` say; its directory is not read.

    Args:
        adjust: What a benchmark changes of each runner before it first runs, and so before anything is captured.

    Raises:
        ConfigError: An option or configuration value that cannot be honoured.
    """
    resolved = resolve(options, config)
    limit = longest_context(options, config, resolved)
    backend = _make_backend(config, resolved, options)
    progress(Progress(stage="loading", done=0, total=1))
    model = load(resolved, limit + resolved.overrun)
    progress(Progress(stage="warming", done=0, total=1))
    factory = _Factory(options, config, resolved, backend, model, adjust)
    num_pages = factory.size_pool(limit)
    max_model_len = reachable(limit, num_pages, options, resolved)
    parts = factory.assemble(num_pages, max_model_len)
    parts.runner.warm_up(factory.warm_up_tokens(max_model_len))
    if resolved.graphs != "off":
        rows = min(options.max_graph_rows or options.max_num_seqs, options.max_num_seqs)
        parts.runner.capture(resolved.graphs, rows, progress)
        parts = replace(parts, info=_with_graphs(parts.info, parts.runner))
    progress(Progress(stage="warming", done=1, total=1))
    return parts


def _with_graphs(info: EngineInfo, runner: Runner) -> EngineInfo:
    assert runner.graphs is not None, "graphs were captured"
    return msgspec.structs.replace(
        info,
        graphs_captured=runner.graphs.captured_rows,
        graph_capture_seconds=runner.graphs.capture_seconds,
        graph_memory_bytes=runner.graphs.memory_bytes,
    )


def _make_backend(config: ModelConfig, resolved: Resolved, options: EngineOptions) -> AttentionBackend:
    spec = AttentionSpec(
        device=resolved.device,
        dtype=resolved.dtype,
        num_heads=config.num_attention_heads,
        kv_lora_rank=config.kv_lora_rank,
        latent_dim=config.latent_dim,
        softmax_scale=config.softmax_scale,
        page_size=resolved.page_size,
        qk_nope_head_dim=config.qk_nope_head_dim,
    )
    return make_backend(options.attention_backend, spec)


def _largest_prefill(options: EngineOptions, max_model_len: int) -> int:
    return min(options.prefill_chunk_size, max_model_len)


def _max_uniform_tokens(
    options: EngineOptions, resolved: Resolved, backend: AttentionBackend, max_model_len: int
) -> int:
    """Tokens of the largest prefill in the uniform form, which a CPU without graphs has no use for."""
    if resolved.graphs == "off" and resolved.device.type == "cpu":
        return 0
    wanted = options.max_graph_prefill_tokens
    if wanted is None:
        wanted = 0 if backend.gathers else GRAPH_PREFILL_TOKENS
    return min(wanted, _largest_prefill(options, max_model_len))


def max_captured_prefill(config: ModelConfig, options: EngineOptions) -> int:
    """Tokens of the largest prefill that an engine would capture, known before there are weights; 0 if none.

    Raises:
        ConfigError: An option that cannot be honoured.
    """
    resolved = resolve(options, config)
    if resolved.graphs == "off":
        return 0
    backend = _make_backend(config, resolved, options)
    return _max_uniform_tokens(options, resolved, backend, longest_context(options, config, resolved))


class _Factory:
    """Builds a runner, and the scheduler that fits it, over a pool of any size."""

    def __init__(
        self,
        options: EngineOptions,
        config: ModelConfig,
        resolved: Resolved,
        backend: AttentionBackend,
        model: LoadedModel,
        adjust: Callable[[Runner], None],
    ) -> None:
        self._options = options
        self._config = config
        self._resolved = resolved
        self._backend = backend
        self._model = model
        self._adjust = adjust

    def size_pool(self, limit: int) -> int:
        """Pages of the pool, the scratch page included."""
        if self._options.num_kv_pages is not None:
            check_pool(self._options, self._config, self._resolved)  # once more: the weights are there now
            return self._options.num_kv_pages
        on_cpu = self._resolved.device.type == "cpu"
        budget = CPU_POOL_BYTES if on_cpu else self._measure_gpu_budget(limit)
        return pages_within(budget, limit, self._options, self._config, self._resolved)

    def _measure_gpu_budget(self, limit: int) -> int:
        """Bytes for the pool: the allowed share of the GPU less the peak of a full prefill chunk and step.

        Captured steps share one memory pool of their own, about as large as the largest step's workspace.
        """
        device = self._resolved.device
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        self.runner(2, limit).warm_up(self.warm_up_tokens(limit))
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device)
        peak = torch.cuda.max_memory_allocated(device)
        outside = total - free - held  # CUDA context, libraries, other processes
        graphs = peak - before if self._resolved.graphs == "cuda" else 0
        return int(total * self._options.gpu_memory_utilization) - outside - peak - graphs

    def warm_up_tokens(self, max_model_len: int) -> int:
        """Tokens of the largest prefill."""
        return _largest_prefill(self._options, max_model_len)

    def runner(self, num_pages: int, max_model_len: int) -> Runner:
        resolved, config = self._resolved, self._config
        pool = LatentPool(
            num_layers=config.num_hidden_layers + (1 if resolved.num_speculative_tokens else 0),
            num_pages=num_pages,
            page_size=resolved.page_size,
            latent_dim=config.latent_dim,
            dtype=resolved.dtype,
            device=resolved.device,
        )
        positions = max_model_len + resolved.overrun
        state = SlotState(
            num_slots=self._options.max_num_seqs,
            num_speculative_tokens=resolved.num_speculative_tokens,
            vocab_size=config.vocab_size,
            table_width=-(-positions // resolved.page_size),
            device=resolved.device,
        )
        runner = Runner(
            model=self._model,
            backend=self._backend,
            pool=pool,
            state=state,
            num_speculative_tokens=resolved.num_speculative_tokens,
            draft_reach=resolved.draft_reach,
            hidden_size=config.hidden_size,
            max_uniform_tokens=_max_uniform_tokens(self._options, resolved, self._backend, max_model_len),
        )
        self._adjust(runner)
        return runner

    def assemble(self, num_pages: int, max_model_len: int) -> Parts:
        options, resolved = self._options, self._resolved
        scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=options.max_num_seqs,
                num_pages=num_pages,
                page_size=resolved.page_size,
                prefill_chunk_size=options.prefill_chunk_size,
                max_model_len=max_model_len,
                stride=resolved.stride,
                prefix_cache=options.prefix_cache,
                cache_salt=self._cache_salt(),
            )
        )
        longest = scheduler.config.max_request_tokens
        if longest < 2:
            raise ConfigError(
                f"num_kv_pages={num_pages}: pages of {resolved.page_size} positions are too few for one request "
                f"with {resolved.num_speculative_tokens} drafts a step"
            )
        info = self._info(num_pages, max_model_len, longest)
        tokenizer_dir = Path(options.tokenizer if options.tokenizer is not None else options.model)
        grammars = GrammarCompiler(tokenizer_dir, info.vocab_size, info.eos_token_ids)
        return Parts(info, self.runner(num_pages, max_model_len), scheduler, grammars)

    def _cache_salt(self) -> bytes:
        """Root of the prefix cache's keys: everything that changes what KV a token leaves."""
        parts = [str(Path(self._options.model).resolve()), repr(self._config), repr(self._resolved)]
        return hashlib.sha256("\0".join(parts).encode()).digest()

    def _info(self, num_pages: int, max_model_len: int, max_request_tokens: int) -> EngineInfo:
        options, config, resolved = self._options, self._config, self._resolved
        dtype = str(resolved.dtype).removeprefix("torch.")
        changed = {
            "device": str(resolved.device),
            "dtype": dtype,
            "schedule": resolved.schedule,
            "graphs": resolved.graphs,
            "attention_backend": self._backend.name,
            "max_model_len": str(max_model_len),
            "num_kv_pages": str(num_pages),
            "threads": str(torch.get_num_threads()),
        }
        shown = {name: str(value) for name, value in msgspec.structs.asdict(options).items()} | changed
        return EngineInfo(
            model_type=config.model_type,
            vocab_size=config.vocab_size,
            max_model_len=max_model_len,
            max_num_seqs=options.max_num_seqs,
            num_speculative_tokens=resolved.num_speculative_tokens,
            num_pages=num_pages,
            page_size=resolved.page_size,
            max_request_tokens=max_request_tokens,
            eos_token_ids=tuple(config.eos_token_ids),
            device=str(resolved.device),
            dtype=dtype,
            attention_backend=self._backend.name,
            schedule=resolved.schedule,
            resolved=shown,
        )
