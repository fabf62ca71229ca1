"""Which backend serves: ``auto`` picks the best that can, an impossible choice is refused with the reason."""

from __future__ import annotations

from engine.attention.base import AttentionBackend, AttentionSpec
from engine.attention.flash_mla import FlashMla
from engine.attention.torch_mla import TorchMla
from engine.attention.trtllm_mla import TrtllmMla
from engine.errors import ConfigError

_BEST_FIRST: tuple[type[TrtllmMla] | type[FlashMla] | type[TorchMla], ...] = (TrtllmMla, FlashMla, TorchMla)


def make_backend(name: str, spec: AttentionSpec) -> AttentionBackend:
    """The attention backend ``name``: ``auto`` or a backend's own name.

    Raises:
        ConfigError: There is no such backend, or it cannot serve ``spec`` here.
    """
    for backend in _BEST_FIRST:
        if name not in ("auto", backend.name):
            continue
        reason = backend.unsupported(spec)
        if reason is None:
            return backend(spec)
        if name == backend.name:
            raise ConfigError(f"attention_backend={name!r}: {reason}")
    known = ", ".join(backend.name for backend in _BEST_FIRST)
    raise ConfigError(f"attention_backend={name!r}: this version has only {known}")
