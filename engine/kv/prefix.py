"""The prefix cache: full blocks that later requests can share, found by the tokens that made them.

A block is one page of positions, for target and draft together. Draft KV at position ``i`` pairs hidden state
``i`` with token ``i + 1``, so a block is named by its own tokens, its parent *and the first token after it*.

The published blocks form a forest that stays closed under parents: who holds a block's page holds those of
all its ancestors, and pages are released deepest first. Eviction of the least recently used is therefore
leaf-first by itself.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.kv.blocks import PageAllocator

Digest = Callable[[bytes], bytes]


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


@dataclass(frozen=True, slots=True)
class BlockKey:
    """Name of a block."""

    digest: bytes
    """Of the parent's digest and ``content``."""
    content: bytes
    """The block's ``page_size`` tokens and the next one, 8 bytes each."""


@dataclass(slots=True, eq=False)
class CachedBlock:
    """A published block. Compared by identity: equal content under another parent is another block."""

    key: BlockKey
    parent: CachedBlock | None
    page: int
    live: bool = True
    """False once evicted or withdrawn: nothing can be published below it."""


class PrefixCache:
    """Published blocks by key.

    Args:
        salt: Root of every key: all that changes KV besides the tokens (model, types, speculation).
        digest: Hash of the keys. Contents are compared as well, so equal hashes cannot mix two prompts up.
    """

    def __init__(self, pages: PageAllocator, page_size: int, salt: bytes, digest: Digest = sha256) -> None:
        self.page_size = page_size
        self.generation = 0
        """Changes whenever the result of ``match`` may change."""
        self._pages = pages
        self._digest = digest
        self._root = digest(salt)
        self._by_digest: dict[bytes, CachedBlock] = {}
        self._by_page: dict[int, CachedBlock] = {}
        pages.on_evict(self._evict)

    def __len__(self) -> int:
        return len(self._by_digest)

    def extend_keys(self, keys: list[BlockKey], tokens: Sequence[int], count: int) -> None:
        """Append to ``keys`` those of the next blocks of ``tokens`` until there are ``count``.

        Each block's name needs the token after it: ``len(tokens) > count * page_size``.
        """
        assert len(tokens) > count * self.page_size, "the token after the last block is not known"
        for index in range(len(keys), count):
            start = index * self.page_size
            content = array("q", tokens[start : start + self.page_size + 1]).tobytes()
            parent = keys[-1].digest if keys else self._root
            keys.append(BlockKey(self._digest(parent + content), content))

    def match(self, keys: Sequence[BlockKey]) -> list[CachedBlock]:
        """The longest published chain along ``keys``. Takes no reference."""
        chain: list[CachedBlock] = []
        parent: CachedBlock | None = None
        for key in keys:
            block = self._by_digest.get(key.digest)
            if block is None or block.parent is not parent or block.key.content != key.content:
                break
            chain.append(block)
            parent = block
        return chain

    def publish(self, key: BlockKey, parent: CachedBlock | None, page: int) -> CachedBlock | None:
        """Make a computed block matchable, for a caller that holds ``page`` and the parent's page.

        Returns:
            The block under ``key``: with another page if an equal one was published before, to be shared
            instead. ``None`` where it cannot be published: below a withdrawn parent, or on a hash collision.
        """
        if parent is not None and not parent.live:
            return None
        block = self._by_digest.get(key.digest)
        if block is not None:
            same = block.parent is parent and block.key.content == key.content
            return block if same else None
        block = CachedBlock(key, parent, page)
        self._by_digest[key.digest] = block
        self._by_page[page] = block
        self._pages.keep(page)
        self.generation += 1
        return block

    def withdraw(self, blocks: Iterable[CachedBlock]) -> None:
        """Make blocks and all their descendants unmatchable; their holders keep the pages.

        Walks the whole cache: for faults only.
        """
        doomed = {id(block) for block in blocks if block.live}
        if not doomed:
            return
        # Parents are published before their children: one pass in order of insertion meets every descendant.
        for block in list(self._by_digest.values()):
            if id(block) in doomed or (block.parent is not None and id(block.parent) in doomed):
                doomed.add(id(block))
                self._remove(block)
                self._pages.forget(block.page)

    def _evict(self, page: int) -> None:
        self._remove(self._by_page[page])

    def _remove(self, block: CachedBlock) -> None:
        block.live = False
        del self._by_digest[block.key.digest]
        del self._by_page[block.page]
        self.generation += 1

    def check(self) -> None:
        """Raises ``AssertionError`` if the forest is broken or would be evicted in a wrong order."""
        order = {page: place for place, page in enumerate(self._pages.cached_pages())}
        assert order.keys() <= self._by_page.keys(), "a cached page is not published"
        assert len(self._by_page) == len(self._by_digest), "two blocks share a page"
        for digest, block in self._by_digest.items():
            assert block.live and digest == block.key.digest, "a dead block can be matched"
            assert self._by_page[block.page] is block, f"page {block.page} belongs to another block"
            if (parent := block.parent) is None:
                continue
            assert parent.live, "a block outlived its parent"
            held, held_above = self._pages.references(block.page), self._pages.references(parent.page)
            assert held <= held_above, "a block is held without its parent"
            if held_above == 0:
                assert order[block.page] < order[parent.page], "a parent would be evicted before its child"
