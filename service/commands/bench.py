"""``eyas bench``: plain and speculative decoding, and Transformers, side by side in one run."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from rich.console import Console
from rich.table import Table

import engine
from engine.bench import BenchResult, Contender, EngineContender, Prompts, TransformersContender, compare
from engine.errors import ConfigError
from engine.types import SamplingParams
from service.settings import Settings
from service.targets import refuse_unwritable_file, write_json
from service.text import Tokenizer

PROMPT_TOKENS = 64
PROMPTS = 16


class Plan(NamedTuple):
    """What to measure."""

    batch_sizes: list[int]
    max_tokens: int
    temperature: float
    rounds: int
    with_transformers: bool


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON document that ``--json`` writes."""

    model: str
    threads: int
    device: str
    dtype: str
    prompt_tokens: int
    max_tokens: int
    temperature: float
    rounds: int
    results: list[BenchResult]


def bench(settings: Settings, plan: Plan, prompt_file: Path | None, json_file: Path | None) -> None:
    """Print a table of tokens per second and ratios; write it as JSON too where asked.

    Raises:
        ConfigError: An option or checkpoint that cannot be honoured.
    """
    refuse_unwritable_file("--json", json_file)
    _check_options(settings, plan)
    console = Console(stderr=True)
    prompts = read_prompts(settings, prompt_file)
    contenders = _contenders(settings, plan)
    # The seed makes sampled rounds repeatable; no stop ids: every contender emits exactly max_tokens
    params = SamplingParams(max_tokens=plan.max_tokens, temperature=plan.temperature, seed=0)
    with console.status("loading") as status:
        results = compare(contenders, prompts, params, plan.batch_sizes, plan.rounds, status.update)
    info = next(c for c in contenders if isinstance(c, EngineContender)).info
    report = Report(
        model=str(settings.model),
        threads=torch.get_num_threads(),
        device=info.device,
        dtype=info.dtype,
        prompt_tokens=PROMPT_TOKENS,
        max_tokens=plan.max_tokens,
        temperature=plan.temperature,
        rounds=plan.rounds,
        results=results,
    )
    Console().print(_table(report))
    write_json("--json", json_file, report)


def _check_options(settings: Settings, plan: Plan) -> None:
    """Refuse a plan that the engine would cut short in silence."""
    if max(plan.batch_sizes) > settings.max_num_seqs:
        raise ConfigError(
            f"--batch-sizes {max(plan.batch_sizes)}: at most --max-num-seqs {settings.max_num_seqs} requests run "
            "at once"
        )
    if settings.max_model_len is not None:
        _check_length(plan, settings.max_model_len, f"--max-model-len is {settings.max_model_len}")


def _check_length(plan: Plan, room: int, limit: str) -> None:
    needed = PROMPT_TOKENS + plan.max_tokens
    if needed > room:
        raise ConfigError(
            f"--max-tokens {plan.max_tokens}: behind a prompt of {PROMPT_TOKENS} tokens that is {needed}, {limit}"
        )


def _contenders(settings: Settings, plan: Plan) -> list[Contender]:
    options = msgspec.structs.replace(settings.engine_options(), prefix_cache=False)
    depths = sorted({0, options.num_speculative_tokens})
    found: list[Contender] = [
        EngineContender(f"K = {k}", msgspec.structs.replace(options, num_speculative_tokens=k))
        for k in depths
    ]
    for one in found:
        if isinstance(one, EngineContender):
            room = min(one.info.max_model_len, one.info.max_request_tokens)
            _check_length(plan, room, f"the model and its KV pool hold {room}")
    if plan.with_transformers and find_spec("transformers") is not None:
        info = found[0].info if isinstance(found[0], EngineContender) else None
        assert info is not None, "the first contender is an engine"
        device = torch.device(info.device)
        found.append(TransformersContender(settings.model, getattr(torch, info.dtype), device))
    return found


def read_prompts(settings: Settings, file: Path | None = None) -> Prompts:
    """Token ids of equal length: from a file of texts, one a line, or from this program's own source.

    Raises:
        ConfigError: The file cannot be read, or no line is long enough.
    """
    tokenizer = Tokenizer.from_directory(settings.tokenizer_dir)
    if file is not None:
        try:
            texts = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--prompts {file}: {error}") from None
    else:
        sources = sorted(Path(engine.__file__).parent.rglob("*.py"))
        texts = [path.read_text(encoding="utf-8") for path in sources]
    encoded = [tokenizer.encode(text) for text in texts]
    prompts = [ids[:PROMPT_TOKENS] for ids in encoded if len(ids) >= PROMPT_TOKENS][:PROMPTS]
    if not prompts:
        raise ConfigError(f"--prompts {file}: no line has the {PROMPT_TOKENS} tokens that a prompt needs")
    return prompts


def _table(report: Report) -> Table:
    title = (
        f"{report.model}, {report.device}, {report.dtype}, {report.threads} threads; prompts of "
        f"{report.prompt_tokens} tokens, {report.max_tokens} new ones, temperature {report.temperature}; "
        f"medians of {report.rounds} alternating rounds"
    )
    table = Table(title=title)
    table.add_column("batch", justify="right")
    table.add_column("")
    for name in ("tokens/s", "min", "max", "ms a step", "accept length", "against K = 0", "against batch 1"):
        table.add_column(name, justify="right")
    rates = {(r.name, r.batch_size): r.tokens_per_second for r in report.results}
    smallest = min(r.batch_size for r in report.results)
    for result in report.results:
        rate = result.tokens_per_second
        table.add_row(
            str(result.batch_size),
            result.name,
            f"{rate:.1f}",
            f"{result.min_tokens_per_second:.1f}",
            f"{result.max_tokens_per_second:.1f}",
            f"{1e3 * result.seconds / result.steps:.2f}" if result.steps else "-",
            f"{result.accept_length:.2f}" if result.accept_length is not None else "-",
            f"{rate / rates['K = 0', result.batch_size]:.2f}x",
            f"{rate / rates[result.name, smallest]:.2f}x",
        )
    return table
