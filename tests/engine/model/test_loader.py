"""What the loader accepts, and what it refuses by name before anything is allocated (E8, E12)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.errors import CheckpointError
from engine.model import loader, plan
from engine.model.check import inspect_checkpoint
from engine.model.quant import dequantise
from engine.model.reader import INDEX, CheckpointReader
from tests.engine.model.support import load, logits_of, relative_error
from tests.fixtures import hf_layout
from tests.fixtures.checkpoints import build_f1, build_f2
from tests.fixtures.hf_layout import FP8_CONFIG, v2_config, v3_config

TOKENS = torch.arange(12)
FILE = "model.safetensors"


def edit(path: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    tensors = load_file(path / FILE)
    change(tensors)
    save_file(tensors, path / FILE, metadata={"format": "pt"})
    return path


def refuse(path: Path, *named: str) -> None:
    """Both the loader and the check refuse, naming each of ``named``; the loader before it allocates."""
    for attempt in (lambda: load(path), lambda: inspect_checkpoint(path)):
        with pytest.raises(CheckpointError) as caught:
            attempt()
        for text in named:
            assert text in str(caught.value)


@pytest.fixture(autouse=True)
def no_allocation_before_a_refusal(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "refused" in request.node.name:
        monkeypatch.setattr(loader, "_materialise", lambda *_: pytest.fail("allocated before the refusal"))


def test_shards_and_one_file_load_alike(tmp_path: Path) -> None:
    single, sharded = build_f2(tmp_path / "1"), build_f2(tmp_path / "3", shards=3)
    assert torch.equal(logits_of(*load(single), TOKENS), logits_of(*load(sharded), TOKENS))
    assert inspect_checkpoint(sharded).num_files == 3


def test_every_parameter_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage that starts as NaN ends without one, in every shape of layer."""

    def poisoned(module: torch.nn.Module, device: torch.device) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            storage = torch.full_like(parameter, torch.nan, device=device)
            setattr(module, name, torch.nn.Parameter(storage, requires_grad=False))

    monkeypatch.setattr(loader, "_materialise", poisoned)
    for name, raw in {
        "v3": v3_config(),
        "v2": v2_config(),
        "tied": v3_config(tie_word_embeddings=True),
    }.items():
        _, model = load(build_f2(tmp_path / name, raw), with_draft=name != "v2")
        for part in (model.decoder, model.draft):
            if isinstance(part, torch.nn.Module):
                assert all(parameter.isfinite().all() for parameter in part.parameters())


def test_derived_rotary_tables_are_tolerated(tmp_path: Path) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    path = edit(build_f2(tmp_path), add)
    load(path)
    assert inspect_checkpoint(path).ignored_tensors == 1


def test_nan_embeddings_load(tmp_path: Path) -> None:
    """Only router biases must be finite: a poisoned embedding is a test fixture (F3), and the guard's affair."""
    f1 = build_f1(tmp_path, nan_tokens=(7,))
    config, model = load(f1.path)
    assert logits_of(config, model, torch.tensor([3, 5])).isfinite().all()
    assert logits_of(config, model, torch.tensor([7])).isnan().all()


def test_e12_refused_directories(tmp_path: Path) -> None:
    refuse(build_empty(tmp_path / "none"), "holds no .safetensors file")
    path = build_empty(tmp_path / "directory")
    (path / "x.safetensors").mkdir()
    refuse(path, "x.safetensors", "not a file")
    path = build_f2(tmp_path / "two")
    (path / "extra.safetensors").write_bytes((path / FILE).read_bytes())
    refuse(path, INDEX)


def build_empty(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(v3_config()))
    return path


SHARD = "model-00002-of-00003.safetensors"


def test_e12_refused_shards(tmp_path: Path) -> None:
    def build(name: str) -> Path:
        return build_f2(tmp_path / name, shards=3)

    path = build("absent")
    (path / SHARD).unlink()
    refuse(path, SHARD, "absent")
    path = build("truncated")
    content = (path / SHARD).read_bytes()
    (path / SHARD).write_bytes(content[: len(content) - 100])
    refuse(path, SHARD, "damaged")
    (path / SHARD).write_bytes(b"")
    refuse(path, SHARD, "damaged")
    path = build("unlisted")
    (path / "model-00004-of-00004.safetensors").write_bytes((path / SHARD).read_bytes())
    refuse(path, "model-00004-of-00004.safetensors", "not named")


def test_e12_refused_indices(tmp_path: Path) -> None:
    path = build_f2(tmp_path, shards=3)
    index = json.loads((path / INDEX).read_text())

    def write(weight_map: object) -> None:
        (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    name, file = next(iter(index["weight_map"].items()))
    write({key: value for key, value in index["weight_map"].items() if key != name})
    refuse(path, name, "not listed")
    write(index["weight_map"] | {"model.ghost.weight": file})
    refuse(path, "model.ghost.weight")
    write(["a"])
    refuse(path, INDEX, "weight_map")
    (path / INDEX).write_text("{")
    refuse(path, INDEX)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", "model.layers.3.eh_proj.weight",
        "model.layers.1.mlp.experts.7.up_proj.weight", "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.layers.0.self_attn.q_a_layernorm.weight", "model.layers.2.mlp.shared_experts.down_proj.weight",
        "model.layers.3.shared_head.norm.weight",
    ],
)  # fmt: skip
def test_e8_refused_missing_tensor(tmp_path: Path, name: str) -> None:
    refuse(edit(build_f2(tmp_path), lambda tensors: tensors.__delitem__(name)), name)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate.weight", "visual.weight",
        "model.layers.4.input_layernorm.weight", "model.layers.1.self_attn.q_a_proj.bias",
        "model.layers.0.self_attn.o_proj.weight_scale_inv", "model.layers.1.mlp.experts.8.up_proj.weight",
    ],
)  # fmt: skip
def test_e8_refused_left_over_tensor(tmp_path: Path, name: str) -> None:
    refuse(edit(build_f2(tmp_path), lambda tensors: tensors.update({name: torch.ones(2)})), name)


def test_refused_shapes_and_types(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    path = build_f2(tmp_path)
    refuse(edit(path, lambda t: t.update({name: t[name].T.contiguous()})), name, "[64, 48]", "[48, 64]")
    refuse(edit(path, lambda t: t.update({name: torch.zeros(48, 64, dtype=torch.int8)})), name, "I8")
    quantised = torch.zeros(48, 64, dtype=torch.float8_e4m3fn)
    refuse(edit(path, lambda t: t.update({name: quantised})), name, "quantization_config")


def test_refused_name_that_occurs_with_and_without_prefix(tmp_path: Path) -> None:
    path = edit(build_f2(tmp_path), lambda t: t.update({"norm.weight": t["model.norm.weight"].clone()}))
    refuse(path, "norm.weight", "also in")


def test_refused_router_bias_that_is_not_finite(tmp_path: Path) -> None:
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    for value in (torch.nan, torch.inf):
        path = build_f2(tmp_path / str(value))
        refuse(edit(path, lambda t, value=value: t[name].__setitem__(3, value)), name, "non-finite")


def test_refused_tied_head_that_differs(tmp_path: Path) -> None:
    path = build_f2(tmp_path, v3_config(tie_word_embeddings=True))
    edit(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert CheckpointReader(path).tensors["lm_head.weight"].shape == (96, 64)
    inspect_checkpoint(path)
    refuse(edit(path, lambda t: t["lm_head.weight"].mul_(2)), "lm_head.weight", "tie_word_embeddings")


def test_fp8_blocks_are_dequantised(tmp_path: Path) -> None:
    """Sizes that are no multiple of 128, so that the last blocks are cut; the truth is worked out elementwise."""
    raw = v3_config(hidden_size=160, intermediate_size=144, q_lora_rank=136)
    path = build_f2(tmp_path / "fp8", raw, fp8=True)
    stored = load_file(path / FILE)
    plain: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name + "_scale_inv" in stored:
            scale = stored[name + "_scale_inv"]
            rows, columns = (torch.arange(size) // 128 for size in tensor.shape)
            plain[name] = tensor.float() * scale[rows[:, None], columns[None, :]]
            assert torch.equal(dequantise(tensor, scale), plain[name])
        elif not name.endswith("_scale_inv"):
            plain[name] = tensor
    expected = logits_of(*load(hf_layout.write(tmp_path / "plain", raw, plain)), TOKENS)
    assert relative_error(logits_of(*load(path), TOKENS), expected) < 1e-6
    report = inspect_checkpoint(path)
    assert report.stored_dtypes["float8_e4m3fn"] > 0 and "dequantised" in str(report)


def test_fp8_scales_are_checked(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    path = build_f2(tmp_path, fp8=True)
    original = load_file(path / FILE)[name]
    refuse(edit(path, lambda t: t.update({name: torch.ones(2, 1)})), name, "[2, 1]")
    refuse(edit(path, lambda t: t.__delitem__(name)), name, "missing")
    edit(path, lambda t: t.update({name: original}))
    assert json.loads((path / "config.json").read_text())["quantization_config"] == FP8_CONFIG
    load(path)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.gate.e_score_correction_bias"])
def test_refused_fp8_vector(tmp_path: Path, name: str) -> None:
    def quantise(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(1)

    refuse(edit(build_f2(tmp_path, fp8=True), quantise), name, "FP8", "only matrices")


@pytest.mark.parametrize(
    ("key", "value", "held"),
    [("num_hidden_layers", 100_000, "4 layers"), ("n_routed_experts", 100_000, "72 tensors")],
)
def test_refused_counts_that_the_files_do_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: int, held: str
) -> None:
    """Before a module is made: that many would take all memory, and for ever."""
    monkeypatch.setattr(plan, "Decoder", lambda *_, **__: pytest.fail("a module before the refusal"))
    path = build_f2(tmp_path)
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | {key: value}))
    refuse(path, f"{key}={value}", held)


def test_experts_that_no_layer_has_are_not_missed(tmp_path: Path) -> None:
    raw = v3_config(first_k_dense_replace=3, num_nextn_predict_layers=0)
    load(build_f2(tmp_path, raw))


def test_report_counts(tmp_path: Path) -> None:
    path = build_f2(tmp_path, mtp_copies=("embed", "head"))
    _, model = load(path, with_draft=True)
    report = inspect_checkpoint(path)
    shapes = hf_layout.tensor_shapes(json.loads((path / "config.json").read_text()))
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    draft = {name for name in sizes if name.startswith("model.layers.3.")}
    copies = {name for name in draft if name.endswith(("embed_tokens.weight", "shared_head.head.weight"))}
    assert report.target_parameters == sum(sizes[name] for name in sizes.keys() - draft)
    assert report.draft_parameters == sum(sizes[name] for name in draft - copies)
    assert report.kv_bytes_per_token(torch.bfloat16) == 4 * 40 * 2
    routers = sum(size for name, size in sizes.items() if ".gate." in name)
    total = report.target_parameters + report.draft_parameters
    assert report.weight_bytes(torch.bfloat16) == 2 * total + 2 * routers
    assert model.report == report
    assert "1 of 1 declared" in str(report) and "deepseek_v3" in str(report)


def test_the_shipped_checkpoint_passes() -> None:
    path = Path(__file__).parents[3] / "models" / "eyas-14m"
    report = inspect_checkpoint(path)
    assert report.mtp_layers_held == 1 and report.own_copies == ()
    config, model = load(path, with_draft=True)
    assert logits_of(config, model, TOKENS).isfinite().all()
