"""Building blocks: root-mean-square norm, projection, dense MLP. Activations are ``[N, features]``."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine import kernels
from engine.model.half import HalfWeight, pack

MAX_PACKED_HEADS = 8
"""More heads cost less as one batched product than as single calls."""


def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised parameter for inference."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class RmsNorm(nn.Module):
    """``y = x / sqrt(mean(x^2) + eps) * weight`` in fp32, returned in the dtype of ``x``."""

    scaled_weight: Tensor
    offset: Tensor

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.size = size
        self.eps = eps
        self.weight = parameter(size, dtype=dtype)

    def prepare(self) -> None:
        """Constants of the CPU form below; called once the weight is loaded."""
        weight = self.weight.float() * math.sqrt(self.size)
        offset = torch.tensor(math.sqrt(self.size * self.eps), device=weight.device)
        self.register_buffer("scaled_weight", weight, persistent=False)
        self.register_buffer("offset", offset, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` ``[..., size]``; on CUDA ``[N, size]``."""
        if kernels.fused(x):
            from engine.kernels.norm import rms_norm

            return rms_norm(x, self.weight, self.eps)
        # sqrt(size) times the root mean square is hypot(|x|, sqrt(size * eps)): four cheap kernels where
        # the CPU's rms_norm runs six.
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        out: Tensor = (x / norm.hypot_(self.offset)).mul_(self.scaled_weight)
        return out if x.dtype == torch.float32 else out.to(x.dtype)


class Projection(nn.Module):
    """``y = x @ weight`` with ``weight`` ``[in_features, out_features]``.

    Args:
        input_major: Memory order of the weight. A CPU multiplies one row fastest by a matrix stored input
            by input; GPU libraries prefer the checkpoint's order, output by output.
    """

    def __init__(self, in_features: int, out_features: int, *, dtype: torch.dtype, input_major: bool) -> None:
        super().__init__()
        self._half: HalfWeight | None = None
        self._input_major = input_major
        self.weight: nn.Parameter | None
        if input_major:
            self.weight = parameter(in_features, out_features, dtype=dtype)
        else:
            weight = torch.empty(out_features, in_features, dtype=dtype).t()
            self.weight = nn.Parameter(weight, requires_grad=False)

    def prepare(self) -> None:
        """Replace the weight by its packed form where that is possible."""
        assert self.weight is not None
        self._half = pack(self.weight.t())
        if self._half is not None:
            self.weight = None

    def forward(self, x: Tensor, norm: RmsNorm | None = None) -> Tensor:
        """``[N, in_features]``, through ``norm`` first if there is one, to ``[N, out_features]``."""
        # In fp16, the product of x and the norm's weight might overflow
        if norm is not None and (x.dtype == torch.float16 or not self._is_skinny(x, normed=True)):
            x, norm = norm(x), None
        if self._is_skinny(x, normed=norm is not None):
            from engine.kernels.linear import skinny_linear

            assert self.weight is not None
            return skinny_linear(x, self.weight.t(), norm=None if norm is None else (norm.weight, norm.eps))
        if self._half is not None:
            return self._half(x)
        assert self.weight is not None
        return torch.mm(x, self.weight)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """``residual + forward(x)``; on CUDA ``residual`` may be overwritten with it, which saves a copy."""
        if self._is_skinny(x, normed=False):
            from engine.kernels.linear import skinny_linear

            assert self.weight is not None
            return skinny_linear(x, self.weight.t(), residual)
        if self._half is not None:
            return self._half(x) + residual
        assert self.weight is not None
        if kernels.fused(x):
            return residual.addmm_(x, self.weight)
        return torch.addmm(residual, x, self.weight)

    def _is_skinny(self, x: Tensor, *, normed: bool) -> bool:
        """Whether the kernel for few rows is the faster one."""
        if not kernels.fused(x) or self._input_major:
            return False
        from engine.kernels.linear import serves

        assert self.weight is not None
        inputs, outputs = self.weight.shape
        return serves(x.shape[0], inputs, outputs, x.dtype, normed)


class HeadProjection(nn.Module):
    """One product for each head: ``[N, heads, in_features]`` to ``[N, heads, out_features]``.

    ``weight`` is ``[heads, in_features, out_features]``.
    """

    def __init__(self, heads: int, in_features: int, out_features: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._halves: list[HalfWeight] = []
        self.weight: nn.Parameter | None = parameter(heads, in_features, out_features, dtype=dtype)

    def prepare(self) -> None:
        """Replace the weight by its heads' packed forms where that is possible and their number is small."""
        assert self.weight is not None
        if self.weight.shape[0] > MAX_PACKED_HEADS:
            return
        halves = [pack(head.t()) for head in self.weight]
        self._halves = [half for half in halves if half is not None]
        if len(self._halves) == len(halves):
            self.weight = None
        else:
            self._halves = []

    def forward(self, x: Tensor) -> Tensor:
        if self._halves:
            return torch.stack([half(x[:, head]) for head, half in enumerate(self._halves)], dim=1)
        assert self.weight is not None
        return torch.bmm(x.transpose(0, 1), self.weight).transpose(0, 1)

    def write(self, x: Tensor, out: Tensor) -> None:
        """``forward(x)`` into ``out`` ``[N, heads, out_features]``, a token's heads at any distance."""
        assert self.weight is not None, "packed weights are for CPUs"
        if kernels.fused(x):
            from engine.kernels.heads import MAX_ROWS, head_linear

            if x.shape[0] <= MAX_ROWS:
                return head_linear(x, self.weight, out)
        torch.bmm(x.transpose(0, 1), self.weight, out=out.transpose(0, 1))


class DenseMlp(nn.Module):
    """``down(silu(gate(x)) * up(x))``, gate and up as one projection."""

    def __init__(self, hidden: int, intermediate: int, *, dtype: torch.dtype, input_major: bool) -> None:
        super().__init__()
        self.intermediate = intermediate
        self.gate_up = Projection(hidden, 2 * intermediate, dtype=dtype, input_major=input_major)
        self.down = Projection(intermediate, hidden, dtype=dtype, input_major=input_major)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual`` plus the MLP of ``x``, both ``[N, hidden]``."""
        gate_up = self.gate_up(x)
        if kernels.fused(x):
            from engine.kernels.act import silu_mul

            return self.down.add_to(residual, silu_mul(gate_up))
        gate, up = gate_up.split(self.intermediate, dim=-1)
        return self.down.add_to(residual, F.silu(gate) * up)
