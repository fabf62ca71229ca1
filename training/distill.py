"""Phase 2: trains the draft alone, on what it will meet when the engine runs it.

    python distill.py --data DIR/tokens --out RUN_DIR --seconds 300

The target is frozen. The draft's chain of five steps learns the target's whole distribution (KL divergence) at
each of its positions. Half of the rows are the target's own continuations, at temperatures from 0 to 1.
"""

import argparse
import time

import export
import torch
from data import TokenStream
from generate import Generator, serving_copy
from model import Model
from optim import Optimizer
from torch import Tensor
from train import Progress, config_of, options, read_cache, run, write_cache

STEPS = 5
STEP_WEIGHTS = (1.0, 0.85, 0.72, 0.61, 0.52)
TEMPERATURES = (0.0, 0.3, 0.6, 0.8, 1.0)


def chain_loss(model: Model, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """tokens [B, T + 5] -> the loss, KL in nats of each step [5], expert loads of the draft [1, E]."""
    size = tokens.shape[1] - STEPS
    with torch.no_grad():
        states = model(tokens[:, :size])[0]
        target = model.lm_head(states).float().log_softmax(-1)  # [B, T, V]; row i is for token i + 1
    embedded = [model.embed(tokens[:, 1 + s : size + 1 + s]) for s in range(STEPS)]
    chain, load = model.draft.chain(states, embedded)
    parts = []
    for step, hidden in enumerate(chain, 1):
        draft = model.lm_head(hidden).float().log_softmax(-1)[:, : size - step]
        wanted = target[:, step:]
        parts.append((wanted.exp() * (wanted - draft)).sum(-1).mean())
    total = sum(w * part for w, part in zip(STEP_WEIGHTS, parts, strict=True))
    return total, torch.stack(parts).detach(), load[None]


def own_text(model: Model, stream: TokenStream, rows: int, batches: int, seconds: float) -> Tensor:
    """The target's own continuations as rows [n, T + 5]; each row holds two of them, one after the other."""
    began = time.monotonic()
    length = (stream.length + STEPS + 1) // 2
    device = stream.tokens.device
    generator = Generator(serving_copy(model), rows, length)
    temperatures = torch.tensor(TEMPERATURES, device=device).repeat(rows)[:rows]
    pool = []
    for batch in range(batches):
        size = length // (4, 8, 16, 32)[batch % 4]
        prompts = torch.cat([stream.rows(min(256, rows), 0)[:, :size] for _ in range(0, rows, 256)])[:rows]
        text = generator(prompts, temperatures).to(torch.int16)
        mixed = text[torch.randperm(rows, device=device)]
        pool.append(mixed.unflatten(0, (-1, 2)).flatten(1)[:, : stream.length + STEPS])
        if time.monotonic() - began > seconds:
            break
    print(
        f"own text: {len(pool)} batches of {rows} x {length} in {time.monotonic() - began:.1f} s", flush=True
    )
    return torch.cat(pool)


def parse() -> argparse.Namespace:
    """Command line."""
    parser = options()
    parser.description = __doc__
    parser.set_defaults(matrix_lr=0.01, adam_lr=2e-3)
    parser.add_argument("--own-rows", type=int, default=2048, help="rows generated together")
    parser.add_argument("--own-batches", type=int, default=6)
    parser.add_argument("--own-seconds", type=float, default=50.0)
    return parser.parse_args()


def main() -> None:
    """Command line."""
    began = time.monotonic()
    args = parse()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    read_cache(args.cache)
    stream = TokenStream(args.data, device, args.length, seed=2)
    model = Model(config_of(args)).to(device)
    model.residual_dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model.load_state_dict(torch.load(args.out / "phase1.pt", map_location=device))
    model.requires_grad_(False)
    model.draft.requires_grad_(True)
    pool = own_text(model, stream, args.own_rows, args.own_batches, args.own_seconds)
    order = torch.randperm(len(pool), device=device)
    used = [0]

    def draw() -> Tensor:
        half = max(1, args.rows // 2)
        chosen = order[(torch.arange(half, device=device) + used[0]) % len(order)]
        used[0] += half
        return torch.cat((stream.rows(args.rows - half, STEPS), pool[chosen].long()))

    step = chain_loss if args.eager else torch.compile(chain_loss, dynamic=False)
    optimizer = Optimizer(model, args.matrix_lr, args.adam_lr)
    last = model.moe_layers()[-1:]
    report = lambda progress, line: print(line, flush=True)  # noqa: E731
    progress: Progress = run(
        model, step, draw, last, optimizer, report, began + args.seconds, device, args.log_every
    )
    torch.save(model.state_dict(), args.out / "phase2.pt")
    if args.publish:
        print(f"published: {export.save(model, args.publish) / 1e6:.2f} MB", flush=True)
    progress.write(args.out / "phase2.json", own_tokens=pool.numel(), own_passes=used[0] / len(pool))
    write_cache(args.cache)
    print(f"whole program {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()
