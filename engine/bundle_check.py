"""What a bundle must hold so that its step can be run again, checked before any model is loaded.

The host's own records have to agree with each other and with the tensors. Rows of device state are evidence and may
hold any value that the step itself survives: they are held to their types and shapes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, get_args

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.guard import DRAFT, HALTING, Flag
from engine.kv.pool import SCRATCH_PAGE
from engine.options import AttentionBackend, Dtype, EngineOptions, Schedule
from engine.sampler import Variant, choose_variant
from engine.state import SlotState, processes_logits
from engine.types import EngineInfo, SamplingParams

if TYPE_CHECKING:
    from engine.bundle import Manifest

_INT32_MAX: Final = 2**31 - 1
_INT64_MAX: Final = 2**63 - 1
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_DEVICE: Final = re.compile(r"cpu|cuda(:\d+)?")
_ALL_FLAGS: Final = sum(Flag)
_TYPE_NAMES: Final = {
    torch.bool: "BOOL",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
}
"""As safetensors writes them."""
_WAYS: Final = (("step", "replay", "none"), ("step", "eager", None), ("prefill", "eager", "prefill"))
"""Phase, path and reason of the forwards that are bundled."""
_WIDE: Final = frozenset({"logit_bias", "stop_mask", "output_counts", "prompt_seen"})
"""State as wide as the vocabulary, which only requests that process logits read."""


class DamagedError(ValueError):
    """The message names the field or tensor that cannot be as it is."""


class Form(NamedTuple):
    """A tensor's type, by its name in safetensors, and shape; ``None``: any length."""

    dtype: str
    shape: tuple[int | None, ...]


def flag_names(flags: int) -> list[str]:
    """Names of the bits of a row's flag word."""
    return [str(flag.name) for flag in Flag if flags & flag]


def omitted_state(variant: Variant, params: SamplingParams) -> frozenset[str]:
    """Names of the state tensors that a step of ``variant`` does not read for a request: a bundle lacks them."""
    wide = frozenset() if processes_logits(params) else _WIDE
    return wide if variant.sampled else wide | {"draft_probs"}


def valid_pages(block_table: Tensor, num_pages: int) -> list[int]:
    """Pages that a block-table row names, each once, in order; ids outside of the pool cannot be stored."""
    ids = dict.fromkeys(block_table.flatten().tolist())
    return [page for page in ids if page != SCRATCH_PAGE and 0 <= page < num_pages]


def check_fields(found: Any, known: Any, place: str = "$") -> None:
    """Refuse JSON that is not its decoded form in builtin types: a default stands for no missing field.

    Raises:
        DamagedError: Naming the first field that is missing, unknown or of another value.
    """
    if isinstance(found, dict) and isinstance(known, dict):
        for name in known:
            if name not in found:
                raise DamagedError(f"{place}.{name} is missing")
            check_fields(found[name], known[name], f"{place}.{name}")
        for name in found:
            if name not in known:
                raise DamagedError(f"{place}.{name} is not a field of a bundle")
    elif found != (list(known) if isinstance(known, tuple) else known):
        raise DamagedError(f"{place} cannot be read exactly")


def check_manifest(manifest: Manifest) -> None:
    """Refuse records that no engine writes.

    Raises:
        DamagedError: Naming the field.
    """
    _check_engine(manifest.options, manifest.info)
    _check_request(manifest)
    _check_params(manifest.params, manifest.info.vocab_size)
    _check_step(manifest)
    _check_pages(manifest)


def _check_engine(options: EngineOptions, info: EngineInfo) -> None:
    try:
        options.validate()
    except ConfigError as error:
        raise DamagedError(f"options.{error}") from error
    _within("info.vocab_size", info.vocab_size, 1, _INT32_MAX)
    _within("info.max_model_len", info.max_model_len, 2, _INT32_MAX)
    _within("info.num_pages", info.num_pages, 2, _INT32_MAX)
    for name, choices in (
        ("dtype", Dtype),
        ("schedule", Schedule),
        ("attention_backend", AttentionBackend),
    ):
        allowed = [choice for choice in get_args(choices) if choice != "auto"]
        value = getattr(info, name)
        _require(value in allowed, f"info.{name}={value!r}: must be one of {', '.join(allowed)}")
    _require(
        _DEVICE.fullmatch(info.device) is not None,
        f"info.device={info.device!r}: must be cpu or cuda, with or without its index",
    )
    chosen = {
        "dtype": (options.dtype, info.dtype),
        "device": (options.device, info.device.partition(":")[0]),
        "schedule": (options.schedule, info.schedule),
        "attention_backend": (options.attention_backend, info.attention_backend),
        "max_model_len": (options.max_model_len, info.max_model_len),
        "num_pages": (options.num_kv_pages, info.num_pages),
        "page_size": (options.kv_page_size, info.page_size),
        "max_num_seqs": (options.max_num_seqs, info.max_num_seqs),
        "num_speculative_tokens": (options.num_speculative_tokens, info.num_speculative_tokens),
    }
    for name, (option, resolved) in chosen.items():
        _require(option in (None, "auto", resolved), f"info.{name}={resolved!r}: the options say {option!r}")


def _check_request(manifest: Manifest) -> None:
    digest = manifest.checkpoint_digest
    _require(_DIGEST.fullmatch(digest) is not None, f"checkpoint_digest={digest!r:.80}: is no SHA-256")
    _within("num_tokens", manifest.num_tokens, 1, manifest.info.max_model_len)
    _within("num_prompt", manifest.num_prompt, 1, manifest.num_tokens)
    _within("position", manifest.position, manifest.num_tokens, manifest.num_tokens)
    _within("flags", manifest.flags, 1, _ALL_FLAGS)
    names = flag_names(manifest.flags)
    _require(manifest.flag_names == names, f"flag_names={manifest.flag_names}: the flags are {names}")
    _require(
        bool(manifest.flags & (HALTING | DRAFT)),
        f"flags={manifest.flags}: none of them halts or drops drafts",
    )


def _check_params(params: SamplingParams, vocab_size: int) -> None:
    _require(params.grammar is None, "params.grammar: a bundle holds none")
    for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
        _require(
            all(0 <= one < vocab_size for one in ids),
            f"params.{name} holds an id outside of [0, {vocab_size})",
        )
    # Both are counted from the request's prompt, in int64
    _within("params.max_tokens", params.max_tokens, 0, _INT32_MAX)
    _within("params.min_tokens", params.min_tokens, 0, _INT32_MAX)
    _within("params.top_k", params.top_k, 0, _INT32_MAX)
    _require(params.temperature >= 0, f"params.temperature={params.temperature}: must not be negative")
    _require(0 < params.top_p <= 1, f"params.top_p={params.top_p}: must be above 0 and at most 1")
    _require(0 <= params.min_p <= 1, f"params.min_p={params.min_p}: must be from 0 to 1")
    _require(
        params.repetition_penalty > 0,
        f"params.repetition_penalty={params.repetition_penalty}: must be above 0",
    )
    if params.seed is not None:
        _within("params.seed", params.seed, -_INT64_MAX - 1, _INT64_MAX)


def _check_step(manifest: Manifest) -> None:
    step, rows = manifest.step, manifest.info.max_num_seqs
    k = manifest.info.num_speculative_tokens
    _within("stride", manifest.stride, k + 1, k + 1)
    _within("slot", manifest.slot, 0, rows - 1)
    _within("step.rows", step.rows, 1, rows if step.path == "replay" else 1)
    if step.longest is not None:
        _within("step.longest", step.longest, 1, _INT32_MAX)
    _require(
        (step.phase, step.path, step.reason) in _WAYS,
        f"step: phase {step.phase!r} with path {step.path!r} and reason {step.reason!r}",
    )
    _require(
        step.verify_drafts or ((step.phase, step.path) == ("step", "eager") and manifest.stride > 1),
        "step.verify_drafts is false, which only an eager step with drafts to leave out can be",
    )
    needed = choose_variant([manifest.params])
    for name in ("sampled", "truncated", "processed"):
        _require(
            getattr(step.variant, name) or not getattr(needed, name),
            f"step.variant.{name} is false, but params need it",
        )


def _check_pages(manifest: Manifest) -> None:
    last = manifest.info.num_pages - 1
    for page in manifest.host_pages:
        _within("host_pages", page, 1, last)
    _require(len({*manifest.host_pages}) == len(manifest.host_pages), "host_pages holds a page twice")
    _within("num_pages", manifest.num_pages, 0, last)
    _within("num_pages_stored", manifest.num_pages_stored, 0, manifest.num_pages)
    whole = manifest.num_pages_stored == manifest.num_pages
    _require(
        manifest.complete == whole,
        f"complete={manifest.complete}: {manifest.num_pages_stored} of {manifest.num_pages} pages are stored",
    )


def expected_forms(manifest: Manifest) -> dict[str, Form]:
    """Type and shape of each tensor that a bundle with this (checked) manifest holds."""
    info = manifest.info
    state = SlotState(
        num_slots=0,
        num_speculative_tokens=info.num_speculative_tokens,
        vocab_size=info.vocab_size,
        table_width=1,
        device=torch.device("meta"),
    )
    omitted = omitted_state(manifest.step.variant, manifest.params)
    forms = {
        name: Form(_TYPE_NAMES[tensor.dtype], tuple(tensor.shape))
        for name, tensor in state.tensors()
        if name not in omitted
    }
    forms["block_table"] = Form("I32", (1, None))
    forms["tokens"] = Form("I64", (manifest.num_tokens,))
    forms["page_ids"] = Form("I64", (manifest.num_pages,))
    pages = (None, manifest.num_pages_stored, info.page_size, None)
    forms["pages"] = Form(_TYPE_NAMES[getattr(torch, info.dtype)], pages)
    return forms


def check_forms(found: Mapping[str, Form], expected: Mapping[str, Form]) -> None:
    """Refuse tensors of other names, types or shapes than ``expected``.

    Raises:
        DamagedError: Naming the tensor.
    """
    for name, form in expected.items():
        if name not in found:
            raise DamagedError(f"holds no {name}")
        dtype, shape = found[name]
        _require(dtype == form.dtype, f"{name} is of type {dtype}, not {form.dtype}")
        fits = len(shape) == len(form.shape) and all(
            want in (None, length) for length, want in zip(shape, form.shape, strict=True)
        )
        wanted = ", ".join("any" if length is None else str(length) for length in form.shape)
        _require(fits, f"{name} has shape {list(shape)}, not [{wanted}]")
    for name in found:
        _require(name in expected, f"holds {name!r}, which the step of this bundle does not read")


def check_values(manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    """Refuse values, in tensors of the expected forms, that would make a replay fail or tell something else.

    Raises:
        DamagedError: Naming the tensor.
    """
    info, tokens, table = manifest.info, tensors["tokens"], tensors["block_table"]
    _require(
        bool(((tokens >= 0) & (tokens < info.vocab_size)).all()),
        f"tokens holds an id outside of [0, {info.vocab_size})",
    )
    width = table.shape[1]
    _require(
        width * info.page_size >= info.max_model_len,
        f"block_table names {width} pages, too few for the {info.max_model_len} positions of max_model_len",
    )
    # Not to max_model_len: a step reaches past it, and so may the bound of a graph for short rows
    if manifest.step.longest is not None:
        _within("step.longest", manifest.step.longest, 1, width * info.page_size)
    _require(len(manifest.host_pages) <= width, f"block_table names {width} pages, host_pages holds more")
    _require(
        tensors["page_ids"].tolist() == valid_pages(table, info.num_pages),
        "page_ids are not the pages that block_table names",
    )
    _within("top_k", int(tensors["top_k"]), 1, info.vocab_size)


def _within(name: str, value: int, low: int, high: int) -> None:
    bounds = f"{low}" if low == high else f"from {low} to {high}"
    _require(low <= value <= high, f"{name}={value}: must be {bounds}")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise DamagedError(message)
