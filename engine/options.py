"""The engine's options: what the service hands to the engine process, checked before anything is loaded."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from engine.errors import ConfigError

Dtype = Literal["auto", "bfloat16", "float16", "float32"]
Device = Literal["auto", "cpu", "cuda"]
Graphs = Literal["auto", "cuda", "simulate", "off"]
Schedule = Literal["auto", "sync", "overlap"]
AttentionBackend = Literal["auto", "torch_mla", "flash_mla", "trtllm_mla"]

MAX_SPECULATIVE_TOKENS = 8
"""Largest K: a step verifies at most 9 positions of a request."""


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to run one engine. ``auto`` and ``None`` are resolved by it and reported in ``EngineInfo``."""

    model: str
    """Checkpoint directory in Hugging Face layout."""
    tokenizer: str | None = None
    """Directory of ``tokenizer.json``, which grammars need; ``None``: the checkpoint's."""
    dtype: Dtype = "auto"
    """``auto``: float32 on a CPU, the checkpoint's type on a GPU."""
    device: Device = "auto"
    max_model_len: int | None = None
    """Most tokens of prompt and output together; ``None``: the checkpoint's, clamped to the KV pool."""
    max_num_seqs: int = 64
    """Most requests that run in one step."""
    num_speculative_tokens: int = 3
    """K, drafts a step; 0 turns speculation off."""
    kv_cache_dtype: str = "auto"
    """Only ``auto`` (the compute type) is supported."""
    kv_page_size: int = 64
    """Positions in one page of the KV pool."""
    num_kv_pages: int | None = None
    """Pages of the pool, the scratch page included; ``None``: sized from the memory at hand."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory that the engine may use; excludes ``num_kv_pages``."""
    prefill_chunk_size: int = 512
    """Most prompt tokens prefilled in one iteration."""
    prefix_cache: bool = True
    schedule: Schedule = "auto"
    attention_backend: AttentionBackend = "auto"
    enforce_eager: bool = False
    """Capture no graph, whatever ``graphs`` says."""
    graphs: Graphs = "auto"
    """``auto``: CUDA graphs on a GPU, none on a CPU. ``simulate``: traces that freeze what a graph would."""
    max_graph_rows: int | None = None
    """Most rows of a captured step; ``None``: ``max_num_seqs``. A larger batch runs eager."""
    max_graph_prefill_tokens: int | None = None
    """Most tokens of a captured prefill; ``None``: ``prefill_chunk_size``, at most 512, but 0 under ``torch_mla``.
    0: none is captured."""
    audit_rate: float = 0.0
    """Share of finished greedy requests whose output is scored again by one ordinary prefill; 0: none."""
    nan_bundle_dir: str | None = None
    """Directory for a bundle of each step that the guard tripped; ``None``: none is written."""
    seed: int | None = None
    """Makes requests without a seed repeatable; ``None``: they draw from the system's entropy."""
    threads: int | None = None
    """CPU threads of the engine; ``None``: the libraries' default."""

    def validate(self) -> None:
        """Check every value that can be judged without the model or the device.

        Raises:
            ConfigError: A value that cannot be honoured; the message names the option and the value.
        """
        for name, allowed in _CHOICES.items():
            if (value := getattr(self, name)) not in allowed:
                raise ConfigError(f"{name}={value!r}: must be one of {', '.join(allowed)}")
        for name, (low, high) in _BOUNDS.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ConfigError(f"{name}={value!r}: must be an integer from {low} to {high}")
        if not self.model:
            raise ConfigError("model='': must name a checkpoint directory")
        # Written so that a NaN is refused too.
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"gpu_memory_utilization={self.gpu_memory_utilization!r}: must be above 0 and at most 1"
            )
        if not 0.0 <= self.audit_rate <= 1.0:
            raise ConfigError(f"audit_rate={self.audit_rate!r}: must be from 0 to 1")
        if self.num_kv_pages is not None and self.gpu_memory_utilization != _DEFAULT_UTILIZATION:
            raise ConfigError(
                f"gpu_memory_utilization={self.gpu_memory_utilization!r}: cannot be given together with "
                f"num_kv_pages={self.num_kv_pages!r}; both set the size of the KV pool"
            )


_INT32_MAX = 2**31 - 1
_DEFAULT_UTILIZATION = 0.9
_CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": get_args(Dtype),
    "device": get_args(Device),
    "kv_cache_dtype": ("auto",),
    "schedule": get_args(Schedule),
    "graphs": get_args(Graphs),
    "attention_backend": get_args(AttentionBackend),
}
_OPTIONAL = frozenset(
    {"max_graph_rows", "max_graph_prefill_tokens", "max_model_len", "num_kv_pages", "seed", "threads"}
)
_BOUNDS: dict[str, tuple[int, int]] = {
    "max_model_len": (2, _INT32_MAX),
    "max_num_seqs": (1, 4096),
    "max_graph_rows": (1, 4096),
    "max_graph_prefill_tokens": (0, 8192),
    "num_speculative_tokens": (0, MAX_SPECULATIVE_TOKENS),
    "kv_page_size": (1, 1024),
    "num_kv_pages": (2, _INT32_MAX),
    "prefill_chunk_size": (1, _INT32_MAX),
    "seed": (-(2**63), 2**63 - 1),
    "threads": (1, 1024),
}
