"""Measures a trained model on text that it never saw.

    python evaluate.py --data DIR/tokens --weights MODEL_DIR --out RUN_DIR

1. Loss, in nats a token and bits a byte, of every held-out package and of the held-out files.
2. Accept length (tokens emitted per verify) for K = 1..5. The target continues held-out prompts; then one pass
   of the draft's chain over the finished text tells for every position whether draft step s would have been
   accepted, and the engine's walk (advance by accepted + 1) is replayed over those answers. This is exact:
   - greedy: a draft is accepted when its largest logit is the emitted token;
   - temperature: under rejection sampling P(accepted | emitted x) = min(1, draft(x) / target(x)), both at the
     request's temperature, so a uniform number below that ratio means accepted. A chain is followed only as
     long as it was accepted, and then its tokens are the emitted ones.
3. Sample completions.
"""

import argparse
import json
import math
import time
from collections import defaultdict
from pathlib import Path

import export
import numpy as np
import torch
from data import HeldOut, cut, read_heldout
from generate import Generator, serving_copy
from model import Model
from tokenizers import Tokenizer
from torch import Tensor
from train import config_of, heldout_loss

EOS = 1
STEPS = 5
PROMPTS = [
    "def fibonacci(n):",
    "import json\nimport sys\n\n\ndef main():",
    'class Stack:\n    """A simple LIFO stack."""\n\n    def __init__(self):',
    'def read_lines(path):\n    """Read a text file and return its lines without newlines."""',
]


def loss_table(
    model: Model, documents: list[HeldOut], length: int, device: str
) -> dict[str, dict[str, float]]:
    """Loss by held-out package, of the held-out files, and of all packages together."""
    groups: dict[str, list[HeldOut]] = defaultdict(list)
    for d in documents:
        groups[d.package if d.kind == "package" else "files of other packages"].append(d)
        if d.kind == "package":
            groups["held-out packages together"].append(d)
    table = {}
    for name, group in groups.items():
        tokens, size = sum(len(d.ids) - 1 for d in group), sum(d.size for d in group)
        nats = heldout_loss(model, cut(group, length), device)
        bits = nats * tokens / size / math.log(2)
        table[name] = {"documents": len(group), "tokens": tokens, "bytes_per_token": size / tokens}
        table[name] |= {"nats_per_token": nats, "bits_per_byte": bits}
    return table


def prompts_of(documents: list[HeldOut], size: int, count: int) -> Tensor:
    """[count, size]: beginnings of held-out documents, taken from the packages and the files in turn."""
    turns: dict[str, list[HeldOut]] = defaultdict(list)
    for d in documents:
        if len(d.ids) > size + 8:
            turns[d.package if d.kind == "package" else "files"].append(d)
    chosen: list[Tensor] = []
    for rank in range(max(map(len, turns.values()))):
        chosen += [group[rank].ids[:size] for group in turns.values() if rank < len(group)]
    return torch.stack(chosen[:count])


def is_loop(ids: list[int]) -> bool:
    """True if the last 64 tokens repeat with a period up to 64, or fewer than half of the 8-grams differ."""
    if len(ids) < 96:
        return False
    if any(ids[-64:] == ids[-64 - d : -d] for d in range(1, min(64, len(ids) - 64) + 1)):
        return True
    grams = [tuple(ids[i : i + 8]) for i in range(len(ids) - 7)]
    return len(set(grams)) < 0.5 * len(grams)


def before_repeat(ids: list[int], size: int = 16) -> int:
    """How many tokens there are before the first run of `size` tokens that occurred earlier in `ids`."""
    seen: set[tuple[int, ...]] = set()
    for i in range(len(ids) - size + 1):
        gram = tuple(ids[i : i + size])
        if gram in seen:
            return i
        seen.add(gram)
    return len(ids)


@torch.no_grad()
def accepted_steps(model: Model, ids: Tensor, temperature: float) -> Tensor:
    """ids [B, L] -> bool [B, L - 6, 5]: would step s of the chain at row p give the emitted token p + 2 + s."""
    size = ids.shape[1] - STEPS - 1
    states = model(ids[:, : size + STEPS])[0]
    embedded = [model.embed(ids[:, 1 + s : size + 1 + s]) for s in range(STEPS)]
    chain, _ = model.draft.chain(states[:, :size], embedded)
    answers = []
    for s, hidden in enumerate(chain):
        emitted = ids[:, 2 + s : size + 2 + s]
        draft = model.lm_head(hidden).float()
        if temperature == 0:
            answers.append(draft.argmax(-1) == emitted)
            continue
        target = model.lm_head(states[:, 1 + s : size + 1 + s]).float()
        draft_log, target_log = (
            (logits / temperature).log_softmax(-1).gather(-1, emitted[..., None])[..., 0]
            for logits in (draft, target)
        )
        answers.append(torch.rand_like(draft_log) < (draft_log - target_log).exp())
    return torch.stack(answers, -1)


def walk(accepted: np.ndarray, start: int, stop: int, k: int) -> list[int]:
    """Accepted counts of the engine's steps on one row. Token `start` is the first one that was generated.

    accepted [L - 6, 5]; a step at token i verifies the chain of row i - 1, and ends at `stop` at the latest.
    """
    counts, i = [], start
    while i + k < stop and i - 1 < len(accepted):
        row = accepted[i - 1, :k]
        count = k if row.all() else int(row.argmin())
        counts.append(count)
        i += count + 1
    return counts


def accept_table(rows: list[tuple[np.ndarray, int, int]]) -> dict[str, object]:
    """Mean accept length for K = 1..5, and acceptance by position at K = 5 given that the earlier ones held."""
    lengths = {}
    for k in range(1, STEPS + 1):
        counts = [c for row in rows for c in walk(*row, k)]
        lengths[k] = float(np.mean(counts)) + 1
    counts = np.array([c for row in rows for c in walk(*row, STEPS)])
    conditional = [float((counts > s).sum() / max(1, (counts >= s).sum())) for s in range(STEPS)]
    return {
        "prompts": len(rows),
        "verify_steps_at_5": len(counts),
        "accept_length": lengths,
        "by_position": conditional,
    }


def accept_lengths(model: Model, documents: list[HeldOut], args: argparse.Namespace) -> dict[str, object]:
    """Accept tables: greedy, its rows that do not loop, its text before any repeat, and T = 0.8."""
    device = next(model.parameters()).device
    torch.manual_seed(3)
    groups: dict[str, list[tuple[np.ndarray, int, int]]] = defaultdict(list)
    for size in args.prompt_sizes:
        prompts = prompts_of(documents, size, args.prompts).to(device)
        generator = Generator(model, len(prompts), size + args.new_tokens)
        for name, temperature in (("greedy", 0.0), ("temperature 0.8", 0.8)):
            ids = generator(prompts, torch.full((len(prompts),), temperature, device=device))
            answers = (
                torch.cat([accepted_steps(model, part, temperature) for part in ids.split(32)]).cpu().numpy()
            )
            for answer, row in zip(answers, ids.tolist(), strict=True):
                made = row[size:]
                made = made[: made.index(EOS) + 1] if EOS in made else made
                entry = (answer, size, size + len(made))
                groups[name].append(entry)
                if temperature == 0 and not is_loop(made):
                    groups["greedy, no loop"].append(entry)
                if temperature == 0:
                    groups["greedy, before a repeat"].append((answer, size, size + before_repeat(made)))
        del generator
    return {name: accept_table(rows) for name, rows in groups.items()}


def samples(model: Model, tokenizer: Tokenizer, new_tokens: int) -> list[dict[str, object]]:
    """Completions of a few prompts: greedy, T = 0.2 and T = 0.8."""
    out = []
    device = next(model.parameters()).device
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt).ids] * 3, device=device)
        generator = Generator(model, 3, ids.shape[1] + new_tokens)
        temperatures = torch.tensor([0.0, 0.2, 0.8], device=device)
        for t, row in zip(temperatures.tolist(), generator(ids, temperatures).tolist(), strict=True):
            row = row[: row.index(EOS)] if EOS in row else row
            out.append({"temperature": round(t, 1), "prompt": prompt, "text": tokenizer.decode(row)})
    return out


def main() -> None:
    """Command line."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--prompts", type=int, default=128, help="prompts of each size")
    parser.add_argument("--prompt-sizes", type=int, nargs="+", default=[64, 192, 512])
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--parts", nargs="+", default=["samples", "accept", "loss"])
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    documents = read_heldout(args.data)
    model = Model(config_of(args))
    export.load(model, args.weights)
    model = serving_copy(model.to(device))
    report: dict[str, object] = {}

    def keep(name: str, value: object) -> None:
        report[name] = value
        (args.out / "evaluation.json").write_text(json.dumps(report, indent=1))
        print(name, json.dumps(value, indent=1), f"after {time.monotonic() - began:.1f} s", flush=True)

    if "samples" in args.parts:
        keep("samples", samples(model, Tokenizer.from_file(str(args.data / "tokenizer.json")), 160))
    if "accept" in args.parts:
        keep("accept", accept_lengths(model, documents, args))
    if "loss" in args.parts:
        keep("loss", loss_table(model, documents, args.length, device))


if __name__ == "__main__":
    main()
