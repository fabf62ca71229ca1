"""A backend that consumes query offsets, for tests only: flashinfer's fa3 ``BatchMLAPagedAttentionWrapper``.

What its kernel reads of lengths and offsets are the work lists that ``plan()`` makes on the host and copies to the
device; the ``qo_indptr`` buffer that a wrapper in CUDA-graph mode is given is written by ``plan()`` and read by
nobody. So a graph of ``run()`` is replayed behind a new ``plan()``, and the values given there are what counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from engine.attention import AttentionSpec
from engine.layout import PackedLayout, UniformLayout

_WORKSPACE_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class VarlenPlan:
    """What one plan() was given, on the host."""

    offsets: list[int]
    lengths: list[int]


class FlashInferVarlen:
    """``AttentionBackend`` over query offsets; each forward is planned on the host, so it runs eager only."""

    name = "flashinfer_varlen"
    reads: ClassVar[frozenset[str]] = frozenset({"block_table", "seq_lens", "cu_seqlens_q"})
    gathers: ClassVar[bool] = False

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self._wrapper = _new_wrapper(spec)
        self._current: VarlenPlan | None = None

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> str | None:
        if spec.device.type != "cuda" or torch.cuda.get_device_capability(spec.device) != (9, 0):
            return "fa3 kernels need a Hopper GPU"
        return None

    def short_length(self, rows: int, stride: int) -> None:
        return None

    def prepare(
        self, layout: UniformLayout, block_table: Tensor, seq_lens: Tensor, max_seq_lens: tuple[int, ...]
    ) -> VarlenPlan:
        """Waits for the device: the lengths and the table are read on the host."""
        return self._plan(layout.cu_seqlens_q.tolist(), seq_lens.tolist(), block_table)

    def attend(self, query: Tensor, pages: Tensor, plan: VarlenPlan) -> Tensor:
        assert plan is self._current, "a later plan has taken this one's place"
        out = query.new_empty((*query.shape[:-1], self._spec.kv_lora_rank))
        _run(self._wrapper, self._spec, query.flatten(0, 1), pages, out.flatten(0, 1))
        return out

    def prepare_packed(self, layout: PackedLayout, block_table: Tensor) -> VarlenPlan:
        lengths = [a + b for a, b in zip(layout.query_lens, layout.context_lens, strict=True)]
        return self._plan(offsets_of(layout.query_lens), lengths, block_table)

    def attend_packed(self, query: Tensor, pages: Tensor, plan: VarlenPlan) -> Tensor:
        assert plan is self._current, "a later plan has taken this one's place"
        out = query.new_empty((*query.shape[:-1], self._spec.kv_lora_rank))
        _run(self._wrapper, self._spec, query, pages, out)
        return out

    def _plan(self, offsets: list[int], lengths: list[int], block_table: Tensor) -> VarlenPlan:
        plan_wrapper(self._wrapper, self._spec, offsets, lengths, block_table)
        self._current = VarlenPlan(offsets, lengths)
        return self._current


class GraphedVarlen:
    """``run()`` of one ``[rows, stride]`` forward as a CUDA graph, as engines with such a kernel capture it.

    Attributes:
        qo_indptr: ``[rows + 1]`` int32 on the device, the buffer bound by the wrapper.
        out: ``[rows, stride, H, kv_lora_rank]``, what a replay writes.
    """

    def __init__(self, spec: AttentionSpec, query: Tensor, pages: Tensor, block_table: Tensor) -> None:
        rows = query.shape[0]
        self._spec, self._query, self._pages, self._table = spec, query, pages, block_table
        self.qo_indptr = _int32_zeros(spec, rows + 1)
        self._wrapper = _new_wrapper(
            spec,
            use_cuda_graph=True,
            qo_indptr=self.qo_indptr,
            kv_indptr=_int32_zeros(spec, rows + 1),
            kv_indices=_int32_zeros(spec, block_table.numel()),
            kv_len_arr=_int32_zeros(spec, rows),
        )
        self.out = query.new_zeros((*query.shape[:-1], spec.kv_lora_rank))

    def plan(self, offsets: list[int], lengths: list[int]) -> None:
        """Query offsets and key lengths of the next run or replay."""
        torch.cuda.synchronize()  # the last plan's host copy may still be on its way
        plan_wrapper(self._wrapper, self._spec, offsets, lengths, self._table)

    def capture(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._run()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._run()

    def replay(self) -> Tensor:
        """A copy of what the replay left; rows that it did not write are NaN."""
        self.out.fill_(float("nan"))
        self._graph.replay()
        torch.cuda.synchronize()
        return self.out.clone()

    def _run(self) -> None:
        _run(self._wrapper, self._spec, self._query.flatten(0, 1), self._pages, self.out.flatten(0, 1))


def offsets_of(query_lens: Sequence[int]) -> list[int]:
    """``[0, l0, l0 + l1, ...]``."""
    return [0, *torch.tensor(list(query_lens)).cumsum(0).tolist()]


def plan_wrapper(
    wrapper: Any, spec: AttentionSpec, offsets: list[int], lengths: list[int], block_table: Tensor
) -> None:
    """``plan()`` from host values; each query run is aligned with the end of its keys."""
    counts = [-(-length // spec.page_size) for length in lengths]
    table = block_table.cpu()
    ids = torch.cat([table[row, :count] for row, count in enumerate(counts)])
    wrapper.plan(
        torch.tensor(offsets, dtype=torch.int32),
        torch.tensor(offsets_of(counts), dtype=torch.int32),
        ids,
        torch.tensor(lengths, dtype=torch.int32),
        spec.num_heads,
        spec.kv_lora_rank,
        spec.latent_dim - spec.kv_lora_rank,
        spec.page_size,
        True,
        spec.softmax_scale,
        spec.dtype,
        spec.dtype,
    )


def _new_wrapper(spec: AttentionSpec, **graph_buffers: Any) -> Any:
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.int8, device=spec.device)
    return BatchMLAPagedAttentionWrapper(workspace, backend="fa3", **graph_buffers)


def _int32_zeros(spec: AttentionSpec, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=spec.device)


def _run(wrapper: Any, spec: AttentionSpec, query: Tensor, pages: Tensor, out: Tensor) -> None:
    """``query`` ``[N, H, latent_dim]``, ``out`` ``[N, H, kv_lora_rank]``."""
    rank = spec.kv_lora_rank
    wrapper.run(query[..., :rank], query[..., rank:], pages[..., :rank], pages[..., rank:], out=out)
