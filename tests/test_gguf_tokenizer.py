"""Tokenizers from GGUF metadata give the ids of the models' own, and bad metadata is refused."""

import json
import lzma
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import TEXTS, USER, build, byte_level_metadata, pieces, references, sentencepiece_metadata

from jaxserve.gguf_tokenizer import PRE_TOKENIZERS
from jaxserve.tokenizer import Tokenizer, load_tokenizer

TEXT = st.text(st.sampled_from("ab 12'sTé漢😀\n\t.!") | st.characters(exclude_categories=["Cs"]), max_size=40)


@pytest.fixture(scope="module")
def vocabs(shared_dir: Path) -> Path:
    return shared_dir / "data" / "tokenizers" / "llamacpp-vocab"


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Tokenizer:
    return load_tokenizer(smollm2_gguf)


@pytest.mark.parametrize("name", ["gpt-2", "llama-spm", "phi-3"])
def test_gguf_vocabularies_give_the_reference_ids(vocabs: Path, name: str) -> None:
    tokenizer = load_tokenizer(vocabs / f"ggml-vocab-{name}.gguf")
    for text, ids in references(vocabs, name):
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.decode(ids) == text


def test_smollm2_gives_the_reference_ids(smollm2: Tokenizer, shared_dir: Path) -> None:
    """128 real prompts' lengths, and the ids of 16 of them."""
    prompts = [json.loads(line) for line in (shared_dir / "peers" / "workload.jsonl").read_text().splitlines()]
    ids = {p["id"]: smollm2.encode(p["prompt"]) for p in prompts}
    assert [len(ids[p["id"]]) for p in prompts] == [p["prompt_tokens"] for p in prompts]
    for line in (shared_dir / "peers" / "golden_greedy.jsonl").read_text().splitlines():
        golden = json.loads(line)
        assert ids[golden["id"]] == golden["prompt_token_ids"]


def test_smollm2_has_the_models_own_facts(smollm2: Tokenizer) -> None:
    assert (smollm2.bos_token_id, smollm2.eos_token_id, smollm2.vocab_size) == (1, 2, 49152)
    assert smollm2.hf.model_max_length == 8192
    assert smollm2.encode("a") == smollm2.encode("a", add_special_tokens=False)
    assert smollm2.all_special_ids == frozenset(range(17))
    assert smollm2.decode(smollm2.apply_chat_template(USER), skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pre", "reference"),
    [("llama3_1", "llama-bpe", "llama-bpe"), ("qwen3", "qwen2", "qwen2"), ("deepseek_v3", "deepseek-v3", None), ("gptoss", "gpt-4o", None)],
)
def test_pre_tokenizers_are_those_of_the_models_own_files(
    shared_dir: Path, vocabs: Path, name: str, pre: str, reference: str | None
) -> None:
    """A real tokenizer.json told in GGUF metadata gives the same ids as itself, and as the reference of its vocabulary."""
    data = lzma.decompress((shared_dir / "data" / "tokenizers" / "hf" / name / "tokenizer.json.xz").read_bytes()).decode()
    spec = json.loads(data)
    tokens = {i: token for token, i in spec["model"]["vocab"].items()} | {a["id"]: a["content"] for a in spec["added_tokens"]}
    kinds = {a["id"]: 3 if a["special"] else 4 for a in spec["added_tokens"]}
    size = max(tokens) + 1
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [tokens.get(i, f"[PAD{i}]") for i in range(size)],
        "tokenizer.ggml.token_type": [kinds.get(i, 1) for i in range(size)],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in spec["model"]["merges"]],
        "tokenizer.ggml.add_bos_token": False,
    }
    ours, own = build(metadata), tokenizers.Tokenizer.from_str(data)

    @settings(max_examples=300, deadline=None)
    @given(TEXT)
    def same(text: str) -> None:
        assert ours.encode(text) == own.encode(text, add_special_tokens=False).ids

    same()
    for text, ids in references(vocabs, reference or "gpt-2"):
        assert ours.encode(text) == (ids if reference else own.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["a", " 12345"]),
        ("smollm", ["a", " ", "1", "2", "3", "4", "5"]),
        ("qwen2", ["a", " ", "1", "2", "3", "4", "5"]),
        ("llama-bpe", ["a", " ", "123", "45"]),
        ("deepseek-v3", ["a", " ", "123", "45"]),
        ("deepseek-coder", ["a", " ", "1", "2", "3", "4", "5"]),
    ],
)
def test_the_pre_tokenizer_decides_how_digits_are_split(pre: str, expected: list[str]) -> None:
    merges = ("1 2", "12 3", "123 4", "1234 5", "Ġ 12345", "4 5")
    assert pieces(build(byte_level_metadata(pre, merges)), "a 12345") == expected


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_keeps_the_text(pre: str) -> None:
    tokenizer = build(byte_level_metadata(pre, add_bos_token=False))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, ["a"]),
        ({"add_bos_token": True}, ["<s>", "a"]),
        ({"add_bos_token": True, "add_eos_token": True}, ["<s>", "a", "</s>"]),
        ({"pre": "llama-bpe"}, ["<s>", "a"]),
        ({"pre": "llama-bpe", "add_bos_token": False}, ["a"]),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(keys: dict[str, Any], expected: list[str]) -> None:
    tokenizer = build(byte_level_metadata(**keys))
    assert [tokenizer.token_text(i) for i in tokenizer.encode("a")] == expected
    assert tokenizer.encode("a", add_special_tokens=False) == [tokenizer.hf.convert_tokens_to_ids("a")]


def test_control_tokens_are_special_and_user_defined_ones_are_text() -> None:
    tokenizer = build(byte_level_metadata())
    ids = tokenizer.encode("a<think></s>")
    assert ids[1:] == [2, 1]
    assert tokenizer.decode(ids) == "a<think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<think></s>"
    assert tokenizer.all_special_ids == {0, 1}


def test_sentencepiece_merges_the_best_scored_pair_first_and_falls_back_to_bytes() -> None:
    tokenizer = build(sentencepiece_metadata())
    assert tokenizer.encode("") == [1]
    assert tokenizer.encode("aab b", add_special_tokens=False) == tokenizer.hf.convert_tokens_to_ids(["▁a", "ab", "▁b"])
    ids = tokenizer.encode("é a")
    assert [tokenizer.convert_id_to_token(i) for i in ids] == ["<s>", "▁", "<0xC3>", "<0xA9>", "▁a"]
    assert tokenizer.decode(ids) == "é a"
    assert tokenizer.token_bytes(ids[2]) == b"\xc3"


def test_add_space_prefix_false_keeps_the_text_as_it_is() -> None:
    tokenizer = build(sentencepiece_metadata(add_space_prefix=False, add_bos_token=False))
    assert pieces(tokenizer, "a b") == ["a", " b"]
    assert tokenizer.decode(tokenizer.encode(" a")) == " a"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pre": "martian"}, r"model.gguf: tokenizer.ggml.pre is 'martian', an unknown pre-tokenizer; known: .*smollm.*--tokenizer"),
        ({"pre": None}, "pre is None, an unknown"),
        ({"model": "t5"}, "tokenizer.ggml.model is 't5'; supported: gpt2, llama"),
        ({"tokens": []}, "has no tokenizer.ggml.tokens"),
        ({"tokens": ["a", "b", "a"]}, "holds 'a' twice"),
        ({"merges": ["x yz"]}, "tokenizer.ggml.merges do not fit"),
        ({"merges": ["xyz"]}, "merges holds 'xyz'"),
        ({"bos_token_id": 999}, "bos_token_id is 999, outside the vocabulary of 259 tokens"),
        ({"add_eos_token": True, "eos_token_id": None}, "add_eos_token is true, but there is no tokenizer.ggml.eos_token_id"),
    ],
)
def test_bad_metadata_is_an_error_that_names_the_key(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(byte_level_metadata() | {f"tokenizer.ggml.{key}": value for key, value in keys.items()})


@pytest.mark.parametrize(("key", "build_metadata"), [("merges", byte_level_metadata), ("scores", sentencepiece_metadata)])
def test_missing_metadata_is_an_error_that_names_the_key(key: str, build_metadata: Any) -> None:
    metadata = build_metadata()
    del metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(ValueError, match=f"model.gguf has no tokenizer.ggml.{key}; give a tokenizer by --tokenizer"):
        build(metadata)


def test_named_templates_of_a_gguf_file_are_kept() -> None:
    metadata = byte_level_metadata() | {"tokenizer.chat_template": "{{ 'x' }}", "tokenizer.chat_template.tool_use": "{{ 'y' }}"}
    tokenizer = build(metadata)
    assert tokenizer.render_chat(USER) == "x"
    assert tokenizer.render_chat(USER, tools=[{"type": "function"}]) == "y"


@pytest.mark.parametrize("name", ["tiny", "tiny-nobos", "tiny-bos-template-nobos", "nosys", "tooltemplate", "zero"])
def test_gguf_file_and_directory_of_one_model_agree(shared_dir: Path, name: str) -> None:
    checkpoints = shared_dir / "conformance" / "checkpoints"
    directory, gguf = load_tokenizer(checkpoints / name), load_tokenizer(checkpoints / "gguf" / f"{name}.gguf")
    for text in TEXTS:
        assert gguf.encode(text) == directory.encode(text)
        assert gguf.decode(gguf.encode(text)) == directory.decode(gguf.encode(text))
    assert gguf.apply_chat_template(USER) == directory.apply_chat_template(USER)
    assert (gguf.bos_token_id, gguf.eos_token_id) == (directory.bos_token_id, directory.eos_token_id)
