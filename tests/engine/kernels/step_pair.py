"""The fused operators of a step beside the plain ones, each over its own copy of one state."""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from engine.guard import Flag
from engine.kv.pool import LatentPool
from engine.sampler import GREEDY, Variant
from engine.spec import Drafted, Rows, StepOps
from engine.state import FLAGS, NEXT_TOKEN, NUM_DRAFTS, SEQ_LEN, SlotState
from engine.step_ops import PlainOps

PAGE_SIZE, NUM_PAGES, TABLE_WIDTH = 8, 50, 6
SLOTS = 9
NAN, INF = float("nan"), float("inf")


def make_pool(device: torch.device) -> LatentPool:
    return LatentPool(
        num_layers=1,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        latent_dim=1,
        dtype=torch.float32,
        device=device,
    )


def make_state(k: int, vocab: int, generator: torch.Generator, num_slots: int = SLOTS) -> SlotState:
    """Sound slots: every row can run."""
    state = SlotState(
        num_slots=num_slots,
        num_speculative_tokens=k,
        vocab_size=vocab,
        table_width=TABLE_WIDTH,
        device=torch.device("cpu"),
    )

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    core = state.core[:num_slots]
    core[:, SEQ_LEN] = draw(0, TABLE_WIDTH * PAGE_SIZE - 2 * k, num_slots)
    core[:, NUM_DRAFTS] = draw(0, 2, num_slots) * k
    core[:, FLAGS] = draw(0, 2, num_slots) * int(Flag.DRAFT_NAN)
    core[:, NEXT_TOKEN:] = draw(0, vocab, num_slots, k + 1)
    state.block_table[:num_slots] = draw(1, NUM_PAGES, num_slots, TABLE_WIDTH).to(torch.int32)
    return state


def moved(state: SlotState, device: torch.device) -> SlotState:
    """A copy of its own."""
    twin = copy.deepcopy(state)
    for name, tensor in twin.tensors():
        setattr(twin, name, tensor.to(device))
    return twin


def same(found: Any, expected: Any, what: str) -> None:
    """Equality of all that two results hold: tensors in dtype, shape and value."""
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype and found.cpu().equal(expected), (what, found, expected)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            same(one, other, f"{what}[{place}]")
    elif hasattr(expected, "__dataclass_fields__"):
        for field in fields(expected):
            same(getattr(found, field.name), getattr(expected, field.name), f"{what}.{field.name}")
    else:
        assert found == expected, what


@dataclass
class Pair:
    """The fused operators and their oracle, each over its own copy of one state."""

    fused_state: SlotState
    plain_state: SlotState
    fused: StepOps
    plain: StepOps
    k: int
    device: torch.device

    @classmethod
    def of(cls, state: SlotState, k: int, device: torch.device, checks: bool = True) -> Pair:
        from engine.kernels.step import FusedOps  # only where Triton is

        fused_state, cpu = moved(state, device), torch.device("cpu")
        fused = FusedOps(fused_state, make_pool(device), k)
        plain = PlainOps(state, make_pool(cpu), k)
        fused.checks = plain.checks = checks
        return cls(fused_state, state, fused, plain, k, device)

    def load(
        self,
        slots: list[int],
        *,
        check: int | None = None,
        max_len: int = TABLE_WIDTH * PAGE_SIZE,
        variant: Variant = GREEDY,
        width: int | None = None,
    ) -> tuple[Rows, Rows]:
        width = self.k + 1 if width is None else width
        made = []
        for ops, device in ((self.fused, self.device), (self.plain, torch.device("cpu"))):
            word = None if check is None else torch.tensor([check], device=device)
            lens = (1,) * (len(slots) - 1) + (max_len,)
            made.append(ops.load(torch.tensor(slots, device=device), word, lens, variant, width))
        same(made[0], made[1], "rows")
        return made[0], made[1]

    def draft(self, rows: tuple[Rows, Rows], logits: list[Tensor]) -> tuple[Drafted, Drafted]:
        """Drafts from ``logits`` ``[B, V]`` each."""
        made = []
        for ops, own, device in ((self.fused, rows[0], self.device), (self.plain, rows[1], "cpu")):
            steps = [
                ops.propose(own, one.to(device), own.seq_len + 1, None, number)
                for number, one in enumerate(logits)
            ]
            made.append(Drafted([one[0] for one in steps], None, [one[2] for one in steps]))
        same(made[0], made[1], "drafted")
        return made[0], made[1]

    def step(self, rows: tuple[Rows, Rows], logits: Tensor, draft_logits: list[Tensor]) -> Tensor:
        """From ``accept`` on, for verify logits ``[B, W, V]``; the packed results."""
        accepted = (
            self.fused.accept(rows[0], logits.to(self.device), None),
            self.plain.accept(rows[1], logits, None),
        )
        same(*accepted, "accepted")
        drafted = self.draft(rows, draft_logits) if self.k else (None, None)
        packed = self.fused.commit(rows[0], accepted[0], drafted[0])
        same(packed, self.plain.commit(rows[1], accepted[1], drafted[1]), "packed")
        self.same_state()
        return packed.cpu()

    def place(self, rows: tuple[Rows, Rows], ahead: int, stride: int) -> None:
        found = self.fused.place(rows[0], rows[0].seq_len + ahead, stride)
        same(found, self.plain.place(rows[1], rows[1].seq_len + ahead, stride), "places")

    def same_state(self) -> None:
        for (name, found), (_, expected) in zip(
            self.fused_state.tensors(), self.plain_state.tensors(), strict=True
        ):
            same(found, expected, name)


def tied_logits(*shape: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """Whole numbers of which most are equal to another, with zeros of both signs."""
    values = torch.randn(shape, generator=generator).mul(1.5).round()
    return values.to(dtype)


def agreeing(logits: Tensor, rows: Rows, generator: torch.Generator) -> Tensor:
    """``logits`` ``[B, W, V]`` that prefer the rows' drafts at random places."""
    agree = torch.rand(logits.shape[:2], generator=generator) < 0.7
    for row, place in agree.nonzero().tolist():
        if place < rows.width - 1:
            logits[row, place, rows.tokens[row, place + 1]] = 50
    return logits


def plant(logits: Tensor, generator: torch.Generator, chance: float = 0.3) -> Tensor:
    """Some rows of ``logits`` ``[..., V]`` get one or more non-finite values."""
    flat = logits.view(-1, logits.shape[-1])
    for row in flat:
        while float(torch.rand((), generator=generator)) < chance:
            token = int(torch.randint(0, len(row), (), generator=generator))
            row[token] = (NAN, INF, -INF)[int(torch.randint(0, 3, (), generator=generator))]
    return logits
