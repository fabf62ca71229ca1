"""Several programs that read one row together: with few rows most of a GPU would be idle.

Each member takes a part of the row and posts what it found there; then all members read all postings and reduce
them alike, so that they decide alike and take the same way through their code. A posting is words of 32 bits, each
beside the turn that it belongs to, in one word of 64: it is there or it is not, and no fence is needed. Turns go on
from launch to launch, and each turn writes every word of its board, so none is ever mistaken for an older one.

There are two boards, for odd and even turns: a member posts for turn n + 2 only when it has seen all postings of
n + 1, and each of those was made after its member had read turn n.

A member waits for the others, so all of them have to run at once: ``team_size``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from engine.kernels.jit import jit_function

SIZES = (32, 16, 8)
"""Sizes of teams. In larger ones a member would read less than it exchanges, and smaller ones are no faster than
one program, which searches in its registers."""
FIELDS = tl.constexpr(8)
"""Words of a posting."""
LOW = tl.constexpr(0xFFFFFFFF)
"""The lower half of a word."""


def team_size(rows: int, processors: int) -> int:
    """Members for each of ``rows`` rows (a power of two): no more programs than ``processors``, multiprocessors.

    All programs of a launch then run at once whatever else runs, for that ends without them.
    """
    return next((size for size in SIZES if size * rows <= processors), 1)


@dataclass(frozen=True, slots=True)
class Boards:
    """Where teams of one size meet, for as many rows as there can be of it; a row's turn outlives a launch."""

    words: Tensor
    """``[rows, 2, members, FIELDS]`` int64."""
    turns: Tensor
    """``[rows]`` int64: the turn that comes next."""

    @classmethod
    def of(cls, members: int, rows: int, device: torch.device) -> Boards:
        words = torch.zeros((rows, 2, members, FIELDS.value), dtype=torch.int64, device=device)
        return cls(words, torch.ones(rows, dtype=torch.int64, device=device))


@jit_function
def _elsewhere(missing: tl.tensor) -> None:
    """Where programs do not run side by side, as in tests, others run here while words are missing."""


@jit_function
def team_of(board: tl.tensor, turns: tl.tensor, row: tl.tensor, members: tl.constexpr) -> tl.tuple:
    """The team of a row (its boards, and this program's number in it), and the turn that comes next."""
    turn = tl.full([], 0, tl.int64)
    if members > 1:
        turn = tl.load(turns + row)
        tl.debug_barrier()  # every thread has it before any posts: then it may change
    return (board + row * (2 * members * FIELDS), tl.program_id(1)), turn


@jit_function
def disband(turns: tl.tensor, row: tl.tensor, team: tl.tuple, turn: tl.tensor, members: tl.constexpr) -> None:
    """Keeps the turn for the next launch: whoever exchanged anything has read the old one."""
    if members > 1 and team[1] == 0:
        tl.store(turns + row, turn)


@jit_function
def exchanged(team: tl.tuple, turn: tl.tensor, found: tl.tensor, members: tl.constexpr) -> tl.tuple:
    """What all members found, ``[members, FIELDS]`` int32, from each one's ``[FIELDS]``; and the next turn.

    ``team``: the row's boards, and the member's number.
    """
    board, rank = team
    board += (turn & 1) * (members * FIELDS)
    field = tl.arange(0, FIELDS)
    word = (turn << 32) | (found.to(tl.int64) & LOW)
    tl.atomic_xchg(board + rank * FIELDS + field, word, sem="relaxed")
    place = tl.arange(0, members)[:, None] * FIELDS + field[None, :]
    own = (turn << 32) >> 32
    missing = tl.full([], 1, tl.int32)
    while missing > 0:
        words = tl.load(board + place, volatile=True)
        missing = tl.sum(tl.sum((words >> 32 != own).to(tl.int32), axis=1), axis=0)
        _elsewhere(missing)
    # A word can be in several threads' hands, of which some may have looked too early. All are there now
    tl.debug_barrier()
    words = tl.load(board + place, volatile=True)
    tl.debug_barrier()  # every thread has read them before any posts again
    return words.to(tl.int32), turn + 1


@jit_function
def posted(field: tl.constexpr, value: tl.tensor) -> tl.tensor:
    """A posting ``[FIELDS]`` int32 with ``value`` (int32, or float32's bits) in one field and 0 in the others."""
    return tl.where(tl.arange(0, FIELDS) == field, value.to(tl.int32, bitcast=True), 0)


@jit_function
def column(found: tl.tensor, field: tl.constexpr) -> tl.tensor:
    """One field of all members, ``[members]`` int32."""
    return tl.sum(tl.where(tl.arange(0, FIELDS)[None, :] == field, found, 0), axis=1)


@jit_function
def floats(found: tl.tensor, field: tl.constexpr) -> tl.tensor:
    """One field of all members, ``[members]`` float32."""
    return column(found, field).to(tl.float32, bitcast=True)
