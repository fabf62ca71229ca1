"""``eyas bench gpu``: a speculative step beside its floor, for random weights of a shape or for a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from engine.bench_floor import read_bandwidth
from engine.bench_gpu import BenchReport, BenchRow, GpuBench
from engine.bench_plan import BenchPlan, VariantName, check_memory, check_plan
from engine.bench_prefill import PAIRS
from engine.config import ModelConfig, parse_config
from engine.errors import ConfigError
from engine.model.loader import LoadedModel, load_model
from engine.options import MAX_SPECULATIVE_TOKENS
from engine.resolve import Resolved
from engine.synthetic import PRESETS, Routing, random_model
from service.commands.lists import read_list, read_numbers
from service.settings import SHIPPED_MODEL
from service.targets import make_writable_directory, refuse_unwritable_file, write_json

SHIPPED = "shipped"
_WIDTH = 150
_COLUMNS = (
    "K", "variant", "batch", "step ms", "mean ms", "device ms", "host gap", "tokens/s", "accept", "eager",
    "experts verify", "extend", "draft", "floor ms", "step/floor",
)  # fmt: skip


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """Which model to measure: a preset's shape with random weights, or a checkpoint."""

    preset: str | None
    directory: Path | None
    routing: Routing | None
    save_to: Path | None


def choose_model(
    preset: str | None, directory: Path | None, routing: str | None, save_to: Path | None
) -> Model:
    """The model that the options name.

    Raises:
        ConfigError: An unknown value, or options that exclude each other, by name.
    """
    if preset is not None and directory is not None:
        raise ConfigError(f"--preset {preset}: --model {directory} names a model too")
    if preset is not None and preset not in (*PRESETS, SHIPPED):
        raise ConfigError(f"--preset {preset}: must be one of {', '.join((*PRESETS, SHIPPED))}")
    if preset == SHIPPED:
        directory = SHIPPED_MODEL
    if directory is None:
        chosen = next((one for one in get_args(Routing) if one == (routing or "spread")), None)
        if chosen is None:
            raise ConfigError(f"--routing {routing}: must be one of {', '.join(get_args(Routing))}")
        return Model(preset=preset or "v2-lite", directory=None, routing=chosen, save_to=save_to)
    for option, value in (("--routing", routing), ("--save-weights", save_to)):
        if value is not None:
            raise ConfigError(
                f"{option} {value}: only for random weights, {directory} has weights of its own"
            )
    return Model(preset=preset, directory=directory, routing=None, save_to=None)


def read_depths(text: str, accept_length: float | None) -> list[int]:
    """Values of K that ``accept_length`` fits.

    Raises:
        ConfigError: Naming the option at fault.
    """
    depths = read_numbers("--speculative-tokens", text, 0, MAX_SPECULATIVE_TOKENS)
    if accept_length is None:
        return depths
    name = f"--synthetic-accept-length {accept_length:g}"
    least = min((k for k in depths if k), default=None)
    if least is None:
        raise ConfigError(f"{name}: --speculative-tokens {text} verifies no drafts to accept")
    if not (math.isfinite(accept_length) and 1 <= accept_length <= least + 1):
        raise ConfigError(f"{name}: a step of K = {least} emits 1 to {least + 1} tokens")
    return depths


def read_variants(text: str) -> list[VariantName]:
    """Comma-separated variants.

    Raises:
        ConfigError: Another name than theirs, or one twice.
    """
    names: dict[str, VariantName] = {"greedy": "greedy", "full": "full"}
    parts = read_list("--variants", text)
    if not set(parts) <= names.keys():
        raise ConfigError(f"--variants {text}: must be of {', '.join(names)}, comma-separated")
    return [names[part] for part in parts]


def bench_gpu(model: Model, plan: BenchPlan, json_file: Path | None) -> None:
    """Print tables of steps, floors and overheads; write them as JSON too where asked.

    Raises:
        ConfigError: An option that this model or machine cannot honour; most are known before weights are made.
        CheckpointError: A damaged or incomplete checkpoint.
    """
    console = Console(stderr=True)

    def tell(text: str) -> None:
        console.print(text, style="dim", markup=False, highlight=False)

    refuse_unwritable_file("--json", json_file)
    name = str(model.directory or model.preset)
    raw = PRESETS[model.preset] if model.directory is None and model.preset is not None else None
    config = parse_config(raw, ()) if raw is not None else ModelConfig.from_dir(Path(name))
    resolved = check_plan(plan, name, config)
    if raw is not None:
        check_memory(plan, name, config, resolved)
    make_writable_directory("--save-weights", model.save_to)
    tell("measuring read bandwidth")
    bandwidth = read_bandwidth(resolved.device)
    loaded = _load(model, raw, config, resolved, plan, tell)
    report = GpuBench(name, config, loaded, plan, bandwidth, tell).run(model.routing)
    out = Console()
    if not out.is_terminal:
        out = Console(width=_WIDTH)  # a pipe or file has no width of its own to squeeze the table into
    for table in tables(report):
        out.print(table)
    write_json("--json", json_file, report)


def _load(
    model: Model,
    raw: dict[str, object] | None,
    config: ModelConfig,
    resolved: Resolved,
    plan: BenchPlan,
    tell: Callable[[str], None],
) -> LoadedModel:
    if raw is None or model.routing is None:
        assert model.directory is not None, "a model without a preset's shape is a checkpoint"
        tell(f"loading {model.directory}")
        return load_model(
            model.directory,
            config,
            dtype=resolved.dtype,
            device=resolved.device,
            max_positions=plan.max_positions,
            with_draft=resolved.num_speculative_tokens > 0,
        )
    tell(f"making random weights, {model.routing} routing")
    return random_model(
        raw,
        config,
        model.routing,
        dtype=resolved.dtype,
        device=resolved.device,
        max_positions=plan.max_positions,
        seed=plan.seed,
        save_to=model.save_to,
    )


def tables(report: BenchReport) -> list[Table]:
    """One of the steps, and those of what was measured besides."""
    plan = report.plan
    routing = f", {report.routing} routing" if report.routing else ""
    forced = "" if plan.accept_length is None else f", {plan.accept_length:g} tokens a step forced"
    steps = Table(
        title=f"{report.model}{routing}: {report.device}, {report.dtype}, {report.attention_backend}, graphs "
        f"{report.graphs}, {report.schedule} schedule, torch {torch.__version__}; prompts of "
        f"{plan.prompt_tokens} tokens, {plan.output_tokens} new ones{forced}; reads reach "
        f"{report.read_bytes_per_second / 1e12:.3f} TB/s"
    )
    for name in _COLUMNS:
        steps.add_column(name, justify="right")
    for row in report.rows:
        steps.add_row(*_cells(row))
    besides = [_overhead_table(report)] if report.overheads else []
    return [steps, *besides, *([_first_token_table(report)] if report.first_tokens else [])]


def _cells(row: BenchRow) -> list[str]:
    touched = row.touched
    experts = ["-"] * 3
    if touched is not None:
        experts = [f"{one:.1f}" if one else "-" for one in (touched.verify, touched.extend, touched.draft)]
    return [
        str(row.num_speculative_tokens),
        row.variant,
        str(row.batch_size),
        f"{row.step_ms:.3f}",
        f"{row.mean_step_ms:.3f}",
        "-" if row.device_ms is None else f"{row.device_ms:.3f}",
        "-" if row.host_gap is None else f"{row.host_gap:.1%}",
        f"{row.tokens_per_second:.0f}",
        "-" if row.accept_length is None else f"{row.accept_length:.2f}",
        str(row.eager_forwards),
        *experts,
        f"{row.floor_ms:.3f}",
        f"{row.ratio:.2f}",
    ]


def _overhead_table(report: BenchReport) -> Table:
    pairs = len(report.overheads[0].percent)
    table = Table(title=f"Guard and contract, {pairs} alternating pairs of windows")
    for name in ("K", "variant", "batch", "on ms", "off ms", "overhead", "least", "most"):
        table.add_column(name, justify="right")
    for one in report.overheads:
        ordered = sorted(one.percent)
        table.add_row(
            str(one.num_speculative_tokens),
            one.variant,
            str(one.batch_size),
            f"{one.on_ms:.3f}",
            f"{one.off_ms:.3f}",
            f"{one.median_percent:+.2f} %",
            f"{ordered[0]:+.2f} %",
            f"{ordered[-1]:+.2f} %",
        )
    return table


def _first_token_table(report: BenchReport) -> Table:
    table = Table(title=f"One request at an idle engine: first token, median of {PAIRS} alternating pairs")
    for name in ("K", "prompt", "captured ms", "eager ms", "eager/captured"):
        table.add_column(name, justify="right")
    for one in report.first_tokens:
        table.add_row(
            str(one.num_speculative_tokens),
            str(one.prompt_tokens),
            f"{one.captured_ms:.2f}",
            f"{one.eager_ms:.2f}",
            f"{one.ratio:.2f}x",
        )
    return table
