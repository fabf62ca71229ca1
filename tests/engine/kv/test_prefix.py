"""The prefix cache: what a block's key covers, who may match it, what happens to duplicates."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.kv.blocks import PageAllocator
from engine.kv.prefix import BlockKey, CachedBlock, PrefixCache, sha256

SIZE = 4
A = [1, 2, 3, 4]
B = [5, 6, 7, 8]
C = [9, 10, 11, 12]


def make(num_pages: int = 20, salt: bytes = b"", digest: Callable[[bytes], bytes] = sha256) -> PrefixCache:
    pages = PageAllocator(num_pages)
    return PrefixCache(pages, SIZE, salt, digest)


def keys_of(cache: PrefixCache, tokens: list[int]) -> list[BlockKey]:
    """Keys of all blocks of ``tokens`` whose next token is known."""
    keys: list[BlockKey] = []
    cache.extend_keys(keys, tokens, (len(tokens) - 1) // SIZE)
    return keys


def store(cache: PrefixCache, tokens: list[int], *, release: bool = True) -> list[CachedBlock]:
    """Publish ``tokens`` as a sequence would that shares what it can."""
    chain: list[CachedBlock] = []
    for key in keys_of(cache, tokens):
        (page,) = cache._pages.allocate(1)
        block = cache.publish(key, chain[-1] if chain else None, page)
        if block is None:
            cache._pages.release([page])
            break
        if block.page != page:
            cache._pages.retain(block.page)
            cache._pages.release([page])
        chain.append(block)
    if release:
        let_go(cache, chain)
    cache.check()
    return chain


def let_go(cache: PrefixCache, chain: list[CachedBlock]) -> None:
    cache._pages.release(block.page for block in reversed(chain))


def hits(cache: PrefixCache, tokens: list[int]) -> int:
    return len(cache.match(keys_of(cache, tokens)))


def test_a_block_is_matched_with_the_token_after_it() -> None:
    cache = make()
    store(cache, [*A, *B, 77])
    assert hits(cache, [*A, *B, 77]) == 2
    assert hits(cache, [*A, *B, 78]) == 1, "draft KV of the last position pairs with the next token"
    assert hits(cache, [*A, 5, 0, 0, 0, 0]) == 1
    assert hits(cache, [*A, 6, 6, 7, 8, 77]) == 0


def test_a_key_needs_the_next_token() -> None:
    with pytest.raises(AssertionError, match="not known"):
        make().extend_keys([], A, 1)


def test_keys_are_extended_without_touching_earlier_ones() -> None:
    cache = make()
    tokens = [*A, *B, *C, 1]
    keys: list[BlockKey] = []
    cache.extend_keys(keys, tokens[:6], 1)
    cache.extend_keys(keys, tokens, 3)
    assert keys == keys_of(cache, tokens)


def test_the_same_block_under_another_parent_is_a_miss() -> None:
    cache = make()
    store(cache, [*A, *C, 0])
    store(cache, [*B, 9, 0, 0, 0, 0])
    assert hits(cache, [*B, *C, 0]) == 1
    keys_a, keys_b = keys_of(cache, [*A, *C, 0]), keys_of(cache, [*B, *C, 0])
    assert keys_a[1].content == keys_b[1].content and keys_a[1].digest != keys_b[1].digest


def test_salt_separates_engines() -> None:
    one, other = make(salt=b"1"), make(salt=b"2")
    assert keys_of(one, [*A, 0])[0].digest != keys_of(other, [*A, 0])[0].digest


def test_ids_of_any_size_have_keys_of_their_own() -> None:
    cache = make()
    numbers = [0, 1, 255, 256, 65536, 2**31 - 1, 2**31, 2**40]
    digests = {keys_of(cache, [number, 0, 0, 0, 0])[0].digest for number in numbers}
    assert len(digests) == len(numbers)


def test_equal_hashes_of_different_blocks_do_not_mix_them_up() -> None:
    cache = make(digest=lambda data: b"same")
    store(cache, [*A, 0])
    assert hits(cache, [*A, 0]) == 1
    assert hits(cache, [*B, 0]) == 0
    assert store(cache, [*B, 0]) == [], "the name is taken: the block cannot be published"
    assert hits(cache, [*A, 0]) == 1


def test_equal_hashes_under_different_parents_do_not_mix_them_up() -> None:
    """Second blocks collide, and their tokens are equal; only the parents differ."""
    cache = make(digest=lambda data: data[-8 * (SIZE + 1) :])
    second = keys_of(cache, [*A, *C, 0])[1], keys_of(cache, [*B, *C, 0])[1]
    assert second[0] == second[1], "the test needs a collision"
    store(cache, [*A, *C, 0])
    store(cache, [*B, 9, 0, 0, 0, 0])
    assert hits(cache, [*A, *C, 0]) == 2
    assert hits(cache, [*B, *C, 0]) == 1


def test_a_duplicate_is_answered_with_the_first_page() -> None:
    cache = make()
    first = store(cache, [*A, *B, 0], release=False)
    second = store(cache, [*A, *B, 0], release=False)
    assert first == second and len(cache) == 2
    assert [cache._pages.references(block.page) for block in first] == [2, 2]
    let_go(cache, first)
    let_go(cache, second)
    assert cache._pages.num_cached == 2 and cache._pages.num_used == 0


def test_eviction_takes_leaves_first_and_the_oldest_chain_first() -> None:
    cache = make(num_pages=7)
    old, new = [*A, *B, *C, 0], [*C, *B, *A, 0]
    store(cache, old)
    store(cache, new)
    seen = []
    for _ in range(6):
        cache._pages.allocate(1)
        cache.check()
        seen.append((hits(cache, old), hits(cache, new)))
    assert seen == [(2, 3), (1, 3), (0, 3), (0, 2), (0, 1), (0, 0)]


def test_a_hit_protects_the_part_it_used() -> None:
    cache = make(num_pages=7)
    old, new = [*A, *B, *C, 0], [*C, *B, *A, 0]
    store(cache, old)
    store(cache, new)
    store(cache, [*A, *B, 9])
    cache._pages.allocate(4)
    assert (hits(cache, old), hits(cache, new)) == (2, 0)
    cache.check()


def test_withdrawn_blocks_and_all_built_on_them_are_gone() -> None:
    cache = make()
    healthy, other = [*A, 5, 0, 0, 0, 0], [*B, *A, 0]
    chain = store(cache, [*A, *B, *C, 0])
    store(cache, healthy)
    store(cache, [*A, *B, 9, 9, 9, 9, 9])
    store(cache, other)
    cache.withdraw(chain[1:2])
    cache.check()
    assert hits(cache, [*A, *B, *C, 0]) == 1
    assert hits(cache, [*A, *B, 9, 9, 9, 9, 9]) == 1
    assert hits(cache, healthy) == 2 and hits(cache, other) == 2
    assert cache._pages.num_cached == len(cache) == 4


def test_nothing_is_published_below_a_withdrawn_block() -> None:
    cache = make()
    chain = store(cache, [*A, 0], release=False)
    cache.withdraw(chain)
    cache.withdraw(chain)
    (page,) = cache._pages.allocate(1)
    assert cache.publish(keys_of(cache, [*A, *B, 0])[1], chain[0], page) is None
    let_go(cache, chain)
    assert cache._pages.num_cached == 0, "a withdrawn page is free as soon as nobody holds it"


def test_a_withdrawn_block_can_be_computed_again() -> None:
    cache = make()
    cache.withdraw(store(cache, [*A, *B, 0]))
    assert hits(cache, [*A, *B, 0]) == 0
    store(cache, [*A, *B, 0])
    assert hits(cache, [*A, *B, 0]) == 2


def test_generation_tells_when_a_match_may_change() -> None:
    cache = make(num_pages=3)
    before = cache.generation
    store(cache, [*A, 0])
    published = cache.generation
    store(cache, [*A, 0])
    assert before != published == cache.generation, "a duplicate changes nothing"
    cache._pages.allocate(2)
    assert cache.generation != published, "an eviction does"
