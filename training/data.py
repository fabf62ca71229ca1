"""Token streams, read from what `tokenizer.py` wrote."""

import base64
import json
import lzma
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One document that was never trained on. ids [n] int64, BOS and EOS included."""

    kind: str
    package: str
    path: str
    size: int
    ids: Tensor


class TokenStream:
    """Fixed-length rows of one long stream, each epoch from another offset and in another order.

    A row may begin inside a document and run on into the next; BOS marks the border.
    """

    def __init__(self, folder: Path, device: str, length: int, seed: int = 1) -> None:
        raw = np.frombuffer(lzma.decompress((folder / "train.u16.xz").read_bytes()), "<u2")
        self.tokens = torch.from_numpy(raw.astype(np.int16)).to(device)
        self.length, self.device = length, device
        self.random = np.random.default_rng(seed)
        self.epoch, self.order, self.used = -1, np.empty(0, np.int64), 0

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, count: int, extra: int) -> Tensor:
        """[count, length + extra] int64: the next rows, with `extra` tokens of look-ahead."""
        if self.used + count > len(self.order):
            offset = int(self.random.integers(self.length))
            total = (len(self.tokens) - offset - extra) // self.length
            self.order = self.random.permutation(total) * self.length + offset
            self.epoch, self.used = self.epoch + 1, 0
        starts = torch.from_numpy(self.order[self.used : self.used + count]).to(
            self.device, non_blocking=True
        )
        self.used += count
        return self.tokens[starts[:, None] + torch.arange(self.length + extra, device=self.device)].long()


def read_heldout(folder: Path) -> list[HeldOut]:
    """The held-out documents."""
    with lzma.open(folder / "heldout.json.xz", "rt") as file:
        rows = json.load(file)
    return [
        HeldOut(
            row["kind"],
            row["package"],
            row["path"],
            row["bytes"],
            torch.from_numpy(np.frombuffer(base64.b64decode(row["ids"]), "<u2").astype(np.int64)),
        )
        for row in rows
    ]


def cut(documents: list[HeldOut], length: int, limit: int | None = None) -> Tensor:
    """Packs documents into rows [n, length + 1]; the tail that fills no row is left out."""
    stream = torch.cat([d.ids for d in documents])[:limit]
    count = (len(stream) - 1) // length
    starts = torch.arange(count)[:, None] * length
    return stream[starts + torch.arange(length + 1)]
