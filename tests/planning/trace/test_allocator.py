import pytest

from lit_fsdp.planning.trace.allocator import MIB, Block, CachingAllocator, OutOfMemoryError


def fill(allocator: CachingAllocator, *sizes: int, stream: int = 0) -> list[Block]:
    return [allocator.allocate(size, stream) for size in sizes]


@pytest.mark.parametrize(
    ("num_bytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),  # the largest of the small ones
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # what is left would be 1 MiB, and stays with it
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
    ],
)
def test_a_request_takes_a_segment_of_its_class(num_bytes: int, allocated: int, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(num_bytes)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated, reserved)


def test_the_smallest_free_block_that_is_large_enough_is_taken_and_split() -> None:
    allocator = CachingAllocator()
    large, _, medium, _ = fill(allocator, 40 * MIB, 12 * MIB, 30 * MIB, 12 * MIB)
    for block in (large, medium):
        allocator.free(block)
    (taken,) = fill(allocator, 24 * MIB)
    assert taken.address == medium.address
    assert fill(allocator, 6 * MIB)[0].address == medium.address + 24 * MIB  # what was left of it
    assert fill(allocator, 39 * MIB + 512)[0].num_bytes == 40 * MIB  # less than 1 MiB is left, and stays with it
    assert allocator.reserved_bytes == 94 * MIB == allocator.allocated_bytes


def test_small_and_large_requests_share_no_segments() -> None:
    allocator = CachingAllocator()
    (large,) = fill(allocator, 12 * MIB)
    allocator.free(large)
    fill(allocator, *[MIB] * 3)
    assert allocator.reserved_bytes == 12 * MIB + 2 * 2 * MIB


def test_free_neighbours_become_one_block_whichever_goes_first() -> None:
    for order in ((0, 1, 2), (0, 2, 1), (2, 1, 0)):
        allocator = CachingAllocator()
        blocks = fill(allocator, 4 * MIB, 8 * MIB, 8 * MIB)
        assert allocator.reserved_bytes == 20 * MIB
        for i in order:
            allocator.free(blocks[i])
        assert allocator.allocated_bytes == 0
        assert fill(allocator, 20 * MIB)[0].address == 0
        assert allocator.reserved_bytes == 20 * MIB


def test_a_stream_does_not_get_what_another_has_freed() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(12 * MIB, 1))
    allocator.allocate(12 * MIB, 0)
    assert allocator.reserved_bytes == 24 * MIB
    allocator.allocate(12 * MIB, 1)
    assert allocator.reserved_bytes == 24 * MIB


def test_where_nothing_is_left_wholly_free_segments_go_back_and_the_request_is_tried_again() -> None:
    allocator = CachingAllocator(limit_bytes=64 * MIB)
    whole, split = fill(allocator, 20 * MIB, 30 * MIB)
    allocator.free(whole)
    allocator.free(split)
    fill(allocator, 4 * MIB, 10 * MIB)  # of the first 20, then of what is left of that
    assert (allocator.reserved_bytes, allocator.num_retries) == (50 * MIB, 0)
    fill(allocator, 40 * MIB)  # only the 30 are wholly free
    assert (allocator.reserved_bytes, allocator.num_retries) == (60 * MIB, 1)
    assert allocator.peak_reserved_bytes == 60 * MIB
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(10 * MIB)
    assert fill(allocator, 6 * MIB)[0].num_bytes == 6 * MIB  # what is left of the first 20
    assert allocator.num_retries == 2


@pytest.mark.parametrize("is_expandable", [False, True])
def test_growing_requests_reuse_an_expandable_segment_only(*, is_expandable: bool) -> None:
    allocator = CachingAllocator(is_expandable=is_expandable)
    for size in (20, 40, 60):
        allocator.free(allocator.allocate(size * MIB))
    assert allocator.reserved_bytes == (60 if is_expandable else 120) * MIB


def test_an_expandable_segment_maps_whole_pages_and_gives_back_those_that_are_free() -> None:
    allocator = CachingAllocator(limit_bytes=80 * MIB, is_expandable=True)
    blocks = fill(allocator, 15 * MIB, 30 * MIB, 13 * MIB)
    assert allocator.reserved_bytes == 60 * MIB  # three pages of 20
    fill(allocator, MIB)
    assert allocator.reserved_bytes == 62 * MIB  # small requests have pages of 2
    allocator.free(blocks[1])  # 15 to 45: the page from 20 to 40 is wholly free
    assert fill(allocator, 29 * MIB)[0].address == blocks[1].address  # right where it was
    allocator = CachingAllocator(limit_bytes=60 * MIB, is_expandable=True)
    blocks = fill(allocator, 15 * MIB, 30 * MIB, 13 * MIB)
    allocator.free(blocks[1])
    fill(allocator, 14 * MIB)  # 15 to 29: fits what is mapped
    assert allocator.num_retries == 0
    fill(allocator, 10 * MIB)
    assert (allocator.reserved_bytes, allocator.num_retries) == (60 * MIB, 0)
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(10 * MIB)


def test_pages_that_went_back_are_mapped_again_at_their_place() -> None:
    allocator = CachingAllocator(limit_bytes=60 * MIB, is_expandable=True)
    first, _ = fill(allocator, 40 * MIB, 20 * MIB)
    allocator.free(first)
    fill(allocator, 20 * MIB, stream=1)  # takes the pages of the first
    assert (allocator.reserved_bytes, allocator.num_retries) == (40 * MIB, 1)
    assert fill(allocator, 20 * MIB)[0].address == first.address
    assert allocator.reserved_bytes == 60 * MIB
