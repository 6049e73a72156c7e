"""A model of torch's caching allocator for CUDA: how much memory a sequence of allocations makes it reserve.

Note [Caching allocator]: the native backend with its default settings. Sizes are those of torch 2.13
(``c10/core/AllocatorConfig.h``), rules those of ``c10/cuda/CUDACachingAllocator.cpp`` at 001074d, which is older.
A request is rounded up to 512 bytes. The smallest free block of its stream and pool that is large enough serves it, and
is split if enough is left. Else a segment is taken from the driver: 2 MiB for requests of up to 1 MiB, 20 MiB for those
below 10 MiB, above that the request rounded up to 2 MiB. A freed block joins free neighbours of its segment, and stays
reserved. Segments go back to the driver only when it has none left: then all that are wholly free do, and the request
is tried once more. With ``expandable_segments``, each pool of a stream has one growing range of addresses, into which
pages of 2 or 20 MiB are mapped where they are needed.

Left out: garbage collection, ``max_split_size_mb``, graphs, and blocks that wait for another stream (``record_stream``,
which FSDP2 does not use). The addresses of segments are those in order of their making, and break ties only.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

MIB = 2**20
_MIN_BLOCK = 512
_SMALL_SIZE = MIB  # the largest request of the pool of small ones
_SMALL_SEGMENT = 2 * MIB
_LARGE_SEGMENT = 20 * MIB
_MIN_LARGE = 10 * MIB  # from here on a segment is as large as the request
_ROUND_LARGE = 2 * MIB
_RANGE = 2**50  # of addresses of an expandable segment: more than there is memory


class OutOfMemoryError(Exception):
    """The memory is not enough, also once all that was free has gone back to the driver."""


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment: in use, free, or without memory (expandable segments only)."""

    address: int
    num_bytes: int
    pool: _Pool
    before: Block | None = None
    after: Block | None = None
    is_free: bool = True
    is_mapped: bool = True


class _Pool:
    """The free blocks of one stream that serve small requests, or large ones."""

    def __init__(self, *, is_small: bool) -> None:
        self.is_small = is_small
        self.blocks: dict[int, Block] = {}  # by address
        self.sizes: list[tuple[int, int]] = []  # and addresses, sorted
        self.unmapped: dict[int, Block] = {}  # of expandable segments, by address

    @property
    def page_bytes(self) -> int:
        return _SMALL_SEGMENT if self.is_small else _LARGE_SEGMENT

    def add(self, block: Block) -> None:
        self.blocks[block.address] = block
        insort(self.sizes, (block.num_bytes, block.address))

    def remove(self, block: Block) -> None:
        del self.blocks[block.address]
        del self.sizes[bisect_left(self.sizes, (block.num_bytes, block.address))]

    def iterate_fitting(self, num_bytes: int) -> Iterator[Block]:
        """Yield the blocks that are large enough, the smallest first."""
        for i in range(bisect_left(self.sizes, (num_bytes, 0)), len(self.sizes)):
            yield self.blocks[self.sizes[i][1]]


class CachingAllocator:
    """What torch would reserve on a GPU, see Note [Caching allocator].

    Args:
        limit_bytes: The memory that it can have of the driver; ``None``: all that it asks for.
        is_expandable: As with ``PYTORCH_ALLOC_CONF=expandable_segments:True``.
    """

    def __init__(self, limit_bytes: int | None = None, *, is_expandable: bool = False) -> None:
        self.allocated_bytes = self.peak_allocated_bytes = 0  # with what blocks are larger than the request
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.num_retries = 0  # what torch counts as num_alloc_retries
        self._limit_bytes = limit_bytes
        self._is_expandable = is_expandable
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._next_address = 0

    def allocate(self, num_bytes: int, stream: int = 0) -> Block:
        """Return a block of at least ``num_bytes``, of which there must be one or more.

        Raises:
            OutOfMemoryError: There is no room.
        """
        size = round_up(num_bytes, _MIN_BLOCK)
        key = (stream, size <= _SMALL_SIZE)
        pool = self._pools.get(key) or self._pools.setdefault(key, _Pool(is_small=key[1]))
        block = self._find_free(pool, size) or self._reserve(pool, size)
        if block is None:
            self._release_free()
            self.num_retries += 1
            block = self._reserve(pool, size)
        if block is None:
            raise OutOfMemoryError
        pool.remove(block)
        left = block.num_bytes - size
        if left >= _MIN_BLOCK if pool.is_small or self._is_expandable else left > _SMALL_SIZE:
            pool.add(_cut(block, size))
        block.is_free = False
        self.allocated_bytes += block.num_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Take a block back."""
        self.allocated_bytes -= block.num_bytes
        block.is_free = True
        block.pool.add(_join_neighbours(block))

    def _find_free(self, pool: _Pool, size: int) -> Block | None:
        fitting = pool.iterate_fitting(size)
        best = next(fitting, None)
        if best is None or not self._is_expandable:
            return best
        # A block before room that can still be mapped is as large as it can become.
        for block in fitting:
            if _count_room(block) >= _count_room(best):
                break
            best = block
        return best

    def _reserve(self, pool: _Pool, size: int) -> Block | None:
        """Return a free block of new memory; ``None`` if there is none."""
        if self._is_expandable:
            return self._extend(pool, size)
        if size <= _SMALL_SIZE:
            num_bytes = _SMALL_SEGMENT
        else:
            num_bytes = _LARGE_SEGMENT if size < _MIN_LARGE else round_up(size, _ROUND_LARGE)
        if not self._take(num_bytes):
            return None
        block = Block(address=self._next_address, num_bytes=num_bytes, pool=pool)
        self._next_address += num_bytes
        pool.add(block)
        return block

    def _take(self, num_bytes: int) -> bool:
        if self._limit_bytes is not None and self.reserved_bytes + num_bytes > self._limit_bytes:
            return False
        self.reserved_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _release_free(self) -> None:
        """Give back all segments that are wholly free; of expandable ones all pages that are."""
        for pool in self._pools.values():
            for block in list(pool.blocks.values()):
                if self._is_expandable:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved_bytes -= block.num_bytes

    def _extend(self, pool: _Pool, size: int) -> Block | None:
        """Return a free block of an expandable segment, at the lowest address where enough can be mapped."""
        block = next((b for _, b in sorted(pool.unmapped.items()) if _count_free(_get_start(b)) >= size), None)
        if block is None:
            block = Block(address=self._next_address, num_bytes=_RANGE, pool=pool, is_mapped=False)
            self._next_address += _RANGE
            pool.unmapped[block.address] = block
        block = _get_start(block)
        if not block.is_mapped:
            mapped = self._map(block, min(block.num_bytes, size))
            if mapped is None:
                return None
            block = mapped
        while block.num_bytes < size:
            assert block.after is not None
            mapped = self._map(block.after, min(size - block.num_bytes, block.after.num_bytes))
            if mapped is None:
                return None
            block = mapped
        return block

    def _map(self, block: Block, num_bytes: int) -> Block | None:
        """Give the first pages of a block memory; return the free block that they are part of now."""
        num_bytes = round_up(num_bytes, block.pool.page_bytes)
        if not self._take(num_bytes):
            return None
        del block.pool.unmapped[block.address]
        if num_bytes < block.num_bytes:
            rest = _cut(block, num_bytes)
            block.pool.unmapped[rest.address] = rest
        block.is_mapped = True
        joined = _join_neighbours(block)
        block.pool.add(joined)
        return joined

    def _unmap(self, block: Block) -> None:
        """Take memory from the whole pages of a free block."""
        pool, page = block.pool, block.pool.page_bytes
        begin = round_up(block.address, page)
        end = (block.address + block.num_bytes) // page * page
        if begin >= end:
            return
        pool.remove(block)
        if begin > block.address:
            first, block = block, _cut(block, begin - block.address)
            pool.add(first)
        if end < block.address + block.num_bytes:
            pool.add(_cut(block, end - begin))
        block.is_mapped = False
        self.reserved_bytes -= end - begin
        joined = _join_neighbours(block)
        pool.unmapped[joined.address] = joined


def round_up(num_bytes: int, step: int) -> int:
    """Return the smallest multiple of ``step`` that is not below ``num_bytes``."""
    return -(-num_bytes // step) * step


def _cut(block: Block, num_bytes: int) -> Block:
    """Shorten a block to ``num_bytes``; return the rest of it."""
    rest = Block(
        address=block.address + num_bytes,
        num_bytes=block.num_bytes - num_bytes,
        pool=block.pool,
        before=block,
        after=block.after,
        is_mapped=block.is_mapped,
    )
    if block.after is not None:
        block.after.before = rest
    block.num_bytes, block.after = num_bytes, rest
    return rest


def _join_neighbours(block: Block) -> Block:
    """Return a free block, which is in no list, with those around it that are as free as it is."""
    for neighbour in (block.before, block.after):
        if neighbour is None or not neighbour.is_free or neighbour.is_mapped != block.is_mapped:
            continue
        if neighbour.is_mapped:
            block.pool.remove(neighbour)
        else:
            del block.pool.unmapped[neighbour.address]
        if neighbour is block.before:
            block.address, block.before = neighbour.address, neighbour.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = neighbour.after
            if block.after is not None:
                block.after.before = block
        block.num_bytes += neighbour.num_bytes
    return block


def _count_room(block: Block) -> int:
    after = block.after
    return block.num_bytes + (after.num_bytes if after is not None and not after.is_mapped else 0)


def _get_start(block: Block) -> Block:
    """Return the free block before one without memory, which both can serve; else that itself."""
    return block.before if block.before is not None and block.before.is_free else block


def _count_free(block: Block | None) -> int:
    """Return how many bytes in a row are free from a block on, with memory or without."""
    num_bytes = 0
    while block is not None and block.is_free:
        num_bytes += block.num_bytes
        block = block.after
    return num_bytes
