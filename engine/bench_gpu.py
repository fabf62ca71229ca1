"""``eyas bench gpu``: steady decoding by K, variant and batch size, beside the floor of ``engine.bench_floor``."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import mean, median
from typing import Any

import msgspec
import torch

from engine.bench_floor import StepBytes, Touched, step_bytes
from engine.bench_plan import BenchPlan, VariantName
from engine.bench_prefill import FirstToken, compare_first_tokens
from engine.bench_steady import Batch, measure, recorded_routing
from engine.build import assemble
from engine.config import ModelConfig
from engine.engine import Engine
from engine.model.loader import LoadedModel
from engine.model.moe import Moe
from engine.options import EngineOptions
from engine.resolve import Resolved
from engine.runner import Runner
from engine.synthetic import ForcedOps
from engine.types import Progress, SamplingParams

Report = Callable[[str], None]

PROBE_STEPS = 4
"""Steps whose routing is counted."""
OVERHEAD_PAIRS = 10

_FULL: dict[str, Any] = {
    "temperature": 1.0, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "presence_penalty": 0.1,
    "frequency_penalty": 0.1, "repetition_penalty": 1.1,
}  # fmt: skip


class BenchRow(msgspec.Struct, frozen=True, kw_only=True):
    """Steady decoding of one batch size, K and variant; times in milliseconds."""

    num_speculative_tokens: int
    variant: VariantName
    batch_size: int
    steps: int
    """Iterations in the window."""
    step_ms: float
    """Median time from one iteration's results to the next one's."""
    mean_step_ms: float
    device_ms: float | None
    """Median time that the device worked on a step; ``None`` where it was not told."""
    host_gap: float | None
    """Share of the window in which the device waited for a launch."""
    tokens_per_second: float
    accept_length: float | None
    """Tokens a verify that had drafts."""
    eager_forwards: int
    """In the window, by all phases."""
    live_positions: float
    """With KV, of all rows together, on average."""
    touched: Touched | None
    """Routed experts; ``None`` without MoE layers."""
    bytes: StepBytes
    floor_ms: float
    ratio: float
    """Median step over floor."""


class Overhead(msgspec.Struct, frozen=True, kw_only=True):
    """What guard and contract cost: median steps of alternating windows with and without them."""

    num_speculative_tokens: int
    variant: VariantName
    batch_size: int
    on_ms: float
    off_ms: float
    percent: list[float]
    """Of each pair: how much longer the step with checks took."""
    median_percent: float


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was measured."""

    model: str
    routing: str | None
    device: str
    dtype: str
    attention_backend: str
    graphs: str
    schedule: str
    plan: BenchPlan
    read_bytes_per_second: float
    rows: list[BenchRow]
    overheads: list[Overhead]
    first_tokens: list[FirstToken]


def params_for(variant: VariantName, max_tokens: int) -> SamplingParams:
    """Parameters that need ``variant``; ``full`` uses everything that is captured."""
    return SamplingParams(max_tokens=max_tokens, **(_FULL if variant == "full" else {"temperature": 0.0}))


class GpuBench:
    """Engines over one loaded model, measured by ``plan``.

    Args:
        name: Of the model, for the record.
        bandwidth: Measured before the weights took the memory (bytes a second).
        report: Told what is being done.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        model: LoadedModel,
        plan: BenchPlan,
        bandwidth: float,
        report: Report,
    ) -> None:
        self._name = name
        self._config = config
        self._model = model
        self._plan = plan
        self._bandwidth = bandwidth
        self._report = report

    def run(self, routing: str | None) -> BenchReport:
        """Measure everything; ``routing`` is noted, and held to what it promises.

        Raises:
            ConfigError: An option that this model or machine cannot honour.
        """
        rows: list[BenchRow] = []
        overheads: list[Overhead] = []
        first_tokens: list[FirstToken] = []
        for k in self._plan.depths:
            touched = {size: self._count_touched(k, size, routing) for size in self._plan.batch_sizes}
            engine = self._engine(self._plan.options(self._name, k))
            info = engine.info
            for size in self._plan.batch_sizes:
                for variant in self._plan.variants:
                    self._report(f"K = {k}, {variant}, batch {size}: measuring")
                    rows.append(self._row(engine, k, variant, size, touched[size]))
            if self._plan.overhead:
                overheads += self._overheads(engine, k)
            if self._plan.first_tokens:
                first_tokens += self._first_tokens(engine, k)
            engine.close()
        return BenchReport(
            model=self._name,
            routing=routing,
            device=_device_name(info.device),
            dtype=info.dtype,
            attention_backend=info.attention_backend,
            graphs=info.resolved["graphs"],
            schedule=info.schedule,
            plan=self._plan,
            read_bytes_per_second=self._bandwidth,
            rows=rows,
            overheads=overheads,
            first_tokens=first_tokens,
        )

    def _engine(self, options: EngineOptions, *, checks: bool = True) -> Engine:
        """An engine over the loaded weights."""
        k = options.num_speculative_tokens

        def load(resolved: Resolved, max_positions: int) -> LoadedModel:
            assert max_positions <= self._plan.max_positions, "the model was loaded for shorter requests"
            return self._model

        def adjust(runner: Runner) -> None:
            if k and self._plan.accept_length is not None:
                ops, length = runner.step.ops, self._plan.accept_length
                runner.step.ops = ForcedOps(ops, runner.state, runner.pool, k, length)
            runner.step.checks = checks

        def tell(progress: Progress) -> None:
            if progress.total > 1:
                self._report(f"K = {k}: {progress.stage} {progress.done} of {progress.total}")

        return Engine(assemble(self._config, options, load, tell, adjust), options)

    def _prompts(self, size: int) -> list[list[int]]:
        source, length = random.Random(self._plan.seed), self._plan.prompt_tokens
        return [[source.randrange(self._config.vocab_size) for _ in range(length)] for _ in range(size)]

    def _row(
        self, engine: Engine, k: int, variant: VariantName, size: int, touched: Touched | None
    ) -> BenchRow:
        window = measure(engine, self._prompts(size), params_for(variant, self._plan.output_tokens))
        live, total = mean(window.live), sum(window.seconds)
        kv_dtype: torch.dtype = getattr(torch, engine.info.dtype)
        needed = step_bytes(self._config, k, live, touched or Touched(verify=0), kv_dtype)
        step, floor = median(window.seconds), needed.total / self._bandwidth
        return BenchRow(
            num_speculative_tokens=k,
            variant=variant,
            batch_size=size,
            steps=len(window.seconds),
            step_ms=1e3 * step,
            mean_step_ms=1e3 * mean(window.seconds),
            device_ms=1e3 * median(window.device_seconds) if window.device_seconds else None,
            host_gap=sum(window.gap_seconds) / total if window.gap_seconds else None,
            tokens_per_second=window.tokens / total,
            accept_length=window.verify_tokens / window.verified if window.verified else None,
            eager_forwards=window.eager,
            live_positions=live,
            touched=touched,
            bytes=needed,
            floor_ms=1e3 * floor,
            ratio=step / floor,
        )

    def _count_touched(self, k: int, size: int, routing: str | None) -> Touched | None:
        """Experts that the routers choose for the bench's own tokens, in eager steps of an engine of its own."""
        if not any(isinstance(module, Moe) for module in self._model.decoder.modules()):
            return None
        self._report(f"K = {k}, batch {size}: counting experts")
        engine = self._engine(msgspec.structs.replace(self._plan.options(self._name, k), graphs="off"))
        batch = Batch(engine, self._prompts(size), params_for("greedy", self._plan.output_tokens))
        with recorded_routing(self._model) as counts:
            for _ in range(PROBE_STEPS):
                batch.iterate()
        batch.drop()
        engine.close()
        drafts = counts["draft"]
        extend, later = drafts[:: max(k, 1)], [n for i, n in enumerate(drafts) if i % max(k, 1)]
        touched = Touched(
            verify=mean(counts["verify"]),
            extend=mean(extend) if extend else 0.0,
            draft=mean(later) if later else 0.0,
        )
        chosen = self._config.num_experts_per_tok
        if routing == "concentrated" and {*counts["verify"], *drafts} != {chosen}:
            raise RuntimeError(f"concentrated routing touches other than {chosen} experts: {touched}")
        return touched

    def _first_tokens(self, eager: Engine, k: int) -> list[FirstToken]:
        """With prefills captured, and without, in turn, over the same weights."""
        captured = self._engine(self._plan.first_token_options(self._name, k))
        most = max(captured.info.graphs_captured.get("prefill", [0]))
        assert max(self._plan.first_tokens) - 1 <= most, "the plan is checked before there are weights"
        self._report(f"K = {k}: first tokens")
        found = compare_first_tokens(captured, eager, self._config.vocab_size, self._plan.first_tokens)
        captured.close()
        return found

    def _overheads(self, on: Engine, k: int) -> list[Overhead]:
        """Guard and contract on and off, in turn, over the same weights."""
        off = self._engine(self._plan.options(self._name, k), checks=False)
        variant = self._plan.variants[0]
        params = params_for(variant, self._plan.output_tokens)
        found = []
        for size in self._plan.batch_sizes:
            pairs: list[tuple[float, float]] = []
            prompts = self._prompts(size)
            for number in range(OVERHEAD_PAIRS):
                self._report(f"K = {k}, batch {size}: overhead, pair {number + 1} of {OVERHEAD_PAIRS}")
                order = (on, off) if number % 2 else (off, on)
                step = {one: median(measure(one, prompts, params).seconds) for one in order}
                pairs.append((step[on], step[off]))
            percent = [100 * (with_checks / without - 1) for with_checks, without in pairs]
            found.append(
                Overhead(
                    num_speculative_tokens=k,
                    variant=variant,
                    batch_size=size,
                    on_ms=1e3 * median(with_checks for with_checks, _ in pairs),
                    off_ms=1e3 * median(without for _, without in pairs),
                    percent=percent,
                    median_percent=median(percent),
                )
            )
        off.close()
        return found


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device
