"""Phase 1: trains target and draft together, for a given number of seconds.

    python train.py --data DIR/tokens --out RUN_DIR --seconds 500

Loss: next token, plus 0.3 x (1, 0.8, 0.6) x the loss of the first three steps of the draft's chain (on half of
the rows, which costs less and is enough: phase 2 trains the draft alone). The learning rate follows the clock.
"""

import argparse
import contextlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import export
import torch
import torch.nn.functional as F
from data import HeldOut, TokenStream, cut, read_heldout
from model import Model, ModelConfig, MoE
from optim import Optimizer, schedule
from torch import Tensor

CHAIN_WEIGHTS = (0.3, 0.24, 0.18)


@dataclass(slots=True)
class Progress:
    """What the run reports."""

    history: list[dict[str, float]] = field(default_factory=list)
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def write(self, path: Path, **more: object) -> None:
        """Writes the report so far."""
        rest = {"steps": self.steps, "tokens": self.tokens, "seconds": round(self.seconds, 1)}
        path.write_text(json.dumps({**rest, **more, "history": self.history}, indent=1))


def precision(device: str) -> contextlib.AbstractContextManager[None]:
    """bf16 autocast on a GPU, fp32 elsewhere."""
    return torch.autocast("cuda", torch.bfloat16) if device == "cuda" else contextlib.nullcontext()


def token_loss(model: Model, states: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy in nats. states [B, T, H], labels [B, T]."""
    return F.cross_entropy(model.lm_head(states).float().flatten(0, 1), labels.flatten())


def joint_loss(model: Model, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """tokens [B, T + 4] -> the loss, its parts [4] (next token, chain 1..3), expert loads [MoE layers, E]."""
    size = tokens.shape[1] - 4
    states, loads, _ = model(tokens[:, :size])
    losses = [token_loss(model, states, tokens[:, 1 : size + 1])]
    half = tokens[: max(1, len(tokens) // 2)]
    embedded = [model.embed(half[:, 1 + s : size + 1 + s]) for s in range(len(CHAIN_WEIGHTS))]
    chain, load = model.draft.chain(states[: len(half)], embedded)
    losses += [token_loss(model, h, half[:, 2 + s : size + 2 + s]) for s, h in enumerate(chain)]
    total = losses[0] + sum(w * loss for w, loss in zip(CHAIN_WEIGHTS, losses[1:], strict=True))
    return total, torch.stack(losses).detach(), torch.cat((loads, load[None]))


@torch.no_grad()
def balance(layers: list[MoE], loads: Tensor, rate: float) -> None:
    """Moves each router's bias towards equal use of its experts (DeepSeek-V3, section 2.1.2)."""
    for layer, load in zip(layers, loads, strict=True):
        layer.bias += rate * torch.sign(1 / len(load) - load)


def balance_rate(share: float) -> float:
    """Fast at first, when routers collapse most easily; 0 at the end."""
    return (2e-3 + 8e-3 * max(0.0, 1 - 20 * share)) * min(1.0, 4 * (1 - share))


@torch.no_grad()
def heldout_loss(model: Model, rows: Tensor, device: str, batch: int = 16) -> float:
    """Mean loss in nats on rows [n, T + 1], without compilation."""
    total = 0.0
    with precision(device):
        for part in rows.split(batch):
            part = part.to(device)
            total += token_loss(model, model(part[:, :-1])[0], part[:, 1:]).item() * len(part)
    return total / len(rows)


def sample_of(documents: list[HeldOut], length: int, rows: int) -> Tensor:
    """A fixed held-out sample for the log: rows spread over all held-out text."""
    everything = cut(documents, length)
    return everything[torch.linspace(0, len(everything) - 1, min(rows, len(everything))).long()]


def log_line(progress: Progress, parts: Tensor, loads: Tensor, factor: float) -> dict[str, float]:
    """Losses and expert loads of the last step, speed so far. Waits for the device."""
    line = {f"loss{i}": round(x, 4) for i, x in enumerate(parts.tolist())}
    line |= {"seconds": round(progress.seconds, 1), "step": progress.steps, "lr": round(factor, 3)}
    line |= {"most_loaded": round(loads.max().item(), 3), "least_loaded": round(loads.min().item(), 3)}
    line["tokens_per_second"] = round(progress.tokens / progress.seconds)
    return line


def run(
    model: Model,
    step: Callable[[Model, Tensor], tuple[Tensor, Tensor, Tensor]],
    draw: Callable[[], Tensor],
    layers: list[MoE],
    optimizer: Optimizer,
    report: Callable[[Progress, dict[str, float]], None],
    deadline: float,
    device: str,
    log_every: float,
) -> Progress:
    """The loop of both phases, until `deadline` (of time.monotonic). The first step compiles and is not timed."""
    progress, start, last = Progress(), 0.0, 0.0
    while (now := time.monotonic()) < deadline or progress.steps < 2:
        share = (now - start) / (deadline - start) if progress.steps else 0.0
        factor = schedule(share)
        tokens = draw()
        with precision(device):
            total, parts, loads = step(model, tokens)
        total.backward()
        optimizer.step(factor)
        balance(layers, loads, balance_rate(share))
        progress.steps += 1
        progress.tokens += tokens.numel()
        if progress.steps == 1:
            parts.tolist()
            start = last = time.monotonic()
            print(f"first step after {start - now:.1f} s", flush=True)
        elif time.monotonic() - last > log_every:
            last = time.monotonic()
            progress.seconds = last - start
            line = log_line(progress, parts, loads, factor)
            progress.history.append(line)
            report(progress, line)
            if not math.isfinite(line["loss0"]):
                raise FloatingPointError("the loss is not finite")
    parts.tolist()
    progress.seconds = time.monotonic() - start
    return progress


def options() -> argparse.ArgumentParser:
    """Options that both phases share."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="wall time of the whole program")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--matrix-lr", type=float, default=0.015)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--log-every", type=float, default=10.0)
    parser.add_argument("--cache", type=Path, help="compilation cache: read if it is there, else written")
    parser.add_argument("--publish", type=Path, help="where to write the published directory")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--tiny", action="store_true", help="a very small model, to try the code")
    return parser


def config_of(args: argparse.Namespace) -> ModelConfig:
    """The real model, or one that any machine runs."""
    return ModelConfig(hidden_size=64, kv_lora_rank=64, num_hidden_layers=4) if args.tiny else ModelConfig()


def read_cache(path: Path | None) -> None:
    """Loads compiled kernels of an earlier run, if there are any."""
    if path is not None and path.exists():
        torch.compiler.load_cache_artifacts(path.read_bytes())


def write_cache(path: Path | None) -> None:
    """Keeps this run's compiled kernels, unless there was a cache already."""
    if path is not None and not path.exists() and (made := torch.compiler.save_cache_artifacts()) is not None:
        path.write_bytes(made[0])


def main() -> None:
    """Command line."""
    began = time.monotonic()
    args = options().parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    read_cache(args.cache)
    stream = TokenStream(args.data, device, args.length)
    sample = sample_of(read_heldout(args.data), args.length, 256 if device == "cuda" else 2)
    model = Model(config_of(args)).to(device)
    model.residual_dtype = torch.bfloat16 if device == "cuda" else torch.float32
    step = joint_loss if args.eager else torch.compile(joint_loss, dynamic=False)
    print(f"{len(stream)} tokens, ready after {time.monotonic() - began:.1f} s", flush=True)
    next_check = [0.0]

    def report(progress: Progress, line: dict[str, float]) -> None:
        if progress.seconds >= next_check[0]:
            next_check[0] = progress.seconds + 60
            line["heldout"] = round(heldout_loss(model, sample, device), 4)
        print(line, flush=True)

    optimizer = Optimizer(model, args.matrix_lr, args.adam_lr)
    deadline = began + args.seconds
    draw = lambda: stream.rows(args.rows, 4)  # noqa: E731
    progress = run(model, step, draw, model.moe_layers(), optimizer, report, deadline, device, args.log_every)
    torch.save(model.state_dict(), args.out / "phase1.pt")
    if args.publish:
        export.save(model, args.publish)
    final = heldout_loss(model, sample, device)
    memory = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    more = {"heldout": final, "epochs": progress.tokens / len(stream), "stream_tokens": len(stream)}
    progress.write(args.out / "phase1.json", **more, memory_gib=memory)
    write_cache(args.cache)
    print(f"{more}, {memory:.1f} GiB, whole program {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()
