"""IncrementalDetokenizer against a brute-force oracle: any text, any split into tokens, any stop strings."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.detokenizer import IncrementalDetokenizer, StopMatcher, WindowStream

END = "<|end|>"
END_ID = 10**6
# few characters, so that stop strings are met often; of one to four bytes, so that tokens split them
CHARS = st.sampled_from("aab é漢😀\n<")
TEXT = st.text(CHARS | st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=30)
STOPS = st.lists(st.text(CHARS, min_size=1, max_size=5), max_size=4, unique=True)


@dataclass
class Pieces:
    """A tokenizer whose token i stands for the bytes pieces[i]; END_ID is special."""

    pieces: list[bytes]
    strips_first_space: bool = False
    decode_window: None = None
    all_special_ids: frozenset[int] = field(default_factory=lambda: frozenset({END_ID}))

    def token_bytes(self, token_id: int) -> bytes:
        if token_id == END_ID:
            return END.encode()
        return self.pieces[token_id] if token_id < len(self.pieces) else b""

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")


@st.composite
def split_texts(draw: st.DrawFn) -> tuple[str, Pieces]:
    """A text and a tokenizer that splits it anywhere, inside characters too."""
    text = draw(TEXT)
    data = text.encode()
    cuts = sorted(draw(st.sets(st.integers(0, len(data)), max_size=len(data))) | {0, len(data)})
    return text, Pieces([data[a:b] for a, b in itertools.pairwise(cuts)])


def run(detokenizer: IncrementalDetokenizer, token_ids: Sequence[int]) -> str:
    return "".join([*map(detokenizer.add, token_ids), detokenizer.finish()])


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    found = [(text.find(s), len(s), s) for s in stops if s in text]
    return (min(found)[0], min(found)[2]) if found else None


def complete(data: bytes) -> str:
    """The whole characters in the beginning of a text."""
    return data.decode("utf-8", "ignore")


def longest_beginning(text: str, stops: list[str]) -> str:
    """The longest end of a text that is a proper beginning of a stop string."""
    return max((s[:k] for s in stops for k in range(len(s)) if text.endswith(s[:k])), key=len, default="")


@given(split_texts())
def test_joined_deltas_are_the_text_and_none_holds_half_a_character(case: tuple[str, Pieces]) -> None:
    text, tokenizer = case
    detokenizer = IncrementalDetokenizer(tokenizer)
    deltas = [detokenizer.add(i) for i in range(len(tokenizer.pieces))]
    assert "".join(deltas) + detokenizer.finish() == text == detokenizer.text
    assert "\ufffd" not in "".join(deltas)
    assert detokenizer.stop_reason is None


@settings(max_examples=500)
@given(split_texts(), STOPS, st.booleans())
def test_stop_strings_cut_where_the_first_one_begins(case: tuple[str, Pieces], stops: list[str], include: bool) -> None:
    text, tokenizer = case
    detokenizer = IncrementalDetokenizer(tokenizer, stops, include_stop=include)
    out = run(detokenizer, range(len(tokenizer.pieces)))
    match = first_stop(text, stops)
    expected = text if match is None else text[: match[0]] + (match[1] if include else "")
    assert (out, detokenizer.stop_reason) == (expected, match and match[1])
    assert detokenizer.text == out
    if match and tokenizer.pieces:
        assert detokenizer.add(0) == detokenizer.finish() == ""


@settings(max_examples=500)
@given(split_texts(), STOPS)
def test_exactly_what_may_become_a_stop_string_is_held_back(case: tuple[str, Pieces], stops: list[str]) -> None:
    _, tokenizer = case
    detokenizer, data, given_out = IncrementalDetokenizer(tokenizer, stops), b"", ""
    for i, piece in enumerate(tokenizer.pieces):
        data += piece
        given_out += detokenizer.add(i)
        text = complete(data)
        if first_stop(text, stops):
            break
        held = longest_beginning(text, stops)
        assert given_out == text.removesuffix(held)


@settings(max_examples=300)
@given(split_texts(), STOPS, st.integers(0, 60), st.booleans())
def test_a_hidden_special_token_ends_the_text_when_it_is_a_stop_string(
    case: tuple[str, Pieces], stops: list[str], place: int, include: bool
) -> None:
    _, tokenizer = case
    place = min(place, len(tokenizer.pieces))
    ids = [*range(place), END_ID, *range(place, len(tokenizer.pieces))]
    detokenizer = IncrementalDetokenizer(tokenizer, [*stops, END], include_stop=include)
    out = run(detokenizer, ids)
    before = complete(b"".join(tokenizer.pieces[:place]))
    position, stop = first_stop(before, stops) or (len(before), END)
    assert (out, detokenizer.stop_reason) == (before[:position] + (stop if include else ""), stop)


@given(split_texts(), st.lists(st.integers(0, 60), max_size=3))
def test_hidden_special_tokens_leave_no_trace_and_shown_ones_their_text(case: tuple[str, Pieces], places: list[int]) -> None:
    text, tokenizer = case
    ids = list(range(len(tokenizer.pieces)))
    for place in places:
        ids.insert(min(place, len(ids)), END_ID)
    assert run(IncrementalDetokenizer(tokenizer), ids) == text
    shown = b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")
    assert run(IncrementalDetokenizer(tokenizer, skip_special_tokens=False), ids) == shown


@given(split_texts(), st.integers(0, 60))
def test_the_text_goes_on_from_the_prompt(case: tuple[str, Pieces], place: int) -> None:
    """A character that the prompt begins is given out whole, by the output."""
    text, tokenizer = case
    place = min(place, len(tokenizer.pieces))
    before = complete(b"".join(tokenizer.pieces[:place]))
    ids = list(range(len(tokenizer.pieces)))
    prompt = [*ids[:place], END_ID, END_ID]
    assert run(IncrementalDetokenizer(tokenizer, prompt_token_ids=prompt), ids[place:]) == text.removeprefix(before)


@pytest.mark.parametrize(("prompt", "expected"), [((), "a b"), ((END_ID,), "a b"), ((0,), " a b"), ((0, *[END_ID] * 99), " a b")])
def test_the_first_space_is_dropped_only_at_the_beginning_of_the_visible_text(prompt: tuple[int, ...], expected: str) -> None:
    tokenizer = Pieces([b" a", b" b"], strips_first_space=True)
    assert run(IncrementalDetokenizer(tokenizer, prompt_token_ids=prompt), [0, 1]) == expected


def test_an_unfinished_character_at_the_end_is_one_replacement_character() -> None:
    tokenizer = Pieces([b"a", "😀".encode()[:1], "😀".encode()[1:3]])
    assert run(IncrementalDetokenizer(tokenizer), [0, 1, 2]) == "a\ufffd"


def test_invalid_bytes_do_not_hold_the_text_back() -> None:
    detokenizer = IncrementalDetokenizer(Pieces([b"\xff"]))
    assert "".join(detokenizer.add(0) for _ in range(50)) == "\ufffd" * 50


def test_ids_outside_the_vocabulary_add_nothing() -> None:
    assert run(IncrementalDetokenizer(Pieces([b"a", b"b"])), [0, 77, 1]) == "ab"


def test_a_longer_stop_string_that_began_earlier_is_awaited() -> None:
    stops = ["cd", "bcde"]
    for last, text, reason in ((b"e", "a", "bcde"), (b"x", "ab", "cd")):
        detokenizer = IncrementalDetokenizer(Pieces([b"ab", b"cd", last, b"cd"]), stops)
        assert [detokenizer.add(i) for i in range(2)] == ["a", ""]
        assert detokenizer.stop_reason is None
        detokenizer.add(2)
        assert (detokenizer.text, detokenizer.stop_reason) == (text, reason)


def test_a_stop_string_that_was_awaiting_a_longer_one_counts_at_the_end() -> None:
    detokenizer = IncrementalDetokenizer(Pieces([b"abcd"]), ["cd", "bcde"])
    assert (run(detokenizer, [0]), detokenizer.stop_reason) == ("ab", "cd")


@given(st.text("ab", max_size=40), st.text("ab", min_size=1, max_size=8), st.lists(st.integers(1, 5), min_size=40, max_size=40))
def test_matcher_finds_what_find_finds(text: str, stop: str, sizes: list[int]) -> None:
    matcher, taken = StopMatcher(stop), 0
    for size in sizes:
        piece = text[taken : taken + size]
        behind = matcher.feed(piece)
        if behind is not None:
            assert taken + behind - len(stop) == text.find(stop)
            return
        taken += len(piece)
        assert matcher.matched == len(longest_beginning(text[:taken], [stop]))
    assert stop not in text


@given(split_texts())
def test_window_gives_the_decoders_text(case: tuple[str, Pieces]) -> None:
    """A decoder known only as a whole: here one that drops the first space and replaces broken characters."""
    text, tokenizer = case

    def decode(token_ids: Sequence[int]) -> str:
        return b"".join(map(tokenizer.token_bytes, token_ids)).decode("utf-8", "replace").removeprefix(" ")

    stream = WindowStream(decode)
    deltas = [stream.push(i) for i in range(len(tokenizer.pieces))]
    assert "".join(deltas) + stream.flush() == text.removeprefix(" ")
