"""Pages of sequences: what each holds, shares through the prefix cache, and gives back. No device work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from engine.kv.blocks import PageAllocator
from engine.kv.prefix import Digest, PrefixCache, sha256
from engine.sequence import Sequence


class KvManager:
    """The allocator and the prefix cache, seen from a sequence.

    A running sequence holds its first ``len(blocks)`` pages as published blocks, possibly shared, and every
    later page alone. Only the later ones are still written.

    Args:
        prefix_cache: False: nothing is published or matched.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        prefix_cache: bool,
        cache_salt: bytes,
        page_order: Seq[int] | None = None,
        digest: Digest = sha256,
    ) -> None:
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.pages = PageAllocator(num_pages, page_order)
        self.cache = PrefixCache(self.pages, page_size, cache_salt, digest)

    def pages_for(self, positions: int) -> int:
        return -(-positions // self.page_size)

    # --- admission ------------------------------------------------------------------------------------------

    def match(self, sequence: Sequence) -> None:
        """Set ``sequence.matched`` for a waiting sequence, anew only if the cache changed.

        One known position at least is left to prefill, so that the first step has the same drafts as without
        the cache. One that needs its prompt's logits, or was rebuilt after a fault, matches nothing.
        """
        if not self.prefix_cache or not sequence.uses_cache:
            return
        if sequence.match_generation == self.cache.generation:
            return
        count = max(len(sequence.tokens) - 2, 0) // self.page_size
        self.cache.extend_keys(sequence.keys, sequence.tokens, count)
        sequence.matched = self.cache.match(sequence.keys[:count])
        sequence.match_generation = self.cache.generation

    def is_computing_next_block(self, other: Sequence, sequence: Sequence) -> bool:
        """Whether running ``other`` publishes, by its first result, the block after ``sequence.matched``."""
        index = len(sequence.matched)
        end = (index + 1) * self.page_size
        if not self.prefix_cache or not other.publishable or len(other.blocks) > index:
            return False
        if not sequence.uses_cache:
            return False
        if len(sequence.tokens) - 2 < end or other.prefill_end < end:
            return False
        self.cache.extend_keys(other.keys, other.tokens, index + 1)
        return other.keys[index].digest == sequence.keys[index].digest

    def claim(self, sequence: Sequence, positions: int, reserve: int) -> bool:
        """Take the matched blocks and new pages up to ``positions``, if that leaves ``reserve`` pages."""
        missing = self.pages_for(positions) - len(sequence.matched)
        idle = sum(self.pages.references(block.page) == 0 for block in sequence.matched)
        if missing + idle + reserve > self.pages.num_available:
            return False
        for block in sequence.matched:
            self.pages.retain(block.page)
        sequence.blocks = sequence.matched
        sequence.matched = []
        sequence.num_hit_blocks = len(sequence.blocks)
        sequence.pages = [block.page for block in sequence.blocks] + self.pages.allocate(missing)
        return True

    # --- running --------------------------------------------------------------------------------------------

    def num_missing(self, sequence: Sequence, positions: int) -> int:
        """Pages that ``sequence`` lacks to hold ``positions``."""
        missing = self.pages_for(positions) - len(sequence.pages)
        return missing if missing > 0 else 0

    def grow(self, sequence: Sequence, count: int) -> None:
        sequence.pages += self.pages.allocate(count)

    def publish(self, sequence: Sequence) -> None:
        """Publish the full blocks whose next token is known.

        Call it after a result only: that proves that the device ran the prefill and steps that wrote them.
        Steps in flight write at and after position ``len(tokens) - 1``, so never to a published page.
        """
        count = (len(sequence.tokens) - 1) // self.page_size
        if not self.prefix_cache or not sequence.publishable or count <= len(sequence.blocks):
            return
        self.cache.extend_keys(sequence.keys, sequence.tokens, count)
        for index in range(len(sequence.blocks), count):
            parent = sequence.blocks[-1] if sequence.blocks else None
            block = self.cache.publish(sequence.keys[index], parent, sequence.pages[index])
            if block is None:
                sequence.publishable = False
                return
            if block.page != sequence.pages[index]:
                self._adopt(sequence, index, block.page)
            sequence.blocks.append(block)

    def _adopt(self, sequence: Sequence, index: int, page: int) -> None:
        """Another sequence computed the same block first: share its page and give ours back.

        A private copy would break the rule that who holds a block holds the published pages of its ancestors.
        """
        self.pages.retain(page)
        self.pages.release([sequence.pages[index]])
        sequence.pages[index] = page
        sequence.num_pages_synced = min(sequence.num_pages_synced, index)

    def own_pages(self, sequence: Sequence) -> list[int]:
        """Pages that ``sequence`` wrote and nobody else holds."""
        own = sequence.pages[sequence.num_hit_blocks :]
        return [page for page in own if self.pages.references(page) == 1]

    def withdraw(self, sequence: Sequence) -> None:
        """After a fault: what ``sequence`` published, and all built on it, cannot be matched any more."""
        sequence.publishable = False
        self.cache.withdraw(sequence.blocks[sequence.num_hit_blocks :])

    def give_back(self, sequence: Sequence) -> None:
        """Return every page. Keys stay: the tokens that they name are kept."""
        # Deepest first: eviction then takes leaves before their parents.
        self.pages.release(reversed(sequence.pages))
        sequence.pages = []
        sequence.num_pages_synced = 0
        sequence.blocks = []
        sequence.num_hit_blocks = 0
        sequence.publishable = True
        sequence.match_generation = -1  # what it matched was taken, and may be matched again

    def check(self, running: Iterable[Sequence]) -> None:
        """Raises ``AssertionError`` unless pages, blocks and the running sequences agree."""
        holders: Counter[int] = Counter()
        for sequence in running:
            name = sequence.request.request_id
            holders.update(sequence.pages)
            published = len(sequence.blocks)
            shared = [block.page for block in sequence.blocks]
            assert shared == sequence.pages[:published], f"{name}: other pages than its blocks'"
            assert published * self.page_size < len(sequence.tokens), f"{name}: published too early"
            for block, key in zip(sequence.blocks, sequence.keys, strict=False):
                assert block.key == key, f"{name}: holds the block of other tokens"
            for page in sequence.pages[published:]:
                assert self.pages.references(page) == 1, f"{name}: page {page} is shared and will be written"
        self.pages.check(dict(holders))
        self.cache.check()
