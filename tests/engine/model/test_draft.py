"""The MTP layer's mathematics (E10) by F1n, and the forms it is stored in (E8, E9)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from engine.config import ModelConfig, require_draft
from engine.errors import CheckpointError, ConfigError
from engine.model.draft import MtpDraft
from engine.model.layers import RmsNorm
from engine.model.loader import LoadedModel
from tests.engine.model.support import SequenceAttention, load
from tests.fixtures.checkpoints import F1, build_f1, build_f1n, build_f2
from tests.fixtures.hf_layout import v2_config, v3_config


def chain(
    config: ModelConfig, model: LoadedModel, prompt: list[int], k: int, target: Callable[[Tensor], Tensor]
) -> list[int]:
    """``k`` chained drafts after ``prompt``: target hidden i with token i + 1, then the draft's own state.

    Args:
        target: What the draft gets of the target's hidden states (a mistake can be put here).
    """
    token_ids = torch.tensor(prompt)
    positions = torch.arange(len(prompt))
    hidden = target(model.decoder(token_ids, positions, SequenceAttention(config)))
    assert model.draft is not None
    attention = SequenceAttention(config)
    state = model.draft(hidden[:-1], token_ids[1:], positions[:-1], attention)[-1:]
    drafts: list[int] = []
    for step in range(k):
        drafts.append(int(model.draft.logits(state).argmax()))
        if step + 1 < k:
            position = positions[-1:] + step
            state = model.draft(state, torch.tensor(drafts[-1:]), position, attention)
    return drafts


def accepted(f1: F1, prompt: list[int], drafts: list[int]) -> int:
    """Leading drafts that greedy decoding would have emitted."""
    truth = f1.walk(prompt[-1], len(drafts))
    wrong = [i for i, (draft, token) in enumerate(zip(drafts, truth, strict=True)) if draft != token]
    return wrong[0] if wrong else len(drafts)


def identity(hidden: Tensor) -> Tensor:
    return hidden


def prompts(f1: F1) -> list[list[int]]:
    """Prompts on the cycle: each token is followed by its successor."""
    return [[start, *f1.walk(start, 5)] for start in range(0, f1.vocab_size, 7)]


def test_e10_f1n_accepts_four_of_four(f1n: F1) -> None:
    config, model = load(f1n.path, with_draft=True)
    for prompt in prompts(f1n):
        assert accepted(f1n, prompt, chain(config, model, prompt, 4, identity)) == 4


def test_e10_f1n_shows_a_target_state_before_its_norm(f1n: F1) -> None:
    config, model = load(f1n.path, with_draft=True)
    model.decoder.norm.forward = identity  # type: ignore[method-assign]
    for prompt in prompts(f1n):
        assert accepted(f1n, prompt, chain(config, model, prompt, 4, identity)) == 0


def test_e10_f1n_shows_a_swapped_concatenation(f1n: F1) -> None:
    config, model = load(f1n.path, with_draft=True)
    assert isinstance(model.draft, MtpDraft)
    merge = model.draft.merge
    half = config.hidden_size

    class Swapped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return merge(torch.cat((x[:, half:], x[:, :half]), dim=-1))

    model.draft.merge = Swapped()  # type: ignore[assignment]
    for prompt in prompts(f1n):
        assert accepted(f1n, prompt, chain(config, model, prompt, 4, identity)) == 0


def test_e10_f1n_shows_a_recycled_state_before_its_norm(f1n: F1) -> None:
    """The head still sees the normed state; only what is handed on is not."""
    config, model = load(f1n.path, with_draft=True)
    assert isinstance(model.draft, MtpDraft)
    norm: RmsNorm = model.draft.norm
    head = model.draft.head

    class NormThenHead(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return head(norm(x))

    model.draft.norm = nn.Identity()  # type: ignore[assignment]
    model.draft.head = NormThenHead()  # type: ignore[assignment]
    for prompt in prompts(f1n):
        assert accepted(f1n, prompt, chain(config, model, prompt, 4, identity)) == 1


def test_wrong_draft_tokens_end_the_accepted_run(tmp_path: Path) -> None:
    for build in (build_f1, build_f1n):
        f1 = build(tmp_path / build.__name__, wrong_draft_tokens=(4, 9, 30))
        config, model = load(f1.path, with_draft=True)
        for prompt in prompts(f1):
            step = f1.predict_steps(prompt, 4, 5)[0]
            assert accepted(f1, prompt, chain(config, model, prompt, 4, identity)) == step.num_accepted


@pytest.mark.parametrize("copies", [(), ("embed",), ("head",), ("embed", "head")])
@pytest.mark.parametrize("prefix", [True, False])
def test_e8_e9_every_stored_form_drafts_alike(tmp_path: Path, copies: tuple[str, ...], prefix: bool) -> None:
    def drop_prefix(tensors: dict[str, Tensor]) -> None:
        for name in [] if prefix else list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    f1 = build_f1(
        tmp_path, mtp_copies=copies, num_hidden_layers=3, first_k_dense_replace=1, edit_tensors=drop_prefix
    )
    config, model = load(f1.path, with_draft=True)
    prompt = prompts(f1)[1]
    assert accepted(f1, prompt, chain(config, model, prompt, 5, identity)) == 5
    assert isinstance(model.draft, MtpDraft)
    assert model.draft.embedding is model.decoder.embedding
    assert model.draft.head is model.decoder.head
    assert model.report.own_copies == ()


def test_e8_copies_that_differ_are_the_drafts_own(tmp_path: Path) -> None:
    """With its own embedding shifted by one token, the draft continues from the successor of what it is fed."""

    def shift(tensors: dict[str, Tensor]) -> None:
        successor = tensors["lm_head.weight"].argmax(dim=0)[:64]
        tensors["model.layers.2.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][successor]

    f1 = build_f1(tmp_path, mtp_copies=("embed", "head"), edit_tensors=shift)
    config, model = load(f1.path, with_draft=True)
    assert model.report.own_copies == ("embedding",)
    assert isinstance(model.draft, MtpDraft) and model.draft.head is model.decoder.head
    prompt = prompts(f1)[0]
    assert chain(config, model, prompt, 1, identity) == [f1.walk(prompt[-1], 2)[1]]


@pytest.mark.parametrize(("declared", "held"), [(0, 0), (1, 1), (2, 2), (2, 1), (1, 0)])
def test_e9_number_of_mtp_layers(tmp_path: Path, declared: int, held: int) -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            if any(name.startswith(f"model.layers.{2 + layer}.") for layer in range(held, declared)):
                del tensors[name]

    f1 = build_f1(tmp_path, mtp=declared, edit_tensors=drop)
    config, model = load(f1.path)
    assert model.draft is None and model.report.mtp_layers_held == held
    if held == 0:
        with pytest.raises(
            ConfigError if declared == 0 else CheckpointError, match="num_nextn_predict_layers"
        ):
            load(f1.path, with_draft=True)
        return
    config, model = load(f1.path, with_draft=True)
    for k in range(1, 6):
        prompt = prompts(f1)[k]
        assert accepted(f1, prompt, chain(config, model, prompt, k, identity)) == k


def test_e9_mtp_layers_that_are_not_declared_are_refused(tmp_path: Path) -> None:
    f1 = build_f1(tmp_path)
    text = (f1.path / "config.json").read_text()
    (f1.path / "config.json").write_text(
        text.replace('"num_nextn_predict_layers": 1', '"num_nextn_predict_layers": 0')
    )
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\..*num_nextn_predict_layers=0"):
        load(f1.path)


@pytest.mark.parametrize("first_k_dense_replace", [0, 1, 3])
@pytest.mark.parametrize("moe_layer_freq", [1, 2])
def test_e9_layer_kinds(tmp_path: Path, first_k_dense_replace: int, moe_layer_freq: int) -> None:
    """Layers 0..2 by the rule; the MTP layer, index 3, is MoE although 3 % 2 is not 0."""
    raw = v3_config(first_k_dense_replace=first_k_dense_replace, moe_layer_freq=moe_layer_freq)
    config, model = load(build_f2(tmp_path, raw), with_draft=True)
    expected = [layer >= first_k_dense_replace and layer % moe_layer_freq == 0 for layer in range(3)]
    assert [config.is_moe(layer) for layer in range(4)] == [*expected, True]
    assert isinstance(model.draft, MtpDraft)
    assert type(model.draft.layer.mlp).__name__ == "Moe"


def test_e9_speculation_without_an_mtp_layer_is_refused(tmp_path: Path) -> None:
    config, _ = load(build_f2(tmp_path, v2_config()))
    require_draft(config, 0)
    with pytest.raises(ConfigError, match="num_speculative_tokens=3"):
        require_draft(config, 3)
