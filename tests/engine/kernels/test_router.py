"""The routing kernels against the router's plain torch form, and their list of blocks against a plain loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.config import ModelConfig, parse_config
from engine.model.moe import Router
from tests.fixtures.hf_layout import Config, v2_config, v3_config

router = pytest.importorskip("engine.kernels.router", reason="Triton is not installed")
blocks = pytest.importorskip("engine.kernels.blocks", reason="Triton is not installed")

LITE = v2_config(n_routed_experts=64, num_experts_per_tok=6, hidden_size=200)
GROUPED = v3_config(
    n_routed_experts=32, num_experts_per_tok=8, n_group=8, topk_group=4, hidden_size=320, moe_layer_freq=1
)
SMALL = v3_config(n_routed_experts=8, num_experts_per_tok=2, n_group=1, topk_group=1, hidden_size=96)
UNEVEN = v3_config(
    scoring_func="softmax", topk_method="group_limited_greedy", n_routed_experts=20, n_group=4, topk_group=3,
    num_experts_per_tok=5, hidden_size=130, norm_topk_prob=True, routed_scaling_factor=16.0,
)  # fmt: skip
SHAPES = {"lite": LITE, "grouped": GROUPED, "small": SMALL, "uneven": UNEVEN}


def make_router(raw: Config, device: torch.device) -> tuple[ModelConfig, Router]:
    config = parse_config(raw, ())
    generator = torch.Generator().manual_seed(5)
    made = Router(config)
    assert made.projection.weight is not None
    made.projection.weight.data = torch.randn(made.projection.weight.shape, generator=generator) / 8
    if made.bias is not None:
        made.bias.data = torch.randn(made.bias.shape, generator=generator) / 4
    return config, made.to(device)


def inputs(rows: int, config: ModelConfig, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, config.hidden_size, generator=generator).to(device)


def weights_by_expert(chosen: Tensor, weights: Tensor, experts: int) -> Tensor:
    return weights.new_zeros(chosen.shape[0], experts).scatter(1, chosen, weights)


def plain(made: Router, x: Tensor) -> tuple[Tensor, Tensor]:
    """The torch form, which is the one of a CPU."""
    chosen, weights = made.cpu()(x.cpu())
    made.to(x.device)
    return chosen.to(x.device), weights.to(x.device)


def pairs_by_expert(found: blocks.Blocks) -> dict[int, list[int]]:
    """What the list says, checking that no block follows an unused one and that sizes are right."""
    out: dict[int, list[int]] = {}
    entries = found.entries.tolist()
    used = sum(entry != 0 for entry in entries)
    assert all(entries[:used]), "a gap"
    for entry, row in zip(entries, found.pairs.tolist(), strict=True):
        if entry:
            assert 1 <= entry % 256 <= found.size
            out.setdefault(entry // 256, []).extend(row[: entry % 256])
    return out


@pytest.mark.parametrize("rows", [1, 3, 17, 70])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_experts_and_weights_as_torch(shape: str, rows: int, device: torch.device) -> None:
    config, made = make_router(SHAPES[shape], device)
    x = inputs(rows, config, device)
    chosen, weights = router.route(x, made.projection.weight, made.bias, made._routing())
    expected_chosen, expected = plain(made, x)
    assert chosen.sort().values.equal(expected_chosen.sort().values)
    found = weights_by_expert(chosen, weights, config.n_routed_experts)
    torch.testing.assert_close(
        found, weights_by_expert(expected_chosen, expected, config.n_routed_experts), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)  # best first, as torch has it


@pytest.mark.parametrize("shape", ["lite", "grouped"])
def test_the_largest_forwards_take_an_ordinary_product(shape: str, device: torch.device) -> None:
    config, made = make_router(SHAPES[shape], device)
    x = inputs(router.MAX_STREAMED_ROWS + 1, config, device)
    chosen, _ = router.route(x, made.projection.weight, made.bias, made._routing())
    assert chosen.sort().values.equal(plain(made, x)[0].sort().values)


@pytest.mark.parametrize("rows", [1, 16, 32, 33, 70])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block_rows", [16, 64])
def test_every_pair_is_listed_once_under_its_expert(
    shape: str, rows: int, block_rows: int, device: torch.device
) -> None:
    config, made = make_router(SHAPES[shape], device)
    x, slots = inputs(rows, config, device), config.num_experts_per_tok + 2
    projection, routing = made.projection.weight, made._routing()
    _, found = router.route_blocks(x, projection, made.bias, routing, block_rows=block_rows, num_shared=2)
    chosen, _ = router.route(x, projection, made.bias, routing)
    expected: dict[int, list[int]] = {}
    for token, experts in enumerate(chosen.tolist()):
        for slot, expert in enumerate(experts):
            expected.setdefault(expert, []).append(token * slots + slot)
    listed = pairs_by_expert(found)
    assert listed == expected  # in token order, though nothing depends on it
    assert list(listed) == sorted(listed)


@pytest.mark.parametrize("rows", [5, 40, 300])
@pytest.mark.parametrize("block_rows", [16, 128])
def test_one_expert_for_all_and_one_for_each_fit_the_list(
    rows: int, block_rows: int, device: torch.device
) -> None:
    """The two ends: fewest blocks, and most."""
    experts, top_k = 40, 3
    same = torch.tensor([[7, 0, 39]]).expand(rows, -1).contiguous()
    different = torch.arange(rows * top_k).view(rows, top_k) % experts
    for chosen in (same, different):
        made = blocks.empty_blocks(
            rows, num_experts=experts, top_k=top_k, slots=top_k, block_rows=block_rows, device=device
        )
        made.entries.fill_(-77)
        blocks.list_blocks(chosen.to(device), made)
        found = pairs_by_expert(made)
        assert sorted(pair for pairs in found.values() for pair in pairs) == list(range(rows * top_k))
        assert set(found) == set(chosen.flatten().tolist())


def test_ties_go_to_the_lower_expert(device: torch.device) -> None:
    _, made = make_router(LITE, device)
    chosen, weights = router.route(
        torch.zeros(3, 200, device=device), made.projection.weight, None, made._routing()
    )
    assert chosen.tolist() == [list(range(6))] * 3
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / 64))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_does_not_depend_on_its_neighbours(shape: str, device: torch.device) -> None:
    config, made = make_router(SHAPES[shape], device)
    x = inputs(20, config, device)
    args = (made.projection.weight, made.bias, made._routing())
    chosen, weights = router.route(x, *args)
    others = torch.full_like(x, 1e4)
    others[7] = x[7]
    again = router.route(others, *args)
    assert again[0][7].equal(chosen[7]) and again[1][7].equal(weights[7])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_row_chooses_existing_experts_and_disturbs_no_other(
    shape: str, value: float, device: torch.device
) -> None:
    """Its output must be non-finite for the guard to see, and its neighbours' must be what it was."""
    config, made = make_router(SHAPES[shape], device)
    x = inputs(3, config, device)
    args = (made.projection.weight, made.bias, made._routing())
    chosen, weights = router.route(x, *args)
    x[1] = value
    found, found_weights = router.route(x, *args)
    assert bool(((found >= 0) & (found < config.n_routed_experts)).all())
    assert all(len(set(row)) == config.num_experts_per_tok for row in found.tolist())
    for row in (0, 2):
        assert found[row].equal(chosen[row]) and found_weights[row].equal(weights[row])
