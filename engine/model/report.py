"""What a checkpoint holds, for ``eyas check`` and the start-up log."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import ModelConfig
from engine.model.moe import Router
from engine.model.plan import LoadPlan
from engine.model.reader import CheckpointReader


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """A verified checkpoint in figures. Parameters are those that are loaded, shared ones counted once."""

    path: Path
    config: ModelConfig
    num_files: int
    file_bytes: int
    """Bytes of all tensors on disk."""
    stored_dtypes: dict[str, int]
    """Tensors by data type."""
    target_parameters: int
    draft_parameters: int
    """Of the MTP layer alone; 0 where none is loaded."""
    fp32_parameters: int
    """How many of both stay fp32 whatever the engine's data type (routers)."""
    mtp_layers_held: int
    """MTP layers whose tensors are there; at most the first is used."""
    own_copies: tuple[str, ...]
    """Which of "embedding" and "head" the draft does not share with the target."""
    ignored_tensors: int

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the loaded weights at ``dtype``, draft included."""
        parameters = self.target_parameters + self.draft_parameters
        return (parameters - self.fp32_parameters) * dtype.itemsize + self.fp32_parameters * 4

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that one token takes in the cache, the draft's layer included where there is one."""
        layers = self.config.num_hidden_layers + (1 if self.draft_parameters else 0)
        return layers * self.config.latent_dim * dtype.itemsize

    def __str__(self) -> str:
        rows = [("directory", str(self.path)), *self._architecture(), *self._sizes()]
        return "\n".join(f"{name:<18}{value}" for name, value in rows)

    def _architecture(self) -> list[tuple[str, str]]:
        config = self.config
        moe = sum(config.is_moe(layer) for layer in range(config.num_hidden_layers))
        experts = f", {config.n_routed_experts} experts top-{config.num_experts_per_tok}"
        experts = f"{experts} + {config.n_shared_experts} shared" if moe else ""
        rope = config.rope_scaling
        yarn = f", YaRN x{rope.factor:g} of {rope.original_max_position_embeddings}" if rope else ""
        mtp = f"{self.mtp_layers_held} of {config.num_nextn_predict_layers} declared"
        if self.draft_parameters:
            copies = f", own {' and '.join(self.own_copies)}" if self.own_copies else ""
            mtp += f", the first drafts{copies}"
        rank = "no query compression" if config.q_lora_rank is None else f"query rank {config.q_lora_rank}"
        sizes = f"vocabulary {config.vocab_size}, hidden {config.hidden_size}"
        return [
            ("architecture", f"{config.model_type}, {sizes}"),
            ("layers", f"{config.num_hidden_layers} ({moe} MoE{experts})"),
            ("attention", f"{config.num_attention_heads} heads, {rank}, "
             f"latent {config.kv_lora_rank} + {config.qk_rope_head_dim}"),
            ("positions", f"{config.max_position_embeddings}, base {config.rope_theta:g}{yarn}"),
            ("MTP layers", mtp),
            ("stop ids", ", ".join(map(str, config.eos_token_ids)) or "none"),
        ]  # fmt: skip

    def _sizes(self) -> list[tuple[str, str]]:
        kinds = ", ".join(f"{count} {name}" for name, count in self.stored_dtypes.items())
        ignored = f", {self.ignored_tensors} derived tables ignored" if self.ignored_tensors else ""
        quantised = ", dequantised when loaded" if self.config.quantisation == "fp8" else ""
        rows = [
            ("files", f"{self.num_files}, {_size(self.file_bytes)}: {kinds}{quantised}{ignored}"),
            ("parameters", f"{self.target_parameters:,} target, {self.draft_parameters:,} draft"),
        ]
        for dtype in (torch.bfloat16, torch.float32):
            weights, cache = self.weight_bytes(dtype), self.kv_bytes_per_token(dtype)
            full = weights + cache * self.config.max_position_embeddings
            text = (
                f"{_size(weights)} weights, {cache:,} KV bytes a token, "
                f"{_size(full)} with one sequence of full length"
            )
            rows.append((f"at {str(dtype).removeprefix('torch.')}", text))
        return rows


def make_report(
    path: Path, config: ModelConfig, reader: CheckpointReader, plan: LoadPlan
) -> CheckpointReport:
    """Count what ``plan`` loads."""
    target = list(plan.decoder.parameters())
    shared = {id(parameter) for parameter in target}
    draft = [] if plan.draft is None else [p for p in plan.draft.parameters() if id(p) not in shared]

    routers = [m for m in plan.modules if isinstance(m, Router)]
    infos = reader.tensors.values()
    return CheckpointReport(
        path=path,
        config=config,
        num_files=len({info.file for info in infos}),
        file_bytes=sum(info.num_bytes for info in infos),
        stored_dtypes=dict(Counter(str(info.dtype).removeprefix("torch.") for info in infos)),
        target_parameters=sum(p.numel() for p in target),
        draft_parameters=sum(p.numel() for p in draft),
        fp32_parameters=sum(p.numel() for router in routers for p in router.parameters()),
        mtp_layers_held=len(plan.mtp_layers),
        own_copies=plan.own_copies,
        ignored_tensors=len(plan.ignored),
    )


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.1f} {unit}" if unit != "B" else f"{num_bytes:.0f} B"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
