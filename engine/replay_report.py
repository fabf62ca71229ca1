"""What running a bundle again showed: values of each run, where they stop being finite, where two runs part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import msgspec
import torch
from torch import Tensor

from engine.bundle_check import flag_names
from engine.recorder import Place

TOLERANCE: Final = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
"""Difference of two runs, relative to the largest magnitude at that place, beyond which they part."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One place of the model in one phase, over the request's live tokens."""

    phase: str
    part: str
    eager_finite: bool
    replay_finite: bool | None
    """``None`` where nothing was captured: with graphs off, in a prefill, and in a step of the next token alone."""
    max_difference: float | None
    """Largest absolute difference of the two where both are finite; ``None`` where none is."""
    parts: bool
    """The difference is beyond the tolerance, or the two are finite in different elements."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The first place of its kind."""

    phase: str
    part: str
    position: int
    """Of the first token that shows it."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the step, or of the prefill."""

    flags: list[str]
    emitted: list[int]
    first_non_finite: Finding | None


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a bundle run again showed."""

    bundle: str
    request_id: str
    model: str
    same_checkpoint: bool
    device: str
    dtype: str
    graphs: Literal["cuda", "simulate", "off"]
    tolerance: float
    rows: int
    stride: int
    verify_drafts: bool
    """False: the step verified its next token alone and was run so again, eager: no graph is captured of that."""
    bundle_flags: list[str]
    bundle_cause: str | None
    kv: Literal["stored", "recomputed"]
    stored_kv_faults: list[tuple[int, int]]
    """(plane, position) of non-finite rows in the stored pages; long lists are cut."""
    block_table_differs: bool
    """The device's block table did not name the pages that the scheduler held."""
    state_differs: bool
    """The device's length or next token was not the host's; never of a prefill, in which neither is set yet."""
    places: list[Row]
    prefill: Run | None
    eager: Run | None
    """``None`` after a fault of a prefill, which no step follows."""
    replay: Run | None
    """``None`` where nothing was captured."""
    first_parting: Finding | None
    reproduced: bool
    """A flag for which the bundle was written was raised again, in one of the runs."""


class Values:
    """What one run left, on the host: for each place, its live tokens' values, or only whether they are finite.

    Args:
        kept: ``[n, ...]`` a place; bool for finiteness. Of verify and extend, rows past the accepted ones are cut:
            nothing depends on them.
        start: Position of the run's first token.
        written: Positions written once it is done.
    """

    def __init__(self, kept: dict[Place, Tensor], start: int, written: int) -> None:
        self.kept = {
            place: (value[: written - start] if place.phase in ("verify", "extend") else value).cpu()
            for place, value in kept.items()
        }
        self._start = start
        self._written = written

    def finite(self, place: Place) -> Tensor:
        """``[n]`` bool."""
        value = self.kept[place]
        return value if value.dtype == torch.bool else value.isfinite().flatten(1).all(dim=1)

    def finding(self, place: Place, bad: Tensor) -> Finding:
        """The first True of ``bad`` ``[n]``."""
        number = place.phase.rpartition("draft ")[2]
        first = self._written + int(number) - 2 if number.isdigit() else self._start
        return Finding(phase=place.phase, part=place.part, position=first + int(bad.int().argmax()))

    def first_non_finite(self) -> Finding | None:
        for place in self.kept:
            bad = ~self.finite(place)
            if bad.any():
                return self.finding(place, bad)
        return None


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run: the row's flag word, what it emitted and its values."""

    flags: int
    emitted: list[int]
    values: Values

    def summary(self) -> Run:
        return Run(
            flags=flag_names(self.flags),
            emitted=self.emitted,
            first_non_finite=self.values.first_non_finite(),
        )


def compare(eager: Values, replayed: Values | None, tolerance: float) -> tuple[list[Row], Finding | None]:
    """A row for each place of ``eager``, and the first place where ``replayed`` parts from it."""
    rows, parting = [], None
    for place in eager.kept:
        if replayed is None:
            finite, difference, bad = None, None, torch.zeros(1, dtype=torch.bool)
        else:
            finite = bool(replayed.finite(place).all())
            difference, bad = _difference(eager.kept[place], replayed.kept[place], tolerance)
        if parting is None and bad.any():
            parting = eager.finding(place, bad)
        rows.append(
            Row(
                phase=place.phase,
                part=place.part,
                eager_finite=bool(eager.finite(place).all()),
                replay_finite=finite,
                max_difference=difference,
                parts=bool(bad.any()),
            )
        )
    return rows, parting


def _difference(a: Tensor, b: Tensor, tolerance: float) -> tuple[float | None, Tensor]:
    """Largest difference where both are finite, and the tokens ``[n]`` in which the two part.

    Where the two accepted different counts, the tokens that both have are compared.
    """
    live = min(a.shape[0], b.shape[0])
    a, b = a[:live].flatten(1).double(), b[:live].flatten(1).double()
    finite = a.isfinite() & b.isfinite()
    difference = torch.where(finite, (a - b).abs(), 0.0)
    scale = torch.where(finite, a.abs(), 0.0).amax()
    bad = (a.isfinite() != b.isfinite()) | (difference > tolerance * scale)
    return float(difference.amax()) if finite.any() else None, bad.any(dim=1)
