"""Small vocabularies told in GGUF metadata, and the reference strings of real ones."""

from pathlib import Path
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from jaxserve.gguf_tokenizer import tokenizer_from_metadata
from jaxserve.tokenizer import Tokenizer

USER = [{"role": "user", "content": "Hello"}]
TEXTS = ["Hello world", " Hello", "  two  spaces\n\n\tx = 12345;", "naïve café 漢字 😀!", "", "<eot>a", "a<think>b"]


def references(vocabs: Path, name: str) -> list[tuple[str, list[int]]]:
    """The strings of a vocabulary's .inp file and their ids in its .out file."""
    texts = (vocabs / f"ggml-vocab-{name}.gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = (vocabs / f"ggml-vocab-{name}.gguf.out").read_text().splitlines()
    pairs = [(text, [int(i) for i in line.split()]) for text, line in zip(texts, lines, strict=False)]
    assert len(pairs) == 46
    return pairs


def byte_level_metadata(pre: str = "gpt-2", merges: tuple[str, ...] = (), **keys: Any) -> dict[str, Any]:
    """A byte-level vocabulary: <s> </s> and a user-defined <think>, the bytes, and what the merges make."""
    tokens = ["<s>", "</s>", "<think>", *sorted(ByteLevel.alphabet()), *[m.replace(" ", "") for m in merges]]
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 4, *[1] * (len(tokens) - 3)],
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def sentencepiece_metadata(**keys: Any) -> dict[str, Any]:
    words = ["▁", "a", "b", "▁a", "ab", "▁ab", "▁b", "aa"]
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{i:02X}>" for i in range(256)], *words]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(words)],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(words))],
    }
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def build(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer(tokenizer_from_metadata(metadata, "model.gguf"))


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_text(i) for i in tokenizer.encode(text, add_special_tokens=False)]
