"""flashinfer on Hopper: a kernel that consumes query offsets, the historical fault with it, and how far a call of
the Blackwell kernel gets. Run where there is such a GPU: ``pytest -m gpu tests/gpu -s``."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.attention.trtllm_mla import decode_arguments, plan_decode
from engine.layout import packed_layout, uniform_layout
from tests.gpu.paged import MAX_ERROR, Paged, packed, paged_case, row_errors
from tests.gpu.varlen import FlashInferVarlen, GraphedVarlen, offsets_of

pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="fa3 kernels need a Hopper GPU",
    ),
]
K, WIDTH = 3, 4
WRITTEN = [37, 61, 90]
"""Positions that each request has written before the draft-extend phase."""
ACCEPTED = [0, K, 1]
WRONG = 0.03
"""A relative error that no rounding explains. Seeing three keys too many of 65 makes 0.1, two 0.045 (computed with
these seeds in float32); another row's keys or query more than 1."""


def _graphed(written: list[int]) -> tuple[Tensor, GraphedVarlen]:
    """A draft-extend phase captured at uniform offsets, and what it should give."""
    lengths = [length + WIDTH for length in written]
    case = paged_case(lengths)
    query = case.query(len(written), WIDTH)
    graphed = GraphedVarlen(case.spec, query, case.pages, case.table)
    graphed.plan([row * WIDTH for row in range(len(written) + 1)], lengths)
    graphed.capture()
    return case.expected(query, lengths), graphed


def _show(title: str, errors: Tensor) -> None:
    print(f"{title}: relative error of each row {[[round(e, 4) for e in row] for row in errors.tolist()]}")


@pytest.mark.parametrize("stride", [1, WIDTH])
@pytest.mark.parametrize("heads", [16, 128])
def test_the_varlen_backend_agrees_with_the_oracle(heads: int, stride: int) -> None:
    lengths = [5, 64, 700, 4, 1025]
    case = paged_case(lengths, heads=heads)
    query = case.query(len(lengths), stride)
    backend = FlashInferVarlen(case.spec)
    layout = uniform_layout(len(lengths), stride, case.spec.device)
    plan = backend.prepare(layout, case.table, case.lengths(lengths), tuple(lengths))
    errors = row_errors(backend.attend(query, case.pages, plan), case.expected(query, lengths))
    assert errors.max() < MAX_ERROR, errors


def test_the_varlen_backend_prefills() -> None:
    queries, contexts = [70, 1, 9], [0, 5, 300]
    case = paged_case([a + b for a, b in zip(queries, contexts, strict=True)])
    tokens = case.query(sum(queries))
    layout = packed_layout(queries, contexts)
    out = packed(FlashInferVarlen(case.spec), tokens, case.pages, layout, case.table)
    start = 0
    for row, (length, context) in enumerate(zip(queries, contexts, strict=True)):
        one = Paged(case.spec, case.pages, case.table[row : row + 1])
        part = slice(start, start + length)
        expected = one.expected(tokens[None, part], [context + length])
        assert row_errors(out[None, part], expected).max() < MAX_ERROR
        start += length


def test_offsets_of_accept_lengths_break_a_replay_of_three_requests() -> None:
    """The fault: captured at ``[0, W, 2W, 3W]``, replayed at ``cumsum(accept_length + 1)``.

    The packed plan is consistent in itself: each request has a + 1 queries, aligned with the end of its
    written + a + 1 keys. But the query buffer is padded to W rows a request, so behind the first request the kernel
    reads and writes other rows than those meant, and leaves the last ones as they were.
    """
    expected, graphed = _graphed(WRITTEN)
    uniform = row_errors(graphed.replay(), expected)
    _show("uniform replay", uniform)
    assert uniform.max() < MAX_ERROR

    graphed.plan(
        offsets_of([a + 1 for a in ACCEPTED]), [n + a + 1 for n, a in zip(WRITTEN, ACCEPTED, strict=True)]
    )
    assert graphed.qo_indptr.tolist() == [0, 1, 5, 7]
    packed = row_errors(graphed.replay(), expected)
    _show("packed replay", packed)
    assert packed[0, 0] < MAX_ERROR  # row 0 is where it should be
    for request in (1, 2):
        for row in range(ACCEPTED[request] + 1):
            assert not packed[request, row] < WRONG, f"live row {row} of request {request} came out right"
    assert packed.flatten()[7:].isnan().all()  # never written

    graphed.plan([0, 4, 8, 12], [n + WIDTH for n in WRITTEN])
    again = row_errors(graphed.replay(), expected)
    _show("uniform replay again", again)
    assert again.max() < MAX_ERROR


def test_one_request_hides_the_fault() -> None:
    """Alone, its a + 1 queries start at row 0 under both offsets: the live rows are right.

    That holds where the keys are shortened by as much as the queries, because runs are aligned at their ends;
    with all W keys counted each query sees W - 1 - a keys of the future.
    """
    written, accepted = 61, 1
    expected, graphed = _graphed([written])
    assert row_errors(graphed.replay(), expected).max() < MAX_ERROR

    graphed.plan([0, accepted + 1], [written + accepted + 1])
    packed = row_errors(graphed.replay(), expected)[0]
    _show("packed replay of one request", packed[None])
    assert packed[: accepted + 1].max() < MAX_ERROR
    assert packed[accepted + 1 :].isnan().all()

    graphed.plan([0, accepted + 1], [written + WIDTH])
    unaligned = row_errors(graphed.replay(), expected)[0]
    _show("the same with all keys counted", unaligned[None])
    assert unaligned[: accepted + 1].min() > WRONG


def test_the_bound_offsets_are_not_what_the_kernel_reads() -> None:
    """Overwriting ``qo_indptr`` on the device changes nothing; only a plan does. See ``tests/gpu/varlen.py``."""
    _, graphed = _graphed(WRITTEN)
    before = graphed.replay()
    graphed.qo_indptr.copy_(torch.tensor([0, 1, 5, 7], dtype=torch.int32))
    assert torch.equal(graphed.replay(), before)


def test_how_far_the_blackwell_kernel_gets_here(
    monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """The public function takes the backend's arguments, and fails for want of the GPU or of its binaries."""
    from flashinfer.mla import trtllm_batch_decode_with_kv_cache_mla as decode

    # Without a network its downloads are tried again behind pauses of a minute in all.
    monkeypatch.setattr("flashinfer.jit.cubin_loader.time.sleep", lambda seconds: None)
    case = paged_case([70, 200])
    plan = plan_decode(case.spec, case.table, case.lengths([70, 200]))
    workspace = torch.zeros(128 << 20, dtype=torch.uint8, device=case.spec.device)
    arguments = decode_arguments(case.spec, case.query(2, WIDTH), case.pages, workspace, plan)
    with pytest.raises(Exception) as caught:
        decode(**arguments)
        torch.cuda.synchronize()
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    first_line = (str(caught.value).splitlines() or [""])[0]
    reached = f"{caught.type.__name__} in {last.name}: {first_line}"
    print(f"trtllm-gen here: {reached}")
    record_property("trtllm_gen", reached)
    assert not isinstance(caught.value, TypeError | ValueError), "the arguments were refused"
