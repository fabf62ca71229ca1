"""Compares the published directory, read by Transformers, with the model of `model.py`: logits in fp32.

python parity.py --data DIR/tokens --weights MODEL_DIR
"""

import argparse
from pathlib import Path

import export
import torch
from data import cut, read_heldout
from model import Model, ModelConfig
from transformers import AutoModelForCausalLM


@torch.no_grad()
def difference(weights: Path, data: Path, rows: int, length: int) -> dict[str, float]:
    """Relative difference (Frobenius norm) and largest difference over the largest logit."""
    peer = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).eval()
    model = Model(ModelConfig())
    export.load(model, weights)
    documents = read_heldout(data)
    tokens = cut(documents, length)[:: max(1, 1000 // rows)][:rows, :-1]
    theirs = peer(tokens).logits
    mine = model.lm_head(model(tokens)[0])
    return {
        "rows": len(tokens),
        "length": length,
        "relative": ((mine - theirs).norm() / theirs.norm()).item(),
        "largest": ((mine - theirs).abs().max() / theirs.abs().max()).item(),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    args = parser.parse_args()
    print(difference(args.weights, args.data, args.rows, args.length))


if __name__ == "__main__":
    main()
