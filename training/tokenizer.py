"""Trains the tokenizer, and turns the corpus into token streams.

    python tokenizer.py --corpus DIR --model MODEL_DIR

Byte-level BPE with 4096 entries, made for Python: a line break and the indentation after it are one piece, and
a mark such as `.`, `_` or `(` may join the word that follows. Every document becomes BOS, text, EOS. Writes
the tokenizer's files into MODEL_DIR, and `tokens/train.u16.xz` (little-endian uint16) and
`tokens/heldout.json` beside it into DIR.
"""

import argparse
import base64
import json
import lzma
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from corpus import SEPARATOR
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCABULARY = 4096
BOS, EOS, PAD = "<|begin_of_sentence|>", "<|end_of_sentence|>", "<|pad|>"
PIECES = r"(?:\r?\n)+[ \t]*|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|[ \t]+|\s+"

# A base model of Python continues files, so a conversation is written as one: the system message is the module's
# docstring, what people say is a comment, and what the assistant said is the code below it. The import keeps
# the model from beginning with a licence header.
CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content is iterable -%}
{%- for part in content -%}{%- if part.type == 'text' -%}{{ part.text }}{%- endif -%}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set state = namespace(begun=false) -%}
{{- bos_token -}}
{%- for message in messages -%}
{%- set said = text(message.content) -%}
{%- if message.role in ['system', 'developer'] -%}
{{- '\"\"\"' ~ said.replace('\"\"\"', "'''") ~ '\"\"\"\\n\\n' -}}
{%- else -%}
{%- if not state.begun -%}{{- 'import sys\\n\\n\\n' -}}{%- set state.begun = true -%}{%- endif -%}
{%- if message.role == 'assistant' -%}
{{- said ~ '\\n\\n\\n' -}}
{%- else -%}
{{- '# ' ~ said.replace('\\n', '\\n# ') ~ '\\n' -}}
{%- endif -%}
{%- endif -%}
{%- endfor -%}
"""


def documents(path: Path, chunk: int = 1 << 22) -> Iterator[str]:
    """Yields the documents of `train.txt` one by one."""
    rest = ""
    with path.open(newline="") as file:
        while block := file.read(chunk):
            *whole, rest = (rest + block).split(SEPARATOR)
            yield from whole
    yield rest


def train(path: Path, every: int) -> Tokenizer:
    """Learns the merges from every n-th document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(False, False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((d for i, d in enumerate(documents(path)) if i % every == 0), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(f"{BOS} $A", f"{BOS} $A {BOS} $B", [(BOS, 0)])
    return tokenizer


def publish(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes what `AutoTokenizer` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}, indent=2) + "\n"
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """Token ids of each document: BOS, text, EOS."""
    eos = tokenizer.token_to_id(EOS)
    return [np.array([*e.ids, eos], np.uint16) for e in tokenizer.encode_batch(texts)]


def write_train(tokenizer: Tokenizer, source: Path, target: Path) -> dict[str, int]:
    """Writes the packed training stream; returns its size."""
    tokens = size = 0
    batch: list[str] = []
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 27, "lc": 0, "lp": 1, "pb": 1}]
    with lzma.open(target, "wb", format=lzma.FORMAT_XZ, filters=filters) as file:

        def flush() -> None:
            nonlocal tokens
            for ids in encode(tokenizer, batch):
                file.write(ids.astype("<u2").tobytes())
                tokens += len(ids)
            batch.clear()

        for document in documents(source):
            batch.append(document)
            size += len(document.encode())
            if len(batch) == 256:
                flush()
        flush()
    return {"tokens": tokens, "bytes": size}


def write_heldout(tokenizer: Tokenizer, source: Path, target: Path) -> None:
    """Writes the held-out documents: kind, package, bytes, token ids (base64 of uint16)."""
    lines = [json.loads(line) for line in source.read_text().splitlines()]
    ids = encode(tokenizer, [line["text"] for line in lines])
    rows = [
        {
            "kind": line["kind"],
            "package": line["package"],
            "path": line["path"],
            "bytes": len(line["text"].encode()),
            "ids": base64.b64encode(i.astype("<u2").tobytes()).decode(),
        }
        for line, i in zip(lines, ids, strict=True)
    ]
    with lzma.open(target, "wt") as file:
        json.dump(rows, file)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--every", type=int, default=8, help="learn the merges from every n-th document")
    args = parser.parse_args()
    tokenizer = train(args.corpus / "train.txt", args.every)
    publish(tokenizer, args.model)
    target = args.corpus / "tokens"
    target.mkdir(exist_ok=True)
    (target / "tokenizer.json").write_text((args.model / "tokenizer.json").read_text())
    write_heldout(tokenizer, args.corpus / "heldout.jsonl", target / "heldout.json.xz")
    size = write_train(tokenizer, args.corpus / "train.txt", target / "train.u16.xz")
    (target / "size.json").write_text(json.dumps(size))
    print(size, f"{size['bytes'] / size['tokens']:.2f} bytes a token")


if __name__ == "__main__":
    main()
