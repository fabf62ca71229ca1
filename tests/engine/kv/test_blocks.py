"""The page allocator: three states, reference counts, eviction order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.blocks import PageAllocator


def counts(pages: PageAllocator) -> tuple[int, int, int]:
    return pages.num_free, pages.num_cached, pages.num_used


def make(num_pages: int) -> tuple[PageAllocator, list[int]]:
    """An allocator, and the list of pages it evicts."""
    pages = PageAllocator(num_pages)
    evicted: list[int] = []
    pages.on_evict(evicted.append)
    return pages, evicted


def test_page_zero_is_never_handed_out() -> None:
    pages = PageAllocator(6)
    assert pages.allocate(5) == [1, 2, 3, 4, 5]
    assert counts(pages) == (0, 0, 5)


def test_pages_come_in_the_order_asked_for() -> None:
    assert PageAllocator(5, [3, 1, 4, 2]).allocate(4) == [3, 1, 4, 2]


@pytest.mark.parametrize("order", [[1, 2], [0, 1, 2], [1, 2, 2], [1, 2, 3, 4]])
def test_an_order_must_name_each_page_once(order: list[int]) -> None:
    with pytest.raises(AssertionError):
        PageAllocator(4, order)


def test_a_page_is_free_again_when_its_last_holder_lets_go() -> None:
    pages = PageAllocator(3)
    (page,) = pages.allocate(1)
    pages.retain(page)
    pages.release([page])
    assert counts(pages) == (1, 0, 1)
    pages.release([page])
    assert counts(pages) == (2, 0, 0)


def test_a_page_released_too_often_is_noticed() -> None:
    pages = PageAllocator(3)
    held = pages.allocate(1)
    pages.release(held)
    with pytest.raises(AssertionError, match="more often than held"):
        pages.release(held)


def test_more_pages_than_available_is_refused_before_anything_changes() -> None:
    pages = PageAllocator(4)
    pages.allocate(2)
    with pytest.raises(AssertionError, match="2 pages asked, 1 available"):
        pages.allocate(2)
    assert counts(pages) == (1, 0, 2)


def test_kept_pages_stay_until_free_ones_run_out_then_go_in_order_of_release() -> None:
    pages, evicted = make(5)
    a, b, c, d = pages.allocate(4)
    for page in (a, b, c):
        pages.keep(page)
    pages.release([c, a, d, b])
    assert counts(pages) == (1, 3, 0)
    assert pages.allocate(1) == [d] and evicted == []
    assert pages.allocate(2) == [c, a] and evicted == [c, a]
    assert pages.num_available == 1


def test_a_hit_takes_a_page_out_of_the_eviction_order_and_puts_it_last_again() -> None:
    pages, evicted = make(4)
    a, b, c = pages.allocate(3)
    for page in (a, b, c):
        pages.keep(page)
    pages.release([a, b, c])
    pages.retain(a)
    assert counts(pages) == (0, 2, 1)
    pages.release([a])
    assert pages.allocate(3) == [b, c, a] and evicted == [b, c, a]


def test_an_evicted_page_is_kept_no_longer() -> None:
    pages, _ = make(2)
    (page,) = pages.allocate(1)
    pages.keep(page)
    pages.release([page])
    pages.release(pages.allocate(1))
    assert counts(pages) == (1, 0, 0)


def test_forgetting_a_cached_page_frees_it_and_a_held_one_later() -> None:
    pages, _ = make(3)
    a, b = pages.allocate(2)
    pages.keep(a)
    pages.keep(b)
    pages.release([a])
    pages.forget(a)
    pages.forget(b)
    assert counts(pages) == (1, 0, 1)
    pages.release([b])
    assert counts(pages) == (2, 0, 0)


def test_a_free_page_has_nothing_to_share() -> None:
    with pytest.raises(AssertionError, match="no content"):
        PageAllocator(3).retain(1)


def test_check_notices_holders_that_differ() -> None:
    pages = PageAllocator(4)
    (page,) = pages.allocate(1)
    pages.check({page: 1})
    with pytest.raises(AssertionError, match="differ"):
        pages.check({page: 2})
    with pytest.raises(AssertionError, match="differ"):
        pages.check({})


@settings(max_examples=100, deadline=None)
@given(
    num_pages=st.integers(2, 12),
    moves=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 99)), max_size=60),
)
def test_i4_free_cached_and_used_pages_make_the_total(num_pages: int, moves: list[tuple[int, int]]) -> None:
    pages, _ = make(num_pages)
    held: list[int] = []
    for move, which in moves:
        if move == 0 and pages.num_available:
            held += pages.allocate(1 + which % pages.num_available)
        elif move == 1 and (shareable := held + pages.cached_pages()):
            page = shareable[which % len(shareable)]
            pages.retain(page)
            held.append(page)
        elif held:
            page = held[which % len(held)]
            if move == 2:
                held.remove(page)
                pages.release([page])
            elif move == 3:
                pages.keep(page)
            elif move == 4:
                pages.forget(page)
        pages.check({page: held.count(page) for page in held})
        assert sum(counts(pages)) == num_pages - 1
