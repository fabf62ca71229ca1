"""The trtllm-gen backend without a Blackwell GPU: what it refuses, how it shapes a call, and that flashinfer's
own signature and shape check take that call. What the kernel computes is in ``tests/gpu/test_b200.py``."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention import AttentionSpec, make_backend
from engine.attention import trtllm_mla as module
from engine.attention.trtllm_mla import TrtllmMla, decode_arguments, plan_decode
from engine.errors import ConfigError
from engine.layout import packed_layout, uniform_layout

HEADS, RANK, ROPE = 16, 512, 64
CPU = torch.device("cpu")
B200 = AttentionSpec(
    torch.device("cuda", 0), torch.bfloat16, HEADS, RANK, RANK + ROPE, 0.1, page_size=64, qk_nope_head_dim=128
)


@pytest.fixture
def blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine as a B200 with flashinfer would describe itself."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    monkeypatch.setattr(module, "find_spec", lambda name: object())


def _meta_call(
    page_size: int, stride: int, rows: int = 3, width: int = 5, **changes: Any
) -> tuple[AttentionSpec, dict[str, Any]]:
    """The arguments of a decode over a table of ``width`` pages, as meta tensors."""
    spec = replace(B200, page_size=page_size, **changes)
    table = torch.empty((rows, width), dtype=torch.int32, device="meta")
    plan = plan_decode(spec, table, torch.empty((rows,), dtype=torch.int64, device="meta"))
    query = torch.empty((rows, stride, HEADS, spec.latent_dim), dtype=torch.bfloat16, device="meta")
    pages = torch.empty((40, page_size, spec.latent_dim), dtype=torch.bfloat16, device="meta")
    workspace = torch.empty((128 << 20,), dtype=torch.uint8, device="meta")
    return spec, decode_arguments(spec, query, pages, workspace, plan)


def _flashinfer_check(spec: AttentionSpec, arguments: dict[str, Any]) -> Tensor:
    """flashinfer's own shape check, called as its public function calls it."""
    mla = pytest.importorskip("flashinfer.mla._core", reason="flashinfer-python is not installed")
    checked: Tensor = mla._check_trtllm_gen_mla_shape(
        arguments["query"],
        arguments["kv_cache"],
        arguments["kv_lora_rank"],
        arguments["qk_rope_head_dim"],
        0,
        arguments["block_tables"],
        arguments["kv_cache"].size(-2),
        True,
    )
    return checked


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float16}, "needs bfloat16, the engine runs in float16"),
        ({"kv_lora_rank": 32, "latent_dim": 40}, "the checkpoint has 32 and 8"),
        ({"kv_lora_rank": 512, "latent_dim": 544}, "the checkpoint has 512 and 32"),
        ({"qk_nope_head_dim": 192}, "needs qk_nope_head_dim 64 or 128, the checkpoint has 192"),
        (
            {"num_heads": 40},
            "needs up to 16 attention heads, 32, 48 or a multiple of 64 up to 256, the checkpoint has 40",
        ),
        (
            {"num_heads": 64, "kv_lora_rank": 256, "latent_dim": 320},
            "16 attention heads or 32, the checkpoint has 64",
        ),
        ({"page_size": 16}, "needs kv_page_size 32 or 64, not 16"),
        ({"page_size": 128}, "needs kv_page_size 32 or 64, not 128"),
        ({"device": CPU}, "needs a CUDA device, the engine runs on cpu"),
    ],
    ids=str,
)
def test_what_it_cannot_serve_is_refused_with_the_reason(
    blackwell: None, changes: dict[str, Any], reason: str
) -> None:
    assert TrtllmMla.unsupported(B200) is None
    assert reason in (TrtllmMla.unsupported(replace(B200, **changes)) or "")
    with pytest.raises(ConfigError, match="attention_backend='trtllm_mla': needs"):
        make_backend("trtllm_mla", replace(B200, **changes))


@pytest.mark.parametrize("page_size", [32, 64])
@pytest.mark.parametrize(
    ("rank", "heads"),
    [(256, 2), (256, 16), (256, 32), (512, 1), (512, 16), (512, 32), (512, 48), (512, 64), (512, 128)],
)
def test_what_it_serves(blackwell: None, heads: int, rank: int, page_size: int) -> None:
    spec = replace(B200, num_heads=heads, kv_lora_rank=rank, latent_dim=rank + ROPE, page_size=page_size)
    assert TrtllmMla.unsupported(spec) is None


@pytest.mark.parametrize(
    ("capability", "serves"), [((9, 0), False), ((10, 0), True), ((10, 3), True), ((12, 0), False)]
)
def test_it_needs_sm100_or_sm103(
    blackwell: None, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], serves: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    reason = TrtllmMla.unsupported(B200)
    assert (reason is None) == serves
    assert serves or f"this GPU has {capability[0]}.{capability[1]}" in (reason or "")


def test_it_needs_flashinfer(blackwell: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert TrtllmMla.unsupported(B200) == "needs the package flashinfer-python, which is not installed"


@pytest.mark.parametrize(
    ("page_size", "width", "padded"), [(32, 1, 4), (32, 4, 4), (32, 5, 8), (64, 1, 2), (64, 2, 2), (64, 7, 8)]
)
def test_the_table_is_filled_up_with_the_scratch_page(page_size: int, width: int, padded: int) -> None:
    table = torch.arange(1, 1 + 3 * width, dtype=torch.int32).view(3, width)
    plan = plan_decode(replace(B200, page_size=page_size), table, torch.tensor([1, 2, 3]))
    assert plan.block_table.shape == (3, padded) and plan.block_table.is_contiguous()
    assert torch.equal(plan.block_table[:, :width], table)
    assert not plan.block_table[:, width:].any()
    assert (plan.block_table.dtype, plan.seq_lens.dtype) == (torch.int32, torch.int32)
    assert plan.max_seq_len == padded * page_size


def test_what_a_capture_freezes_does_not_depend_on_lengths() -> None:
    """The scheduler of the kernel reads ``max_seq_len`` on the host: it may depend on shapes alone."""
    table = torch.zeros((2, 3), dtype=torch.int32)
    short, long = (plan_decode(B200, table, torch.tensor(lengths)) for lengths in ([1, 1], [190, 4]))
    assert short.max_seq_len == long.max_seq_len == 256
    assert short.block_table.shape == long.block_table.shape


def test_a_ragged_prefill_is_rows_of_one_token() -> None:
    """The rows that stand for a prefill's tokens see what those tokens see, by the oracle of both forms."""
    generator = torch.Generator().manual_seed(0)
    spec = replace(B200, device=CPU, dtype=torch.float32, num_heads=2, kv_lora_rank=24, latent_dim=32)
    spec = replace(spec, page_size=32)
    layout = packed_layout([5, 1, 40], [30, 0, 7])
    pages = torch.randn(9, 32, 32, generator=generator)
    table = (torch.randperm(8, generator=generator) + 1)[:6].view(3, 2).int()
    tokens = torch.randn(layout.num_tokens, 2, 32, generator=generator)
    oracle = make_backend("torch_mla", spec)
    expected = oracle.attend_packed(tokens, pages, oracle.prepare_packed(layout, table))

    owners, seq_lens = module._token_rows(layout, CPU)
    assert owners.tolist() == [0] * 5 + [1] + [2] * 40
    assert seq_lens.tolist() == [*range(31, 36), 1, *range(8, 48)]
    rows = uniform_layout(layout.num_tokens, 1, CPU)
    plan = oracle.prepare(rows, table[owners], seq_lens.long(), tuple(seq_lens.tolist()))
    torch.testing.assert_close(oracle.attend(tokens[:, None], pages, plan)[:, 0], expected)


@pytest.mark.parametrize("page_size", [32, 64])
@pytest.mark.parametrize("stride", [1, 4])
def test_flashinfer_takes_the_call(page_size: int, stride: int) -> None:
    mla = pytest.importorskip("flashinfer.mla", reason="flashinfer-python is not installed")
    spec, arguments = _meta_call(page_size, stride)
    signature = inspect.signature(mla.trtllm_batch_decode_with_kv_cache_mla)
    bound = signature.bind(**arguments)
    bound.apply_defaults()
    given = bound.arguments
    assert (given["sparse_mla_top_k"], given["return_lse"], given["uses_shared_paged_kv_idx"]) == (
        0,
        False,
        True,
    )
    assert _flashinfer_check(spec, arguments).shape == (40, 1, page_size, RANK + ROPE)
    with pytest.raises(TypeError):
        signature.bind(**arguments, cu_seqlens_q=None)


@pytest.mark.parametrize(("rank", "nope"), [(512, 128), (256, 64)])
@pytest.mark.parametrize("page_size", [32, 64])
@pytest.mark.parametrize("width", range(1, 10))
def test_flashinfer_takes_tables_of_any_width_once_planned(
    page_size: int, width: int, rank: int, nope: int
) -> None:
    changes = {"kv_lora_rank": rank, "latent_dim": rank + ROPE, "qk_nope_head_dim": nope}
    spec, arguments = _meta_call(page_size, 4, width=width, **changes)
    _flashinfer_check(spec, arguments)
    raw = arguments | {"block_tables": torch.empty((3, width), dtype=torch.int32, device="meta")}
    if width % (128 // page_size):
        with pytest.raises(ValueError, match="block_num"):
            _flashinfer_check(spec, raw)
    else:
        _flashinfer_check(spec, raw)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("query", (3, HEADS, RANK + ROPE)),
        ("query", (2, 4, HEADS, RANK + ROPE)),
        ("query", (3, 4, HEADS, RANK)),
        ("kv_cache", (40, 1, 64, RANK)),
        ("block_tables", (3,)),
        ("block_tables", (2, 6)),
    ],
    ids=str,
)
def test_flashinfer_refuses_another_shape(name: str, shape: tuple[int, ...]) -> None:
    spec, arguments = _meta_call(64, 4)
    _flashinfer_check(spec, arguments)
    wrong = torch.empty(shape, dtype=arguments[name].dtype, device="meta")
    with pytest.raises(ValueError):
        _flashinfer_check(spec, arguments | {name: wrong})
