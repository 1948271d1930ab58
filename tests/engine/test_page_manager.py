import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.page_manager import DUMMY_PAGE, OutOfPages, PageManager


def test_hands_out_every_page_but_the_dummy_page():
    pages = PageManager(num_pages=5, page_size=16)
    assert pages.num_usable_pages == pages.num_free_pages == 4
    taken = pages.allocate(4)
    assert sorted(taken) == [1, 2, 3, 4]
    assert DUMMY_PAGE not in taken
    assert pages.num_free_pages == 0


def test_refuses_more_pages_than_are_free_and_takes_none():
    pages = PageManager(num_pages=4, page_size=16)
    table = pages.allocate(2)
    with pytest.raises(OutOfPages, match="2 pages are needed, 1 of 3 are free"):
        pages.allocate(2)
    assert pages.num_free_pages == 1
    pages.check_integrity([table])


def test_allocates_nothing_when_asked_for_nothing():
    pages = PageManager(num_pages=3, page_size=16)
    assert pages.allocate(0) == []
    assert pages.num_free_pages == 2


def test_shared_page_is_free_after_its_last_release():
    pages = PageManager(num_pages=3, page_size=16)
    table = pages.allocate(2)
    pages.acquire(table[:1])
    pages.check_integrity([table, table[:1]])
    pages.release(table)
    assert pages.num_free_pages == 1
    pages.check_integrity([table[:1]])
    pages.release(table[:1])
    assert pages.num_free_pages == 2
    pages.check_integrity([])


@pytest.mark.parametrize("operation", ["acquire", "release"])
def test_free_page_can_be_neither_shared_nor_released(operation):
    pages = PageManager(num_pages=3, page_size=16)
    table = pages.allocate(1)
    pages.release(table)
    for page in (table[0], DUMMY_PAGE):
        with pytest.raises(ValueError, match=f"page {page} has no user"):
            getattr(pages, operation)([page])
    pages.check_integrity([])


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_counts_the_pages_of_tokens(num_tokens, num_pages):
    assert PageManager(num_pages=2, page_size=16).num_pages_for(num_tokens) == num_pages


@pytest.mark.parametrize(
    ("num_pages", "page_size", "message"), [(1, 16, "num_pages is 1"), (0, 16, "num_pages is 0"), (2, 0, "page_size is 0")]
)
def test_refuses_sizes_without_a_usable_page(num_pages, page_size, message):
    with pytest.raises(ValueError, match=message):
        PageManager(num_pages, page_size)


def test_smallest_pool_has_one_page():
    assert PageManager(num_pages=2, page_size=1).allocate(1) == [1]


def break_lost_page(pages: PageManager, table: list[int]) -> None:
    pages._free.pop()


def break_double_free(pages: PageManager, table: list[int]) -> None:
    pages._free.append(pages._free[0])


def break_free_while_used(pages: PageManager, table: list[int]) -> None:
    pages._free.append(table[0])


def break_leak(pages: PageManager, table: list[int]) -> None:
    table.pop()


def break_shared_without_reference(pages: PageManager, table: list[int]) -> None:
    table.append(table[0])


def break_dummy_in_free_list(pages: PageManager, table: list[int]) -> None:
    pages._free.append(DUMMY_PAGE)


def break_dummy_in_table(pages: PageManager, table: list[int]) -> None:
    pages._num_references[DUMMY_PAGE] = 1
    table.append(DUMMY_PAGE)


BREAKS = [
    (break_lost_page, "0 times in the free list, with 0 references"),
    (break_double_free, "2 times in the free list"),
    (break_free_while_used, "1 times in the free list, with 1 references"),
    (break_leak, "has 1 references but is in 0 block tables"),
    (break_shared_without_reference, "has 1 references but is in 2 block tables"),
    (break_dummy_in_free_list, "page 0 is 1 times in the free list"),
    (break_dummy_in_table, "the dummy page 0 is in 1 block tables"),
]


@pytest.mark.parametrize(("damage", "message"), BREAKS)
def test_integrity_check_sees_each_kind_of_damage(damage, message):
    pages = PageManager(num_pages=6, page_size=16)
    table = pages.allocate(2)
    pages.check_integrity([table])
    damage(pages, table)
    with pytest.raises(AssertionError, match=message):
        pages.check_integrity([table])


@given(st.data())
def test_any_order_of_operations_keeps_the_books(data):
    pages = PageManager(data.draw(st.integers(2, 12)), page_size=4)
    tables: list[list[int]] = []
    for _ in range(data.draw(st.integers(0, 30))):
        operation = data.draw(st.sampled_from(["allocate", "share", "release"]))
        if operation == "allocate":
            tables.append(pages.allocate(data.draw(st.integers(0, pages.num_free_pages))))
        elif operation == "share" and tables:
            table = data.draw(st.sampled_from(tables))
            shared = table[: data.draw(st.integers(0, len(table)))]
            pages.acquire(shared)
            tables.append(shared)
        elif tables:
            pages.release(tables.pop(data.draw(st.integers(0, len(tables) - 1))))
        pages.check_integrity(tables)
    for table in tables:
        pages.release(table)
    assert pages.num_free_pages == pages.num_usable_pages
