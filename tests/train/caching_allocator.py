"""A model of torch's CUDA caching allocator (c10/cuda/CUDACachingAllocator.cpp) for one stream, without memory.

Requests are rounded to 512 bytes. Those of at most 1 MiB share segments of 2 MiB; those below 10 MiB share segments of
20 MiB; larger ones get segments of their own, rounded to 2 MiB. A request takes the smallest free block that holds it,
at the lowest address; the rest of the block is split off. Freed blocks merge with free neighbours of their segment, and
stay. When the device has no memory for a new segment, all segments that are free as a whole are returned to it, and the
request is tried again.

With expandable segments, each of the two pools is one range of addresses, a bit larger than the device, in which pages
of 2 or 20 MiB are mapped as they are needed. When the device has no memory, pages in which nothing lives are unmapped.
"""

from bisect import bisect_left, insort
from itertools import count

KIBI, MEBI, GIBI = 2**10, 2**20, 2**30
LEAST, SMALL, LARGE = 512, MEBI, 10 * MEBI
SMALL_SEGMENT, LARGE_SEGMENT, MULTIPLE = 2 * MEBI, 20 * MEBI, 2 * MEBI


class OutOfMemoryError(Exception):
    """The device has no memory for a request, also after what is free was returned to it."""


class Block:
    """A part of a segment: in use, free, or (of an expandable segment) without memory."""

    def __init__(self, address, size, pool, segment, mapped=True):
        self.address, self.size, self.pool, self.segment, self.mapped = address, size, pool, segment, mapped
        self.used, self.before, self.after = False, None, None
        """``before`` and ``after``: the neighbours in the segment."""

    @property
    def key(self):
        return self.size, self.address

    def cut(self, size):
        """Cut off what lies beyond ``size``; returns it."""
        rest = Block(self.address + size, self.size - size, self.pool, self.segment, self.mapped)
        rest.before, rest.after, self.size = self, self.after, size
        if rest.after:
            rest.after.before = rest
        self.after = rest
        return rest

    def swallow(self, other):
        """Merge with a neighbour."""
        if other is self.before:
            self.address, self.before = other.address, other.before
            if self.before:
                self.before.after = self
        else:
            self.after = other.after
            if self.after:
                self.after.before = self
        self.size += other.size


class Pool:
    """The blocks of small or of large requests that are not in use."""

    def __init__(self, page):
        self.page = page
        self.keys, self.by_key = [], {}
        self.unmapped = []
        """Blocks without memory, by address."""

    def add(self, block):
        insort(self.keys, block.key)
        self.by_key[block.key] = block

    def remove(self, block):
        del self.keys[bisect_left(self.keys, block.key)], self.by_key[block.key]

    def add_unmapped(self, block):
        insort(self.unmapped, block, key=lambda one: one.address)


class CachingAllocator:
    """See the module.

    Args:
        capacity: bytes of the device.
        expandable: ``expandable_segments:True``.
    """

    def __init__(self, capacity, *, expandable=False):
        self.capacity, self.expandable = capacity, expandable
        self.small, self.large = Pool(SMALL_SEGMENT), Pool(LARGE_SEGMENT)
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = self.retries = 0
        self._blocks, self._segments = {}, count(1)
        self._apart = LARGE_SEGMENT * GIBI  # so far apart do segments begin

    def allocate(self, name, size):
        """Memory for a request, which ``free`` frees under the same name."""
        size = max(LEAST, -(-size // LEAST) * LEAST)
        pool = self.small if size <= SMALL else self.large
        block = self._take(pool, size) or self._new(pool, size)
        if block is None:
            self.retries += 1
            self.release()
            block = self._new(pool, size)
        if block is None:
            raise OutOfMemoryError(f"{size:,} bytes; {self.allocated:,} of {self.reserved:,} are in use")
        rest = block.size - size
        if rest >= LEAST if pool is self.small or self.expandable else rest > SMALL:
            pool.add(block.cut(size))
        block.used, self._blocks[name] = True, block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def free(self, name):
        """End a request."""
        block = self._blocks.pop(name)
        block.used = False
        self.allocated -= block.size
        self._merge(block)
        block.pool.add(block)

    def release(self):
        """``torch.cuda.empty_cache``: return to the device what is free as a whole."""
        for pool in (self.large, self.small):
            for block in [pool.by_key[key] for key in pool.keys]:
                if self.expandable:
                    self._unmap(block)
                elif not block.before and not block.after:
                    pool.remove(block)
                    self.reserved -= block.size

    def _take(self, pool, size):
        """The free block that fits best. Of blocks that can grow, the one that can grow least is taken."""
        at = bisect_left(pool.keys, (size, 0))
        if at == len(pool.keys):
            return None

        def room(block):
            return block.size + (block.after.size if block.after and not block.after.mapped else 0)

        best = pool.by_key[pool.keys[at]]
        if self.expandable:
            for key in pool.keys[at + 1 :]:
                if room(pool.by_key[key]) >= room(best):
                    break
                best = pool.by_key[key]
        pool.remove(best)
        return best

    def _new(self, pool, size):
        """A block of a new segment, or of new pages; None: the device has no memory for it."""
        if self.expandable:
            return self._expanded(pool, size)
        size = pool.page if size < LARGE else -(-size // MULTIPLE) * MULTIPLE
        if not self._reserve(size):
            return None
        return Block(next(self._segments) * self._apart, size, pool, size)

    def _expanded(self, pool, size):
        block = self._lowest(pool, size)
        if not block.mapped and not self._map(block, min(size, block.size)):
            return None
        while block.size < size:
            grown = block.after
            if not self._map(grown, min(size - block.size, grown.size)):
                return None
            block = grown
        pool.remove(block)
        return block

    def _lowest(self, pool, size):
        """The lowest place in a range where free and unmapped blocks beside each other hold a request."""
        for block in pool.unmapped:
            first = block.before if block.before and not block.before.used else block
            room, one = 0, first
            while room < size and one and not one.used:
                room, one = room + one.size, one.after
            if room >= size:
                return first
        whole = -(-(self.capacity + self.capacity // 8) // pool.page) * pool.page
        block = Block(next(self._segments) * self._apart, whole, pool, whole, mapped=False)
        pool.add_unmapped(block)
        return block

    def _map(self, block, size):
        """Map pages at the beginning of an unmapped block, which becomes a free one."""
        size = -(-size // block.pool.page) * block.pool.page
        if not self._reserve(size):
            return False
        block.pool.unmapped.remove(block)
        if size < block.size:
            block.pool.add_unmapped(block.cut(size))
        block.mapped = True
        self._merge(block)
        block.pool.add(block)
        return True

    def _unmap(self, block):
        """Unmap the pages that lie in a free block as a whole."""
        page, pool = block.pool.page, block.pool
        begin, end = -(-block.address // page) * page, (block.address + block.size) // page * page
        if begin >= end:
            return
        pool.remove(block)
        if begin > block.address:
            rest = block.cut(begin - block.address)
            pool.add(block)
            block = rest
        if end < block.address + block.size:
            pool.add(block.cut(end - block.address))
        block.mapped = False
        self.reserved -= block.size
        self._merge(block)
        if block.size < block.segment:
            pool.add_unmapped(block)

    def _merge(self, block):
        """Merge a block that is in no list with its neighbours that are alike."""
        for other in (block.before, block.after):
            if other and not other.used and other.mapped == block.mapped:
                block.pool.remove(other) if other.mapped else block.pool.unmapped.remove(other)
                block.swallow(other)

    def _reserve(self, size):
        if self.reserved + size > self.capacity:
            return False
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True
