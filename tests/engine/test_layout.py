"""The layout is a value that one function makes (invariant I1, field note A1)."""

from __future__ import annotations

import pytest
import torch

from engine.layout import PackedLayout, UniformLayout, packed_layout, uniform_layout

CPU = torch.device("cpu")


@pytest.mark.parametrize(("rows", "stride"), [(1, 1), (3, 4), (8, 9)])
def test_uniform_offsets_are_multiples_of_the_stride(rows: int, stride: int) -> None:
    layout = uniform_layout(rows, stride, CPU)
    assert layout.cu_seqlens_q.tolist() == [row * stride for row in range(rows + 1)]
    assert layout.cu_seqlens_q.dtype == torch.int32
    assert layout.seq_lens_q.tolist() == [stride] * rows
    assert layout.max_seq_len_q == stride
    assert layout.sum_seq_lens_q == rows * stride
    assert layout.row_starts.tolist() == [row * stride for row in range(rows)]


def test_same_arguments_give_the_same_object() -> None:
    assert uniform_layout(3, 4, CPU) is uniform_layout(3, 4, CPU)


def test_a1_accept_lengths_cannot_reach_a_layout() -> None:
    """With accept lengths [0, K, 1] the packed offsets of the historical fault would be [0, 1, K + 2, K + 4]."""
    k = 3
    packed = torch.tensor([0, *(torch.tensor([0, k, 1]) + 1).cumsum(0).tolist()], dtype=torch.int32)
    shipped = uniform_layout(3, k + 1, CPU)
    assert shipped.cu_seqlens_q.tolist() != packed.tolist()
    with pytest.raises(TypeError, match=r"made by uniform_layout"):
        UniformLayout(
            rows=3,
            stride=k + 1,
            cu_seqlens_q=packed,
            seq_lens_q=shipped.seq_lens_q,
            offsets=shipped.offsets,
            row_starts=shipped.row_starts,
            mint=object(),
        )
    with pytest.raises(TypeError, match=r"made by packed_layout"):
        PackedLayout((1,), (0,), mint=object())


def test_layouts_are_frozen() -> None:
    layout = uniform_layout(2, 3, CPU)
    with pytest.raises(AttributeError):
        layout.stride = 4  # type: ignore[misc]


def test_packed_layout_counts_tokens() -> None:
    assert packed_layout([3, 1], [0, 64]).num_tokens == 4
    with pytest.raises(AssertionError, match="impossible"):
        packed_layout([0], [0])
