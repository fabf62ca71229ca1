"""Loads a checkpoint directory into a target model and its draft."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from engine.config import ModelConfig, require_draft
from engine.errors import CheckpointError
from engine.model.decoder import Decoder
from engine.model.draft import Draft
from engine.model.layers import HeadProjection, Projection, RmsNorm
from engine.model.moe import Moe
from engine.model.plan import LoadPlan, make_plan, published_name
from engine.model.reader import CheckpointReader
from engine.model.report import CheckpointReport, make_report
from engine.model.rope import RotaryTable

ROUTER_BIAS = "e_score_correction_bias"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A target, its draft if one was asked for, and what the checkpoint holds."""

    decoder: Decoder
    draft: Draft | None
    report: CheckpointReport


def load_model(
    path: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int,
    with_draft: bool,
) -> LoadedModel:
    """Load a Hugging Face directory, one tensor in memory at a time.

    Args:
        dtype: Of weights and activations; the routers stay fp32.
        max_positions: Positions that a forward can name, overrun of speculative steps included.
        with_draft: Load the first MTP layer too.

    Raises:
        ConfigError: ``with_draft`` without an MTP layer.
        CheckpointError: A damaged or incomplete directory, a tensor missing, left over or of the wrong shape,
            a non-finite router bias. No weight is allocated before all of that is checked.
    """
    require_draft(config, int(with_draft))
    reader = CheckpointReader(path)
    plan = make_plan(
        config,
        reader,
        RotaryTable(config, max_positions, device),
        dtype=dtype,
        input_major=device.type == "cpu",
        with_draft=with_draft,
    )
    check_router_biases(reader)
    report = make_report(path, config, reader, plan)
    for module in plan.modules:
        _materialise(module, device)
    for name in reader.tensors:
        if name in plan.targets:
            tensor = reader.read(name)
            for target in plan.targets[name]:
                target.fill(tensor)
    _prepare(plan)
    return LoadedModel(plan.decoder, plan.draft, report)


def check_router_biases(reader: CheckpointReader) -> None:
    """Refuse a bias that would let an expert win or lose for ever.

    Raises:
        CheckpointError: A non-finite value, naming the tensor.
    """
    for name in reader.tensors:
        if name.endswith(ROUTER_BIAS):
            values: Tensor = reader.read(name)
            if not bool(values.isfinite().all()):
                bad = values[~values.isfinite()][0].item()
                raise CheckpointError(f"{published_name(name)} holds a non-finite value ({bad})")


def _materialise(module: nn.Module, device: torch.device) -> None:
    """Give a meta module's own parameters storage, in their memory order."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        storage = torch.empty_like(parameter, device=device)
        setattr(module, name, nn.Parameter(storage, requires_grad=False))


def _prepare(plan: LoadPlan) -> None:
    """Derive what the forward needs from the loaded weights."""
    for module in plan.modules:
        if isinstance(module, RmsNorm | Projection | HeadProjection | Moe):
            module.prepare()
