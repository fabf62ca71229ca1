"""Random models for benchmarks: weights, written checkpoint, routing; forced acceptance; the floor."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from engine.bench_floor import Touched, step_bytes
from engine.build import assemble
from engine.config import ModelConfig, parse_config
from engine.engine import Engine
from engine.errors import ConfigError
from engine.model.loader import LoadedModel, load_model
from engine.model.moe import Router
from engine.options import EngineOptions
from engine.runner import Runner
from engine.synthetic import PRESETS, ForcedOps, forced_counts, random_model
from engine.types import SamplingParams
from tests.engine.drive import Answer, finish, greedy, request

TINY = PRESETS["tiny"]
SOFTMAX = TINY | {
    "scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": False, "n_group": 1, "topk_group": 1,
}  # fmt: skip
POSITIONS = 256
CPU = torch.device("cpu")


def make(raw: dict[str, Any] = TINY, dtype: torch.dtype = torch.float32, **changes: Any) -> LoadedModel:
    arguments = {"routing": "spread", "device": CPU, "max_positions": POSITIONS, "seed": 3} | changes
    return random_model(raw, parse_config(raw, ()), dtype=dtype, **arguments)


def make_engine(model: LoadedModel, accept_length: float | None = None, **options: Any) -> Engine:
    def adjust(runner: Runner) -> None:
        if accept_length is not None:
            k = runner.state.draft_probs.shape[1]
            runner.step.ops = ForcedOps(runner.step.ops, runner.state, runner.pool, k, accept_length)

    defaults: dict[str, Any] = {
        "model": "random",
        "device": "cpu",
        "max_model_len": 128,
        "max_num_seqs": 2,
        "kv_page_size": 8,
        "num_kv_pages": 64,
        "seed": 0,
    }
    config = parse_config(TINY, ())
    chosen = EngineOptions(**defaults | options)
    return Engine(assemble(config, chosen, lambda resolved, positions: model, lambda _: None, adjust), chosen)


def answer(engine: Engine, prompt: list[int], count: int = 24, **params: Any) -> Answer:
    engine.add(request("a", prompt, greedy(count, **params)))
    return finish(engine)["a"]


def prompt_of(count: int, seed: int = 0) -> list[int]:
    return torch.randint(TINY["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed)).tolist()


# --- weights and checkpoint ---------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [TINY, SOFTMAX | {"q_lora_rank": None}], ids=["v3", "v2-lite"])
def test_a_written_checkpoint_holds_the_same_weights(tmp_path: Path, raw: dict[str, Any]):
    made = make(raw, torch.bfloat16, save_to=tmp_path)
    read = load_model(
        tmp_path,
        ModelConfig.from_dir(tmp_path),
        dtype=torch.bfloat16,
        device=CPU,
        max_positions=POSITIONS,
        with_draft=True,
    )
    assert read.report.own_copies == ()
    for mine, theirs in ((made.decoder, read.decoder), (made.draft, read.draft)):
        assert isinstance(mine, nn.Module) and isinstance(theirs, nn.Module)
        expected = dict(theirs.named_parameters())
        found = dict(mine.named_parameters())
        assert found.keys() == expected.keys()
        for name, parameter in found.items():
            assert torch.equal(parameter, expected[name]), name


def test_shards_are_listed_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("engine.synthetic.SHARD_BYTES", 300_000)
    made = make(save_to=tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    from_disk = Engine.load(
        EngineOptions(model=str(tmp_path), device="cpu", max_model_len=128, kv_page_size=8, num_kv_pages=64),
        lambda _: None,
    )
    prompt = prompt_of(20)
    mine, theirs = answer(make_engine(made), prompt, logprobs=5), answer(from_disk, prompt, logprobs=5)
    assert mine.token_ids == theirs.token_ids
    assert mine.logprobs == theirs.logprobs


def test_transformers_reads_it_and_agrees(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    made = make(save_to=tmp_path)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    prompt = prompt_of(20)
    found = answer(make_engine(made, num_speculative_tokens=0), prompt, 1, logprobs=5)
    with torch.inference_mode():
        expected = oracle(torch.tensor([prompt])).logits[0, -1].log_softmax(dim=-1)
    for token, logprob in found.logprobs[0].top:
        assert logprob == pytest.approx(float(expected[token]), abs=1e-3)


def test_a_checkpoint_is_not_overwritten(tmp_path: Path):
    make(save_to=tmp_path)
    with pytest.raises(ConfigError, match="--save-weights"):
        make(save_to=tmp_path)


def test_a_seed_names_the_weights():
    first, again, other = (
        make(dtype=torch.bfloat16),
        make(dtype=torch.bfloat16),
        make(dtype=torch.bfloat16, seed=4),
    )
    for one, same, different in zip(
        *(model.decoder.embedding.parameters() for model in (first, again, other)), strict=True
    ):
        assert torch.equal(one, same)
        assert not torch.equal(one, different)


def test_activations_stay_of_order_one():
    model = make()
    sizes: list[float] = []
    for layer in model.decoder.layers:
        layer.register_forward_hook(lambda module, args, out: sizes.append(float(out.square().mean().sqrt())))
    answer(make_engine(model), prompt_of(30), 4)
    assert len(sizes) > 6
    assert all(0.5 < size < 4 for size in sizes)


# --- routing ------------------------------------------------------------------------------------------------


def distinct(model: LoadedModel, rows: int) -> list[int]:
    """How many experts ``rows`` random normed rows choose, for each MoE layer of target and draft."""
    assert isinstance(model.draft, nn.Module)
    x = torch.nn.functional.normalize(torch.randn(rows, TINY["hidden_size"])) * math.sqrt(TINY["hidden_size"])
    modules = [*model.decoder.modules(), *model.draft.modules()]
    return [router(x)[0].unique().numel() for router in modules if isinstance(router, Router)]


@pytest.mark.parametrize("raw", [TINY, SOFTMAX], ids=["sigmoid", "softmax"])
def test_concentrated_rows_all_take_the_same_experts(raw: dict[str, Any]):
    assert distinct(make(raw, routing="concentrated"), 200) == [TINY["num_experts_per_tok"]] * 3


def test_spread_rows_take_about_as_many_as_independent_draws_do():
    torch.manual_seed(0)
    model = make(SOFTMAX)
    experts, chosen = TINY["n_routed_experts"], TINY["num_experts_per_tok"]
    for rows in (1, 4, 16):
        expected = experts * (1 - (1 - chosen / experts) ** rows)
        found = [n for _ in range(20) for n in distinct(model, rows)]
        assert sum(found) / len(found) == pytest.approx(expected, rel=0.1)


# --- forced acceptance --------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1.0, 1.5, 2.0, 2.5, 3.0, 3.4, 4.0])
def test_forced_counts_keep_their_mean_over_any_window(length: float):
    counts = forced_counts(length, 500, 3)
    assert all(0 <= count <= 3 for count in counts)
    ends = {math.floor(n * Fraction(length).limit_denominator(1000)) for n in range(1000)}
    for start in range(40):
        position, stops = start, []
        while position < 450:
            position += counts[position] + 1
            stops.append(position)
        assert ends.issuperset(stops)
        for first in range(0, len(stops) - 20, 7):
            for last in range(first + 1, first + 20):
                assert abs(stops[last] - stops[first] - (last - first) * length) < 1


@pytest.mark.parametrize("graphs", ["off", "simulate"])
def test_a_forced_step_emits_what_it_is_told_to(graphs: str):
    engine = make_engine(make(), 2.5, graphs=graphs, max_num_seqs=1)
    prompt = prompt_of(20)
    found = answer(engine, prompt, 60)
    counts = forced_counts(2.5, 256, 3)
    position, expected = len(prompt) - 1, []
    while sum(expected) < 60:
        expected.append(counts[position] + 1)
        position += expected[-1]
    assert [tokens for tokens, _, _ in found.steps[:-1]] == expected[:-1]
    assert [accepted + 1 for _, _, accepted in found.steps[:-1]] == expected[:-1]
    assert {drafts for _, drafts, _ in found.steps} == {3}


def test_one_token_a_step_is_ordinary_decoding():
    model, prompt = make(), prompt_of(20)
    forced = answer(make_engine(model, 1.0), prompt)
    assert forced.accepted == 0
    assert forced.token_ids == answer(make_engine(model, num_speculative_tokens=0), prompt).token_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forced_tokens_are_counted_for_penalties(temperature: float):
    engine = make_engine(make(), 4.0)
    params = SamplingParams(
        max_tokens=100, temperature=temperature, presence_penalty=0.5, frequency_penalty=0.5
    )
    engine.add(request("a", prompt_of(20), params))
    emitted: list[int] = []
    while len(emitted) < 40:
        for delta in engine.iterate().deltas:
            assert len(delta.token_ids) == (4 if emitted else 1)  # the first step ends where steps of four do
            emitted += delta.token_ids
    expected = torch.bincount(torch.tensor(emitted), minlength=TINY["vocab_size"])
    assert torch.equal(engine._runner.state.output_counts[0].long(), expected)
    assert len(set(emitted)) > 10


def test_forced_tokens_of_sampled_rows_are_the_drafts():
    """All of them but the one that the target drew instead."""
    engine = make_engine(make(), 4.0, schedule="sync")
    engine.add(request("a", prompt_of(20), SamplingParams(max_tokens=100, temperature=1.0)))
    compared = 0
    while compared < 10:
        rows = engine._scheduler._running
        drafts = engine._runner.read_drafts(rows)[0] if rows and rows[0].may_step else []
        for delta in engine.iterate().deltas:
            if len(delta.token_ids) == 4 and drafts:
                assert sum(t != d for t, d in zip(delta.token_ids, drafts, strict=False)) <= 1
                compared += 1


# --- floor --------------------------------------------------------------------------------------------------


def test_the_floor_counts_each_tensor_of_the_checkpoint(tmp_path: Path):
    """With every expert touched and K = 1, target and draft layer are read once, the head twice."""
    make(save_to=tmp_path)
    config = ModelConfig.from_dir(tmp_path)
    [file] = tmp_path.glob("*.safetensors")
    expected = {"dense": 0, "experts": 0, "head": 0}
    for name, tensor in load_file(file).items():
        if "embed_tokens" in name or "correction_bias" in name:
            continue
        kind = "experts" if "experts" in name else "head" if "head.weight" in name else "dense"
        router = name.endswith("mlp.gate.weight")
        expected[kind] += tensor.numel() * (4 if router else 2)
    every = float(config.n_routed_experts)
    found = step_bytes(config, 1, 100.0, Touched(verify=every, extend=every), torch.float32)
    assert {name: getattr(found, name) for name in expected} == expected
    assert found.kv == (config.num_hidden_layers + 1) * 100 * (32 + 8) * 4
    assert found.total == sum(expected.values()) + found.kv


def test_the_floor_of_the_anchors_shape():
    config = parse_config(PRESETS["v2-lite"], ())
    six = Touched(verify=6, extend=6, draft=6)
    one_row, many = (step_bytes(config, 3, rows * 640, six, torch.bfloat16) for rows in (1, 64))
    assert one_row.total / 4.1e12 == pytest.approx(1.6e-3, rel=0.03)
    assert many.total / 4.1e12 == pytest.approx(2.0e-3, rel=0.03)
    plain = step_bytes(config, 0, 640, six, torch.bfloat16)
    assert plain.total == pytest.approx(4.9e9, rel=0.02)
