"""The model that the repository ships: speculation changes its speed and nothing else (invariant I2)."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

import engine
from engine.model.check import inspect_checkpoint
from engine.types import SamplingParams
from tests.engine.drive import generate, greedy, make_engine

ROOT = Path(engine.__file__).parent.parent
MODEL = ROOT / "models" / "eyas-14m"
OPTIONS = {"kv_page_size": 64, "num_kv_pages": 200, "max_num_seqs": 16}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """200 pieces of this project's own source, 8 to 55 tokens each: text that the model was not trained on."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    sources = sorted(chain((ROOT / "engine").rglob("*.py"), (ROOT / "service").rglob("*.py")))
    found: list[list[int]] = []
    for path in sources:
        ids = tokenizer.encode(path.read_text(encoding="utf-8"), add_special_tokens=False).ids
        found += [[0, *ids[start : start + 8 + start % 48]] for start in range(0, len(ids) - 64, 331)]
    assert len(found) >= 200
    return found[:200]


@pytest.mark.parametrize("k", [3, 5])
def test_i2_greedy_over_200_prompts_equals_plain_decoding(prompts: list[list[int]], k: int) -> None:
    plain = generate(make_engine(MODEL, num_speculative_tokens=0, **OPTIONS), prompts, greedy(24))
    drafted = generate(make_engine(MODEL, num_speculative_tokens=k, **OPTIONS), prompts, greedy(24))
    assert [answer.token_ids for answer in drafted] == [answer.token_ids for answer in plain]
    verified = [step for answer in drafted for step in answer.steps if step[1]]
    assert sum(step[2] + 1 for step in verified) / len(verified) > 2.0


def test_seeded_sampling_does_not_depend_on_the_batch(prompts: list[list[int]]) -> None:
    engine_ = make_engine(MODEL, **OPTIONS)
    params = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95, seed=11)
    together = generate(engine_, prompts[:16], params)
    for prompt, answer in list(zip(prompts, together, strict=False))[::4]:
        assert generate(engine_, [prompt], params)[0].token_ids == answer.token_ids


def test_it_is_what_its_report_says() -> None:
    report = inspect_checkpoint(MODEL)
    files = list(MODEL.glob("*.safetensors"))
    assert sum(file.stat().st_size for file in files) <= 28_000_000
    assert max(file.stat().st_size for file in files) < 15 * 2**20
    assert report.config.num_nextn_predict_layers == 1
    assert (report.config.kv_lora_rank, report.config.qk_rope_head_dim) == (512, 64)


def test_greedy_tokens_equal_transformers(prompts: list[list[int]]) -> None:
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    oracle.generation_config = transformers.GenerationConfig(max_new_tokens=16, pad_token_id=0)
    answers = generate(make_engine(MODEL, **OPTIONS), prompts[:3], greedy(16))
    for prompt, answer in zip(prompts, answers, strict=False):
        ids = torch.tensor([prompt])
        out = oracle.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False)
        assert answer.token_ids == out[0, len(prompt) :].tolist()
