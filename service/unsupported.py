"""Request fields that OpenAI's or vLLM's APIs have and this service does not offer.

One rule for both endpoints: such a field is accepted at the values that mean "off" (they change nothing) and
refused with 400 at any other. A field that is in no table is refused whatever its value, unless it is null.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from service.errors import bad_request

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "suffix": ("",),
    "echo": (False,),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "prompt_cache_key": (),
    "safety_identifier": (),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("none",),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "regex": (),
    "ebnf": (),
    "json_schema": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "logits_processors": (),
    "detokenize": (True,),
    "return_tokens_as_token_ids": (False,),
    "continue_final_message": (False,),
    "chat_template": (),
    "documents": (),
    "include_reasoning": (True,),
    "separate_reasoning": (True,),
    "cache_salt": (),
    "request_id": (),
    "kv_transfer_params": (),
    "mm_processor_kwargs": (),
    "vllm_xargs": (),
    "lora_path": (),
}
"""Field to the values at which it is accepted (besides null)."""


def drop_neutral(body: Mapping[str, Any], supported: Collection[str]) -> dict[str, Any]:
    """``body`` without the fields above that are off.

    Args:
        body: A decoded request body.
        supported: Fields that the endpoint honours, whatever the table says of them.

    Raises:
        ApiError: One of them is on.
    """
    kept: dict[str, Any] = {}
    for name, value in body.items():
        neutral = None if name in supported else NEUTRAL_VALUES.get(name)
        if neutral is None:
            kept[name] = value
        elif value is not None and not any(_same(value, off) for off in neutral):
            raise bad_request(f"{name} is not supported.", name, "unsupported_parameter")
    return kept


def drop_nulls(value: object) -> object:
    """``value``, if it is an object without its null entries."""
    if isinstance(value, dict):
        return {key: item for key, item in value.items() if item is not None}
    return value


def _same(value: object, other: object) -> bool:
    # In Python True == 1, in JSON they differ.
    return isinstance(value, bool) == isinstance(other, bool) and value == other
