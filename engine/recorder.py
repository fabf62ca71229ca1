"""Keeps what the parts of a model give during a step: embedding, each layer, final state and logits, by phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.model.decoder import Decoder, DecoderLayer, Embedding
from engine.model.draft import MtpDraft


class Place(NamedTuple):
    """Where a value was made."""

    phase: str
    """``verify``, ``extend``, ``draft 1`` ...; ``prefill``, ``prefill extend``, ``prefill draft 1`` ..."""
    part: str
    """``embedding``, ``layer N`` (the residual stream), ``hidden`` (after the final norm), ``logits``."""


class Recorder:
    """Hooks on a target and its draft.

    A hook runs wherever the module does, while a step is captured too: what ``keep`` makes of a value is then an
    operation of the graph, and holds each replay's value as long as the tensor is kept.

    Args:
        in_prefill: Name the phases as those of a prefill.
        keep: From a value ``[N, ...]`` to what is kept of it. Not the value itself: it may be changed in place.

    Attributes:
        values: What was kept since ``clear``, in order; several tensors where a place was met several times.
    """

    def __init__(self, keep: Callable[[Tensor], Tensor], *, in_prefill: bool = False) -> None:
        self._target = "prefill" if in_prefill else "verify"
        self._prefix = "prefill " if in_prefill else ""
        self._keep = keep
        self.values: dict[Place, list[Tensor]] = {}
        self._drafts = 0
        self._phase = self._target

    def clear(self) -> None:
        self.values = {}

    def tensors(self) -> dict[Place, Tensor]:
        """What was kept, as one tensor a place."""
        return {place: torch.cat(parts) if parts[1:] else parts[0] for place, parts in self.values.items()}

    @contextmanager
    def attached(self, decoder: Decoder, draft: MtpDraft | None) -> Iterator[None]:
        """Record every forward of these models until the end of the block."""
        models: list[Decoder | MtpDraft] = [decoder] if draft is None else [decoder, draft]
        parts: dict[int, tuple[nn.Module, str]] = {}
        handles = [decoder.register_forward_pre_hook(self._begin_target)]
        if draft is not None:
            handles.append(draft.register_forward_pre_hook(self._begin_draft))
        for model in models:
            handles.append(model.register_forward_hook(self._hook("hidden")))
            # The two may share embedding and head
            parts |= {id(module): (module, name) for module, name in _parts(model)}
        for module, name in parts.values():
            handles.append(module.register_forward_hook(self._hook(name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin_target(self, *_: Any) -> None:
        self._phase, self._drafts = self._target, 0

    def _begin_draft(self, *_: Any) -> None:
        self._drafts += 1
        self._phase = self._prefix + ("extend" if self._drafts == 1 else f"draft {self._drafts}")

    def _hook(self, part: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(_: nn.Module, __: Any, out: Tensor) -> None:
            # The state that a draft is read from comes from the forward before: the first one's, from extend
            is_draft = part == "logits" and self._drafts > 0
            phase = f"{self._prefix}draft {self._drafts}" if is_draft else self._phase
            self.values.setdefault(Place(phase, part), []).append(self._keep(out))

        return hook


def _parts(model: Decoder | MtpDraft) -> Iterator[tuple[nn.Module, str]]:
    yield model.head, "logits"
    for module in model.modules():
        if isinstance(module, Embedding):
            yield module, "embedding"
        elif isinstance(module, DecoderLayer):
            yield module, f"layer {module.attention.layer}"
