"""The streaming MoE kernels against a plain fp32 loop over the experts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine import kernels
from engine.config import parse_config
from engine.model.moe import Moe
from tests.engine.model.support import relative_error
from tests.fixtures.hf_layout import Config, v2_config, v3_config

moe = pytest.importorskip("engine.kernels.moe", reason="Triton is not installed")
blocks = pytest.importorskip("engine.kernels.blocks", reason="Triton is not installed")

LITE = v2_config(n_routed_experts=24, num_experts_per_tok=6, hidden_size=96, moe_intermediate_size=88)
GROUPED = v3_config(
    n_routed_experts=32,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
    hidden_size=160,
    moe_intermediate_size=64,
)
SMALL = v3_config(
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    hidden_size=64,
    moe_intermediate_size=32,
)
NONE_SHARED = v2_config(n_shared_experts=0, hidden_size=50, moe_intermediate_size=21)
SHAPES = {"lite": LITE, "grouped": GROUPED, "small": SMALL, "none_shared": NONE_SHARED}


NUM_ROUTED, TOP_K = 10, 3


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight(experts: int, inputs: int, outputs: int, *, input_major: bool, seed: int) -> Tensor:
    """``[experts, inputs, outputs]`` in either memory order."""
    values = random(experts, inputs, outputs, seed=seed) / inputs**0.5
    return values if input_major else values.transpose(1, 2).contiguous().transpose(1, 2)


def expected_mix(
    x: Tensor, residual: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Token by token and expert by expert, in fp64."""
    out = residual.double()
    shared = range(NUM_ROUTED, gate_up.shape[0])
    for token in range(x.shape[0]):
        mixed = list(zip(chosen[token].tolist(), weights[token].tolist(), strict=True))
        for expert, share in [*mixed, *((expert, 1.0) for expert in shared)]:
            gate, up = (x[token].double() @ gate_up[expert].double()).chunk(2)
            out[token] += share * ((F.silu(gate) * up) @ down[expert].double())
    return out


def choices(name: str, rows: int) -> Tensor:
    """``[rows, TOP_K]``; the last expert is chosen by none."""
    if name == "same":
        return torch.tensor([[4, 0, 8]]).expand(rows, -1).contiguous()
    if name == "different":
        return torch.arange(rows * TOP_K).view(rows, TOP_K) % (NUM_ROUTED - 1)
    generator = torch.Generator().manual_seed(rows)
    return torch.stack([torch.randperm(NUM_ROUTED - 1, generator=generator)[:TOP_K] for _ in range(rows)])


@pytest.mark.parametrize("rows", [1, 3, 17, 70])
@pytest.mark.parametrize("routes", ["same", "different", "random"])
@pytest.mark.parametrize("input_major", [True, False])
@pytest.mark.parametrize(("hidden", "inner", "shared"), [(48, 40, 2), (50, 21, 0)])
def test_the_products_equal_a_loop_over_experts(
    rows: int, routes: str, input_major: bool, hidden: int, inner: int, shared: int, device: torch.device
) -> None:
    x, residual = random(rows, hidden), random(rows, hidden, seed=1)
    chosen, weights = choices(routes, rows), random(rows, TOP_K, seed=2).abs()
    gate_up = weight(NUM_ROUTED + shared, hidden, 2 * inner, input_major=input_major, seed=3)
    down = weight(NUM_ROUTED + shared, inner, hidden, input_major=input_major, seed=4)
    gate_up[NUM_ROUTED - 1] = down[NUM_ROUTED - 1] = torch.nan  # an expert that none chose is not looked at
    plan = moe.plan_for(rows, x.dtype)
    listed = blocks.empty_blocks(
        rows,
        num_experts=NUM_ROUTED,
        top_k=TOP_K,
        slots=TOP_K + shared,
        block_rows=plan.block_rows,
        device=device,
    )
    blocks.list_blocks(chosen.to(device), listed)
    given = [tensor.to(device) for tensor in (x, residual, weights)]
    found = moe.mix(*given, listed, gate_up.to(device), down.to(device))
    expected = expected_mix(x, residual, chosen, weights, gate_up, down)
    assert relative_error(found.cpu(), expected) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [2, 40, 70])
def test_16_bit_weights(dtype: torch.dtype, rows: int, device: torch.device) -> None:
    if dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("Triton's interpreter multiplies the bits of bf16 as integers")
    hidden, inner = 48, 40
    x, residual = random(rows, hidden).to(dtype), random(rows, hidden, seed=1).to(dtype)
    chosen, weights = choices("random", rows), random(rows, TOP_K, seed=2).abs()
    gate_up = weight(NUM_ROUTED + 1, hidden, 2 * inner, input_major=False, seed=3).to(dtype)
    down = weight(NUM_ROUTED + 1, inner, hidden, input_major=False, seed=4).to(dtype)
    plan = moe.plan_for(rows, dtype)
    listed = blocks.empty_blocks(
        rows, num_experts=NUM_ROUTED, top_k=TOP_K, slots=TOP_K + 1, block_rows=plan.block_rows, device=device
    )
    blocks.list_blocks(chosen.to(device), listed)
    given = [tensor.to(device) for tensor in (x, residual, weights)]
    found = moe.mix(*given, listed, gate_up.to(device), down.to(device))
    assert found.dtype == dtype
    expected = expected_mix(x, residual, chosen, weights, gate_up, down)
    assert relative_error(found.cpu(), expected) < torch.finfo(dtype).eps


def test_only_the_chosen_pairs_are_written(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporaries start as NaN: a pair read but never written, or a block's padding let in, would show."""
    poisoned: list[Tensor] = []

    def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        tensor = torch.full(
            shape, torch.nan if dtype.is_floating_point else 2**30, dtype=dtype, device=device
        )
        poisoned.append(tensor)
        return tensor

    monkeypatch.setattr(torch, "empty", empty)
    hidden, inner, rows = 48, 40, 19
    x, residual = random(rows, hidden), random(rows, hidden, seed=1)
    chosen, weights = choices("random", rows), random(rows, TOP_K, seed=2)
    gate_up = weight(NUM_ROUTED + 1, hidden, 2 * inner, input_major=True, seed=3)
    down = weight(NUM_ROUTED + 1, inner, hidden, input_major=True, seed=4)
    listed = blocks.empty_blocks(
        rows, num_experts=NUM_ROUTED, top_k=TOP_K, slots=TOP_K + 1, block_rows=16, device=device
    )
    blocks.list_blocks(chosen.to(device), listed)
    given = [tensor.to(device) for tensor in (x, residual, weights)]
    found = moe.mix(*given, listed, gate_up.to(device), down.to(device))
    assert len(poisoned) == 5
    assert relative_error(found.cpu(), expected_mix(x, residual, chosen, weights, gate_up, down)) < 2e-6


def make_moe(raw: Config, *, input_major: bool) -> Moe:
    """Random weights in the plain form: not packed."""
    made = Moe(parse_config(raw, ()), torch.float32, input_major=input_major)
    for seed, tensor in enumerate(made.parameters()):
        tensor.data.copy_(
            random(*tensor.shape, seed=seed) / (tensor.shape[-2] ** 0.5 if tensor.ndim > 1 else 4)
        )
    return made


@pytest.mark.parametrize("rows", [1, 3, 17, 70])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("input_major", [True, False])
def test_the_layer_is_the_same_with_the_kernels_as_without(
    shape: str, rows: int, input_major: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_moe(SHAPES[shape], input_major=input_major)
    x, residual = random(rows, made.hidden), random(rows, made.hidden, seed=1)
    chosen, weights = made.router(x)
    no_weights = (torch.arange(made.num_experts) >= made.num_routed).float()[None]
    made.register_buffer("no_weights", no_weights, persistent=False)
    assert made.gate_up is not None and made.down is not None
    expected = made._all_experts(x, chosen, weights, made.gate_up, made.down) + residual
    monkeypatch.setattr(kernels, "fused", lambda x: True)
    found = made.to(device)(x.to(device), residual.to(device))
    assert relative_error(found.cpu(), expected) < 1e-5


def test_a_row_does_not_depend_on_its_neighbours(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as many tokens: neither on what the others hold and choose, nor on where the row stands."""
    monkeypatch.setattr(kernels, "fused", lambda x: True)
    made = make_moe(LITE, input_major=True).to(device)
    x = random(20, made.hidden).to(device)
    alone = made(x, x)
    others = random(20, made.hidden, seed=9).to(device)
    others[3] = torch.nan
    others[11] = x[7]
    assert made(others, others)[11].equal(alone[7])
    assert bool(made(others, others)[3].isnan().all())
