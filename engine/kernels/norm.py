"""Root-mean-square norm of rows, and the draft's input made of two normed halves."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from engine.kernels.jit import await_previous, check_rows, jit, jit_function, power_of_two


@jit_function
def normed(x: tl.tensor, weight: tl.tensor, eps: tl.tensor, size: tl.constexpr) -> tl.tensor:
    """``x`` ``[BLOCK]`` fp32, zero past ``size``, over its root mean square, times ``weight`` ``[BLOCK]``."""
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / size + eps) * weight


@jit
def _rms_norm(
    x: tl.tensor,
    x_stride: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    size: tl.constexpr,
    block: tl.constexpr,
) -> None:
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    inside = columns < size
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        out + row * size + columns, normed(values, scale, eps, size).to(out.dtype.element_ty), mask=inside
    )


@jit
def _merge_inputs(
    token_ids: tl.tensor,
    embedding: tl.tensor,
    embedding_weight: tl.tensor,
    hidden: tl.tensor,
    hidden_stride: tl.tensor,
    hidden_weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    size: tl.constexpr,
    block: tl.constexpr,
) -> None:
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    half = tl.program_id(1)
    columns = tl.arange(0, block)
    inside = columns < size
    if half == 0:
        source = embedding + tl.load(token_ids + row).to(tl.int64) * size
        weight = embedding_weight
    else:
        source = hidden + row * hidden_stride
        weight = hidden_weight
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
    place = out + (row * 2 + half) * size + columns
    tl.store(place, normed(values, scale, eps, size).to(out.dtype.element_ty), mask=inside)


def _warps(block: int) -> int:
    """Warps of a program that holds ``block`` elements: at most 16 elements a thread up to 8192."""
    return min(16, max(1, block // 512))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` of each row, in fp32, rounded once to the dtype of ``x``.

    Args:
        x: ``[N, size]``, rows at any distance (a slice of a wider product is read in place).
        weight: ``[size]``.

    Returns:
        ``[N, size]``, contiguous.
    """
    check_rows("x", x)
    rows, size = x.shape
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    block = power_of_two(size)
    _rms_norm[(rows,)](x, x.stride(0), weight, out, eps, size=size, block=block, num_warps=_warps(block))
    return out


def merge_inputs(
    token_ids: Tensor,
    embedding: Tensor,
    embedding_weight: Tensor,
    hidden: Tensor,
    hidden_weight: Tensor,
    eps: float,
) -> Tensor:
    """Each token's embedding and hidden state, both normed, side by side.

    Args:
        token_ids: ``[N]`` integers below the vocabulary's size.
        embedding: ``[vocab, size]``, contiguous.
        embedding_weight, hidden_weight: ``[size]``, the weights of the two norms.
        hidden: ``[N, size]``, rows at any distance.
        eps: Of both norms.

    Returns:
        ``[N, 2 * size]`` in the dtype of ``hidden``: embeddings first.
    """
    check_rows("hidden", hidden)
    assert embedding.is_contiguous() and token_ids.is_contiguous(), "gathered by position"
    rows, size = hidden.shape
    out = torch.empty((rows, 2 * size), dtype=hidden.dtype, device=hidden.device)
    block = power_of_two(size)
    _merge_inputs[(rows, 2)](
        token_ids,
        embedding,
        embedding_weight,
        hidden,
        hidden.stride(0),
        hidden_weight,
        out,
        eps,
        size=size,
        block=block,
        num_warps=_warps(block),
    )
    return out
