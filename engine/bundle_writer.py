"""Writes bundles (see ``engine.bundle``) while the engine serves: bounded in size and number, never in the way."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import os
import platform
import secrets
import shutil
import time
from pathlib import Path
from typing import Final, Literal

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.bundle import FORMAT, MANIFEST, TENSORS, Manifest, StepPath, checkpoint_digest
from engine.bundle_check import flag_names, omitted_state, valid_pages
from engine.contract import GraphKey
from engine.guard import HALTING, PREFILL
from engine.kv.pool import LatentPool
from engine.options import EngineOptions
from engine.runner import Runner
from engine.sampler import Variant, choose_variant
from engine.sequence import PrefillResult, RowResult
from engine.state import SlotState
from engine.types import EngineInfo, SamplingParams
from engine.writable import make_writable_directory

MAX_BUNDLE_BYTES: Final = 512 << 20
"""Largest bundle. KV pages past it are left out; the rest still tells what happened."""
MAX_BUNDLES: Final = 16
"""Most bundles in a directory; the oldest stay, since a storm's first trip says the most."""

Outcome = Literal["written", "limit", "failed"]

logger = logging.getLogger(__name__)


class BundleWriter:
    """Writes bundles into one directory.

    Args:
        options, info: Of the engine whose steps are bundled.

    Raises:
        ConfigError: The directory cannot be made or written to.
    """

    def __init__(self, directory: Path, options: EngineOptions, info: EngineInfo) -> None:
        self._directory = directory
        self._options = msgspec.structs.replace(options, model=str(Path(options.model).resolve()))
        self._info = info
        self._digest = checkpoint_digest(Path(options.model))
        self._versions = _versions()
        make_writable_directory(f"nan_bundle_dir={str(directory)!r}", directory)

    def write(
        self,
        result: RowResult | PrefillResult,
        step: StepPath,
        state: SlotState,
        pool: LatentPool,
        cause: str | None = None,
    ) -> Outcome:
        """Bundle what the guard found in one row; never raises.

        Call it while the device is idle, before the result's tokens are kept and before the request's slot and
        pages go back. After a fault of the draft alone, the slot's state is put back to what the step read, as
        far as the host knows it: drafts that were refused are lost.

        Returns:
            ``written``; ``limit`` where the directory is full, ``failed`` after an error: both are logged.
        """
        request_id = result.sequence.request.request_id
        try:
            if sum(entry.name.startswith("trip-") for entry in self._directory.iterdir()) >= MAX_BUNDLES:
                logger.warning(
                    "no bundle of request %s: %s holds %d", request_id, self._directory, MAX_BUNDLES
                )
                return "limit"
            path = self._store(*self._collect(result, step, state, pool, cause))
        except Exception:  # whatever it is, requests are worth more than a bundle
            logger.exception("no bundle of request %s", request_id)
            return "failed"
        logger.warning("request %s: %s; bundle %s", request_id, ", ".join(flag_names(result.flags)), path)
        return "written"

    def _collect(
        self,
        result: RowResult | PrefillResult,
        step: StepPath,
        state: SlotState,
        pool: LatentPool,
        cause: str | None,
    ) -> tuple[Manifest, dict[str, Tensor]]:
        sequence = result.sequence
        assert sequence.slot is not None, f"request {sequence.request.request_id} has no slot to bundle"
        params = sequence.request.params
        tensors = _state_rows(state, sequence.slot, step.variant, params)
        if isinstance(result, RowResult) and not result.flags & HALTING:
            _rewind(tensors, result)
        tensors["tokens"] = torch.tensor(sequence.tokens, dtype=torch.int64)
        page_ids = valid_pages(tensors["block_table"], pool.num_pages)
        tensors["page_ids"] = torch.tensor(page_ids, dtype=torch.int64)
        stored = _pages_that_fit(page_ids, tensors, pool)
        tensors["pages"] = _copy_pages(pool, stored)
        manifest = Manifest(
            format=FORMAT,
            versions=self._versions,
            device_name=_device_name(state.core.device),
            checkpoint_digest=self._digest,
            options=self._options,
            info=self._info,
            request_id=sequence.request.request_id,
            params=msgspec.structs.replace(params, grammar=None),
            num_prompt=sequence.num_prompt,
            num_tokens=len(sequence.tokens),
            position=len(sequence.tokens),
            slot=sequence.slot,
            flags=result.flags,
            flag_names=flag_names(result.flags),
            cause=cause,
            step=step,
            stride=sequence.stride,
            host_pages=list(sequence.pages),
            num_pages=len(page_ids),
            num_pages_stored=len(stored),
            complete=len(stored) == len(page_ids),
        )
        return manifest, tensors

    def _store(self, manifest: Manifest, tensors: dict[str, Tensor]) -> Path:
        """Write both files under another name first, so that a bundle with its final name is whole."""
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        path = self._directory / f"trip-{stamp}-{secrets.token_hex(3)}"
        partial = path.with_name(f"{path.name}.partial")
        partial.mkdir(mode=0o700)
        try:
            (partial / MANIFEST).write_bytes(
                msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"
            )
            save_file(tensors, partial / TENSORS)
            for file in partial.iterdir():
                file.chmod(0o600)
            os.rename(partial, path)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return path


class TripBundles:
    """The ladder's ``BundleSink``: bundles each trip of a runner's steps, and counts what became of it."""

    def __init__(self, writer: BundleWriter, runner: Runner) -> None:
        self._writer = writer
        self._runner = runner

    def write(self, result: RowResult | PrefillResult, graph: GraphKey | None) -> None:
        """See ``BundleWriter.write``; ``graph``: what was replayed, ``None`` for an eager forward."""
        runner = self._runner
        step = _step_path(result, graph)
        if graph is not None and graph.short and runner.graphs is not None:
            step = msgspec.structs.replace(step, longest=runner.graphs.longest(graph))
        outcome = self._writer.write(result, step, runner.state, runner.pool)
        runner.counts["nan_bundles", (outcome,)] += 1


def _step_path(result: RowResult | PrefillResult, graph: GraphKey | None) -> StepPath:
    if graph is not None:
        return StepPath(
            phase="step",
            path="replay",
            reason="none",
            rows=graph.rows,
            variant=graph.variant,
            verify_drafts=True,
        )
    sequence = result.sequence
    variant = choose_variant([sequence.request.params])
    if isinstance(result, PrefillResult) or result.flags & PREFILL:
        return StepPath(
            phase="prefill", path="eager", reason="prefill", rows=1, variant=variant, verify_drafts=True
        )
    # A row's result is the same in each variant that serves it, so the least will do for the batch's
    if sequence.constraint is not None:
        variant = dataclasses.replace(variant, constrained=True)
    return StepPath(
        phase="step",
        path="eager",
        reason=None,
        rows=1,
        variant=variant,
        verify_drafts=not sequence.isolated or sequence.stride == 1,
    )


def _state_rows(state: SlotState, slot: int, variant: Variant, params: SamplingParams) -> dict[str, Tensor]:
    """The slot's row ``[1, ...]`` of each tensor that its step reads, on the host."""
    omitted = omitted_state(variant, params)
    return {
        name: tensor[slot : slot + 1].to("cpu", copy=True)
        for name, tensor in state.tensors()
        if name not in omitted
    }


def _rewind(tensors: dict[str, Tensor], result: RowResult) -> None:
    """The row before a step that did commit: its accepted drafts stand as the only ones there were."""
    sequence, emitted, accepted = result.sequence, result.token_ids, result.num_accepted
    drafts = emitted[:accepted] + emitted[accepted:] * (sequence.stride - 1 - accepted)
    head = [len(sequence.tokens) - 1, accepted, 0, sequence.tokens[-1]]
    tensors["core"] = torch.tensor([head + drafts], dtype=torch.int64)
    if "output_counts" in tensors:
        output = torch.tensor(sequence.tokens[sequence.num_prompt :], dtype=torch.int64)
        counts = torch.bincount(output, minlength=tensors["output_counts"].shape[1])
        tensors["output_counts"] = counts[None].to(torch.int32)
    if "draft_probs" in tensors:
        # A draft whose own probability is zero is accepted wherever the target's is not
        tensors["draft_probs"].zero_()


def _pages_that_fit(page_ids: list[int], tensors: dict[str, Tensor], pool: LatentPool) -> list[int]:
    """The leading pages for which a bundle has room beside ``tensors``."""
    each = pool.pages[:, 0].nbytes
    left = MAX_BUNDLE_BYTES - sum(tensor.nbytes for tensor in tensors.values())
    return page_ids[: max(0, left // each)]


def _copy_pages(pool: LatentPool, page_ids: list[int]) -> Tensor:
    """``[planes, len(page_ids), page_size, latent_dim]`` on the host, page by page: the device may be full."""
    planes, _, page_size, latent_dim = pool.pages.shape
    copy = torch.empty((planes, len(page_ids), page_size, latent_dim), dtype=pool.pages.dtype)
    for place, page in enumerate(page_ids):
        copy[:, place] = pool.pages[:, page].cpu()
    return copy


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    for name in ("eyas", "torch", "triton"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
