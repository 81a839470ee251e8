"""The model of CUDA's caching allocator, by hand."""

import pytest

from tests.train.caching_allocator import GIBI, KIBI, MEBI, CachingAllocator, OutOfMemoryError


def test_small_requests_share_segments_of_2_mib():
    allocator = CachingAllocator(GIBI)
    for number in range(4):
        allocator.allocate(number, 600 * KIBI - 1)
    assert allocator.allocated == 4 * 600 * KIBI  # rounded to 512 bytes
    assert allocator.reserved == 4 * MEBI  # three of 600 KiB fit into 2 MiB
    allocator.free(1)
    allocator.allocate("fits", 600 * KIBI)
    allocator.allocate("at the end", 248 * KIBI)  # 3 x 600 KiB + 248 KiB = 2 MiB
    assert allocator.reserved == 4 * MEBI
    allocator.allocate("tiny", 1)
    assert allocator.allocated == (4 * 600 + 248) * KIBI + 512
    assert allocator.reserved == 4 * MEBI


def test_large_requests_below_10_mib_share_segments_of_20_mib():
    allocator = CachingAllocator(GIBI)
    allocator.allocate("a", 9 * MEBI)
    allocator.allocate("b", 9 * MEBI)
    assert allocator.reserved == 20 * MEBI
    allocator.allocate("c", MEBI + 512)  # of the 2 MiB that are left; less than 1 MiB is not split off
    assert (allocator.reserved, allocator.allocated) == (20 * MEBI, 20 * MEBI)
    allocator.allocate("d", 10 * MEBI)
    allocator.allocate("e", 11 * MEBI)  # a segment of 12 MiB, which is not split
    assert (allocator.reserved, allocator.allocated) == ((20 + 10 + 12) * MEBI, (20 + 10 + 12) * MEBI)


def test_the_best_fit_is_taken_and_neighbours_merge():
    allocator = CachingAllocator(GIBI)
    for name, size in (("a", 100), ("b", 60), ("c", 80)):
        allocator.allocate(name, size * MEBI)
    for name in "abc":
        allocator.free(name)
    allocator.allocate("d", 70 * MEBI)  # of the 80
    allocator.allocate("e", 70 * MEBI)  # of the 100
    allocator.allocate("f", 30 * MEBI)  # of the 30 that are left of it
    allocator.allocate("g", 60 * MEBI)
    assert allocator.reserved == 240 * MEBI
    allocator.free("e"), allocator.free("f")
    allocator.allocate("h", 100 * MEBI)
    assert (allocator.reserved, allocator.retries) == (240 * MEBI, 0)


def test_in_an_expandable_segment_what_is_freed_beside_each_other_is_one_block():
    """Two blocks of past sizes hold no larger one; pages of one range do."""
    for expandable in (False, True):
        allocator = CachingAllocator(200 * MEBI, expandable=expandable)
        for name in "abcd":
            allocator.allocate(name, 40 * MEBI)
        allocator.free("b"), allocator.free("c")
        allocator.allocate("e", 80 * MEBI)
        assert allocator.retries == (not expandable)
        assert allocator.reserved == 160 * MEBI


def test_an_expandable_segment_grows_by_pages_of_20_mib():
    allocator = CachingAllocator(GIBI, expandable=True)
    allocator.allocate("a", 30 * MEBI)
    assert allocator.reserved == 40 * MEBI
    allocator.allocate("b", 15 * MEBI)  # 10 are there, 20 more
    assert (allocator.reserved, allocator.allocated) == (60 * MEBI, 45 * MEBI)
    allocator.allocate("small", 512)
    assert allocator.reserved == 62 * MEBI
    allocator.allocate("c", 15 * MEBI)  # to the last byte
    assert (allocator.reserved, allocator.allocated) == (62 * MEBI, 60 * MEBI + 512)


def test_free_pages_are_unmapped_when_memory_runs_out():
    allocator = CachingAllocator(102 * MEBI, expandable=True)
    for name, size in (("a", 10), ("b", 50), ("c", 20), ("d", 20)):
        allocator.allocate(name, size * MEBI)
    assert allocator.reserved == 100 * MEBI
    allocator.free("b")  # from 10 to 60 of the range, of which the pages from 20 to 60 are free as a whole
    allocator.allocate("e", 10 * MEBI)
    assert (allocator.reserved, allocator.retries) == (100 * MEBI, 0)
    allocator.allocate("small", 1)
    allocator.allocate("f", 30 * MEBI)  # of the 40 that are left, which were "b"
    allocator.free("d")
    allocator.free("f")
    assert (allocator.reserved, allocator.retries) == (102 * MEBI, 0)
    allocator.allocate("g", 60 * MEBI)  # 40 below "c" and 20 above: unmapped, and mapped after "c"
    assert (allocator.reserved, allocator.retries) == (102 * MEBI, 1)
    with pytest.raises(OutOfMemoryError):
        allocator.allocate("h", 20 * MEBI)
    allocator.free("g")
    allocator.allocate("i", 35 * MEBI)
    assert allocator.allocated == (10 + 20 + 10 + 35) * MEBI + 512
