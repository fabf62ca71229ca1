"""Verifies a checkpoint directory without a device and without loading it."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.config import ModelConfig
from engine.model.loader import check_router_biases
from engine.model.plan import make_plan
from engine.model.reader import CheckpointReader
from engine.model.report import CheckpointReport, make_report
from engine.model.rope import RotaryTable


def inspect_checkpoint(path: Path) -> CheckpointReport:
    """Everything that loading verifies, as a report that prints itself.

    The MTP layer is taken for the draft where the checkpoint holds one.

    Raises:
        ConfigError: A configuration that cannot be honoured, naming key and value.
        CheckpointError: What loading would refuse, naming file or tensor.
    """
    config = ModelConfig.from_dir(path)
    reader = CheckpointReader(path)
    held = any(name.startswith(f"layers.{config.num_hidden_layers}.") for name in reader.tensors)
    plan = make_plan(
        config,
        reader,
        RotaryTable(config, 1, torch.device("cpu")),
        dtype=config.dtype,
        input_major=True,
        with_draft=held and config.num_nextn_predict_layers > 0,
    )
    check_router_biases(reader)
    return make_report(path, config, reader, plan)
