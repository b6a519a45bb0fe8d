"""The block pool: counts, sharing, eviction order, and prefixes compared exactly."""

from __future__ import annotations

import pytest

from cb_backend.kv.blocks import BlockPool, HostPool, OutOfBlocks


def fill(pool, ids, salt=""):
    """Takes blocks for `ids` and indexes the full ones."""
    blocks = pool.allocate(pool.blocks_for(len(ids)))
    pool.index(ids, blocks, [], len(ids), salt)
    return blocks


def test_allocate_and_release_keep_the_sum():
    pool = BlockPool(4, 2)
    blocks = pool.allocate(3)
    assert (blocks, pool.available, pool.num_used) == ([0, 1, 2], 1, 3)
    with pytest.raises(OutOfBlocks, match="2 blocks asked for, 1 of 4"):
        pool.allocate(2)
    pool.release(blocks)
    assert pool.available == 4
    with pytest.raises(RuntimeError, match="released more often"):
        pool.release([0])


def test_a_shared_block_is_free_only_when_everybody_released_it():
    pool = BlockPool(2, 2)
    blocks = pool.allocate(1)
    pool.share(blocks)
    pool.release(blocks)
    assert pool.num_used == 1
    pool.release(blocks)
    assert pool.num_used == 0


def test_a_prefix_is_found_in_whole_blocks_and_partially():
    pool = BlockPool(8, 2)
    blocks = fill(pool, [1, 2, 3, 4, 5])
    assert pool.lookup([1, 2, 3, 4, 5, 6])[0] == blocks[:2]  # the half block is not indexed
    assert pool.lookup([1, 2, 9, 9])[0] == blocks[:1]
    assert pool.lookup([9, 2, 3, 4])[0] == []
    assert pool.lookup([1, 2, 3, 4], limit=3)[0] == blocks[:1]


def test_equal_blocks_after_different_beginnings_are_not_confused():
    pool = BlockPool(8, 2)
    fill(pool, [1, 2, 7, 8])
    assert pool.lookup([3, 4, 7, 8])[0] == []
    assert pool.lookup([7, 8])[0] == []


def test_ids_whose_hashes_collide_are_not_confused():
    assert hash((-1,)) == hash((-2,))  # Python's own collision
    pool = BlockPool(8, 1)
    fill(pool, [-1])
    assert pool.lookup([-2])[0] == []


def test_a_released_prefix_comes_back_and_its_tail_is_evicted_first():
    pool = BlockPool(3, 1)
    blocks = fill(pool, [1, 2, 3])
    pool.release(blocks)
    assert (pool.num_cached, pool.available) == (3, 3)
    pool.allocate(1)
    assert pool.lookup([1, 2, 3])[0] == blocks[:2]


def test_the_least_recently_used_prefix_is_evicted_first():
    pool = BlockPool(2, 1)
    first, second = fill(pool, [1]), fill(pool, [2])
    pool.release(first)
    pool.release(second)
    found, _ = pool.lookup([1])
    pool.share(found)
    pool.release(found)  # used again: now the younger one
    pool.allocate(1)
    assert pool.lookup([1])[0] == first
    assert pool.lookup([2])[0] == []


def test_invalidated_content_is_never_hit_again():
    pool = BlockPool(4, 2)
    blocks = fill(pool, [1, 2, 3, 4])
    pool.forget(blocks[1:])
    assert pool.lookup([1, 2, 3, 4])[0] == blocks[:1]
    pool.release(blocks)
    pool.check([])


def test_salts_and_switching_off():
    pool = BlockPool(4, 2)
    fill(pool, [1, 2], salt="a")
    assert pool.lookup([1, 2], salt="b")[0] == []
    off = BlockPool(4, 2, enable_prefix_caching=False)
    fill(off, [1, 2])
    assert off.lookup([1, 2])[0] == []


def test_check_finds_a_leak_and_a_double_use():
    pool = BlockPool(4, 2)
    blocks = pool.allocate(2)
    pool.check([blocks])
    with pytest.raises(RuntimeError, match="reference counts differ"):
        pool.check([blocks[:1]])
    with pytest.raises(RuntimeError, match="holds a block twice"):
        pool.check([[blocks[0], blocks[0]]])


@pytest.mark.parametrize("size", [(0, 1), (1, 0)])
def test_an_empty_pool_is_refused(size):
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(*size)


def test_the_host_pool_gives_and_takes_ids():
    host = HostPool(2)
    blocks = host.allocate(2)
    assert sorted(blocks) == [0, 1] and host.available == 0
    with pytest.raises(OutOfBlocks):
        host.allocate(1)
    host.release(blocks)
    assert (host.available, host.num_used) == (2, 0)
