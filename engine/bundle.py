"""Bundles: what one request's tripped step read, written to disk so that ``eyas replay`` can run it again.

A bundle is a directory with ``bundle.json`` (a ``Manifest``) and ``tensors.safetensors``: the slot's row of each
state tensor that the step reads, the known token ids and the request's KV pages. It holds token ids and never text;
with the tokenizer they are text again, so only the owner can read the files.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.bundle_check import (
    DamagedError,
    Form,
    check_fields,
    check_forms,
    check_manifest,
    check_values,
    expected_forms,
)
from engine.errors import ConfigError, EngineError
from engine.options import EngineOptions
from engine.sampler import Variant
from engine.types import EngineInfo, ForwardPath, ForwardReason, SamplingParams

FORMAT: Final = 2
"""Raise it with any change of ``Manifest``, also within its parts, and of the tensors of ``SlotState`` (names,
types, shapes): every field, and every tensor that the step reads, has to be there to be read."""
MANIFEST: Final = "bundle.json"
TENSORS: Final = "tensors.safetensors"
"""The files of a bundle."""


class BundleError(EngineError):
    """A bundle that is damaged, of another format, or does not fit the model that it is run on."""


class StepPath(msgspec.Struct, frozen=True, kw_only=True):
    """How a forward ran: what it needs, besides device state, to run in the same way again."""

    phase: Literal["step", "prefill"]
    path: ForwardPath
    reason: ForwardReason | None
    """Why it ran eager; ``None`` where that is not known any more."""
    rows: int
    """Rows of the forward, padding rows included; 1 where it ran eager."""
    variant: Variant
    longest: int | None = None
    """Positions that its rows could reach, which may decide which kernels ran; ``None``: all that there are."""
    verify_drafts: bool
    """False: of a stride above 1 it verified its next token alone, as each step of an isolated request does."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """``bundle.json``; ``engine.bundle_check`` says what of it is refused."""

    format: int
    versions: dict[str, str]
    device_name: str
    checkpoint_digest: str
    """SHA-256 of the checkpoint's ``config.json`` and, where it has one, its index."""
    options: EngineOptions
    info: EngineInfo

    request_id: str
    params: SamplingParams
    """Without its grammar, which is text."""
    num_prompt: int
    num_tokens: int
    """Known tokens: prompt and the output that was kept."""
    position: int
    """Of the first token that the step could not decide."""
    slot: int
    flags: int
    flag_names: list[str]
    cause: str | None
    """What was found to be at fault, where it was known when the bundle was written."""
    step: StepPath
    stride: int
    """Query positions of each row, W."""
    host_pages: list[int]
    """Page ids that the scheduler holds for the request, in order of position."""
    num_pages: int
    num_pages_stored: int
    complete: bool
    """Every page is stored."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle in memory.

    Attributes:
        tensors: State rows by name, each with a leading dimension of 1; ``tokens`` ``[num_tokens]`` int64;
            ``page_ids`` ``[num_pages]`` int64, ids of the valid pages that the device's block table names;
            ``pages`` ``[planes, num_pages_stored, page_size, latent_dim]``, the leading ones of these.
    """

    path: Path
    manifest: Manifest
    tensors: dict[str, Tensor]

    @property
    def tokens(self) -> list[int]:
        ids: list[int] = self.tensors["tokens"].tolist()
        return ids


def read_bundle(path: Path) -> Bundle:
    """Read and check a bundle: whatever is damaged is found here, before a model is loaded.

    Raises:
        BundleError: It is absent, damaged or of another format; the message names file and field.
    """
    file = path / MANIFEST
    try:
        manifest = _parse(file.read_bytes())
        check_manifest(manifest)
    except OSError as error:
        raise BundleError(f"{file}: {error.strerror}") from error
    except RecursionError as error:
        raise BundleError(f"{file}: nested too deeply") from error
    except ValueError as error:  # DamagedError and what msgspec raises are such
        raise BundleError(f"{file}: {_one_line(error)}") from error
    file = path / TENSORS
    try:
        tensors = _load(file, manifest)
        check_values(manifest, tensors)
    except DamagedError as error:
        raise BundleError(f"{file}: {_one_line(error)}") from error
    except (SafetensorError, OSError) as error:
        raise BundleError(f"{file}: damaged or unreadable: {_one_line(error)}") from error
    return Bundle(path, manifest, tensors)


def _parse(raw: bytes) -> Manifest:
    found: object = msgspec.json.decode(raw)
    if not isinstance(found, dict):
        raise DamagedError("is not a JSON object")
    number = found.get("format")
    if type(number) is not int or number != FORMAT:
        raise DamagedError(f"format {json.dumps(number):.80} is not {FORMAT}, the one read here")
    manifest = msgspec.json.decode(raw, type=Manifest)
    check_fields(found, msgspec.to_builtins(manifest, str_keys=True))
    return manifest


def _load(file: Path, manifest: Manifest) -> dict[str, Tensor]:
    """The tensors of a file, which are looked at in its header first: no other is ever made."""
    held: Any
    with safe_open(file, framework="pt", device="cpu") as held:
        views = {name: held.get_slice(name) for name in held.keys()}  # noqa: SIM118 (not a mapping)
        forms = {name: Form(view.get_dtype(), tuple(view.get_shape())) for name, view in views.items()}
        check_forms(forms, expected_forms(manifest))
        return {name: held.get_tensor(name) for name in forms}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def checkpoint_digest(path: Path) -> str:
    """SHA-256 of the ``config.json`` of a checkpoint directory and of its index, if it has one.

    Raises:
        ConfigError: There is no ``config.json``.
    """
    digest = hashlib.sha256()
    for name in ("config.json", "model.safetensors.index.json"):
        file = path / name
        try:
            content = file.read_bytes()
        except FileNotFoundError as error:
            if name != "config.json":
                continue
            raise ConfigError(f"{file}: {error.strerror}") from error
        except OSError as error:
            raise ConfigError(f"{file}: {error.strerror}") from error
        except ValueError as error:  # a NUL in the path
            raise ConfigError(f"{str(file)!r}: {error}") from error
        digest.update(f"{name}:{len(content)}:".encode() + content)
    return digest.hexdigest()
