"""Attention of few requests against its definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

mla = pytest.importorskip("engine.kernels.split_mla", reason="Triton is not installed")

RANK, ROPE, PAGE = 32, 16, 64
SCALE = 0.17


def make(
    lengths: list[int], stride: int, heads: int, rank: int = RANK, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, pages, block table and lengths; what is not written is not finite."""
    generator = torch.Generator().manual_seed(seed)
    width = -(-max(lengths) // PAGE) + 1
    rows = len(lengths)
    table = torch.randperm(rows * width, generator=generator).view(rows, width).to(torch.int32)
    pages = torch.full((rows * width, PAGE, rank + ROPE), float("nan"))
    for row, length in enumerate(lengths):
        flat = torch.full((width * PAGE, rank + ROPE), float("nan"))
        flat[:length] = torch.randn(length, rank + ROPE, generator=generator)
        pages[table[row].long()] = flat.view(width, PAGE, -1)
    query = torch.randn(rows, stride, heads, rank + ROPE, generator=generator) * 1.5
    return query, pages, table, torch.tensor(lengths, dtype=torch.int32)


def expected(query: Tensor, pages: Tensor, table: Tensor, lengths: Tensor, rank: int = RANK) -> Tensor:
    rows, stride, heads, _ = query.shape
    out = torch.empty(rows, stride, heads, rank, dtype=torch.float64)
    for row in range(rows):
        for token in range(stride):
            seen = int(lengths[row]) - stride + 1 + token
            keys = pages[table[row].long()].flatten(0, 1)[:seen].double()
            scores = query[row, token].double() @ keys.T * SCALE
            out[row, token] = scores.softmax(-1) @ keys[:, :rank]
    return out


def run(device: torch.device, query: Tensor, *others: Tensor, rank: int = RANK) -> Tensor:
    moved = [one.to(device) for one in (query, *others)]
    found: Tensor = mla.split_mla(*moved, rank, SCALE)
    return found.cpu()


@pytest.mark.parametrize("stride", [1, 4])
@pytest.mark.parametrize("heads", [1, 5, 16])
@pytest.mark.parametrize("lengths", [[4], [64, 65], [130, 5, 448], [7] * 9])
def test_every_query_sees_what_is_before_it(
    lengths: list[int], heads: int, stride: int, device: torch.device
) -> None:
    """Parts without keys, with one block and with several; keys that a query may not see are not finite."""
    made = make(lengths, stride, heads)
    torch.testing.assert_close(run(device, *made).double(), expected(*made), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("splits", [1, 2, 32])
def test_the_number_of_parts_does_not_matter(
    splits: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mla, "num_splits", lambda tokens: splits)
    made = make([700, 64], 2, 3)
    torch.testing.assert_close(run(device, *made).double(), expected(*made), rtol=1e-4, atol=1e-5)


def test_rows_are_alike_alone_and_together(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla, "num_splits", lambda tokens: 4)
    query, pages, table, lengths = make([130, 300, 61], 4, 2)
    together = run(device, query, pages, table, lengths)
    for row in range(3):
        one = slice(row, row + 1)
        assert together[one].equal(run(device, query[one], pages, table[one], lengths[one]))


def test_a_fault_reaches_those_who_see_it_and_no_one_else(device: torch.device) -> None:
    query, pages, table, lengths = make([70, 90], 4, 2)
    flat = pages[table[0].long()].flatten(0, 1)
    flat[68] = float("nan")  # which only the last two queries of the first row may see
    pages[table[0].long()] = flat.view(-1, PAGE, RANK + ROPE)
    query[1, 2, 1, 3] = float("inf")
    bad = ~run(device, query, pages, table, lengths).isfinite().all(dim=-1)
    wanted = torch.zeros(2, 4, 2, dtype=torch.bool)
    wanted[0, 2:] = wanted[1, 2, 1] = True
    assert bad.equal(wanted)


@pytest.mark.parametrize("tokens", range(1, 300))
def test_programs_are_about_as_many_as_multiprocessors(tokens: int) -> None:
    splits = mla.num_splits(tokens)
    assert splits & (splits - 1) == 0 and 1 <= splits <= mla.MAX_SPLITS
    assert splits in (1, mla.MAX_SPLITS) or mla.PROGRAMS / 2 < tokens * splits <= mla.PROGRAMS
