#!/usr/bin/env python3
"""Copy a checkpoint and make one token's embedding NaN, to see guard, alerts and runbook at work.

    nan_drill.py CHECKPOINT COPY --token-id N

Serve the copy, never the original's directory: every request that holds the token fails with ``numerical_error``,
all others are answered as ever. A prompt may be given as token ids: ``"prompt": [N]``. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

TENSOR = "model.embed_tokens.weight"
QUIET_NAN = {"BF16": b"\xc0\x7f", "F16": b"\x00\x7e", "F32": b"\x00\x00\xc0\x7f"}
"""One NaN of each safetensors type that an embedding can have, as stored (little endian)."""


class DrillError(Exception):
    """The checkpoint cannot be used; the message says why."""


def shard_of(checkpoint: Path) -> Path:
    """The safetensors file that holds the embedding.

    Raises:
        DrillError: There is none.
    """
    index = checkpoint / "model.safetensors.index.json"
    name = "model.safetensors"
    if index.is_file():
        name = json.loads(index.read_text())["weight_map"].get(TENSOR, "")
    if not name or not (checkpoint / name).is_file():
        raise DrillError(f"{checkpoint}: no safetensors file with {TENSOR}")
    return checkpoint / name


def find_row(shard: Path, token_id: int) -> tuple[int, bytes]:
    """Offset in the file of a token's embedding row, and as many bytes of NaN.

    Raises:
        DrillError: The token does not exist, or the embedding has a type without NaN rows.
    """
    with shard.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(header_size)).get(TENSOR)
    if entry is None or entry["dtype"] not in QUIET_NAN:
        raise DrillError(f"{shard.name}: {TENSOR} must be one of {', '.join(QUIET_NAN)}")
    vocabulary, width = entry["shape"]
    if not 0 <= token_id < vocabulary:
        raise DrillError(f"token {token_id} is not in the vocabulary of {vocabulary}")
    row = QUIET_NAN[entry["dtype"]] * width
    return 8 + header_size + entry["data_offsets"][0] + token_id * len(row), row


def poison(checkpoint: Path, copy: Path, token_id: int) -> None:
    """Copy a checkpoint with one embedding row of NaN.

    Raises:
        DrillError: The checkpoint cannot be used, or ``copy`` exists.
    """
    if copy.exists():
        raise DrillError(f"{copy} exists")
    offset, row = find_row(shard_of(checkpoint), token_id)
    shutil.copytree(checkpoint, copy)
    with shard_of(copy).open("r+b") as file:
        file.seek(offset)
        file.write(row)


def main() -> int:
    parser = argparse.ArgumentParser(description="Copy a checkpoint and make one token's embedding NaN.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("copy", type=Path)
    parser.add_argument("--token-id", type=int, required=True, help="a token that no real prompt has")
    arguments = parser.parse_args()
    try:
        poison(arguments.checkpoint, arguments.copy, arguments.token_id)
    except (DrillError, OSError) as error:
        print(f"nan_drill: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.copy}: the embedding of token {arguments.token_id} is NaN; serve it for a drill only")
    return 0


if __name__ == "__main__":
    sys.exit(main())
