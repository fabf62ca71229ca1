"""A step that was launched: what to read of it, and how to wait for it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.contract import GraphKey
from engine.prompt_logprobs import MAX_LOGPROBS
from engine.sampler import Variant, choose_variant
from engine.sequence import RowResult, Sequence
from engine.staging import fetch, stage
from engine.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class DeviceLogprobs:
    """Log-probabilities of the rows that asked for them: ``index`` are their places among the step's rows."""

    index: list[int]
    emitted: Tensor  # [R, W]
    top_values: Tensor  # [R, W, 20]
    top_ids: Tensor  # [R, W, 20]


@dataclass(frozen=True, slots=True)
class StepTiming:
    """When the device began and ended a step, and ended the step before it if that was launched just before."""

    started: torch.cuda.Event | float
    ended: torch.cuda.Event | float
    previous: torch.cuda.Event | None

    @property
    def seconds(self) -> float:
        """How long the device worked on the step; it must be done."""
        return _between(self.started, self.ended)

    @property
    def gap_seconds(self) -> float | None:
        """How long the device had nothing to do before the step."""
        return None if self.previous is None else _between(self.previous, self.started)


def _between(first: torch.cuda.Event | float, second: torch.cuda.Event | float) -> float:
    if isinstance(first, float) or isinstance(second, float):
        assert isinstance(first, float) and isinstance(second, float)
        return second - first
    return float(first.elapsed_time(second)) / 1e3


class StepClock:
    """Times steps on the device, without waiting for it; on a CPU, their calls."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._previous: torch.cuda.Event | None = None

    def start(self) -> torch.cuda.Event | float:
        return self._now()

    def stop(self, started: torch.cuda.Event | float) -> StepTiming:
        ended, previous = self._now(), self._previous
        self._previous = ended if isinstance(ended, torch.cuda.Event) else None
        return StepTiming(started, ended, previous)

    def interrupt(self) -> None:
        """Something else than a step was launched: what follows is no gap between steps."""
        self._previous = None

    def _now(self) -> torch.cuda.Event | float:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step, and what all steps of the same rows have in common."""

    members: list[tuple[Sequence, int]]
    """Each with its epoch: who loses its slot goes on in another epoch."""
    slots: list[int]
    least_variant: Variant
    with_logprobs: list[int]
    """Places of the rows that asked for log-probabilities."""

    @classmethod
    def of(cls, members: list[tuple[Sequence, int]]) -> StepRows:
        params = [row.request.params for row, _ in members]
        slots = [row.slot for row, _ in members if row.slot is not None]
        assert len(slots) == len(members), "a row of a step has a slot"
        wanted = [place for place, one in enumerate(params) if one.logprobs is not None]
        return cls(members, slots, choose_variant(params), wanted)

    def variant(self, constrained: bool) -> Variant:
        """The least variant that serves them; ``constrained``: some row has a grammar."""
        return replace(self.least_variant, constrained=True) if constrained else self.least_variant


class PendingStep:
    """A launched step whose results were not read yet.

    Attributes:
        graph: What was replayed; ``None`` for an eager step.
    """

    def __init__(
        self,
        rows: StepRows,
        packed: Tensor,
        logprobs: DeviceLogprobs | None,
        timing: StepTiming,
        graph: GraphKey | None,
    ) -> None:
        self.graph = graph
        self.timing = timing
        self._members = rows.members
        self._packed = fetch(packed)
        self._logprobs = logprobs
        self._copied: torch.cuda.Event | None = None
        if packed.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def results(self) -> list[RowResult]:
        """Wait for the step and say what each row emitted."""
        if self._copied is not None:
            self._copied.synchronize()
        results = []
        for (sequence, epoch), values in zip(self._members, self._packed.tolist(), strict=True):
            accepted, num_drafts, flags = values[-3:]
            kept = values[: accepted + 1]
            results.append(RowResult(sequence, epoch, kept, num_drafts, accepted, flags))
        if self._logprobs is not None:
            for place, read in self._read_logprobs(self._logprobs).items():
                result = results[place]
                result.logprobs = read(result.token_ids, result.sequence)
        return results

    @staticmethod
    def _read_logprobs(logprobs: DeviceLogprobs) -> dict[int, _LogprobReader]:
        emitted, values, ids = (t.tolist() for t in (logprobs.emitted, logprobs.top_values, logprobs.top_ids))
        return {
            place: _LogprobReader(*row)
            for place, *row in zip(logprobs.index, emitted, values, ids, strict=True)
        }


@dataclass(frozen=True, slots=True)
class _LogprobReader:
    """One row's log-probabilities on the host."""

    emitted: list[float]
    top_values: list[list[float]]
    top_ids: list[list[int]]

    def __call__(self, token_ids: list[int], sequence: Sequence) -> list[TokenLogprobs]:
        wanted = sequence.request.params.logprobs or 0
        return [
            TokenLogprobs(
                token, self.emitted[i], list(zip(self.top_ids[i], self.top_values[i], strict=True))[:wanted]
            )
            for i, token in enumerate(token_ids)
        ]


def device_logprobs(logits: Tensor, packed: Tensor, wanted: list[int]) -> DeviceLogprobs:
    """Log-probabilities of the emitted tokens under the target's raw distribution, on their way to the host."""
    index = stage(wanted, torch.int64, logits.device)
    log_probs = logits.index_select(0, index).float().log_softmax(dim=-1)  # [R, W, V]
    emitted = packed.index_select(0, index)[:, : logits.shape[1], None]
    top = log_probs.topk(min(MAX_LOGPROBS, log_probs.shape[-1]), dim=-1)
    chosen = log_probs.gather(2, emitted).squeeze(2)
    return DeviceLogprobs(wanted, fetch(chosen), fetch(top.values), fetch(top.indices))
