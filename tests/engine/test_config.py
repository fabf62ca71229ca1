"""config.json is read strictly (E7, E14) and end-of-sequence ids are united (E15)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import ModelConfig, parse_config
from engine.config_keys import tokenizer_eos_id
from engine.errors import ConfigError
from tests.fixtures.hf_layout import FP8_CONFIG, YARN, Config, v2_config, v3_config
from tests.fixtures.tokenizers import word_tokenizer, write_tokenizer


def parse(raw: Config) -> ModelConfig:
    return parse_config(raw, ())


def test_v3_fields() -> None:
    config = parse(v3_config())
    assert (config.model_type, config.vocab_size, config.q_lora_rank) == ("deepseek_v3", 96, 24)
    assert (config.topk_method, config.scoring_func, config.n_group) == ("noaux_tc", "sigmoid", 4)
    assert config.latent_dim == 40
    assert config.softmax_scale == pytest.approx(24**-0.5)
    assert config.rope_scaling is None and config.rope_theta == 10000.0 and config.rope_interleave
    assert config.num_nextn_predict_layers == 1 and config.quantisation == "none"


def test_published_files_need_no_router_keys() -> None:
    """Transformers' own DeepseekV3Config has neither key; the architecture decides."""
    raw = v3_config()
    del raw["scoring_func"], raw["topk_method"]
    assert (parse(raw).scoring_func, parse(raw).topk_method) == ("sigmoid", "noaux_tc")
    raw = v2_config(topk_method=None)
    del raw["scoring_func"]
    assert (parse(raw).scoring_func, parse(raw).topk_method) == ("softmax", "greedy")


def test_kimi_k2_is_the_v3_architecture() -> None:
    assert parse(v3_config(model_type="kimi_k2")).topk_method == "noaux_tc"


def test_softmax_scale_holds_yarns_magnitude_twice() -> None:
    config = parse(v3_config(rope_scaling=YARN))
    magnitude = 0.1 * 0.7 * math.log(4) + 1
    assert config.softmax_scale == pytest.approx(24**-0.5 * magnitude**2)
    assert config.rope_scaling is not None
    assert config.rope_scaling.table_scale == pytest.approx((0.1 * math.log(4) + 1) / magnitude)


REFUSED: list[tuple[str, Any]] = [
    ("model_type", "x"), ("model_type", None), ("architectures", ["DeepseekV32ForCausalLM"]),
    ("topk_method", "x"), ("scoring_func", "x"), ("hidden_act", "gelu"), ("attention_bias", True),
    ("mlp_bias", True), ("sliding_window", 4096), ("index_topk", 2048), ("num_key_value_heads", 1),
    ("qk_rope_head_dim", 7), ("rope_interleave", "yes"), ("vocab_size", 0), ("vocab_size", 96.0),
    ("hidden_size", True), ("num_hidden_layers", "3"), ("num_attention_heads", -4), ("kv_lora_rank", None),
    ("q_lora_rank", 0), ("rms_norm_eps", 0), ("rms_norm_eps", math.nan), ("routed_scaling_factor", None),
    ("routed_scaling_factor", math.inf), ("norm_topk_prob", None), ("first_k_dense_replace", None),
    ("moe_layer_freq", 0), ("n_group", 3), ("topk_group", 5), ("n_group", 8), ("num_experts_per_tok", 5),
    ("rope_theta", None), ("rope_theta", -1.0), ("rope_theta", 1), ("rope_theta", "1e4"), ("rope_scaling", "yarn"),
    ("torch_dtype", "int8"), ("torch_dtype", 16), ("tie_word_embeddings", 1),
    ("num_nextn_predict_layers", -1), ("quantization_config", "fp8"), ("n_group", None), ("topk_group", None),
    ("rope_interleave", None), ("num_hidden_layers", 10**9), ("num_hidden_layers", 10**30), ("hidden_size", 10**30),
    ("vocab_size", 10**19), ("kv_lora_rank", 2**62), ("num_nextn_predict_layers", 10**9),
    ("n_routed_experts", 10**9), ("max_position_embeddings", 10**30), ("rms_norm_eps", 1e-60),
    ("routed_scaling_factor", 1e60),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), REFUSED)
def test_e7_a_value_that_cannot_be_honoured_is_refused_by_key_and_value(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key) as caught:
        parse(v3_config(**{key: value}))
    assert value is None or repr(value) in str(caught.value) or str(value) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"type": "linear"}, "'linear'"), ({"rope_type": "dynamic", "type": None}, "'dynamic'"),
        ({"rope_type": "default"}, "type"), ({"factor": 0.5}, "factor"), ({"factor": None}, "factor"),
        ({"original_max_position_embeddings": None}, "original_max_position_embeddings"),
        ({"long_factor": [1.0]}, "long_factor"), ({"mscale": "big"}, "mscale"), ({"truncate": 1}, "truncate"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"), ({"mscale_all_dim": -10.0}, "mscale_all_dim"),
        ({"beta_fast": 1e-320}, "beta_fast"), ({"beta_slow": 10**400}, "beta_slow"), ({"mscale": 1e-320}, "mscale"),
        ({"factor": 10**400}, "factor"), ({"original_max_position_embeddings": 10**30}, "original_max_position"),
    ],
)  # fmt: skip
def test_e7_rope_scaling_is_strict(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse(v3_config(rope_scaling=YARN | change))


@pytest.mark.parametrize("key", ["rope_theta", "rms_norm_eps", "routed_scaling_factor"])
@pytest.mark.parametrize("value", [10**400, -(10**400), math.inf])
def test_e7_a_number_beyond_all_range_is_refused_in_one_short_line(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"^config\.json: {key}=.{{1,110}}: expected a ") as caught:
        parse(v3_config(**{key: value}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["n_group", "topk_group"])
@pytest.mark.parametrize("raw", [v3_config(), v2_config(topk_method="group_limited_greedy")])
def test_e7_groups_are_stated_where_the_router_has_them(raw: Config, key: str) -> None:
    """DeepSeek-V3's own are 8 and 4, DeepSeek-V2's none: a default of 1 would route otherwise."""
    absent = {name: value for name, value in raw.items() if name != key}
    with pytest.raises(ConfigError, match=f"{key} is missing"):
        parse(absent)
    assert parse(absent | {"topk_method": "greedy"}).n_group == 1


@pytest.mark.parametrize(("key", "value"), [("rope_interleave", False), ("norm_topk_prob", True)])
def test_e7_what_the_v2_architecture_does_not_have_is_refused(key: str, value: bool) -> None:
    parse(v2_config(**{key: not value}))
    with pytest.raises(ConfigError, match=f"{key}={value}: DeepSeek-V2"):
        parse(v2_config(**{key: value}))
    assert getattr(parse(v3_config(**{key: value})), key) is value


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"quant_method": "x"}, "quant_method='x'"), ({"fmt": "e5m2"}, "fmt='e5m2'"),
        ({"activation_scheme": "static"}, "activation_scheme='static'"),
        ({"weight_block_size": [64, 64]}, "weight_block_size"), ({"weight_block_size": None}, "weight_block_size"),
    ],
)  # fmt: skip
def test_e7_quantisation_is_strict(change: dict[str, Any], named: str) -> None:
    assert parse(v3_config(quantization_config=FP8_CONFIG)).quantisation == "fp8"
    with pytest.raises(ConfigError, match=named):
        parse(v3_config(quantization_config=FP8_CONFIG | change))


@pytest.mark.parametrize("theta", [10000.0, 1e6])
def test_e14_old_and_new_rope_keys_mean_the_same(theta: float) -> None:
    old = v3_config(rope_theta=theta, rope_scaling=YARN)
    kept = {key: value for key, value in YARN.items() if key != "type"}
    new = v3_config(rope_parameters={"rope_type": "yarn", "rope_theta": theta} | kept)
    del new["rope_theta"], new["rope_scaling"]
    both = old | {"rope_parameters": new["rope_parameters"]}
    assert parse(old) == parse(new) == parse(both)
    assert parse(old).rope_theta == theta
    plain = v3_config(rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": theta})
    assert parse(plain).rope_scaling is None and parse(plain).rope_theta == theta


def test_e14_conflicting_rope_keys_are_refused() -> None:
    with pytest.raises(ConfigError, match="rope_theta has conflicting values"):
        parse(v3_config(rope_theta=1e4, rope_parameters={"rope_type": "default", "rope_theta": 1e6}))
    with pytest.raises(ConfigError, match=r"rope_scaling=.* conflicts with rope_parameters"):
        parse(v3_config(rope_scaling=YARN, rope_parameters=YARN | {"factor": 8}))
    with pytest.raises(ConfigError, match=r"rope_scaling=.* conflicts with rope_parameters"):
        parse(v3_config(rope_scaling=YARN, rope_parameters={"rope_type": "default", "rope_theta": 1e4}))


def test_e14_dtype_goes_by_two_names() -> None:
    raw = v3_config(torch_dtype=None, dtype="bfloat16")
    assert parse(raw).dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="dtype"):
        parse(v3_config(torch_dtype="float16", dtype="bfloat16"))


def write_config(path: Path, eos: Any, generation: Any = None, tokenizer_eos: str | None = None) -> Path:
    (path / "config.json").write_text(json.dumps(v3_config(eos_token_id=eos)))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    write_tokenizer(path, word_tokenizer(96), eos_token=tokenizer_eos)
    return path


@pytest.mark.parametrize(
    ("eos", "generation", "tokenizer_eos", "expected"),
    [
        (None, None, None, ()), (5, None, None, (5,)), ([7, 5], None, None, (5, 7)), (None, 9, None, (9,)),
        (None, [9, 3], None, (3, 9)), (None, None, "</s>", (1,)), (5, [5, 9], "w7", (5, 7, 9)),
        (None, None, "no such token", ()),
    ],
)  # fmt: skip
def test_e15_eos_ids_are_the_union(
    tmp_path: Path, eos: Any, generation: Any, tokenizer_eos: str | None, expected: tuple[int, ...]
) -> None:
    path = write_config(tmp_path, eos, generation, tokenizer_eos)
    assert ModelConfig.from_dir(path).eos_token_ids == expected


def test_e15_tokenizer_eos_as_an_object_or_absent(tmp_path: Path) -> None:
    path = write_config(tmp_path, None)
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    assert tokenizer_eos_id(path) == 1
    (path / "tokenizer.json").unlink()
    assert tokenizer_eos_id(path) is None


@pytest.mark.parametrize(
    ("eos", "generation"), [(96, None), (-1, None), ("5", None), ([True], None), (1, [2.5])]
)
def test_e15_impossible_ids_are_refused(tmp_path: Path, eos: Any, generation: Any) -> None:
    with pytest.raises(ConfigError, match="eos_token_id"):
        ModelConfig.from_dir(write_config(tmp_path, eos, generation))


@pytest.mark.parametrize(
    ("tokenizer", "named"),
    [
        ({"added_tokens": ["x"]}, "added_tokens"), ({"added_tokens": {"a": 1}}, "added_tokens"),
        ({"model": "x"}, "model"), ({"added_tokens": [{"content": "</s>"}]}, "id of '</s>' is None"),
        ({"added_tokens": [{"content": "</s>", "id": "7"}]}, "id of '</s>' is '7'"),
        ({"model": {"vocab": {"</s>": "7"}}}, "id of '</s>' is '7'"), ({"model": {"vocab": {"</s>": -1}}}, "is -1"),
        ({"model": {"vocab": {"</s>": True}}}, "is True"), ({"model": {"vocab": {"</s>": None}}}, "is None"),
    ],
)  # fmt: skip
def test_e15_a_damaged_tokenizer_is_refused_by_file_and_key(
    tmp_path: Path, tokenizer: dict[str, Any], named: str
) -> None:
    path = write_config(tmp_path, None)
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=rf"tokenizer\.json: .*{named}"):
        ModelConfig.from_dir(path)


@pytest.mark.parametrize("vocab", [{"a": 0, "</s>": 7}, [["a", 0.0]] * 7 + [["</s>", -1.5]]])
def test_e15_the_id_is_found_in_a_vocabulary_of_either_form(tmp_path: Path, vocab: Any) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    assert tokenizer_eos_id(tmp_path) == 7


def test_a_repeated_key_is_refused(tmp_path: Path) -> None:
    text = json.dumps(v3_config(rope_scaling=YARN))
    for one in ('"kv_lora_rank": 32', '"factor": 4'):
        (tmp_path / "config.json").write_text(text.replace(one, f"{one}, {one}"))
        with pytest.raises(ConfigError, match=rf"config\.json: .*{one.split(chr(34))[1]}.* more than once"):
            ModelConfig.from_dir(tmp_path)


@pytest.mark.parametrize(
    "content", ["[" * 200_000, '{"a":' * 200_000, "", "{", "[]", "3", '{"model_type": "deepseek_v3"}', "\xff"]
)
def test_unusable_config_files_are_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.from_dir(tmp_path)
