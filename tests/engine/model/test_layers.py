"""Norm, rotation, packed products, and what a graph or a batch may rely on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from engine.config import parse_config
from engine.model import half
from engine.model.half import FEW_ROWS, HalfWeight, column_scale, is_exact, pack
from engine.model.layers import HeadProjection, Projection, RmsNorm
from engine.model.rope import RotaryTable, half_split_rows, rotate
from tests.engine.model.support import CPU, load, relative_error
from tests.fixtures.checkpoints import build_f2
from tests.fixtures.hf_layout import v3_config

needs_half = pytest.mark.skipif(not half.is_available(), reason="no fp16-weight products on this machine")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [32, 100, 256])
@pytest.mark.parametrize("eps", [1e-12, 1e-6, 1e-2])
def test_rms_norm_equals_the_formula(size: int, eps: float) -> None:
    norm = RmsNorm(size, eps, torch.float32)
    norm.weight.copy_(1 + 0.1 * randn(size))
    norm.prepare()
    x = randn(5, size, seed=1) * torch.tensor([1e-6, 1e-3, 1.0, 1e3, 1e6])[:, None]
    wide = x.double()
    expected = wide / (wide.square().mean(dim=-1, keepdim=True) + eps).sqrt() * norm.weight.double()
    for row in range(5):
        assert relative_error(norm(x[row]), expected[row]) < 1e-6
    assert norm(torch.zeros(2, size)).abs().max() == 0


def test_rotation_turns_pairs_by_position() -> None:
    """Every pair (i, i + dim/2) turns by position x frequency; lengths stay."""
    table = RotaryTable(parse_config(v3_config(rope_theta=100.0), ()), 50, CPU)
    x = randn(3, 2, 8)
    positions = torch.tensor([0, 1, 49])
    out = rotate(x, *table(positions))
    assert torch.equal(out[0], x[0])
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(
        torch.ones(3, 1, 4), positions[:, None, None] * 100.0 ** (-torch.arange(4) / 4)
    )
    assert (torch.complex(out[..., :4], out[..., 4:]) - turned).abs().max() < 1e-5


def test_half_split_rows_part_even_and_odd() -> None:
    assert half_split_rows(8).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


@needs_half
def test_half_weights_are_exact_for_bf16_values() -> None:
    weight = (0.05 * randn(96, 64)).bfloat16().float()
    assert is_exact(weight)
    assert not is_exact(0.05 * randn(96, 64))
    assert not is_exact(torch.full((2, 2), 1e6)) and not is_exact(torch.full((2, 2), torch.nan))
    packed = HalfWeight(weight)
    for rows in (1, 3, FEW_ROWS, FEW_ROWS + 1, 50):
        x = randn(rows, 64, seed=rows)
        assert relative_error(packed(x), x.double() @ weight.double().T) < 1e-6


def sizes_of(kind: str, rows: int, columns: int) -> Tensor:
    """Factors of a matrix's values, by which a model can spread them without being another model."""
    down, along = torch.logspace(0, -12, rows)[:, None], torch.logspace(0, -12, columns)
    return {"matrix": torch.tensor(1e-12), "rows": down, "columns": along, "both": down * along}[kind]


@needs_half
@pytest.mark.parametrize("kind", ["matrix", "rows", "columns", "both"])
@pytest.mark.parametrize("rows", [1, FEW_ROWS + 1])
def test_small_weights_are_packed_without_loss_or_not_at_all(kind: str, rows: int) -> None:
    """Each output is compared with its own size, for activations that make every column count alike."""
    sizes = sizes_of(kind, 96, 64)
    weight = (0.05 * randn(96, 64)).bfloat16().float() * torch.exp2(sizes.log2().round())
    x = randn(rows, 64, seed=1)
    if kind in ("columns", "both"):
        x = x / torch.logspace(0, -12, 64)
    assert not is_exact(weight)
    packed = pack(weight)
    assert (packed is None) == (kind in ("rows", "both")), "only a row's own scale would hold what is left"
    product = x @ weight.T if packed is None else packed(x)
    expected = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    assert ((product - expected).abs() / size).max() < 1e-6


def test_a_scale_is_exact_whatever_a_columns_size() -> None:
    weight = torch.tensor([[0.0, 1.0, -3e38, 2.0**-126, 0.1], [0.0, 0.5, 1.0, 0.0, 70000.0]])
    scale = column_scale(weight)
    scaled = weight * scale
    assert torch.equal(scaled / scale, weight) and torch.equal(scale, torch.exp2(scale.log2().round()))
    assert scaled.abs().amax(dim=0).tolist()[:2] == [0.0, 16384.0] and scaled.abs().max() < 2**15


@needs_half
def test_half_products_do_not_depend_on_the_other_rows() -> None:
    packed = HalfWeight(randn(96, 64).bfloat16().float())
    x = randn(40, 64, seed=2)
    whole = packed(x)
    for start, end in ((0, 1), (7, 8), (0, 4), (4, 12), (30, 40), (3, 20)):
        assert torch.equal(packed(x[start:end]), whole[start:end])


def test_projections_pack_only_what_is_exact() -> None:
    for weight, packs in ((randn(64, 48).bfloat16().float(), True), (randn(64, 48), False)):
        projection = Projection(48, 64, dtype=torch.float32, input_major=True)
        heads = HeadProjection(2, 48, 32, torch.float32)
        assert projection.weight is not None and heads.weight is not None
        projection.weight.copy_(weight.T)
        heads.weight.copy_(weight.view(2, 32, 48).transpose(1, 2))
        x = randn(5, 48, seed=1)
        expected = x @ weight.T
        projection.prepare()
        heads.prepare()
        assert (projection.weight is None) == (packs and half.is_available())
        assert relative_error(projection(x), expected) < 1e-6
        assert relative_error(projection.add_to(expected, x), 2 * expected) < 1e-6
        by_head = heads(x[:, None].expand(5, 2, 48))
        assert relative_error(by_head.reshape(5, 64), expected) < 1e-6


class Echo:
    """Attention that returns each token's own latent: no batch, no cache."""

    def attend(self, layer: int, query: Tensor, latent: Tensor) -> Tensor:
        return (query[..., :32] + latent[:, None, :32]) * (layer + 1)


@needs_half
def test_i3_rows_of_a_bf16_checkpoint_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    """Bit for bit, whatever the number of rows: greedy tokens cannot turn on who else is in the batch."""
    raw = v3_config(n_group=1, topk_group=1, hidden_size=128)
    _, model = load(build_f2(tmp_path, raw, dtype=torch.bfloat16))
    token_ids, positions = torch.arange(40), torch.arange(40) * 5

    def run(start: int, end: int) -> Tensor:
        hidden = model.decoder(token_ids[start:end], positions[start:end], Echo())
        return model.decoder.logits(hidden)

    whole = run(0, 40)
    for start, end in ((0, 1), (5, 6), (8, 12), (0, 8), (3, 19), (10, 40)):
        assert torch.equal(run(start, end), whole[start:end])


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 4, 24])
def test_forward_is_traceable(tmp_path: Path, stored: torch.dtype, rows: int) -> None:
    """A trace of one input serves another: no value of a tensor decides what runs."""
    _, model = load(build_f2(tmp_path, dtype=stored), with_draft=True)
    draft = model.draft
    assert draft is not None

    def forward(token_ids: Tensor, positions: Tensor) -> Tensor:
        hidden = model.decoder(token_ids, positions, Echo())
        return draft.logits(draft(hidden, token_ids, positions, Echo()))

    traced = make_fx(forward)(torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64))
    token_ids, positions = torch.arange(rows) * 3 + 1, torch.arange(rows) * 11
    assert torch.equal(traced(token_ids, positions), forward(token_ids, positions))
