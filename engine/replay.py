"""Runs a bundled step again, eager and captured, from the same state.

The request runs alone, in the first of as many rows as its step had; the others are padding rows. Both runs are the
same call with the same bounds, so that nothing but the capture differs. What is never captured runs eager only: a
fault of a prefill is looked for in a prefill of the known tokens, and a step of the next token alone is just that.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

import msgspec
import torch
from torch import Tensor

from engine.build import build
from engine.bundle import Bundle, BundleError, Manifest, checkpoint_digest
from engine.bundle_check import flag_names
from engine.capture import CudaGraph, Outputs, SimulatedGraph
from engine.errors import ConfigError
from engine.guard import DRAFT, HALTING, PREFILL
from engine.kv.pool import SCRATCH_PAGE
from engine.model.draft import MtpDraft
from engine.options import Device, EngineOptions, Graphs
from engine.recorder import Place, Recorder
from engine.replay_report import TOLERANCE, ReplayReport, RunResult, Values, compare
from engine.runner import Runner
from engine.sampler import mask_words
from engine.sequence import Sequence
from engine.state import FLAGS, NEXT_TOKEN, SEQ_LEN
from engine.types import Progress, Request

MAX_KV_FAULTS: Final = 32
"""Most non-finite rows of the stored KV that a report names."""

_Mode = Literal["cuda", "simulate", "off"]


def replay(
    bundle: Bundle,
    *,
    model: Path | None = None,
    device: Device = "auto",
    graphs: Graphs = "auto",
    force: bool = False,
    progress: Callable[[Progress], None] = lambda _: None,
) -> ReplayReport:
    """Run a bundle's step on its checkpoint.

    Args:
        model: Checkpoint directory; ``None``: the one named in the bundle.
        graphs: ``auto`` captures a CUDA graph on a GPU and its stand-in on a CPU; ``off`` runs eager only.
        force: Take a checkpoint with another configuration or index than the bundle's.

    Raises:
        ConfigError: The checkpoint is another one, or something asked for cannot be honoured here.
        CheckpointError: A damaged or incomplete checkpoint.
        BundleError: The bundle does not fit the checkpoint.
    """
    path = model if model is not None else Path(bundle.manifest.options.model)
    same = checkpoint_digest(path) == bundle.manifest.checkpoint_digest
    if not same and not force:
        raise ConfigError(
            f"{path}: config.json or index is not that of the bundle; --force takes it all the same"
        )
    options = _options(bundle.manifest, path, device)
    mode = _mode(graphs, options.device)
    runner = build(path, options, progress).runner
    with torch.inference_mode():
        return _Replayer(bundle, runner).report(path, same, mode)


def _options(manifest: Manifest, path: Path, device: Device) -> EngineOptions:
    """The bundle's engine with a pool for one request: the same slots, block tables and step."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    info = manifest.info
    return msgspec.convert(
        {
            "model": str(path),
            "device": device,
            "dtype": info.dtype,
            "max_model_len": info.max_model_len,
            "max_num_seqs": info.max_num_seqs,
            "num_speculative_tokens": info.num_speculative_tokens,
            "kv_page_size": info.page_size,
            "num_kv_pages": 1 + -(-info.max_model_len // info.page_size),
            "prefill_chunk_size": manifest.options.prefill_chunk_size,
            "prefix_cache": False,
            "schedule": info.schedule,
            "attention_backend": info.attention_backend if info.device.startswith(device) else "auto",
            "graphs": "off",
            "max_graph_prefill_tokens": 0,
        },
        EngineOptions,
    )


def _mode(graphs: Graphs, device: Device) -> _Mode:
    if graphs == "auto":
        return "cuda" if device == "cuda" else "simulate"
    if graphs == "cuda" and device != "cuda":
        raise ConfigError("graphs='cuda': needs a CUDA device; simulate traces on a CPU")
    return graphs


class _Replayer:
    """A bundle put in place in the slots and pages of a runner."""

    def __init__(self, bundle: Bundle, runner: Runner) -> None:
        self._bundle, self._manifest = bundle, bundle.manifest
        self._runner, self._state, self._pool = runner, runner.state, runner.pool
        assert runner.draft is None or isinstance(runner.draft, MtpDraft)
        self._models = runner.decoder, runner.draft
        self._device = self._state.core.device
        in_prefill = bool(self._manifest.flags & PREFILL)
        self._in_prefill = in_prefill or self._manifest.step.phase == "prefill"
        # A target that is not finite makes the draft so
        self._sought = self._manifest.flags & HALTING or self._manifest.flags & DRAFT
        self._check_fit()
        self._pages = bundle.tensors["pages"].to(self._device)
        self._table = self._remapped_table()

    def _check_fit(self) -> None:
        manifest, tensors = self._manifest, self._bundle.tensors
        expected = {name: (1, *tensor.shape[1:]) for name, tensor in self._state.tensors()}
        planes, total, page_size, latent_dim = self._pool.pages.shape
        expected["pages"] = (planes, manifest.num_pages_stored, page_size, latent_dim)
        for name, tensor in tensors.items():
            if name in expected and tuple(tensor.shape) != expected[name]:
                shapes = f"{list(tensor.shape)}, the engine's has {list(expected[name])}"
                raise BundleError(f"{self._bundle.path}: {name} has shape {shapes}")
        if manifest.num_pages >= total:
            raise BundleError(
                f"{self._bundle.path}: num_pages={manifest.num_pages}: a request has at most {total - 1}"
            )
        if manifest.info.vocab_size != self._state.vocab_size:
            raise BundleError(
                f"{self._bundle.path}: info.vocab_size={manifest.info.vocab_size}, the engine's is "
                f"{self._state.vocab_size}"
            )

    def _remapped_table(self) -> Tensor:
        """The block table in page ids of this pool; what lay outside of the old pool lies outside of this one."""
        new_ids = {page: new for new, page in enumerate(self._bundle.tensors["page_ids"].tolist(), start=1)}
        new_ids[SCRATCH_PAGE] = SCRATCH_PAGE
        row = self._bundle.tensors["block_table"][0].tolist()
        outside = self._pool.num_pages
        table = [new_ids.get(page, -1 if page < 0 else outside) for page in row]
        return torch.tensor(table, dtype=torch.int32, device=self._device)

    def report(self, path: Path, same: bool, mode: _Mode) -> ReplayReport:
        """Run what the bundle is about and say what it showed."""
        manifest, dtype = self._manifest, self._pool.pages.dtype
        prefilled, eager, replayed = self._run_all(mode)
        runs = [run for run in (prefilled, eager, replayed) if run is not None]
        rows = [] if prefilled is None else compare(prefilled.values, None, 0.0)[0]
        parting = None
        if eager is not None:
            other = None if replayed is None else replayed.values
            step_rows, parting = compare(eager.values, other, TOLERANCE[dtype])
            rows += step_rows
        return ReplayReport(
            bundle=str(self._bundle.path),
            request_id=manifest.request_id,
            model=str(path),
            same_checkpoint=same,
            device=str(self._device),
            dtype=str(dtype).removeprefix("torch."),
            graphs=mode if replayed is not None else "off",
            tolerance=TOLERANCE[dtype],
            rows=manifest.step.rows,
            stride=manifest.stride,
            verify_drafts=manifest.step.verify_drafts,
            bundle_flags=flag_names(manifest.flags),
            bundle_cause=manifest.cause,
            kv="stored" if manifest.complete else "recomputed",
            stored_kv_faults=self._find_kv_faults(),
            block_table_differs=self._block_table_differs(),
            state_differs=not self._in_prefill and self._state_differs(),
            places=rows,
            prefill=None if prefilled is None else prefilled.summary(),
            eager=None if eager is None else eager.summary(),
            replay=None if replayed is None else replayed.summary(),
            first_parting=parting,
            reproduced=any(run.flags & self._sought for run in runs),
        )

    def _run_all(self, mode: _Mode) -> tuple[RunResult | None, RunResult | None, RunResult | None]:
        """A prefill, the step eager and the step replayed: each if the bundle is about it."""
        manifest = self._manifest
        # The first drafts of a request come from the phase behind its prefill
        first_drafts = self._sought & DRAFT and manifest.num_tokens == manifest.num_prompt
        prefilled = self._prefill() if self._in_prefill or first_drafts or not manifest.complete else None
        if self._in_prefill:
            return prefilled, None, None
        if not manifest.complete:
            self._take_recomputed_pages()
        eager = self._run_eager()
        # Graphs verify all of W, so a step of the next token alone has no replay to be compared with
        if mode == "off" or not manifest.step.verify_drafts:
            return prefilled, eager, None
        return prefilled, eager, self._run_captured(mode)

    def _install(self) -> None:
        """Put the state in place that the step started from."""
        slot = self._manifest.slot
        for name, tensor in self._state.tensors():
            if name in self._bundle.tensors:
                tensor[slot] = self._bundle.tensors[name][0].to(self._device)
        self._state.core[slot, FLAGS] = 0
        self._state.block_table[slot] = self._table
        self._pool.pages.zero_()
        self._pool.pages[:, 1 : 1 + self._pages.shape[1]] = self._pages

    def _run_eager(self) -> RunResult:
        slots, recorder = self._slots(self._manifest.slot), self._recorder()
        self._install()
        with recorder.attached(*self._models):
            packed, *_ = self._step(slots, recorder)()
        return self._result(packed, recorder.tensors())

    def _run_captured(self, mode: Literal["cuda", "simulate"]) -> RunResult:
        """Capture over padding rows, as the engine does, then replay with the request in the first one."""
        slots, recorder = self._slots(self._state.padding_slot), self._recorder()
        with recorder.attached(*self._models):
            run = self._step(slots, recorder)
            try:
                captured = CudaGraph(run, None) if mode == "cuda" else SimulatedGraph(run, slots)
            except (RuntimeError, NotImplementedError) as error:
                raise ConfigError(
                    f"capturing the step failed: {error}; --graphs off runs eager only"
                ) from error
        self._install()
        slots[0] = self._manifest.slot
        packed, *kept = captured.replay()
        return self._result(packed, dict(zip(recorder.tensors(), kept, strict=True)))

    def _step(self, slots: Tensor, recorder: Recorder) -> Callable[[], Outputs]:
        """The step over ``slots``, returning what was recorded behind its packed results."""
        rows, step = len(slots), self._manifest.step
        width = self._manifest.stride if step.verify_drafts else 1
        whole = self._state.block_table.shape[1] * self._pool.page_size
        max_lens = (min(step.longest or whole, whole),) * rows
        allowed = None
        if step.variant.constrained:  # the mask is not in the bundle: it only changes what is chosen
            words = mask_words(self._state.vocab_size)
            allowed = torch.full((rows, width, words), -1, dtype=torch.int32, device=self._device)

        def run() -> Outputs:
            recorder.clear()
            out = self._runner.step.run(
                slots, max_lens, step.variant, allowed, verify_drafts=step.verify_drafts
            )
            return out.packed, *recorder.tensors().values()

        return run

    def _slots(self, first: int) -> Tensor:
        slots = torch.full((self._manifest.step.rows,), self._state.padding_slot, device=self._device)
        slots[0] = first
        return slots

    def _recorder(self) -> Recorder:
        rows = self._manifest.step.rows
        return Recorder(lambda value: value[: value.shape[0] // rows].clone())

    def _result(self, packed: Tensor, kept: dict[Place, Tensor]) -> RunResult:
        *emitted, accepted, _, flags = packed[0].tolist()
        start = int(self._bundle.tensors["core"][0, SEQ_LEN])
        emits = [] if flags & HALTING else emitted[: accepted + 1]
        return RunResult(flags, emits, Values(kept, start, start + accepted + 1))

    def _prefill(self) -> RunResult:
        """Prefill the known tokens into pages of their own, in chunks as the engine would."""
        sequence = self._sequence()
        recorder = Recorder(lambda value: value.isfinite().flatten(1).all(dim=1), in_prefill=True)
        self._runner.bind(sequence, sequence.request.params.seed or 0)
        positions = len(sequence.tokens) + 2 * self._manifest.stride
        width = min(-(-positions // self._pool.page_size), self._pool.num_pages - 1, len(self._table))
        pages = torch.arange(1, width + 1, dtype=torch.int32, device=self._device)
        self._state.block_table[self._manifest.slot, :width] = pages
        with recorder.attached(*self._models):
            while sequence.left_to_prefill:
                chunk = min(sequence.left_to_prefill, self._manifest.options.prefill_chunk_size)
                self._runner.prefill([sequence.next_chunk(chunk)])
        flags = int(self._state.core[self._manifest.slot, FLAGS])
        return RunResult(flags, [], Values(recorder.tensors(), 0, sequence.prefill_end))

    def _sequence(self) -> Sequence:
        manifest, tokens = self._manifest, self._bundle.tokens
        request = Request(
            request_id=manifest.request_id,
            prompt_token_ids=tokens,
            params=msgspec.structs.replace(manifest.params, prompt_logprobs=None),
            arrival_time=0.0,
        )
        sequence = Sequence(request, (0, 0.0, 0), len(tokens) + 1, manifest.stride)
        sequence.num_prompt = manifest.num_prompt
        sequence.slot = manifest.slot
        sequence.prefill_end = len(tokens) - 1
        return sequence

    def _take_recomputed_pages(self) -> None:
        """Go on with the KV that the prefill wrote."""
        self._table = self._state.block_table[self._manifest.slot].clone()
        self._pages = self._pool.pages[:, 1 : 1 + int(self._table.max())].clone()

    def _find_kv_faults(self) -> list[tuple[int, int]]:
        places = {new: index for index, new in reversed(list(enumerate(self._remapped_table().tolist())))}
        bad = (~self._bundle.tensors["pages"].isfinite().all(dim=-1)).nonzero()[:MAX_KV_FAULTS]
        size = self._pool.page_size
        return [(plane, places[page + 1] * size + offset) for plane, page, offset in bad.tolist()]

    def _block_table_differs(self) -> bool:
        held = self._manifest.host_pages
        named: list[int] = self._bundle.tensors["block_table"][0].tolist()
        return named[: len(held)] != held[: len(named)]

    def _state_differs(self) -> bool:
        core, tokens = self._bundle.tensors["core"][0], self._bundle.tokens
        return [int(core[SEQ_LEN]), int(core[NEXT_TOKEN])] != [len(tokens) - 1, tokens[-1]]
