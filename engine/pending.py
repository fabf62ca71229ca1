"""A step that was launched: what to read of it, and how to wait for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.prompt_logprobs import MAX_LOGPROBS
from engine.sequence import RowResult, Sequence
from engine.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class DeviceLogprobs:
    """Log-probabilities of the rows that asked for them: ``index`` are their places among the step's rows."""

    index: list[int]
    emitted: Tensor  # [R, W]
    top_values: Tensor  # [R, W, 20]
    top_ids: Tensor  # [R, W, 20]


class PendingStep:
    """A launched step whose results were not read yet."""

    def __init__(
        self, rows: list[tuple[Sequence, int]], packed: Tensor, logprobs: DeviceLogprobs | None
    ) -> None:
        self._rows = rows
        self._packed = packed
        self._logprobs = logprobs
        self._copied: torch.cuda.Event | None = None
        if packed.is_cuda:
            self._packed = torch.empty_like(packed, device="cpu", pin_memory=True)
            self._packed.copy_(packed, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def results(self) -> list[RowResult]:
        """Wait for the step and say what each row emitted."""
        if self._copied is not None:
            self._copied.synchronize()
        logprobs = self._read_logprobs()
        results = []
        for place, ((sequence, epoch), values) in enumerate(
            zip(self._rows, self._packed.tolist(), strict=True)
        ):
            *emitted, accepted, num_drafts, flags = values
            kept = emitted[: accepted + 1]
            row_logprobs = logprobs[place](kept, sequence) if place in logprobs else None
            results.append(RowResult(sequence, epoch, kept, num_drafts, accepted, flags, row_logprobs))
        return results

    def _read_logprobs(self) -> dict[int, _LogprobReader]:
        if self._logprobs is None:
            return {}
        emitted, values, ids = (
            t.tolist() for t in (self._logprobs.emitted, self._logprobs.top_values, self._logprobs.top_ids)
        )
        return {
            place: _LogprobReader(*row)
            for place, *row in zip(self._logprobs.index, emitted, values, ids, strict=True)
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
    """Log-probabilities of the emitted tokens under the target's raw distribution."""
    index = torch.tensor(wanted, device=logits.device)
    log_probs = logits.index_select(0, index).log_softmax(dim=-1)  # [R, W, V]
    emitted = packed.index_select(0, index)[:, : logits.shape[1], None]
    top = log_probs.topk(min(MAX_LOGPROBS, log_probs.shape[-1]), dim=-1)
    return DeviceLogprobs(wanted, log_probs.gather(2, emitted).squeeze(2), top.values, top.indices)
