"""Logits against Transformers on the same directory, fp32 (F2)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.model.support import load, logits_of, relative_error
from tests.fixtures.checkpoints import build_f1, build_f2
from tests.fixtures.hf_layout import YARN, Config, v2_config, v3_config

SHAPES: dict[str, Config] = {
    "v3": v3_config(),
    "v3_no_query_rank": v3_config(q_lora_rank=None),
    "v3_one_group": v3_config(n_group=1, topk_group=1),
    "v3_half_split_rope": v3_config(rope_interleave=False),
    "v3_yarn": v3_config(rope_scaling=YARN),
    "v3_yarn_plain": v3_config(rope_scaling={"type": "yarn", "factor": 8.0,
                                             "original_max_position_embeddings": 16}),
    "v3_top_1": v3_config(num_experts_per_tok=1, n_group=2, topk_group=1),
    "v3_theta": v3_config(rope_theta=1e6),
    "v3_dense_only_first_two": v3_config(first_k_dense_replace=2),
    "v3_all_moe": v3_config(first_k_dense_replace=0, n_shared_experts=3),
    "v3_latent_eps": v3_config(rms_norm_eps=1e-2),
    "v2_greedy": v2_config(),
    "v2_greedy_query_rank": v2_config(q_lora_rank=24, routed_scaling_factor=16.0),
    "v2_groups": v2_config(topk_method="group_limited_greedy", n_group=4, topk_group=2),
    "v2_groups_yarn": v2_config(topk_method="group_limited_greedy", n_group=2, topk_group=1,
                                rope_scaling=YARN, q_lora_rank=24),
    "v2_lite_values": v2_config(rope_scaling=YARN | {"factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707}),
}  # fmt: skip


def reference_logits(path: Path, token_ids: torch.Tensor) -> torch.Tensor:
    reference: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        return reference(token_ids[None]).logits[0]


@pytest.mark.parametrize("shape", SHAPES)
def test_e1_e3_logits_equal_transformers_whole_and_in_chunks(tmp_path: Path, shape: str) -> None:
    """48 positions, beyond YaRN's original 16 or 32; chunks, single tokens and a verify of 4 give the same."""
    path = build_f2(tmp_path, SHAPES[shape], seed=len(shape))
    config, model = load(path)
    token_ids = torch.randint(0, 96, (48,), generator=torch.Generator().manual_seed(1))
    expected = reference_logits(path, token_ids)
    assert relative_error(logits_of(config, model, token_ids), expected) < 1e-4
    cuts = (20, 37, 38, 39, 43)
    assert relative_error(logits_of(config, model, token_ids, cuts), expected) < 1e-4


@pytest.mark.parametrize("config", [v3_config(), v2_config(q_lora_rank=24)])
def test_bf16_checkpoint_in_fp32_equals_transformers(tmp_path: Path, config: Config) -> None:
    """What a bf16 checkpoint stores is multiplied exactly, packed or not."""
    path = build_f2(tmp_path, config, dtype=torch.bfloat16)
    loaded_config, model = load(path)
    token_ids = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(2))
    found = logits_of(loaded_config, model, token_ids, cuts=(11, 12, 16))
    assert relative_error(found, reference_logits(path, token_ids)) < 1e-4


def test_bf16_arithmetic_stays_close_to_fp32(tmp_path: Path) -> None:
    path = build_f2(tmp_path, v3_config(n_group=1, topk_group=1), dtype=torch.bfloat16)
    token_ids = torch.arange(20)
    config, model = load(path)
    expected = logits_of(config, model, token_ids)
    config, model = load(path, dtype=torch.bfloat16)
    found = logits_of(config, model, token_ids)
    assert found.dtype == torch.bfloat16
    # Routing may flip at ties, so single rows may differ; the bulk must agree.
    assert torch.nn.functional.cosine_similarity(found.float(), expected).median() > 0.99


def test_tied_embeddings_equal_transformers(tmp_path: Path) -> None:
    path = build_f2(tmp_path, v3_config(tie_word_embeddings=True))
    config, model = load(path, with_draft=True)
    token_ids = torch.arange(16)
    assert relative_error(logits_of(config, model, token_ids), reference_logits(path, token_ids)) < 1e-4


def test_dense_model_without_experts_loads(tmp_path: Path) -> None:
    """n_routed_experts null: every layer is dense, as if all were below first_k_dense_replace."""
    dense = v3_config(first_k_dense_replace=3, num_nextn_predict_layers=0)
    path = build_f2(tmp_path / "a", dense)
    token_ids = torch.arange(16)
    expected = logits_of(*load(path), token_ids)
    path = build_f2(tmp_path / "b", dense | {"n_routed_experts": None})
    assert torch.equal(logits_of(*load(path), token_ids), expected)


def test_f1_logits_are_the_chosen_table(tmp_path: Path) -> None:
    f1 = build_f1(tmp_path, next_probs={5: [1 / 64] * 64})
    token_ids = torch.tensor([3, 9, 5, 9, 63])
    found = logits_of(*load(f1.path), token_ids)
    assert (found.double() - f1.logits[token_ids]).abs().max() < 1e-4
    assert (reference_logits(f1.path, token_ids).double() - f1.logits[token_ids]).abs().max() < 1e-4
