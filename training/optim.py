"""Muon for the matrices, Adam for everything else.

Muon (Jordan et al., 2024, "Muon: an optimizer for hidden layers in neural networks"): the momentum of each
matrix is replaced by the nearest half-orthogonal matrix. Matrices of one shape are worked on together.
"""

import torch
from torch import Tensor, nn


def orthogonal(x: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration: pushes the singular values of each matrix of x [n, r, c] towards 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    out = x.bfloat16() if x.is_cuda else x
    tall = out.shape[-2] > out.shape[-1]
    if tall:
        out = out.mT
    out = out / (out.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = out @ out.mT
        out = a * out + (b * gram + c * gram @ gram) @ out
    return (out.mT if tall else out).to(x.dtype)


class Muon:
    """Keeps one momentum buffer for each shape of matrix."""

    def __init__(self, parameters: list[Tensor], momentum: float = 0.95, weight_decay: float = 0.05) -> None:
        self.momentum, self.weight_decay = momentum, weight_decay
        self.groups: dict[tuple[int, int], list[Tensor]] = {}
        for p in parameters:
            self.groups.setdefault((p.shape[-2], p.shape[-1]), []).append(p)
        self.buffers: dict[tuple[int, int], Tensor] = {}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update; gradients are left as they are."""
        for shape, parameters in self.groups.items():
            grads = torch.cat([p.grad.reshape(-1, *shape) for p in parameters])
            buffer = self.buffers.setdefault(shape, torch.zeros_like(grads))
            buffer.lerp_(grads, 1 - self.momentum)
            update = orthogonal(grads.lerp(buffer, self.momentum))
            scale = lr * max(1.0, shape[0] / shape[1]) ** 0.5
            sizes = [p.numel() // (shape[0] * shape[1]) for p in parameters]
            pieces = [u.view_as(p) for u, p in zip(update.split(sizes), parameters, strict=True)]
            torch._foreach_mul_(parameters, 1 - lr * self.weight_decay)
            torch._foreach_add_(parameters, pieces, alpha=-scale)


class Optimizer:
    """Muon for hidden matrices; Adam for embedding, head, routers and norms."""

    def __init__(self, model: nn.Module, matrix_lr: float, adam_lr: float) -> None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        adam = [p for n, p in named if p.ndim == 1 or "embed" in n or "lm_head" in n or "router" in n]
        ids = {id(p) for p in adam}
        routers = [p for n, p in named if "router" in n]
        adam = [p for n, p in named if id(p) in ids and "router" not in n]
        self.muon = Muon([p for _, p in named if id(p) not in ids])
        # A router is wide open to Adam's equal-sized steps: at the full rate its choices collapse at once.
        groups = [{"params": adam, "scale": adam_lr}, {"params": routers, "scale": 0.1 * adam_lr}]
        self.adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=adam[0].is_cuda)
        self.matrix_lr = matrix_lr

    def step(self, factor: float) -> None:
        """One update with both learning rates times `factor`; clears the gradients."""
        for group in self.adam.param_groups:
            group["lr"] = group["scale"] * factor
        self.adam.step()
        self.muon.step(self.matrix_lr * factor)
        for parameters in (*self.muon.groups.values(), *(g["params"] for g in self.adam.param_groups)):
            for p in parameters:
                p.grad = None


def schedule(progress: float, warm: float = 0.01, flat: float = 0.4) -> float:
    """Learning-rate factor at `progress` (0..1): a short rise, a plateau, a straight fall to 0."""
    if progress < warm:
        return (progress + 0.001) / (warm + 0.001)
    return 1.0 if progress < flat else max(0.0, (1 - progress) / (1 - flat))
