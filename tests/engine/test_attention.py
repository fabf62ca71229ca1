"""The oracle backend: equal to plain attention, whatever the pages, and at a cost of the rows' own lengths."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from engine.attention import AttentionSpec, make_backend
from engine.attention.torch_mla import TorchMla
from engine.errors import ConfigError
from engine.layout import packed_layout, uniform_layout

HEADS, RANK, DIM = 2, 24, 32
CPU = torch.device("cpu")


def _spec(page_size: int) -> AttentionSpec:
    return AttentionSpec(CPU, torch.float32, HEADS, RANK, DIM, DIM**-0.5, page_size, 16)


def _case(page_size: int, lengths: list[int], stride: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries ``[B, S, H, D]``, pages, and a block table of shuffled pages; unowned entries are 0."""
    generator = torch.Generator().manual_seed(page_size + stride)
    width = -(-max(lengths) // page_size) + 2
    count = 1 + len(lengths) * width
    pages = torch.randn(count, page_size, DIM, generator=generator)
    pages[0] = 0
    table = (torch.randperm(count - 1, generator=generator) + 1).view(len(lengths), width).int()
    for row, length in enumerate(lengths):
        table[row, -(-length // page_size) :] = 0
    return torch.randn(len(lengths), stride, HEADS, DIM, generator=generator), pages, table


def _expected(query: Tensor, latent: Tensor) -> Tensor:
    """``query`` ``[T, H, D]`` are the last T tokens of a row whose latents are ``[L, D]``."""
    length, tokens = latent.shape[0], query.shape[0]
    scores = torch.einsum("thd,ld->thl", query, latent) / math.sqrt(DIM)
    visible = torch.arange(length) <= torch.arange(length - tokens, length)[:, None]
    return torch.einsum(
        "thl,lc->thc", scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1), latent[:, :RANK]
    )


LENGTHS = [[5], [9, 130, 4, 77], [300, 8, 9, 10, 11, 12, 13, 14]]


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("stride", [1, 4])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_a10_rows_of_any_length_on_any_pages(page_size: int, stride: int, lengths: list[int]) -> None:
    query, pages, table = _case(page_size, lengths, stride)
    backend = make_backend("torch_mla", _spec(page_size))
    layout = uniform_layout(len(lengths), stride, CPU)
    for slack in (0, 7):
        bounds = tuple(min(length + slack, table.shape[1] * page_size) for length in lengths)
        plan = backend.prepare(layout, table, torch.tensor(lengths), bounds)
        out = backend.attend(query, pages, plan)
        for row, length in enumerate(lengths):
            latent = pages[table[row].long()].flatten(0, 1)[:length]
            torch.testing.assert_close(out[row], _expected(query[row], latent), rtol=1e-5, atol=1e-5)


def test_short_rows_do_not_pay_for_a_long_one() -> None:
    """Keys that are gathered: at most twice the sum of the rows' own, where all at once would be 15 times that."""
    units = [128, *[4] * 63]
    groups = TorchMla._group(units)
    assert sorted(row for rows, _ in groups for row in rows or []) == list(range(64))
    assert sum(len(rows or []) * count for rows, count in groups) == sum(units)
    assert TorchMla._group([8, 8, 7, 9]) == [(None, 9)]


def test_a_prefill_equals_plain_attention() -> None:
    _, pages, table = _case(16, [40, 7], 1)
    tokens = torch.randn(13, HEADS, DIM, generator=torch.Generator().manual_seed(1))
    layout = packed_layout([10, 3], [30, 4])
    backend = make_backend("torch_mla", _spec(16))
    out = backend.attend_packed(tokens, pages, backend.prepare_packed(layout, table))
    for row, (start, end, length) in enumerate([(0, 10, 40), (10, 13, 7)]):
        latent = pages[table[row].long()].flatten(0, 1)[:length]
        torch.testing.assert_close(out[start:end], _expected(tokens[start:end], latent), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["flash_mla", "trtllm_mla", "other"])
def test_an_impossible_backend_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ConfigError, match=f"attention_backend='{name}'"):
        make_backend(name, _spec(64))
    assert make_backend("auto", _spec(64)).name == "torch_mla"
