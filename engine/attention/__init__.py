"""The attention seam: one contract, several kernels."""

from engine.attention.base import (
    Attention,
    AttentionBackend,
    AttentionSpec,
    PackedAttention,
    UniformAttention,
)
from engine.attention.select import make_backend

__all__ = [
    "Attention",
    "AttentionBackend",
    "AttentionSpec",
    "PackedAttention",
    "UniformAttention",
    "make_backend",
]
