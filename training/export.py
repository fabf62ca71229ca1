"""Between the model of `model.py` and a published directory (the layout of DeepSeek-V3).

    python export.py --random MODEL_DIR     # a checkpoint with the final names and shapes, untrained

The MTP layer has the index after the last layer; it carries no copies of the embedding and the head.
"""

import argparse
import json
from pathlib import Path

import torch
from model import Model, ModelConfig
from safetensors.torch import load_file, save_file
from torch import Tensor

SHARD_BYTES = 10_000_000


def published_names(name: str, value: Tensor, c: ModelConfig) -> dict[str, Tensor]:
    """The published tensors that one parameter or buffer of `Model` stands for (views of `value`)."""
    if name.startswith("draft."):
        index, inner = c.num_hidden_layers, name.removeprefix("draft.")
        inner = inner.removeprefix("layer.") if inner.startswith("layer.") else inner
        name = f"layers.{index}." + ("shared_head.norm.weight" if inner == "norm.weight" else inner)
    if name == "lm_head.weight":
        return {name: value}
    prefix, _, last = f"model.{name}".rpartition(".")
    if last == "router":
        return {f"{prefix}.gate.weight": value}
    if last == "bias":
        return {f"{prefix}.gate.e_score_correction_bias": value}
    if last in ("gate", "up", "down"):
        return {f"{prefix}.experts.{i}.{last}_proj.weight": value[i] for i in range(len(value))}
    return {f"{prefix}.{last}": value}


def published_tensors(model: Model) -> dict[str, Tensor]:
    """All tensors under their published names: bf16, but the router's correction bias stays fp32."""
    out = {}
    for name, value in model.state_dict().items():
        for published, tensor in published_names(name, value, model.c).items():
            dtype = torch.float32 if published.endswith("correction_bias") else torch.bfloat16
            out[published] = tensor.detach().to("cpu", dtype).contiguous()
    return out


def shards_of(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Cuts in published order, each piece below SHARD_BYTES."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def save(model: Model, folder: Path) -> int:
    """Writes shards, index, `config.json` and `generation_config.json`; returns the bytes of all tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.safetensors"):
        old.unlink()
    tensors = published_tensors(model)
    shards, where = shards_of(tensors), {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, file)
    total = sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    generation = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    generation |= {"do_sample": True, "temperature": 0.7, "top_p": 0.95}
    for name, data in (
        ("model.safetensors.index.json", index),
        ("config.json", model.c.published()),
        ("generation_config.json", generation),
    ):
        (folder / name).write_text(json.dumps(data, indent=2) + "\n")
    return total


def load(model: Model, folder: Path) -> None:
    """Reads a published directory into `model`; every tensor must be there and be used."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            for published, tensor in published_names(name, value, model.c).items():
                tensor.copy_(tensors.pop(published))
    if tensors:
        raise ValueError(f"tensors that the model has no place for: {sorted(tensors)[:5]}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--random", type=Path, required=True)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Model(ModelConfig())
    print(f"{save(model, args.random) / 1e6:.2f} MB, {sum(p.numel() for p in model.parameters()) / 1e6:.2f}M")
    (args.random / "RANDOM_WEIGHTS").write_text("These weights are untrained; names and shapes are final.\n")


if __name__ == "__main__":
    main()
