"""Bundles: what one request's tripped step read, written to disk so that ``eyas replay`` can run it again.

A bundle is a directory with ``bundle.json`` (a ``Manifest``) and ``tensors.safetensors``: the slot's row of each
state tensor that the step reads, the known token ids and the request's KV pages. It holds token ids and never text;
with the tokenizer they are text again, so only the owner can read the files.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from engine.errors import ConfigError, EngineError
from engine.guard import Flag
from engine.options import EngineOptions
from engine.sampler import Variant
from engine.types import EngineInfo, ForwardPath, ForwardReason, SamplingParams

FORMAT: Final = 1
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


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """``bundle.json``."""

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


def flag_names(flags: int) -> list[str]:
    """Names of the bits of a row's flag word."""
    return [str(flag.name) for flag in Flag if flags & flag]


def read_bundle(path: Path) -> Bundle:
    """Read and check a bundle.

    Raises:
        BundleError: It is absent, damaged or of another format; the message names file and field.
    """
    raw = _read(path / MANIFEST)
    try:
        found = msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).get("format", msgspec.Raw(b"null"))
        if bytes(found) != str(FORMAT).encode():
            raise BundleError(
                f"{path / MANIFEST}: format {bytes(found).decode()} is not {FORMAT}, the one read here"
            )
        manifest = msgspec.json.decode(raw, type=Manifest)
    except msgspec.MsgspecError as error:
        raise BundleError(f"{path / MANIFEST}: {error}") from error
    try:
        tensors = load_file(path / TENSORS)
    except (SafetensorError, OSError) as error:
        raise BundleError(f"{path / TENSORS}: damaged or unreadable: {error}") from error
    bundle = Bundle(path, manifest, tensors)
    _check(bundle)
    return bundle


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise BundleError(f"{file}: {error.strerror}") from error


def _check(bundle: Bundle) -> None:
    """Refuse what a replay would stumble over."""
    manifest, tensors, where = bundle.manifest, bundle.tensors, bundle.path / TENSORS
    for name in ("core", "block_table", "tokens", "page_ids", "pages"):
        if name not in tensors:
            raise BundleError(f"{where}: holds no {name}")
    expected = {
        "core": (1, 3 + manifest.stride),
        "tokens": (manifest.num_tokens,),
        "page_ids": (manifest.num_pages,),
    }
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise BundleError(f"{where}: {name} has shape {list(tensors[name].shape)}, not {list(shape)}")
    pages = tensors["pages"]
    if pages.dim() != 4 or pages.shape[1] != manifest.num_pages_stored:
        raise BundleError(f"{where}: pages of shape {list(pages.shape)} are not {manifest.num_pages_stored}")
    if not 0 < manifest.num_prompt <= manifest.num_tokens or manifest.step.rows < 1:
        raise BundleError(
            f"{bundle.path / MANIFEST}: {manifest.num_prompt} prompt tokens of {manifest.num_tokens}, "
            f"{manifest.step.rows} rows"
        )
    ids = tensors["tokens"]
    if bool(((ids < 0) | (ids >= manifest.info.vocab_size)).any()):
        raise BundleError(f"{where}: tokens holds an id outside of [0, {manifest.info.vocab_size})")


def checkpoint_digest(path: Path) -> str:
    """SHA-256 of the ``config.json`` of a checkpoint directory and of its index, if it has one.

    Raises:
        ConfigError: There is no ``config.json``.
    """
    digest = hashlib.sha256()
    for name in ("config.json", "model.safetensors.index.json"):
        file = path / name
        if file.exists() or name == "config.json":
            try:
                content = file.read_bytes()
            except OSError as error:
                raise ConfigError(f"{file}: {error.strerror}") from error
            digest.update(f"{name}:{len(content)}:".encode() + content)
    return digest.hexdigest()
