"""Damaged bundles: refused before a model is loaded, by the name of the file and of what is wrong in it."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.bundle import FORMAT, MANIFEST, TENSORS, BundleError, read_bundle
from engine.guard import HALTING
from engine.replay import replay
from engine.sampler import FULL, GREEDY, Variant
from engine.types import SamplingParams
from tests.engine.drive import greedy
from tests.engine.live import Live
from tests.fixtures.checkpoints import F1, build_f1

NAN_TOKEN = 30
SAMPLED = SamplingParams(
    max_tokens=40, temperature=0.7, top_p=0.9, frequency_penalty=0.1, logit_bias={5: 2.0}, seed=3
)

Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def f3(tmp_path_factory: pytest.TempPathFactory) -> F1:
    """F1 with the embedding of one token NaN."""
    return build_f1(tmp_path_factory.mktemp("f3") / "m", nan_tokens=[NAN_TOKEN], eos=None)


@pytest.fixture(scope="module", params=[(greedy(40), GREEDY), (SAMPLED, FULL)], ids=["greedy", "sampled"])
def any_bundle(request: pytest.FixtureRequest, f3: F1, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole bundle, without and with the vocabulary-wide tables."""
    return _bundle(f3, tmp_path_factory, *request.param)


@pytest.fixture(scope="module")
def whole(f3: F1, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _bundle(f3, tmp_path_factory, greedy(40), GREEDY)


def _bundle(f3: F1, directories: pytest.TempPathFactory, params: SamplingParams, variant: Variant) -> Path:
    live = Live.start(f3.path, [4, 9, NAN_TOKEN], params, schedule="overlap")
    return live.bundle(directories.mktemp("b"), live.run_until(HALTING), variant).path


def put(**values: Any) -> Damage:
    """Set fields; ``a__b`` is b within a."""

    def edit(path: Path) -> None:
        manifest = json.loads((path / MANIFEST).read_text())
        for name, value in values.items():
            *parents, last = name.split("__")
            at = manifest
            for parent in parents:
                at = at[parent]
            at[last] = value
        (path / MANIFEST).write_text(json.dumps(manifest))

    return edit


def drop(*names: str) -> Damage:
    """Leave a field out."""

    def edit(path: Path) -> None:
        manifest = json.loads((path / MANIFEST).read_text())
        at = manifest
        for name in names[:-1]:
            at = at[name]
        del at[names[-1]]
        (path / MANIFEST).write_text(json.dumps(manifest))

    return edit


def text(content: str) -> Damage:
    return lambda path: void((path / MANIFEST).write_text(content))


def change(name: str, edit: Callable[[Tensor], Tensor | None]) -> Damage:
    """Replace a tensor; ``None``: leave it out."""

    def damage(path: Path) -> None:
        tensors = load_file(path / TENSORS)
        new = edit(tensors.pop(name, torch.zeros(1)).clone())
        save_file(tensors if new is None else tensors | {name: new.contiguous()}, path / TENSORS)

    return damage


def element(index: int, value: float) -> Callable[[Tensor], Tensor]:
    def edit(tensor: Tensor) -> Tensor:
        tensor.view(-1)[index] = value
        return tensor

    return edit


def void(_: Any) -> None:
    pass


def cut(file: str, keep: float) -> Damage:
    def damage(path: Path) -> None:
        content = (path / file).read_bytes()
        (path / file).write_bytes(content[: int(keep * len(content))])

    return damage


IN_MANIFEST: list[tuple[str, Damage, str]] = [
    ("absent", lambda path: (path / MANIFEST).unlink(), "No such file"),
    ("a directory", lambda path: (path / MANIFEST).unlink() or (path / MANIFEST).mkdir(), "directory"),
    ("empty", text(""), "truncated"),
    ("cut", cut(MANIFEST, 0.5), "truncated"),
    ("another kind", text("[]"), "object"),
    ("deep", text("[" * 100_000), "deep"),
    ("long number", text('{"format": ' + "1" * 10_000 + "}"), ""),
    ("not UTF-8", lambda path: void((path / MANIFEST).write_bytes(b'{"format": "\xff"}')), "UTF-8"),
    ("format", put(format=1), "format 1 is not 2"),
    ("no format", drop("format"), "format null is not 2"),
    ("float format", put(format=2.0), "format"),
    ("wrong kind", put(slot="a"), "slot"),
    ("wrong kind within", put(info__page_size=None), "info.page_size"),
    ("missing", drop("stride"), "stride"),
    ("missing with a default", drop("options", "prefill_chunk_size"), "options.prefill_chunk_size is missing"),
    ("missing parameter", drop("params", "min_p"), "params.min_p is missing"),
    ("unknown", put(params__best_of=2), "params.best_of"),
    ("page_size 0", put(info__page_size=0, options__kv_page_size=0), "kv_page_size=0"),
    ("page_size alone", put(info__page_size=4), "info.page_size=4"),
    ("dtype", put(info__dtype="int8"), "info.dtype='int8'"),
    ("dtype's module", put(info__dtype="nn"), "info.dtype='nn'"),
    ("backend", put(info__attention_backend="fa3"), "info.attention_backend='fa3'"),
    ("schedule", put(info__schedule="eager"), "info.schedule='eager'"),
    ("another schedule", put(info__schedule="sync"), "info.schedule='sync'"),
    ("device", put(info__device=""), "info.device=''"),
    ("option's schedule", put(options__schedule="eager"), "schedule"),
    ("chunk 0", put(options__prefill_chunk_size=0), "prefill_chunk_size=0"),
    ("chunk -1", put(options__prefill_chunk_size=-1), "prefill_chunk_size=-1"),
    ("no model", put(options__model=""), "model=''"),
    ("rows", put(step__rows=10**9), "step.rows=1000000000"),
    ("rows 0", put(step__rows=0), "step.rows=0"),
    ("rows eager", put(step__path="eager", step__reason=None), "step.rows=4"),
    ("phase", put(step__phase="prefill"), "step"),
    ("path", put(step__path="eager", step__rows=1), "step"),
    ("variant", put(params__temperature=1.0), "step.variant.sampled"),
    ("a replay without drafts", put(step__verify_drafts=False), "step.verify_drafts"),
    ("no drafts or not", drop("step", "verify_drafts"), "verify_drafts"),
    (
        "a prefill without drafts",
        put(step__phase="prefill", step__path="eager", step__reason="prefill", step__rows=1,
            step__verify_drafts=False),
        "step.verify_drafts",
    ),
    (
        "no drafts to leave out",
        put(step__path="eager", step__reason=None, step__rows=1, step__verify_drafts=False,
            info__num_speculative_tokens=0, options__num_speculative_tokens=0, stride=1),
        "step.verify_drafts",
    ),
    ("stride", put(stride=9), "stride=9"),
    ("depth", put(info__num_speculative_tokens=2, stride=3), "info.num_speculative_tokens=2"),
    ("slots", put(info__max_num_seqs=10**9), "info.max_num_seqs=1000000000"),
    ("option's slots", put(info__max_num_seqs=10**9, options__max_num_seqs=10**9), "max_num_seqs=1000000000"),
    ("slot", put(slot=4), "slot=4"),
    ("slot below 0", put(slot=-1), "slot=-1"),
    ("vocabulary", put(info__vocab_size=0), "info.vocab_size=0"),
    ("length", put(info__max_model_len=10**9), "info.max_model_len=1000000000"),
    ("pool", put(info__num_pages=10**10), "info.num_pages=10000000000"),
    ("other pool", put(info__num_pages=17), "info.num_pages=17"),
    ("prompt", put(num_prompt=0), "num_prompt=0"),
    ("prompt's end", put(num_prompt=4), "num_prompt=4"),
    ("position", put(position=2), "position=2"),
    ("flags", put(flags=0, flag_names=[]), "flags=0"),
    ("unknown flag", put(flags=1 << 20), "flags=1048576"),
    ("ignored alone", put(flags=4, flag_names=["IGNORED"]), "flags=4"),
    ("names of flags", put(flag_names=["TARGET_INF"]), "flag_names"),
    ("digest", put(checkpoint_digest="0" * 63), "checkpoint_digest"),
    ("stop id", put(params__stop_token_ids=[64]), "params.stop_token_ids"),
    ("bias", put(params__logit_bias={"-1": 1.0}), "params.logit_bias"),
    ("top_k", put(params__top_k=10**30), "params.top_k=1"),
    ("min_tokens", put(params__min_tokens=2**63), "params.min_tokens=9223372036854775808"),
    ("seed", put(params__seed=2**64), "params.seed=18446744073709551616"),
    ("host page twice", put(host_pages=[7, 7]), "host_pages holds a page twice"),
    ("scratch page", put(host_pages=[7, 0]), "host_pages=0"),
    ("host page outside", put(host_pages=[16]), "host_pages=16"),
    ("pages", put(num_pages=10**9), "num_pages=1000000000"),
    ("stored pages", put(num_pages_stored=7), "num_pages_stored=7"),
    ("fewer stored pages", put(num_pages_stored=1), "complete=True"),
    ("incomplete", put(complete=False), "complete=False"),
]  # fmt: skip
IN_TENSORS: list[tuple[str, Damage, str]] = [
    ("absent", lambda path: (path / TENSORS).unlink(), "damaged or unreadable"),
    ("empty", cut(TENSORS, 0.0), "damaged or unreadable"),
    ("cut header", cut(TENSORS, 0.01), "damaged or unreadable"),
    ("cut", cut(TENSORS, 0.9), "damaged or unreadable"),
    ("no core", change("core", lambda _: None), "holds no core"),
    ("no keys", change("keys", lambda _: None), "holds no keys"),
    ("no has_tables", change("has_tables", lambda _: None), "holds no has_tables"),
    ("no pages", change("pages", lambda _: None), "holds no pages"),
    ("unread", change("draft_probs", lambda _: torch.zeros(1, 3, 64)), "draft_probs"),
    ("unknown", change("weights", lambda _: torch.zeros(1)), "weights"),
    ("float core", change("core", lambda t: element(0, float("nan"))(t.double())), "core is of type F64"),
    ("narrow table", change("block_table", Tensor.short), "block_table is of type I16"),
    ("pages of another type", change("pages", Tensor.half), "pages is of type F16"),
    ("flat core", change("core", Tensor.flatten), "core has shape"),
    ("two rows", change("core", lambda t: torch.cat([t, t])), "core has shape [2, 7]"),
    ("no rows", change("floats", lambda t: t[:0]), "floats has shape [0, 6]"),
    ("scalar", change("keys", lambda t: t[0]), "keys has shape []"),
    ("fewer tokens", change("tokens", lambda t: t[1:]), "tokens has shape [2]"),
    ("fewer pages", change("pages", lambda t: t[:, 1:]), "pages has shape"),
    ("page size", change("pages", lambda t: t[:, :, 1:]), "pages has shape"),
    ("token", change("tokens", element(1, 64)), "tokens holds an id outside of [0, 64)"),
    ("token below 0", change("tokens", element(0, -1)), "tokens holds an id outside of [0, 64)"),
    ("page twice", change("page_ids", element(1, 7)), "page_ids"),
    ("scratch page", change("page_ids", element(0, 0)), "page_ids"),
    ("table", change("block_table", element(0, 8)), "page_ids"),
    ("short table", change("block_table", lambda t: t[:, :6]), "block_table names 6 pages"),
    ("past the table", put(step__longest=113), "step.longest=113"),
    ("top_k", change("top_k", element(0, 0)), "top_k=0"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("file", "damage", "words"),
    [
        pytest.param(file, damage, words, id=f"{file}: {name}")
        for file, table in ((MANIFEST, IN_MANIFEST), (TENSORS, IN_TENSORS))
        for name, damage, words in table
    ],
)
def test_damage_is_refused_by_name(
    whole: Path, tmp_path: Path, file: str, damage: Damage, words: str
) -> None:
    path = tmp_path / "b"
    shutil.copytree(whole, path)
    read_bundle(path)
    damage(path)
    with pytest.raises(BundleError) as caught:
        read_bundle(path)
    message = str(caught.value)
    assert message.startswith(f"{path / file}: ") and words in message
    assert "\n" not in message and len(message) < 600


def test_the_graph_for_short_rows_may_reach_past_the_context(whole: Path, tmp_path: Path) -> None:
    """Its bound is the attention backend's; the block table names the positions that a step can touch."""
    path = tmp_path / "b"
    shutil.copytree(whole, path)
    put(step__longest=112)(path)
    assert read_bundle(path).manifest.info.max_model_len == 100


WRONG: list[Any] = [
    ..., None, True, False, 0, -1, 1, 7, 1.5, 2**31, 2**63, 10**30, "", "x", "\0", "[/red]", [], [1], {}, {"a": 1},
]  # fmt: skip
"""``...``: leave it out."""
UNREAD = (
    "versions", "device_name", "request_id", "cause",
    "info.resolved", "info.model_type", "info.eos_token_ids", "info.max_request_tokens",
    "info.graph_capture_seconds", "info.graph_memory_bytes", "info.graphs_captured",
    "options.tokenizer", "options.nan_bundle_dir", "options.seed", "options.threads",
)  # fmt: skip
"""What no replay reads; the rest is run where it passes."""


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything in a JSON value."""
    yield path
    children = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, child in children:
        yield from places(child, (*path, key))


def with_wrong(root: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return None if value is ... else value
    root = copy.deepcopy(root)
    at = root
    for key in path[:-1]:
        at = at[key]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return root


def test_no_json_value_makes_anything_else_than_a_refusal(any_bundle: Path, tmp_path: Path) -> None:
    shutil.copy(any_bundle / TENSORS, tmp_path)
    good = json.loads((any_bundle / MANIFEST).read_text())
    refused = ran = 0
    for path in places(good):
        for value in WRONG:
            (tmp_path / MANIFEST).write_text(json.dumps(with_wrong(good, path, value)))
            try:
                bundle = read_bundle(tmp_path)
            except BundleError:
                refused += 1
                continue
            if not ".".join(map(str, path)).startswith(UNREAD) and path != ("options", "model"):
                assert replay(bundle, graphs="off", force=True).bundle_flags == good["flag_names"]
                ran += 1
    assert refused > 1500 and ran > 10


def test_no_value_of_a_tensor_makes_a_replay_fail(any_bundle: Path, tmp_path: Path) -> None:
    """What the device held is evidence, however wrong: the step says itself what it thinks of it."""
    shutil.copy(any_bundle / MANIFEST, tmp_path)
    good = load_file(any_bundle / TENSORS)
    for name in ("core", "block_table", "keys", "top_k", "min_position", "floats", "tokens"):
        values = [-1, 1, 10**9, -(2**31)]
        values += [2**62, -(2**63)] if good[name].dtype == torch.int64 else []
        values += [float("nan"), float("inf")] if good[name].is_floating_point() else []
        for index in range(min(good[name].numel(), 7)):
            for value in values:
                save_file(good | {name: element(index, value)(good[name].clone())}, tmp_path / TENSORS)
                try:
                    bundle = read_bundle(tmp_path)
                except BundleError as error:
                    assert name in str(error) or "page_ids" in str(error)
                    continue
                replay(bundle, graphs="off")


def test_state_of_this_format(f3: F1) -> None:
    """Whoever changes this list raises ``FORMAT``: bundles of before lack the new ones, or hold more."""
    live = Live.start(f3.path, [4], greedy(4))
    found = {name: (tensor.dtype, tensor.ndim) for name, tensor in live.parts.runner.state.tensors()}
    assert FORMAT == 2 and found == {
        "core": (torch.int64, 2),
        "draft_probs": (torch.float32, 3),
        "block_table": (torch.int32, 2),
        "keys": (torch.int64, 1),
        "top_k": (torch.int64, 1),
        "min_position": (torch.int64, 1),
        "floats": (torch.float32, 2),
        "logit_bias": (torch.float32, 2),
        "stop_mask": (torch.bool, 2),
        "output_counts": (torch.int32, 2),
        "prompt_seen": (torch.bool, 2),
        "has_tables": (torch.bool, 1),
    }


def test_a_state_that_is_not_the_hosts_is_told(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "b"
    shutil.copytree(whole, path)
    assert not replay(read_bundle(path), graphs="off").state_differs
    change("core", element(0, 1))(path)
    assert replay(read_bundle(path), graphs="off").state_differs


def test_a_vocabulary_that_is_not_the_models_is_refused(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "b"
    shutil.copytree(whole, path)
    put(info__vocab_size=65)(path)
    with pytest.raises(BundleError, match=r"info\.vocab_size=65"):
        replay(read_bundle(path), graphs="off")
