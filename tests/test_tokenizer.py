"""Tokenizer: ids and text as transformers has them, whole or token by token, and what it refuses."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from vocabularies import build, byte_level_metadata

from jaxserve.tokenizer import IncrementalDetokenizer, Tokenizer, load_tokenizer

BYTE_LEVEL = build(byte_level_metadata())
TEXT = st.text(st.sampled_from("ab 12'sTé漢😀\n\t.!") | st.characters(exclude_categories=["Cs"]), max_size=40)


@pytest.fixture(scope="module")
def checkpoints(shared_dir: Path) -> Path:
    return shared_dir / "conformance" / "checkpoints"


@pytest.mark.parametrize("name", ["tiny", "spm"])
def test_ids_and_text_are_those_of_transformers(checkpoints: Path, name: str) -> None:
    tokenizer = load_tokenizer(checkpoints / name)

    @given(TEXT)
    def same(text: str) -> None:
        ids = tokenizer.encode(text)
        assert ids == tokenizer.hf.encode(text)
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == tokenizer.hf.decode(ids, skip_special_tokens=skip)
            detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
            assert "".join([*map(detokenizer.add, ids), detokenizer.finish()]) == tokenizer.decode(ids, skip)

    same()


@given(st.lists(st.integers(0, 258), max_size=40))
def test_any_ids_of_a_byte_level_vocabulary_decode_as_transformers_decodes_them(ids: list[int]) -> None:
    assert BYTE_LEVEL.decode(ids) == BYTE_LEVEL.hf.decode(ids, skip_special_tokens=True)


def test_a_decoder_that_is_a_black_box_gives_the_same_text_token_by_token() -> None:
    from tokenizers import decoders, models
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate(["[UNK]", "hello", "##ing", "world", ".", "é"])}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert tokenizer.decode_window is not None

    @given(st.lists(st.integers(1, 5), max_size=12))
    def same(ids: list[int]) -> None:
        assert tokenizer.decode(ids) == backend.decode(ids)

    same()
    assert tokenizer.decode([1, 99, 2]) == "helloing"


def test_the_output_keeps_the_space_between_it_and_the_prompt(checkpoints: Path) -> None:
    tokenizer = load_tokenizer(checkpoints / "spm")
    ids = tokenizer.encode("def f(x):\n    return x", add_special_tokens=True)
    for cut in range(2, len(ids)):
        detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids=ids[:cut])
        text = "".join([*map(detokenizer.add, ids[cut:]), detokenizer.finish()])
        assert tokenizer.decode(ids[:cut]) + text == "def f(x):\n    return x"


def test_ids_outside_the_vocabulary_have_no_text() -> None:
    assert [BYTE_LEVEL.token_bytes(i) for i in (-1, 259, 10**9)] == [b"", b"", b""]
    assert BYTE_LEVEL.convert_id_to_token(259) is None
    assert BYTE_LEVEL.decode([*BYTE_LEVEL.encode("ab"), 259]) == "ab"


def test_half_a_surrogate_pair_is_an_error_that_says_where() -> None:
    with pytest.raises(ValueError, match=r"half of a surrogate pair \(U\+D83D\) at position 2"):
        BYTE_LEVEL.encode("ab\ud83d")


def test_long_texts_are_not_cut(checkpoints: Path) -> None:
    tokenizer = load_tokenizer(checkpoints / "tiny")
    tokenizer.hf.model_max_length = 4
    text = "many words " * 1000
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_threads_can_share_a_tokenizer() -> None:
    texts = [f"text {i} 漢字" for i in range(200)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: BYTE_LEVEL.decode(BYTE_LEVEL.encode(text)), texts)) == texts


def test_a_directory_without_a_tokenizer_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"no tokenizer can be loaded from '{tmp_path}'.*--tokenizer"):
        load_tokenizer(tmp_path)


def test_a_missing_gguf_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing\.gguf"):
        load_tokenizer(tmp_path / "missing.gguf")


def test_importing_the_module_does_not_import_transformers() -> None:
    code = "import sys, jaxserve.tokenizer, jaxserve.gguf_tokenizer; sys.exit('transformers' in sys.modules or 'gguf' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
