"""PageManager: which pages of the pool are free, and how many users each other page has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

DUMMY_PAGE = 0  # what the block tables of padding name; no request ever owns it


class OutOfPages(Exception):
    """More pages were asked for than are free; the scheduler asks `num_free_pages` first, so it never sees this."""


class PageManager:
    """Reference counts over the pages 1..num_pages-1; a page with no reference is free, page 0 is the dummy page.

    It knows ids only: keys and values live on the device, and a block table belongs to its request. A page may be handed out again at
    once, although a dispatched step may still write to it, because steps run on the device in the order of their dispatch.
    """

    def __init__(self, num_pages: int, page_size: int):
        if num_pages < 2:
            raise ValueError(f"num_pages is {num_pages}; give at least 2, as page {DUMMY_PAGE} is kept for padding")
        if page_size < 1:
            raise ValueError(f"page_size is {page_size}; give at least 1 token a page")
        self.num_pages = num_pages
        self.page_size = page_size
        self._num_references = [0] * num_pages
        self._free = list(range(num_pages - 1, DUMMY_PAGE, -1))  # a stack: the page freed last is used first

    @property
    def num_usable_pages(self) -> int:
        """Pages that requests can own: all but the dummy page."""
        return self.num_pages - 1

    @property
    def num_free_pages(self) -> int:
        return len(self._free)

    def num_pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens of one request."""
        return -(-num_tokens // self.page_size)

    def allocate(self, num_pages: int) -> list[int]:
        """Take free pages, each with one reference; OutOfPages, and nothing taken, when fewer are free."""
        remaining = len(self._free) - num_pages
        if remaining < 0:
            raise OutOfPages(f"{num_pages} pages are needed, {len(self._free)} of {self.num_usable_pages} are free")
        pages = self._free[remaining:]
        del self._free[remaining:]
        for page in pages:
            self._num_references[page] = 1
        return pages

    def acquire(self, pages: Iterable[int]) -> None:
        """Add a reference to each page, for one more user of what it holds; ValueError when one is free."""
        for page in pages:
            self._require_used(page)
            self._num_references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop a reference to each page; the last one frees it. ValueError when one is free already."""
        for page in pages:
            self._require_used(page)
            self._num_references[page] -= 1
            if not self._num_references[page]:
                self._free.append(page)

    def _require_used(self, page: int) -> None:
        if not self._num_references[page]:
            raise ValueError(f"page {page} has no user, so that nobody can share or release it; was its block table used twice?")

    def check_integrity(self, block_tables: Iterable[Iterable[int]]) -> None:
        """AssertionError unless these tables are the users of all used pages, and every other page is free exactly once."""
        uses = Counter(page for table in block_tables for page in table)
        free = Counter(self._free)
        for page in range(self.num_pages):
            references = self._num_references[page]
            if references != uses[page]:
                raise AssertionError(f"page {page} has {references} references but is in {uses[page]} block tables")
            if free[page] != (page != DUMMY_PAGE and not references):
                raise AssertionError(f"page {page} is {free[page]} times in the free list, with {references} references")
        if uses[DUMMY_PAGE]:
            raise AssertionError(f"the dummy page {DUMMY_PAGE} is in {uses[DUMMY_PAGE]} block tables")
