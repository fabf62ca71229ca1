"""The model's configuration, read strictly from a Hugging Face checkpoint directory.

A key that shapes the mathematics has no silent default: it is required, or its default is that of the
architecture and stands in ``_DEFAULTS`` below. A value that Eyas cannot honour is refused by key and value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from engine.config_keys import Keys, read_eos_token_ids, read_json_object
from engine.errors import ConfigError

TopkMethod = Literal["greedy", "group_limited_greedy", "noaux_tc"]
ScoringFunc = Literal["softmax", "sigmoid"]

MODEL_TYPES = {"deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}
MODEL_TYPES["kimi_k2"] = MODEL_TYPES["deepseek_v3"]

_DEFAULTS: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": {"scoring_func": "softmax", "topk_method": "greedy"},
    "DeepseekV3ForCausalLM": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
}
_YARN_KEYS = (
    "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
    "attention_factor", "truncate",
)  # fmt: skip
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_VOCAB_SIZE = 1 << 22
MAX_POSITIONS = 2**31 - 1
FP8_BLOCK = 128
"""Rows and columns of a block that shares one scale in a DeepSeek-V3 FP8 checkpoint."""

# Keys whose other values would change the model in ways that are not implemented.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "sliding_window": (None, False),
    "partial_rotary_factor": (None, 1.0),
    "index_topk": (None,),
    "layer_types": (None,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """Parameters of YaRN (arXiv:2309.00071) in the form of DeepSeek's checkpoints."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    def magnitude(self, mscale: float = 1.0) -> float:
        """``0.1 * mscale * ln(factor) + 1``, or 1 where nothing is stretched."""
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    @property
    def table_scale(self) -> float:
        """What multiplies the cosines and sines."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.magnitude(self.mscale) / self.magnitude(self.mscale_all_dim)
        return self.magnitude()

    @property
    def softmax_scale(self) -> float:
        """What multiplies the softmax scale: ``magnitude(mscale_all_dim) ** 2``."""
        return self.magnitude(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything that the model needs to know; sizes are in elements, ids in the vocabulary."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    """0 for a model without MoE layers; the other MoE fields then mean nothing."""
    num_experts_per_tok: int
    n_shared_experts: int
    n_group: int
    topk_group: int
    topk_method: TopkMethod
    scoring_func: ScoringFunc
    norm_topk_prob: bool
    routed_scaling_factor: float
    first_k_dense_replace: int
    moe_layer_freq: int
    rope_theta: float
    rope_scaling: YarnScaling | None
    rope_interleave: bool
    """Whether checkpoint rows pair rotary dimensions as (2i, 2i+1) rather than (i, i + dim/2)."""
    rms_norm_eps: float
    max_position_embeddings: int
    num_nextn_predict_layers: int
    tie_word_embeddings: bool
    dtype: torch.dtype
    """The checkpoint's own data type (of the dequantised weights, where it is quantised)."""
    quantisation: Literal["none", "fp8"]
    eos_token_ids: tuple[int, ...]
    """Union over generation_config.json, config.json and the tokenizer, ascending."""

    @property
    def latent_dim(self) -> int:
        """Elements that one token caches in one layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Factor on ``q . k`` before the softmax, YaRN's included."""
        base = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        return float(base * (self.rope_scaling.softmax_scale if self.rope_scaling else 1.0))

    def is_moe(self, layer: int) -> bool:
        """Whether a layer is MoE. MTP layers (``num_hidden_layers`` and on) are, whatever their index."""
        if self.n_routed_experts == 0:
            return False
        if layer >= self.num_hidden_layers:
            return True
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    @classmethod
    def from_dir(cls, path: Path) -> ModelConfig:
        """Read ``config.json`` (and the end-of-sequence ids of its neighbours).

        Raises:
            ConfigError: No readable ``config.json``, a missing key, or a value that cannot be honoured; the
                message names file or key and value.
        """
        raw = read_json_object(path / "config.json")
        return parse_config(raw, read_eos_token_ids(path, raw))


def require_draft(config: ModelConfig, num_speculative_tokens: int) -> None:
    """Refuse speculation with a checkpoint that has nothing to draft with.

    Raises:
        ConfigError: ``num_speculative_tokens`` > 0 and no MTP layer.
    """
    if num_speculative_tokens > 0 and config.num_nextn_predict_layers == 0:
        raise ConfigError(
            f"num_speculative_tokens={num_speculative_tokens} needs an MTP layer, but the checkpoint has "
            "none (num_nextn_predict_layers is 0); use 0"
        )


def parse_config(raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """A ``ModelConfig`` from the content of ``config.json``.

    Raises:
        ConfigError: A missing key or a value that cannot be honoured, naming both.
    """
    keys = Keys(raw)
    model_type = keys.choice("model_type", tuple(MODEL_TYPES))
    architecture = _check_architecture(raw, model_type)
    for key, neutral in _NEUTRAL.items():
        if key in raw and raw[key] not in neutral:
            raise keys.fail(key, f"only {neutral[0]!r} is supported")
    rope_theta, rope_scaling = _parse_rope(raw)
    config = ModelConfig(
        model_type=model_type,
        vocab_size=keys.integer("vocab_size", most=MAX_VOCAB_SIZE),
        hidden_size=keys.integer("hidden_size"),
        num_hidden_layers=keys.integer("num_hidden_layers"),
        num_attention_heads=keys.integer("num_attention_heads"),
        q_lora_rank=None if raw.get("q_lora_rank") is None else keys.integer("q_lora_rank"),
        kv_lora_rank=keys.integer("kv_lora_rank"),
        qk_nope_head_dim=keys.integer("qk_nope_head_dim"),
        qk_rope_head_dim=keys.integer("qk_rope_head_dim"),
        v_head_dim=keys.integer("v_head_dim"),
        intermediate_size=keys.integer("intermediate_size"),
        **_parse_moe(keys, raw, architecture),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        rope_interleave=_parse_interleave(keys, raw, architecture),
        rms_norm_eps=keys.number("rms_norm_eps"),
        max_position_embeddings=keys.integer("max_position_embeddings", most=MAX_POSITIONS),
        num_nextn_predict_layers=keys.integer("num_nextn_predict_layers", 0, least=0),
        tie_word_embeddings=keys.boolean("tie_word_embeddings", False),
        dtype=_parse_dtype(raw),
        quantisation=_parse_quantisation(raw),
        eos_token_ids=eos_token_ids,
    )
    if config.qk_rope_head_dim % 2:
        raise keys.fail("qk_rope_head_dim", "rotary dimensions come in pairs")
    if raw.get("num_key_value_heads", config.num_attention_heads) not in (None, config.num_attention_heads):
        raise keys.fail("num_key_value_heads", "MLA has one latent for all heads; expected their number")
    if any(token >= config.vocab_size for token in eos_token_ids):
        raise ConfigError(f"eos_token_id={max(eos_token_ids)} is outside vocab_size={config.vocab_size}")
    return config


def _check_architecture(raw: Mapping[str, Any], model_type: str) -> str:
    architecture = MODEL_TYPES[model_type]
    stated = raw.get("architectures")
    if stated is not None and stated != [architecture]:
        raise ConfigError(
            f"config.json: architectures={stated!r}: model_type={model_type!r} is {[architecture]!r}"
        )
    return architecture


def _parse_interleave(keys: Keys, raw: Mapping[str, Any], architecture: str) -> bool:
    """An absent key means true in both architectures; null does not, in Transformers."""
    if "rope_interleave" in raw and raw["rope_interleave"] is None:
        raise keys.fail("rope_interleave", "expected true or false, or no such key")
    interleave = keys.boolean("rope_interleave", True)
    if not interleave and architecture == "DeepseekV2ForCausalLM":
        raise keys.fail("rope_interleave", "DeepSeek-V2 has no such key, its rows are interleaved")
    return interleave


def _parse_moe(keys: Keys, raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """The fields of MoE layers; neutral ones for a model without any."""
    if not raw.get("n_routed_experts"):
        return {
            "n_routed_experts": 0, "num_experts_per_tok": 0, "n_shared_experts": 0,
            "moe_intermediate_size": 0, "n_group": 1, "topk_group": 1,
            "topk_method": "greedy", "scoring_func": "softmax",
            "norm_topk_prob": False, "routed_scaling_factor": 1.0, "first_k_dense_replace": 0,
            "moe_layer_freq": 1,
        }  # fmt: skip
    methods, defaults = ("greedy", "group_limited_greedy", "noaux_tc"), _DEFAULTS[architecture]
    method = keys.choice("topk_method", methods, defaults["topk_method"])
    grouped = method != "greedy"  # which knows no groups (published V2-Lite files still name one)
    moe: dict[str, Any] = {
        "n_routed_experts": keys.integer("n_routed_experts"),
        "num_experts_per_tok": keys.integer("num_experts_per_tok"),
        "n_shared_experts": keys.integer("n_shared_experts", 0, least=0),
        "moe_intermediate_size": keys.integer("moe_intermediate_size"),
        "n_group": keys.integer("n_group") if grouped else 1,
        "topk_group": keys.integer("topk_group") if grouped else 1,
        "topk_method": method,
        "scoring_func": keys.choice("scoring_func", ("softmax", "sigmoid"), defaults["scoring_func"]),
        "norm_topk_prob": keys.boolean("norm_topk_prob"),
        "routed_scaling_factor": keys.number("routed_scaling_factor"),
        "first_k_dense_replace": keys.integer("first_k_dense_replace", least=0),
        "moe_layer_freq": keys.integer("moe_layer_freq", 1),
    }
    if moe["norm_topk_prob"] and architecture == "DeepseekV2ForCausalLM":
        raise keys.fail(
            "norm_topk_prob", "DeepSeek-V2's own code and Transformers disagree on it, expected false"
        )
    experts, groups = moe["n_routed_experts"], moe["n_group"]
    if experts % groups:
        raise keys.fail("n_group", f"does not divide n_routed_experts={experts}")
    if moe["topk_group"] > groups:
        raise keys.fail("topk_group", f"is more than n_group={groups}")
    if moe["topk_method"] == "noaux_tc" and groups > 1 and experts // groups < 2:
        raise keys.fail("n_group", "noaux_tc ranks a group by its two best experts, but a group has one")
    if moe["num_experts_per_tok"] > moe["topk_group"] * (experts // groups):
        raise keys.fail("num_experts_per_tok", "is more than the experts of the chosen groups")
    return moe


def _parse_rope(raw: Mapping[str, Any]) -> tuple[float, YarnScaling | None]:
    """Rotary base and scaling, from the old keys (rope_theta, rope_scaling) or the new (rope_parameters)."""
    old, new = raw.get("rope_scaling"), raw.get("rope_parameters")
    for key, value in (("rope_scaling", old), ("rope_parameters", new)):
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"config.json: {key}={value!r}: expected an object or null")
    thetas = {float(source["rope_theta"]) for source in (raw, old or {}, new or {}) if _has_theta(source)}
    if len(thetas) != 1:
        found = f"has conflicting values {sorted(thetas)}" if thetas else "is missing"
        raise ConfigError(f"config.json: rope_theta {found}")
    scalings = [_parse_scaling(key, raw[key]) for key in ("rope_scaling", "rope_parameters") if raw.get(key)]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        raise ConfigError(f"config.json: rope_scaling={old!r} conflicts with rope_parameters={new!r}")
    return thetas.pop(), scalings[0] if scalings else None


def _has_theta(source: Mapping[str, Any]) -> bool:
    if source.get("rope_theta") is None:
        return False
    keys = Keys(source)
    if keys.number("rope_theta") <= 1:
        raise keys.fail("rope_theta", "expected a number > 1")
    return True


def _parse_scaling(name: str, raw: Mapping[str, Any]) -> YarnScaling | None:
    keys = Keys(raw, f"{name}.")
    kind = keys.agreeing(("rope_type", "type"), "default")
    if kind not in ("default", "yarn"):
        raise ConfigError(f"config.json: {name} type={kind!r}: supported: default, yarn")
    if raw.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise keys.fail("partial_rotary_factor", "only 1.0 is supported")
    allowed = _YARN_KEYS if kind == "yarn" else ()
    for key in raw:
        if key not in allowed and key not in ("rope_type", "type", "rope_theta", "partial_rotary_factor"):
            raise keys.fail(key, f"not a key of rope type {kind!r}")
    if kind == "default":
        return None
    factor = keys.number("factor")
    if factor < 1:
        raise keys.fail("factor", "expected a number >= 1")
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=keys.integer("original_max_position_embeddings", most=MAX_POSITIONS),
        beta_fast=keys.number("beta_fast", 32.0),
        beta_slow=keys.number("beta_slow", 1.0),
        mscale=keys.optional_number("mscale"),
        mscale_all_dim=keys.optional_number("mscale_all_dim"),
        attention_factor=keys.optional_number("attention_factor"),
        truncate=keys.boolean("truncate", True),
    )


def _parse_dtype(raw: Mapping[str, Any]) -> torch.dtype:
    name = Keys(raw).agreeing(("torch_dtype", "dtype"), "float32")
    if name not in _DTYPES:
        raise ConfigError(f"config.json: torch_dtype={name!r}: supported: {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _parse_quantisation(raw: Mapping[str, Any]) -> Literal["none", "fp8"]:
    section = raw.get("quantization_config")
    if section is None:
        return "none"
    if not isinstance(section, Mapping):
        raise ConfigError(f"config.json: quantization_config={section!r}: expected an object")
    keys = Keys(section, "quantization_config.")
    keys.choice("quant_method", ("fp8",))
    keys.choice("fmt", ("e4m3",), "e4m3")
    keys.choice("activation_scheme", ("dynamic",), "dynamic")
    if section.get("weight_block_size") != [FP8_BLOCK, FP8_BLOCK]:
        raise keys.fail("weight_block_size", f"only [{FP8_BLOCK}, {FP8_BLOCK}] is supported")
    return "fp8"
