"""The page stream of the TPU kernels: a ring of blocks of pages that DMA fills ahead of the arithmetic, across work items.

A work item is a range of pages of one row. All items' pages form one stream of blocks; the kernel takes blocks off it in order while
later blocks, those of the next items too, are on their way, so a short row pays no latency of its own.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.tpu_tiles import Tiles

ITEM, PAGE, FETCHED, TAKEN = range(4)  # of the stream's state in SMEM


class Items(NamedTuple):
    """Work items, as scalars in SMEM; page ranges may be empty."""

    row: Array  # i32 [N] row of the block table
    first_page: Array  # i32 [N + 1] index in the row of the first page to read
    end_page: Array  # i32 [N + 1] index after the last
    next_item: Array  # i32 [N + 1] the first item at or after this one that has pages, else N


def make_items(row: Array, first_position: Array, end_position: Array, page_size: int) -> Items:
    """Items that read positions [first_position, end_position) of their rows, each i32 [N]; nothing where that is empty."""
    some = end_position > first_position
    first = jnp.where(some, first_position // page_size, 0)
    end = jnp.where(some, (end_position + page_size - 1) // page_size, 0)
    num_items = row.shape[0]
    candidates = jnp.where(some, jnp.arange(num_items, dtype=jnp.int32), num_items)
    at_or_after = jnp.arange(num_items) >= jnp.arange(num_items)[:, None]
    next_item = jnp.min(jnp.where(at_or_after, candidates, num_items), axis=1)  # a cumulative minimum is slow on a TPU
    return Items(row, *(jnp.pad(x, (0, 1), constant_values=c) for x, c in ((first, 0), (end, 0), (next_item, num_items))))


def stream_scratch(pools: tuple[Array, ...], tiles: Tiles) -> tuple:
    """Scratch shapes for the last three fields of a :class:`PageStream` over ``pools``."""
    buffers = tuple(pltpu.VMEM((tiles.num_buffers, tiles.pages_per_block, *pool.shape[1:]), pool.dtype) for pool in pools)
    return buffers, pltpu.SemaphoreType.DMA((len(pools), tiles.num_buffers)), pltpu.SMEM((4,), jnp.int32)


@dataclasses.dataclass(frozen=True)
class PageStream:
    """Blocks of ``pages_per_block`` pages of each pool (K, V, perhaps their scales); the fields are the kernel's refs.

    ``buffers[i]`` is [num_buffers, pages_per_block, *page] in VMEM for ``pools[i]`` [P, *page] in HBM; ``semaphores`` DMA [len(pools),
    num_buffers]; ``state`` i32 [4] in SMEM; ``block_tables`` i32 [R * table_width] in SMEM.
    """

    items: Items
    block_tables: jax.Ref
    table_width: int
    pools: tuple[jax.Ref, ...]
    buffers: tuple[jax.Ref, ...]
    semaphores: jax.Ref
    state: jax.Ref

    @property
    def num_buffers(self) -> int:
        return self.buffers[0].shape[0]

    @property
    def pages_per_block(self) -> int:
        return self.buffers[0].shape[1]

    def open(self) -> None:
        """Start the stream; in the first grid step only."""
        first = self.items.next_item[0]
        self.state[ITEM] = first
        self.state[PAGE] = self.items.first_page[first]
        self.state[FETCHED] = 0
        self.state[TAKEN] = 0
        for _ in range(self.num_buffers - 1):
            self._fetch()

    def num_blocks(self, item: Array) -> Array:
        """Blocks that the item has on the stream."""
        return pl.cdiv(self.items.end_page[item] - self.items.first_page[item], self.pages_per_block)

    def take(self, item: Array, block: Array) -> tuple[Array, Array]:
        """Wait for the next block, which is number ``block`` of ``item``; return (its buffer, the index of its first page in the row).

        The buffer of the block before is filled anew from here on. Pages past the item's end hold whatever was there.
        """
        self._fetch()
        first = self.items.first_page[item] + block * self.pages_per_block
        slot = lax.rem(self.state[TAKEN], self.num_buffers)
        self.state[TAKEN] += 1
        self._each_page(item, first, slot, lambda copy: copy.wait())
        return slot, first

    def _fetch(self) -> None:
        """Start the copies of the next block, if there is one."""
        item = self.state[ITEM]

        @pl.when(item < self.items.row.shape[0])
        def _():
            first = self.state[PAGE]
            self._each_page(item, first, lax.rem(self.state[FETCHED], self.num_buffers), lambda copy: copy.start())
            self.state[FETCHED] += 1
            done = first + self.pages_per_block >= self.items.end_page[item]
            following = jnp.where(done, self.items.next_item[item + 1], item)
            self.state[ITEM] = following
            self.state[PAGE] = jnp.where(done, self.items.first_page[following], first + self.pages_per_block)

    def _each_page(self, item: Array, first: Array, slot: Array, act) -> None:
        """Call ``act`` with every copy of the block that begins at page ``first`` of the item."""
        table = self.items.row[item] * self.table_width + first

        def one(j, _):
            page = self.block_tables[table + j]
            for i, (pool, buffer) in enumerate(zip(self.pools, self.buffers, strict=True)):
                act(pltpu.make_async_copy(pool.at[page], buffer.at[slot, j], self.semaphores.at[i, slot]))

        lax.fori_loop(0, jnp.minimum(self.items.end_page[item] - first, self.pages_per_block), one, None)
