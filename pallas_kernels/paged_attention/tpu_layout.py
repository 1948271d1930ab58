"""What the TPU kernels ask of a page layout."""

from typing import Protocol

import jax
import numpy as np
from jax import Array

from pallas_kernels.paged_attention.tpu_tiles import Tiles

ELSEWHERE = 2**30  # the position of a slot that a head may not see


class Layout(Protocol):
    """A page layout and its tile sizes; "block" is a ref [pages_per_block, *page] of K or of V in VMEM, N the columns of a score matrix.

    Queries are *wide* inside the decode kernel: [H, W], whatever makes one product with a block give all heads' scores.
    """

    @property
    def name(self) -> str: ...

    @property
    def page_size(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def tiles(self) -> Tiles: ...

    def slot_positions(self, num_heads: int) -> np.ndarray:
        """int32 [H or 1, N]: position in the block of column n as head h sees it, ELSEWHERE if it belongs to another key head."""
        ...

    def widen(self, q: Array) -> Array:
        """[R, H, D] -> [R, H, W]."""
        ...

    def narrow(self, o: Array) -> Array:
        """[R, H, W] -> [R, H, D]."""
        ...

    def scores(self, q: Array, k: jax.Ref) -> Array:
        """q [H, W] . block of keys -> float32 [H, N]."""
        ...

    def values(self, p: Array, v: jax.Ref) -> Array:
        """Weights [H, N] . block of values -> float32 [H, W]."""
        ...

    def zero_outside(self, v: jax.Ref, first: Array | int, end: Array | int) -> None:
        """Make the slots outside positions [first, end) of the block 0: they may hold NaN, and 0 * NaN is NaN."""
        ...

    def head_scratch(self, dtype) -> tuple:
        """Scratch shapes for :meth:`by_head`; ``dtype`` is the queries'."""
        ...

    def by_head(self, k: jax.Ref, v: jax.Ref, scratch: tuple) -> tuple[jax.Ref, jax.Ref]:
        """Blocks of keys and values -> refs that the two methods below take."""
        ...

    def head_scores(self, q: Array, k: jax.Ref, head: Array) -> Array:
        """q [M, D] . the keys of one head -> float32 [M, pages_per_block * page_size]."""
        ...

    def head_values(self, p: Array, v: jax.Ref, head: Array) -> Array:
        """Weights [M, pages_per_block * page_size] . the values of one head -> float32 [M, D]."""
        ...
