"""Who holds which page: reference counts, and unreferenced pages that the prefix cache still knows.

Every page but the scratch page is in exactly one state: *used* (someone holds it), *cached* (nobody holds it,
but its content can still be matched) or *free*. ``free + cached + used == num_pages - 1`` at every moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence


class PageAllocator:
    """Reference-counted page ids ``1 .. num_pages - 1``; page 0 is the scratch page, never handed out.

    Args:
        num_pages: Pages of the pool, the scratch page included.
        order: The page ids in the order of first use; ``None``: ascending.
    """

    def __init__(self, num_pages: int, order: Sequence[int] | None = None) -> None:
        ids = range(1, num_pages) if order is None else order
        assert sorted(ids) == list(range(1, num_pages)), "order must name pages 1.. once each"
        self.num_pages = num_pages
        self._references = [0] * num_pages
        self._kept = [False] * num_pages
        self._free = deque(ids)
        # Insertion-ordered: the first is the least recently used.
        self._cached: dict[int, None] = {}
        self._on_evict: Callable[[int], None] | None = None

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_pages - 1 - self.num_available

    @property
    def num_available(self) -> int:
        """Pages that ``allocate`` can hand out: free ones, then cached ones."""
        return len(self._free) + len(self._cached)

    def on_evict(self, callback: Callable[[int], None]) -> None:
        """Call ``callback(page)`` whenever a cached page is taken for another use."""
        self._on_evict = callback

    def references(self, page: int) -> int:
        return self._references[page]

    def allocate(self, count: int) -> list[int]:
        """``count`` pages held once each; ask ``num_available`` first."""
        assert count <= self.num_available, f"{count} pages asked, {self.num_available} available"
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._free:
            page = self._free.popleft()
        else:
            page = next(iter(self._cached))
            del self._cached[page]
            self._kept[page] = False
            assert self._on_evict is not None, "a cached page without a cache"
            self._on_evict(page)
        self._references[page] = 1
        return page

    def retain(self, page: int) -> None:
        """One more holder of a used or cached page."""
        if self._references[page] == 0:
            assert page in self._cached, f"page {page} is free and has no content to share"
            del self._cached[page]
        self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder less of each page. Of those that become cached, the first released is evicted first."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} released more often than held"
            self._references[page] -= 1
            if self._references[page] == 0:
                if self._kept[page]:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def keep(self, page: int) -> None:
        """The page's content can be matched from now on: unreferenced, it is cached and not free."""
        assert self._references[page] > 0, f"page {page} is kept but nobody holds it"
        self._kept[page] = True

    def forget(self, page: int) -> None:
        """Undo ``keep``: the content must not be matched any more."""
        self._kept[page] = False
        if page in self._cached:
            del self._cached[page]
            self._free.append(page)

    def cached_pages(self) -> list[int]:
        """Cached pages, the next to be evicted first."""
        return list(self._cached)

    def check(self, holders: dict[int, int]) -> None:
        """Compare with who really holds what.

        Args:
            holders: Number of holders of each held page.

        Raises:
            AssertionError: A page is lost, held by nobody, or in two states.
        """
        free, cached = set(self._free), set(self._cached)
        used = {page for page, count in enumerate(self._references) if count}
        assert len(free) == len(self._free), "a page is free twice"
        assert not (free & cached or free & used or cached & used), "a page is in two states"
        assert free | cached | used == set(range(1, self.num_pages)), "a page is lost"
        counted = {page: self._references[page] for page in used}
        assert counted == holders, f"references {counted} differ from holders {holders}"
        assert all(self._kept[page] for page in cached), "a cached page has no content"
        assert not any(self._kept[page] for page in free), "a free page can still be matched"
        assert len(free) + len(cached) + self.num_used == self.num_pages - 1, "free + cached + used != total"
