"""NaN bundles: what they hold, their limits, and what running one again shows."""

from __future__ import annotations

import math
import stat
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch import Tensor

from engine import bundle_writer
from engine.build import Parts, build
from engine.bundle import BundleError, StepPath, read_bundle
from engine.bundle_writer import BundleWriter, TripBundles
from engine.errors import ConfigError
from engine.graph import Outputs, SimulatedGraph
from engine.guard import HALTING, Flag
from engine.ladder import MAX_RESCUES
from engine.layout import uniform_layout
from engine.replay import replay
from engine.sampler import FULL, GREEDY, Variant
from engine.sequence import RowResult
from engine.types import GrammarSpec, SamplingParams
from tests.engine.drive import greedy, make_engine
from tests.engine.faults import poison, serve, tokens_of
from tests.engine.live import PAGES, SLOT, Live, before, place
from tests.fixtures.checkpoints import F1, build_f1, build_f2
from tests.fixtures.hf_layout import v3_config

if TYPE_CHECKING:
    from engine.grammar.walker import Constraint

NAN_TOKEN = 30
DRAFT_FLAGS = Flag.DRAFT_NAN | Flag.DRAFT_INF
PENALISED = greedy(40, frequency_penalty=0.7, repetition_penalty=1.3, logit_bias={5: 2.0, 7: -1.0})


@pytest.fixture(scope="module")
def f3(tmp_path_factory: pytest.TempPathFactory) -> F1:
    """F1 with the embedding of one token NaN."""
    return build_f1(tmp_path_factory.mktemp("f3") / "m", nan_tokens=[NAN_TOKEN], eos=None)


@pytest.fixture(scope="module")
def f2_small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = v3_config(num_hidden_layers=2, first_k_dense_replace=1)
    return build_f2(tmp_path_factory.mktemp("f2") / "m", config)


@pytest.mark.parametrize("graphs", ["simulate", "off"])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_poisoned_embedding_is_named_with_its_position(
    f3: F1, tmp_path: Path, rows: int, graphs: Any
) -> None:
    live = Live.start(f3.path, [9, before(f3, NAN_TOKEN, 5)], greedy(40))
    bundle = live.bundle(tmp_path, live.run_until(HALTING), rows=rows)
    assert "TARGET_NAN" in bundle.manifest.flag_names
    report = replay(bundle, graphs=graphs)
    assert report.reproduced and report.first_parting is None
    # Prompt positions 0 and 1, then five tokens, of which the last is the poisoned one
    expected = ("verify", "embedding", 6)
    for run in (report.eager, report.replay):
        if run is not None:
            assert place(run.first_non_finite) == expected and "TARGET_NAN" in run.flags
    assert (report.replay is None) == (graphs == "off")
    assert report.stored_kv_faults == [] and not report.block_table_differs and report.kv == "stored"


def test_the_first_bad_layer_is_named(tmp_path: Path) -> None:
    def poison(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.self_attn.o_proj.weight"][3, 5] = math.nan

    f1 = build_f1(tmp_path / "m", edit_tensors=poison)
    live = Live.start(f1.path, [5], greedy(9))
    report = replay(live.bundle(tmp_path / "b", live.run_until(HALTING)))
    assert report.eager is not None and place(report.eager.first_non_finite) == ("verify", "layer 1", 0)
    finite = {row.part: row.eager_finite for row in report.places if row.phase == "verify"}
    assert finite == {"embedding": True, "layer 0": True, "layer 1": False, "hidden": False, "logits": False}


@pytest.mark.parametrize(("params", "variant"), [(greedy(40), GREEDY), (greedy(40), FULL), (PENALISED, FULL)])
def test_a_bundle_continues_exactly_where_the_step_was(
    f2_small: Path, tmp_path: Path, params: SamplingParams, variant: Variant
) -> None:
    """The fault was none of the model's: run again, the step emits what it would have emitted."""
    prompt = [(7 * i + 3) % 89 for i in range(19)]
    healthy = Live.start(f2_small, prompt, params)
    tokens: list[int] = []
    for _ in range(4):
        tokens = healthy.step().token_ids
        healthy.sequence.tokens += tokens
    live = Live.start(f2_small, prompt, params)
    live.poison_logits(4)
    report = replay(live.bundle(tmp_path, live.run_until(HALTING), variant))
    assert not report.reproduced and report.first_parting is None
    assert report.eager is not None and report.replay is not None
    assert report.eager.emitted == report.replay.emitted == tokens
    assert report.eager.flags == [] and report.eager.first_non_finite is None
    phases = {row.phase for row in report.places}
    assert phases == {"verify", "extend", "draft 1", "draft 2", "draft 3"}
    assert all(row.eager_finite and row.replay_finite and not row.parts for row in report.places)


def test_a_replay_that_alone_is_wrong_is_told_from_the_eager_run(
    f2_small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = Live.start(f2_small, [5, 6, 7], greedy(40))
    live.poison_logits(2)
    bundle = live.bundle(tmp_path, live.run_until(HALTING))
    built: list[Parts] = []
    original = SimulatedGraph.replay

    def build_and_keep(*args: Any) -> Parts:
        built.append(build(*args))
        return built[-1]

    def corrupt(graph: SimulatedGraph) -> Outputs:
        """What the capture holds changes before the replay."""
        built[-1].runner.decoder.layers[1].mlp_norm.scaled_weight.fill_(math.nan)
        return original(graph)

    monkeypatch.setattr("engine.replay.build", build_and_keep)
    monkeypatch.setattr(SimulatedGraph, "replay", corrupt)
    report = replay(bundle)
    assert report.reproduced and report.eager is not None and report.replay is not None
    assert report.eager.first_non_finite is None and report.eager.flags == []
    expected = ("verify", "layer 1", int(bundle.tensors["core"][0, 0]))
    assert place(report.replay.first_non_finite) == place(report.first_parting) == expected
    assert "TARGET_NAN" in report.replay.flags


def test_a_replay_that_is_finite_but_different_parts_where_the_difference_begins(
    f2_small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The historical fault in small: an offset that the capture froze is another one at the replay."""
    live = Live.start(f2_small, [5, 6, 7], greedy(40))
    live.poison_logits(2)
    bundle = live.bundle(tmp_path, live.run_until(HALTING))
    offsets = uniform_layout(4, 4, torch.device("cpu")).offsets
    original = SimulatedGraph.replay

    def corrupt(graph: SimulatedGraph) -> Outputs:
        offsets[2] = 0
        try:
            return original(graph)
        finally:
            offsets[2] = 2

    monkeypatch.setattr(SimulatedGraph, "replay", corrupt)
    report = replay(bundle)
    assert not report.reproduced and report.replay is not None and report.replay.first_non_finite is None
    assert report.first_parting is not None and report.first_parting.phase == "verify"
    assert report.first_parting.part == "layer 0"


def test_a_fault_of_a_prefill_is_looked_for_in_a_prefill(f3: F1, tmp_path: Path) -> None:
    live = Live.start(f3.path, [4, 5, NAN_TOKEN, 6, 7], greedy(9), prefill_chunk_size=2)
    bundle = live.bundle(tmp_path, live.run_until(HALTING))
    # The draft at the position before it looks at that token too
    assert bundle.manifest.flag_names == ["DRAFT_NAN", "PREFILL_NAN"]
    report = replay(bundle)
    assert report.reproduced and report.eager is None and report.replay is None
    assert report.prefill is not None and place(report.prefill.first_non_finite) == (
        "prefill",
        "embedding",
        2,
    )
    assert report.prefill.flags == ["DRAFT_NAN", "PREFILL_NAN"]
    assert {row.phase for row in report.places} >= {"prefill", "prefill extend", "prefill draft 1"}


@pytest.fixture(scope="module")
def bad_draft(tmp_path_factory: pytest.TempPathFactory) -> F1:
    """F1 whose draft layer's last norm is NaN for one dimension."""

    def poison(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if "shared_head.norm" in name:
                tensor[3] = math.nan

    return build_f1(tmp_path_factory.mktemp("draft") / "m", edit_tensors=poison, eos=None)


def test_a_fault_of_the_first_drafts_is_found_behind_the_prefill(bad_draft: F1, tmp_path: Path) -> None:
    live = Live.start(bad_draft.path, [4, 5, 6], greedy(9))
    report = replay(live.bundle(tmp_path, live.run_until(DRAFT_FLAGS)))
    assert report.reproduced and report.prefill is not None
    assert place(report.prefill.first_non_finite) == ("prefill extend", "hidden", 0)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_fault_of_the_draft_is_run_again_from_the_state_before_the_step(
    bad_draft: F1, tmp_path: Path, ahead: int
) -> None:
    """The slot has gone on since, by the steps that were launched in the meantime too."""
    params = greedy(30, frequency_penalty=0.1)
    live = Live.start(bad_draft.path, [4, 5, 6], params)
    for _ in range(3):
        live.sequence.tokens += live.step().token_ids
    result = live.step()
    assert result.flags & DRAFT_FLAGS and not result.flags & HALTING
    for _ in range(ahead):
        live.step()
    report = replay(live.bundle(tmp_path, result, FULL))
    assert report.reproduced and report.first_parting is None
    assert report.eager is not None and report.replay is not None
    assert report.eager.emitted == report.replay.emitted == result.token_ids
    start = len(live.sequence.tokens) - 1
    assert place(report.eager.first_non_finite) == ("extend", "hidden", start)
    assert "DRAFT_NAN" in report.replay.flags


@pytest.mark.parametrize("params", [greedy(40), SamplingParams(max_tokens=40, temperature=0.2, seed=3)])
def test_accepted_drafts_of_a_step_that_did_commit_stand_again(
    f1: F1, tmp_path: Path, params: SamplingParams
) -> None:
    live = Live.start(f1.path, [5, 9], params)
    live.sequence.tokens += live.step().token_ids
    result = replace(live.step(), flags=int(Flag.DRAFT_NAN))
    assert result.num_accepted == 3
    variant = FULL if params.temperature else GREEDY
    report = replay(live.bundle(tmp_path, result, variant))
    assert report.eager is not None and report.eager.emitted == result.token_ids


def test_what_does_not_fit_is_left_out_and_computed_anew(
    f3: F1, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = Live.start(f3.path, [*range(20), before(f3, NAN_TOKEN, 5)], greedy(40))
    result = live.run_until(HALTING)
    page = live.parts.runner.pool.pages[:, 0].nbytes
    monkeypatch.setattr(bundle_writer, "MAX_BUNDLE_BYTES", 2 * page + 2000)
    bundle = live.bundle(tmp_path, result)
    manifest = bundle.manifest
    assert (manifest.complete, manifest.num_pages, manifest.num_pages_stored) == (False, len(PAGES), 2)
    assert sum(file.stat().st_size for file in bundle.path.iterdir()) < 3 * page + 8000
    report = replay(bundle)
    assert report.kv == "recomputed" and report.reproduced and report.eager is not None
    assert place(report.eager.first_non_finite) == ("verify", "embedding", 25)


def test_a_full_directory_gets_no_more(
    f3: F1, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bundle_writer, "MAX_BUNDLES", 2)
    live = Live.start(f3.path, [NAN_TOKEN], greedy(40))
    result = live.run_until(HALTING)
    (tmp_path / "notes.txt").touch()
    assert [live.write(tmp_path, result) for _ in range(4)] == ["written", "written", "limit", "limit"]
    assert len(list(tmp_path.glob("trip-*"))) == 2
    assert "no bundle of request r" in caplog.text


def test_a_write_that_fails_is_logged_and_leaves_nothing(
    f3: F1, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("No space left on device")

    live = Live.start(f3.path, [NAN_TOKEN], greedy(40))
    monkeypatch.setattr(bundle_writer, "save_file", fail)
    assert live.write(tmp_path, live.run_until(HALTING)) == "failed"
    assert list(tmp_path.iterdir()) == []
    assert "No space left on device" in caplog.text


def test_a_directory_that_cannot_be_written_to_is_refused_at_the_start(f3: F1, tmp_path: Path) -> None:
    live = Live.start(f3.path, [5], greedy(4))
    (tmp_path / "file").touch()
    for path, problem in (("file/b", "cannot be written to"), ("file", "is not a directory")):
        with pytest.raises(ConfigError, match=f"nan_bundle_dir='.*{path}': {problem}"):
            BundleWriter(tmp_path / path, live.options, live.parts.info)


def test_a_bundle_is_private_and_holds_no_text(f3: F1, tmp_path: Path) -> None:
    grammar = GrammarSpec("regex", "a secret pattern")
    live = Live.start(f3.path, [NAN_TOKEN], greedy(40, grammar=grammar))
    bundle = live.bundle(tmp_path / "new", live.run_until(HALTING))
    modes = [
        stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new", bundle.path, *bundle.path.iterdir())
    ]
    assert modes == [0o700, 0o700, 0o600, 0o600]
    for file in bundle.path.iterdir():
        assert b"secret" not in file.read_bytes()
    omitted = {"draft_probs", "logit_bias", "stop_mask", "output_counts", "prompt_seen"}
    state = {name for name, _ in live.parts.runner.state.tensors()} - omitted
    assert set(bundle.tensors) == state | {"tokens", "page_ids", "pages"}
    assert bundle.tokens == [NAN_TOKEN] and bundle.manifest.cause == "replay"
    assert bundle.manifest.versions["torch"] == torch.__version__


@pytest.mark.parametrize("params", [PENALISED, SamplingParams(max_tokens=9, seed=1)])
def test_wide_tables_are_held_where_the_step_reads_them(
    f3: F1, tmp_path: Path, params: SamplingParams
) -> None:
    live = Live.start(f3.path, [NAN_TOKEN], params)
    bundle = live.bundle(tmp_path, live.run_until(HALTING), FULL)
    wide = {"logit_bias", "stop_mask", "output_counts", "prompt_seen"}
    assert ("draft_probs" in bundle.tensors) and (wide <= set(bundle.tensors)) == (params is PENALISED)


def test_non_finite_kv_survives_and_is_named(f1: F1, tmp_path: Path) -> None:
    live = Live.start(f1.path, [*range(2, 30)], greedy(40))
    pages = live.parts.runner.pool.pages
    pages[1, PAGES[1], 3, 4] = math.inf  # position 11
    pages[2, PAGES[0], 6, 0] = math.nan  # position 6 of the draft's plane
    result = live.run_until(HALTING | DRAFT_FLAGS)
    bundle = live.bundle(tmp_path, result)
    assert torch.equal(bundle.tensors["pages"][:, 1], pages[:, PAGES[1]])
    report = replay(bundle)
    assert report.stored_kv_faults == [(1, 11), (2, 6)]
    assert report.reproduced and report.eager is not None
    assert place(report.eager.first_non_finite) == ("verify", "layer 1", 27)


def test_a_block_table_that_names_other_pages_is_told(f3: F1, tmp_path: Path) -> None:
    live = Live.start(f3.path, [NAN_TOKEN], greedy(40))
    live.parts.runner.state.block_table[SLOT, 1] = 4
    result = live.run_until(HALTING)
    bundle = live.bundle(tmp_path, result)
    assert bundle.tensors["page_ids"].tolist() == [7, 4, 9, 12, 5, 2]
    report = replay(bundle)
    assert report.block_table_differs and report.reproduced


def test_a_page_id_outside_of_the_pool_stays_outside(f1: F1, tmp_path: Path) -> None:
    live = Live.start(f1.path, [*range(2, 20)], greedy(40))
    live.parts.runner.state.block_table[SLOT, 1] = 400
    bundle = live.bundle(tmp_path, live.run_until(HALTING))
    assert bundle.manifest.flag_names == ["BLOCK_TABLE"]
    report = replay(bundle)
    assert report.reproduced and report.block_table_differs
    assert report.eager is not None and report.eager.flags == ["BLOCK_TABLE"]


@pytest.mark.parametrize("graphs", ["simulate", "off"])
def test_trips_are_bundled_as_they_ran_and_counted(f3: F1, tmp_path: Path, graphs: str) -> None:
    live = Live.start(f3.path, [4, NAN_TOKEN], greedy(9), graphs=graphs, max_num_seqs=3, max_graph_rows=1)
    pending = live.launch()
    [result] = pending.results()
    runner = live.parts.runner
    bundles = TripBundles(BundleWriter(tmp_path, live.options, live.parts.info), runner)
    bundles.write(result, pending.graph)
    bundles.write(replace(result, flags=int(Flag.PREFILL_NAN)), None)
    assert runner.counts["nan_bundles", ("written",)] == 2
    found = [read_bundle(path) for path in tmp_path.iterdir()]
    steps = {bundle.manifest.step.phase: bundle.manifest.step for bundle in found}
    path, reason = ("replay", "none") if graphs == "simulate" else ("eager", None)
    assert steps["step"] == StepPath(
        phase="step", path=path, reason=reason, rows=1, variant=GREEDY, verify_drafts=True
    )
    assert steps["prefill"].path == "eager" and steps["prefill"].reason == "prefill"
    [step] = [bundle for bundle in found if bundle.manifest.step.phase == "step"]
    assert replay(step).reproduced


@pytest.mark.parametrize("constrained", [False, True])
def test_a_step_of_the_next_token_alone_is_run_as_such(f3: F1, tmp_path: Path, constrained: bool) -> None:
    """Its slot holds a draft that would trip the model, and the step did not look at it."""
    start = before(f3, NAN_TOKEN, 3)
    live = Live.start(f3.path, [9, start], greedy(40))
    sequence = live.sequence
    sequence.constraint = cast("Constraint", object()) if constrained else None
    result = RowResult(sequence, sequence.epoch, [0], 0, 0, flags=int(Flag.TARGET_NAN))
    bundles = TripBundles(BundleWriter(tmp_path, live.options, live.parts.info), live.parts.runner)
    reports = {}
    for isolated in (False, True):
        sequence.isolated = isolated
        bundles.write(result, None)
    for path in tmp_path.iterdir():
        report = replay(read_bundle(path))
        reports[report.verify_drafts] = report
    with_drafts, alone = reports[True], reports[False]
    assert with_drafts.reproduced and with_drafts.replay is not None and with_drafts.graphs == "simulate"
    assert place(with_drafts.replay.first_non_finite) == ("verify", "embedding", 4)
    assert not alone.reproduced and alone.replay is None and alone.graphs == "off"
    assert alone.eager is not None and alone.eager.emitted == f3.walk(start, 1)
    assert all(row.eager_finite for row in alone.places if row.phase in ("verify", "extend"))
    assert alone.first_parting is None and all(row.replay_finite is None for row in alone.places)


def test_the_step_that_ended_an_isolated_request_is_found_again(
    f3: F1, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's own bundles: of steps with drafts until it was isolated, of its next token alone then."""
    engine = make_engine(f3.path, nan_bundle_dir=str(tmp_path), graphs="off")
    # The drafts trip on the way to the poisoned token, which no rung can stand
    poison(engine, monkeypatch, lambda hidden, _: hidden.shape[0] > 1, math.nan, 0)
    deltas, counts = serve(engine, ("a", [5, before(f3, NAN_TOKEN, 9)], greedy(40)))
    assert tokens_of(deltas, "a")[-1] == NAN_TOKEN
    assert counts["nan_guard_actions", ("isolated", "draft_token")] == 1
    found = [read_bundle(path) for path in tmp_path.iterdir()]
    found.sort(key=lambda bundle: bundle.manifest.position)
    assert [bundle.manifest.step.verify_drafts for bundle in found] == [True] * MAX_RESCUES + [False]
    report = replay(found[-1])
    assert report.reproduced and not report.verify_drafts and report.eager is not None
    assert place(report.eager.first_non_finite) == ("verify", "embedding", 10)
    assert {row.phase for row in report.places} == {"verify", "extend", "draft 1", "draft 2", "draft 3"}


def test_without_speculation_an_isolated_step_has_a_replay_to_compare_with(f3: F1, tmp_path: Path) -> None:
    live = Live.start(f3.path, [4, NAN_TOKEN], greedy(9), num_speculative_tokens=0)
    live.sequence.isolated = True
    bundles = TripBundles(BundleWriter(tmp_path, live.options, live.parts.info), live.parts.runner)
    bundles.write(live.run_until(HALTING), None)
    [path] = tmp_path.iterdir()
    report = replay(read_bundle(path))
    assert report.verify_drafts and report.reproduced and report.replay is not None


def test_another_checkpoint_is_refused_unless_forced(f1: F1, f3: F1, f2: Path, tmp_path: Path) -> None:
    live = Live.start(f3.path, [NAN_TOKEN], greedy(40))
    bundle = live.bundle(tmp_path, live.run_until(HALTING))
    with pytest.raises(ConfigError, match="not that of the bundle"):
        replay(bundle, model=f1.path)
    report = replay(bundle, model=f1.path, force=True)
    assert not report.same_checkpoint and not report.reproduced
    with pytest.raises(BundleError, match="pages has shape"):
        replay(bundle, model=f2, force=True)
    with pytest.raises(ConfigError, match="graphs='cuda'"):
        replay(bundle, graphs="cuda", device="cpu")
