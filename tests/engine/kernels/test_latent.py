"""The latent kernel against the operators that it replaces, alone and inside a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import kernels
from engine.attention.base import AttentionSpec, PackedAttention, UniformAttention
from engine.attention.torch_mla import TorchMla
from engine.config import ModelConfig, parse_config
from engine.kv.pool import LatentPool
from engine.layout import packed_layout, uniform_layout
from engine.model.decoder import DecoderLayer
from engine.model.rope import RotaryTable, rotate
from tests.fixtures.hf_layout import v2_config, v3_config

latent = pytest.importorskip("engine.kernels.latent", reason="Triton is not installed")

EPS = 1e-6
POISON = -77.0
"""What outputs hold before a kernel runs; exact in every dtype."""
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DOT_DTYPES = [*TOLERANCE] if torch.cuda.is_available() else [torch.float32, torch.float16]
"""The interpreter cannot multiply bf16 blocks."""


@dataclass
class Case:
    """One call of the kernel; slices of one wide product, as a layer gives them."""

    q_nope: Tensor
    q_rope: Tensor
    k_rope: Tensor
    compressed: Tensor
    weight: Tensor
    table: RotaryTable
    positions: Tensor
    slots: Tensor
    pool: LatentPool
    query: Tensor
    w_uk: Tensor

    def run(self) -> bool:
        absorbed: bool = latent.write_latent(
            self.q_nope,
            self.q_rope,
            self.k_rope,
            self.compressed,
            weight=self.weight,
            eps=EPS,
            table=self.table.table,
            positions=self.positions,
            pool_rows=self.pool.rows[1],
            slots=self.slots,
            query=self.query,
            w_uk=self.w_uk,
        )
        return absorbed

    def wanted(self) -> tuple[Tensor, Tensor]:
        """Latent rows ``[N, lora + rope]`` and rotated queries ``[N, H, rope]`` of plain operators."""
        rows, rope = self.k_rope.shape
        parts = torch.cat((self.q_rope, self.k_rope), dim=-1).view(rows, -1, rope)
        rotated = rotate(parts, *self.table(self.positions))
        wide = self.compressed.float()
        scale = (wide.square().mean(dim=-1, keepdim=True) + EPS).rsqrt()
        normed = (wide * scale * self.weight.float()).to(self.compressed.dtype)
        whole = torch.cat((normed, rotated[:, -1]), dim=-1)
        return whole.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0), rotated[:, :-1]


def make(
    device: torch.device,
    *,
    rows: int = 5,
    heads: int = 3,
    rope: int = 8,
    rank: int = 40,
    nope: int = 7,
    dtype: torch.dtype = torch.float32,
    pool_dtype: torch.dtype | None = None,
) -> Case:
    config = parse_config(v3_config(qk_rope_head_dim=rope, kv_lora_rank=rank), ())
    generator = torch.Generator().manual_seed(0)
    widths = [heads * nope, heads * rope, rope, rank]
    down = torch.randn(rows, sum(widths), generator=generator).to(device, dtype)
    q_nope, q_rope, k_rope, compressed = down.split(widths, dim=-1)
    pool = LatentPool(
        num_layers=2,
        num_pages=8,
        page_size=8,
        latent_dim=rank + rope,
        dtype=pool_dtype or dtype,
        device=device,
    )
    pool.pages.fill_(POISON)
    slots = torch.randperm(64, generator=generator)[:rows]
    return Case(
        q_nope,
        q_rope,
        k_rope,
        compressed,
        torch.randn(rank, generator=generator).to(device, dtype),
        RotaryTable(config, 50, device),
        torch.randint(50, (rows,), generator=generator).to(device),
        slots.to(device),
        pool,
        torch.full((rows, heads, rank + rope), POISON, dtype=dtype, device=device),
        (torch.randn(heads, nope, rank, generator=generator) / nope**0.5).to(device, dtype),
    )


def check(case: Case) -> None:
    """What is written is right, and nothing else is touched."""
    absorbed = case.run()
    assert absorbed == (case.query.shape[0] <= latent.MAX_ROWS)
    rows, queries = case.wanted()
    rank, tolerance = case.weight.shape[0], TOLERANCE[case.compressed.dtype]
    written = case.pool.rows[1][case.slots]
    torch.testing.assert_close(written, rows.to(written.dtype), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(case.query[..., rank:], queries, rtol=tolerance, atol=tolerance)
    if not absorbed:
        assert (case.query[..., :rank] == POISON).all()
    elif case.query.dtype in DOT_DTYPES:
        q_nope = case.q_nope.unflatten(1, case.w_uk.shape[:2])
        product = torch.einsum("nhi,hio->nho", q_nope.double(), case.w_uk.double())
        error = (case.query[..., :rank].double() - product).norm() / product.norm()
        assert error < tolerance
    untouched = [row for row in range(64) if row not in case.slots.tolist()]
    assert (case.pool.rows[1][untouched] == POISON).all()
    assert (case.pool.rows[0] == POISON).all()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("heads", "rope", "rank"), [(3, 8, 40), (1, 2, 1), (9, 6, 33), (16, 64, 512), (21, 12, 24)]
)
def test_rows_and_queries_are_written_in_place(
    device: torch.device, dtype: torch.dtype, heads: int, rope: int, rank: int
) -> None:
    check(make(device, heads=heads, rope=rope, rank=rank, dtype=dtype))


@pytest.mark.parametrize("rows", [1, latent.MAX_ROWS, latent.MAX_ROWS + 1, 40])
@pytest.mark.parametrize("nope", [1, 16, 130])
def test_few_rows_get_their_absorbed_part_too(device: torch.device, rows: int, nope: int) -> None:
    check(make(device, rows=rows, nope=nope, rank=70))


def test_a_pool_of_another_dtype(device: torch.device) -> None:
    check(make(device, pool_dtype=torch.float16))
    check(make(device, dtype=torch.float16, pool_dtype=torch.float32))


def test_what_is_not_finite_is_stored_as_zero(device: torch.device) -> None:
    """A bad KV spoils its own row's norm, a bad key one pair; other rows and the queries stay as they are."""
    case = make(device, rows=6)
    case.compressed[1, 3] = torch.nan
    case.compressed[2, 0] = torch.inf
    case.k_rope[3, 2] = -torch.inf
    case.q_rope[4, 5] = torch.nan
    case.run()
    written = case.pool.rows[1][case.slots]
    assert written.isfinite().all()
    rows, queries = case.wanted()
    torch.testing.assert_close(written, rows, rtol=2e-6, atol=2e-6)
    assert (written[1, :40] == 0).all() and (written[1, 40:] != 0).any()
    assert (written[3] == 0).sum() == 2
    torch.testing.assert_close(case.query[..., 40:], queries, rtol=2e-6, atol=2e-6, equal_nan=True)


def test_fp16_overflow_is_stored_as_zero(device: torch.device) -> None:
    case = make(device, dtype=torch.float16)
    case.weight.fill_(6e4)
    case.run()
    written = case.pool.rows[1][case.slots]
    assert written.isfinite().all() and (written[:, :40] == 0).any()


def layer_of(config: ModelConfig, device: torch.device) -> DecoderLayer:
    """A dense layer with random fp32 weights in the GPU's memory order."""
    layer = DecoderLayer(config, 0, dtype=torch.float32, input_major=False)
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[0] ** 0.5)
    for norm in (layer.input_norm, layer.mlp_norm, layer.attention.kv_norm, layer.attention.query_norm):
        if norm is not None:
            norm.prepare()
    return layer.to(device)


def attention_of(config: ModelConfig, device: torch.device, packed: bool) -> tuple[LatentPool, Any]:
    """A pool with a past, and attention of 6 tokens: two rows of three, or requests of two and four."""
    rank = config.kv_lora_rank
    dim = rank + config.qk_rope_head_dim
    spec = AttentionSpec(
        device=device,
        dtype=torch.float32,
        num_heads=config.num_attention_heads,
        kv_lora_rank=rank,
        latent_dim=dim,
        softmax_scale=config.softmax_scale,
        page_size=4,
        qk_nope_head_dim=config.qk_nope_head_dim,
    )
    pool = LatentPool(
        num_layers=1, num_pages=9, page_size=4, latent_dim=dim, dtype=torch.float32, device=device
    )
    pool.pages.copy_(torch.randn(pool.pages.shape, generator=torch.Generator().manual_seed(1)))
    table = torch.tensor([[3, 5, 1], [8, 2, 7]], dtype=torch.int32, device=device)
    lengths = (2, 4) if packed else (3, 3)
    contexts = (5, 2)
    slots = torch.cat(
        [
            table[row, torch.arange(before, before + length) // 4].long() * 4
            + torch.arange(before, before + length).to(device) % 4
            for row, (length, before) in enumerate(zip(lengths, contexts, strict=True))
        ]
    )
    if packed:
        return pool, PackedAttention(
            TorchMla(spec), pool, packed_layout(list(lengths), list(contexts)), table, slots
        )
    seq_lens = torch.tensor([8, 5], dtype=torch.int32, device=device)
    layout = uniform_layout(2, 3, device)
    return pool, UniformAttention(TorchMla(spec), pool, layout, table, seq_lens, (8, 5), slots)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("config", [v2_config(), v3_config()], ids=["no query rank", "query rank"])
def test_a_fused_layer_equals_the_plain_one(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], few: bool, packed: bool
) -> None:
    """Through the kernels for few rows, or through the library's products into slices."""
    linear = pytest.importorskip("engine.kernels.linear")
    heads = pytest.importorskip("engine.kernels.heads")
    model = parse_config(config, ())
    layer = layer_of(model, device)
    angles = RotaryTable(model, 50, device).at(torch.tensor([5, 6, 7, 2, 3, 4], device=device))
    x = torch.randn(6, model.hidden_size, generator=torch.Generator().manual_seed(2)).to(device)
    outs, pools = [], []
    monkeypatch.setattr(linear, "serves", lambda *_: few)
    if not few:
        monkeypatch.setattr(latent, "MAX_ROWS", 0)
        monkeypatch.setattr(heads, "MAX_ROWS", 0)
    for fused in (False, True):
        monkeypatch.setattr(kernels, "fused", lambda _, fused=fused: fused)
        pool, attention = attention_of(model, device, packed)
        outs.append(layer(x.clone(), angles, attention))
        pools.append(pool.pages)
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(pools[1], pools[0], rtol=1e-5, atol=1e-5)
