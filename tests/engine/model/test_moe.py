"""Routing and mixing against the published formula in fp64 (E5, E6)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from engine.config import ModelConfig, parse_config
from engine.model.layers import DenseMlp
from engine.model.moe import BAG_ROWS, Moe, Router
from tests.engine.model.support import load, relative_error
from tests.fixtures.checkpoints import build_f2
from tests.fixtures.hf_layout import Config, quantise_fp8, v2_config, v3_config


def reference_routing(config: ModelConfig, logits: Tensor, bias: Tensor | None) -> Tensor:
    """[N, experts] fp64 weights, row by row and group by group."""
    scores = logits.sigmoid() if config.scoring_func == "sigmoid" else logits.softmax(dim=-1)
    dense = torch.zeros_like(scores)
    size = config.n_routed_experts // config.n_group
    for row, score in enumerate(scores):
        preference = score if bias is None else score + bias
        best = {"noaux_tc": 2, "group_limited_greedy": 1}.get(config.topk_method, 1)
        rank = [
            float(preference[group * size : (group + 1) * size].topk(min(best, size))[0].sum())
            for group in range(config.n_group)
        ]
        groups = sorted(range(config.n_group), key=lambda group: -rank[group])[: config.topk_group]
        allowed = [expert for expert in range(config.n_routed_experts) if expert // size in groups]
        chosen = sorted(allowed, key=lambda expert: -float(preference[expert]))[: config.num_experts_per_tok]
        total = float(score[chosen].sum()) if config.norm_topk_prob else 1.0
        for expert in chosen:
            dense[row, expert] = score[expert] / total * config.routed_scaling_factor
    return dense


def reference_moe(config: ModelConfig, tensors: dict[str, Tensor], prefix: str, x: Tensor) -> Tensor:
    """fp64 sum over experts of weight x MLP, plus the shared experts unscaled."""
    weights = {name: tensor.double() for name, tensor in tensors.items() if name.startswith(prefix)}

    def mlp(name: str) -> Tensor:
        gate, up, down = (weights[f"{prefix}.{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

    bias = weights.get(f"{prefix}.gate.e_score_correction_bias")
    dense = reference_routing(config, x @ weights[f"{prefix}.gate.weight"].T, bias)
    out = torch.zeros_like(x)
    for expert in range(config.n_routed_experts):
        out += dense[:, expert, None] * mlp(f"experts.{expert}")
    return out + mlp("shared_experts") if config.n_shared_experts else out


def moe_of(path: Path, dtype: torch.dtype = torch.float32) -> tuple[ModelConfig, Moe]:
    config, model = load(path, dtype=dtype)
    moe = model.decoder.layers[1].mlp
    assert isinstance(moe, Moe)
    return config, moe


def inputs(rows: int, hidden: int = 64) -> Tensor:
    return torch.randn(rows, hidden, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("shared", [0, 1, 2])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "fp8"])
def test_e5_moe_equals_the_formula(
    tmp_path: Path, norm_topk_prob: bool, scale: float, shared: int, stored: str
) -> None:
    """One row, few rows, many rows: each takes another product; the stored type decides which are packed."""
    raw = v3_config(norm_topk_prob=norm_topk_prob, routed_scaling_factor=scale, n_shared_experts=shared)
    dtype = torch.bfloat16 if stored == "bfloat16" else torch.float32
    path = build_f2(tmp_path, raw, dtype=dtype, fp8=stored == "fp8")
    config, moe = moe_of(path)
    tensors = load_file(path / "model.safetensors")
    if stored == "fp8":
        scales = {name: tensor for name, tensor in tensors.items() if name.endswith("_scale_inv")}
        for name, scale_inv in scales.items():
            weight_name = name.removesuffix("_scale_inv")
            tensors[weight_name] = tensors[weight_name].float() * scale_inv  # one block at these sizes
    for rows in (1, 5, BAG_ROWS, BAG_ROWS + 1, 40):
        x = inputs(rows)
        residual = torch.randn(rows, 64)
        expected = reference_moe(config, tensors, "model.layers.1.mlp", x.double()) + residual
        assert relative_error(moe(x, residual), expected) < 1e-5


@pytest.mark.parametrize(
    "raw",
    [
        v2_config(),
        v2_config(topk_method="group_limited_greedy", n_group=4, topk_group=2, routed_scaling_factor=16.0),
        v3_config(scoring_func="softmax", topk_method="greedy", routed_scaling_factor=2.5),
        v3_config(n_group=2, topk_group=1, num_experts_per_tok=3),
        v3_config(n_group=1, topk_group=1),
        v3_config(scoring_func="softmax"),
        v3_config(n_routed_experts=24, n_group=1, topk_group=1, num_experts_per_tok=6),
    ],
)
def test_e5_routing_families_equal_the_formula(tmp_path: Path, raw: Config) -> None:
    path = build_f2(tmp_path, raw, dtype=torch.bfloat16)
    config, moe = moe_of(path)
    tensors = load_file(path / "model.safetensors")
    for rows in (3, 33):
        x = inputs(rows)
        expected = reference_moe(config, tensors, "model.layers.1.mlp", x.double())
        assert relative_error(moe(x, torch.zeros_like(x)), expected) < 1e-5


@pytest.mark.parametrize(
    ("hidden", "inner", "dtype"),
    [(66, 24, torch.float32), (64, 30, torch.float32), (68, 24, torch.bfloat16), (64, 20, torch.bfloat16)],
)
def test_rows_that_no_grouped_product_takes(
    tmp_path: Path, hidden: int, inner: int, dtype: torch.dtype
) -> None:
    """Sizes whose rows are no multiple of 16 bytes, for few rows and for many."""
    path = build_f2(tmp_path, v3_config(hidden_size=hidden, moe_intermediate_size=inner))
    _, model = load(path, dtype=dtype)
    moe = model.decoder.layers[1].mlp
    assert isinstance(moe, Moe) and moe.gate_up is not None and moe.down is not None
    for rows in (1, BAG_ROWS, BAG_ROWS + 1, 40):
        x = inputs(rows, hidden).to(dtype)
        chosen, weights = moe.router(x)
        expected = moe._all_experts(x, chosen, weights.to(dtype), moe.gate_up, moe.down)
        error = relative_error(moe(x, torch.zeros_like(x)), expected)
        assert error < (1e-5 if dtype == torch.float32 else 3e-2)


def test_every_product_gives_the_same(tmp_path: Path) -> None:
    """Also the ones that this device would not choose, and in bf16 within its precision."""
    _, moe = moe_of(build_f2(tmp_path))
    assert moe.gate_up is not None and moe.down is not None
    for rows in (1, 7, BAG_ROWS):
        x = inputs(rows)
        chosen, weights = moe.router(x)
        weight_args = (moe.gate_up, moe.down)
        expected = moe._all_experts(x, chosen, weights, *weight_args)
        chosen = torch.cat((chosen, moe.shared_ids.expand(rows, -1)), dim=-1)
        weights = F.pad(weights, (0, moe.num_shared), value=1.0)
        assert relative_error(moe._bags(x, chosen, weights, *weight_args), expected) < 1e-5
        assert relative_error(moe._grouped(x, chosen, weights, *weight_args), expected) < 1e-5
        half = [tensor.bfloat16() for tensor in (x, weights, moe.gate_up, moe.down)]
        grouped = moe._grouped(half[0], chosen, half[1], half[2], half[3])
        assert relative_error(grouped, expected) < 3e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("base", "spread"), [(7.0, 0.1), (12.0, 0.1), (12.0, 1e-4)])
def test_e6_large_biases_choose_the_experts_of_fp64(
    tmp_path: Path, dtype: torch.dtype, base: float, spread: float
) -> None:
    """A bias around 12 with tiny logits: in bf16 it would keep a handful of values, and (s + b) - b would be 0."""
    config = parse_config(v3_config(n_routed_experts=64, n_group=8, topk_group=4, num_experts_per_tok=8), ())
    generator = torch.Generator().manual_seed(3)
    router = Router(config)
    assert router.projection.weight is not None and router.bias is not None
    router.projection.weight.copy_(1e-3 * torch.randn(64, 64, generator=generator))
    router.bias.copy_(base + spread * (2 * torch.rand(64, generator=generator) - 1))
    router.projection.prepare()
    x = inputs(50).to(dtype)
    chosen, weights = router(x)
    weight = router.projection.weight
    assert weight is not None and weights.dtype == torch.float32
    expected = reference_routing(config, x.double() @ weight.double(), router.bias.double())
    found = torch.zeros(50, 64, dtype=torch.float64).scatter(1, chosen, weights.double())
    assert torch.equal(found > 0, expected > 0)
    assert (found - expected).abs().max() < 1e-6
    assert (found.sum(dim=-1) - config.routed_scaling_factor).abs().max() < 1e-5


def test_e6_routers_stay_fp32_in_a_bf16_engine(tmp_path: Path) -> None:
    _, moe = moe_of(build_f2(tmp_path), torch.bfloat16)
    assert moe.router.bias is not None and moe.router.bias.dtype == torch.float32
    weight = moe.router.projection.weight
    assert weight is not None and weight.dtype == torch.float32
    assert moe.down is not None and moe.down.dtype == torch.bfloat16


def test_a_nan_row_leaves_the_other_rows_alone(tmp_path: Path) -> None:
    for stored in (torch.float32, torch.bfloat16):
        _, moe = moe_of(build_f2(tmp_path / str(stored), dtype=stored))
        for rows in (4, 40):
            x = inputs(rows)
            expected = moe(x, x)
            x = x.clone()
            x[2] = torch.nan
            found = moe(x, x)
            others = [row for row in range(rows) if row != 2]
            assert torch.isnan(found[2]).all()
            assert torch.equal(found[others], expected[others])


def test_dense_mlp_equals_the_formula() -> None:
    for input_major in (True, False):
        mlp = DenseMlp(16, 24, dtype=torch.float32, input_major=input_major)
        generator = torch.Generator().manual_seed(0)
        gate, up = (torch.randn(24, 16, generator=generator) for _ in range(2))
        down = torch.randn(16, 24, generator=generator)
        assert mlp.gate_up.weight is not None and mlp.down.weight is not None
        mlp.gate_up.weight.copy_(torch.cat((gate, up)).T)
        mlp.down.weight.copy_(down.T)
        x, residual = inputs(6, 16), inputs(7, 16)[:6]
        expected = residual + (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
        assert relative_error(mlp(x, residual), expected) < 1e-5


def test_quantise_fixture_is_lossy_but_close() -> None:
    """The FP8 fixture really quantises: the loader's dequantisation is tested on values it had to change."""
    weight = torch.randn(200, 150, generator=torch.Generator().manual_seed(1))
    stored = quantise_fp8({"q_proj.weight": weight})
    scales = stored["q_proj.weight_scale_inv"]
    assert scales.shape == (2, 2) and stored["q_proj.weight"].dtype == torch.float8_e4m3fn
    assert (
        0
        < (stored["q_proj.weight"].float()[:128, :128] * scales[0, 0] - weight[:128, :128]).abs().max()
        < 0.2
    )
