"""The tokenizer that a GGUF file's metadata describes: byte-level BPE with a named pre-tokenizer, or a SentencePiece BPE.

Keys: github.com/ggml-org/ggml, docs/gguf.md. `tokenizer.ggml.pre` names how text is split before the merges; each name stands for what the
models' own tokenizer.json has.
"""

from __future__ import annotations

from typing import Any

_KEY = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # token types

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_HAN_KANA_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(digits: str, letters: str = r"\p{L}", marks: str = "") -> str:
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased(digits: str, suffix: str = "") -> str:
    """Words of one capitalisation: Upperlower or UPPER."""
    start = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{start}{_UPPER}*{_LOWER}+{suffix}|{start}{_UPPER}+{_LOWER}*{suffix}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


# Letters with case, as deepseek-llm lists them: hexadecimal code points, for several look like others or normalise to them.
_DEEPSEEK_LETTERS = """
41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 3A3-3F5 3F7-481 48A-52F
531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57
1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107
210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2
2CF3 A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3
104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943
"""
_DEEPSEEK_PUNCTUATION = "21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002"


def _class(ranges: str) -> str:
    """A regular expression's class of characters from hexadecimal ranges."""
    return "[" + "".join("-".join(rf"\x{{{end}}}" for end in part.split("-")) for part in ranges.split()) + "]"


_ASCII_PUNCTUATION_WORD = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""

# (patterns, applied one after the other; the names that stand for them)
_PATTERNS: tuple[tuple[tuple[str, ...], str], ...] = (
    ((_GPT2,), "gpt-2 phi-2 olmo mpt jais gigachat exaone4"),
    ((r"\p{N}", _GPT2), "smollm starcoder refact command-r codeshell exaone minerva-7b"),
    ((_words(r"\p{N}{1,3}"),), "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 smaug-bpe dbrx glm4 chatglm-bpe"),
    ((_words(r"\p{N}"),), "qwen2 deepseek-r1-qwen megrez kormo stablelm2 hunyuan"),
    ((_words(r"\p{N}", r"[\p{L}\p{M}]", r"\p{M}"),), "qwen35"),
    (
        (
            r"[\r\n]",
            rf"\s?{_class(_DEEPSEEK_LETTERS)}+",
            rf"\s?{_class(_DEEPSEEK_PUNCTUATION)}+",
            r"\s+$",
            _HAN_KANA_HANGUL,
            r"\p{N}",
        ),
        "deepseek-llm",
    ),
    ((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_KANA_HANGUL, r"\p{N}"), "deepseek-coder"),
    (
        (
            r"\p{N}{1,3}",
            "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
            rf"{_ASCII_PUNCTUATION_WORD}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
        ),
        "deepseek-v3 hunyuan-dense",
    ),
    ((_cased(r"\p{N}"),), "tekken"),
    ((_cased(r"\p{N}{1,3}", _CONTRACTIONS + "?"),), "gpt-4o llama4"),
)
PRE_TOKENIZERS = {name: patterns for patterns, names in _PATTERNS for name in names.split()}
# A word that is in the vocabulary is taken whole, whatever the merges make of it; these models' tokens also begin with BOS by default.
_WHOLE_WORDS_AND_BOS = frozenset(["llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"])
_COMPOSED = frozenset(["qwen2", "qwen35", "command-r", "olmo", "mpt"])  # text is brought to Unicode's form NFC first


def tokenizer_from_metadata(metadata: dict[str, Any], source: str) -> Any:
    """A transformers PreTrainedTokenizerFast from GGUF metadata; ValueError names `source`, the key and what is supported."""
    from transformers import PreTrainedTokenizerFast

    kind = metadata.get(_KEY + "model")
    builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
    if kind not in builders:
        raise ValueError(f"{source}: {_KEY}model is {kind!r}; supported: {', '.join(builders)}; give another tokenizer by --tokenizer")
    tokens = metadata.get(_KEY + "tokens")
    if not tokens:
        raise ValueError(f"{source} has no {_KEY}tokens; give a tokenizer by --tokenizer")
    if len(set(tokens)) < len(tokens):
        double = next(t for i, t in enumerate(tokens) if tokens.index(t) < i)
        raise ValueError(f"{source}: {_KEY}tokens holds {double!r} twice; give another tokenizer by --tokenizer")
    try:
        backend, defaults = builders[kind](metadata, tokens, source)
    except KeyError as error:
        raise ValueError(f"{source} has no {error.args[0]}; give a tokenizer by --tokenizer") from error
    names = _special_names(metadata, tokens, source, defaults)
    _add_tokens(backend, metadata, tokens)
    _add_ends(backend, metadata, names, defaults, source)
    limit = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **names, **({"model_max_length": limit} if limit else {})
    )
    hf.chat_template = _chat_template(metadata)
    return hf


def _byte_level_bpe(metadata: dict[str, Any], tokens: list[str], source: str) -> tuple[Any, dict[str, Any]]:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = metadata.get(_KEY + "pre")
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ValueError(f"{source}: {_KEY}pre is {pre!r}, an unknown pre-tokenizer; known: {known}; give another tokenizer by --tokenizer")
    merges = [_pair(merge, source) for merge in metadata[_KEY + "merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _WHOLE_WORDS_AND_BOS)
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(f"{source}: {_KEY}merges do not fit {_KEY}tokens: {error}") from error
    backend = Tokenizer(model)
    if pre in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[pre]]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    return backend, {"add_bos_token": pre in _WHOLE_WORDS_AND_BOS}


def _pair(merge: str, source: str) -> tuple[str, str]:
    parts = merge.split(" ")
    if len(parts) != 2:
        raise ValueError(
            f"{source}: {_KEY}merges holds {merge!r}; a merge is two tokens with a space between; give a tokenizer by --tokenizer"
        )
    return parts[0], parts[1]


def _sentencepiece_bpe(metadata: dict[str, Any], tokens: list[str], source: str) -> tuple[Any, dict[str, Any]]:
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = metadata.get(_KEY + "unknown_token_id", 0)
    merges = _merges(metadata, tokens, vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True))
    spaces, back = normalizers.Replace(" ", "▁"), [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get(_KEY + "add_space_prefix", True):
        spaces, back = normalizers.Sequence([normalizers.Prepend("▁"), spaces]), [*back, decoders.Strip(" ", 1, 0)]
    backend.normalizer, backend.decoder = spaces, decoders.Sequence(back)
    return backend, {"add_bos_token": True, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}


def _merges(metadata: dict[str, Any], tokens: list[str], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to make a token out of two, the best scored tokens first: SentencePiece merges by the score of what comes out."""
    scores, types = metadata[_KEY + "scores"], metadata.get(_KEY + "token_type")
    ranked = []
    for i, token in enumerate(tokens):
        if types and types[i] not in (_NORMAL, _USER_DEFINED):
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[i], i, vocab[left], vocab[right]))
    return [(tokens[left], tokens[right]) for _, _, left, right in sorted(ranked)]


def _special_names(metadata: dict[str, Any], tokens: list[str], source: str, defaults: dict[str, Any]) -> dict[str, str]:
    keys = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id", "pad_token": "padding_token_id"}
    names = {}
    for name, key in keys.items():
        token_id = metadata.get(_KEY + key, defaults.get(key))
        if token_id is None:
            continue
        if not 0 <= token_id < len(tokens):
            raise ValueError(f"{source}: {_KEY}{key} is {token_id}, outside the vocabulary of {len(tokens)} tokens")
        names[name] = tokens[token_id]
    return names


def _add_tokens(backend: Any, metadata: dict[str, Any], tokens: list[str]) -> None:
    """Tokens that are found in the text before anything else: control tokens, and the model maker's own."""
    from tokenizers import AddedToken

    types = metadata.get(_KEY + "token_type") or []
    added = [(token, kind) for token, kind in zip(tokens, types, strict=False) if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)]
    backend.add_tokens([AddedToken(token, normalized=False, special=kind != _USER_DEFINED) for token, kind in added])


def _add_ends(backend: Any, metadata: dict[str, Any], names: dict[str, str], defaults: dict[str, Any], source: str) -> None:
    """Let encode() add BOS and EOS as the file says."""
    from tokenizers import processors

    ends = {}
    for end in ("bos", "eos"):
        wanted = metadata.get(f"{_KEY}add_{end}_token", defaults.get(f"add_{end}_token", False))
        if wanted and f"{end}_token" not in names:
            raise ValueError(f"{source}: {_KEY}add_{end}_token is true, but there is no {_KEY}{end}_token_id")
        ends[end] = [names[f"{end}_token"]] if wanted else []
    used = {token: backend.token_to_id(token) for token in ends["bos"] + ends["eos"]}
    if used:
        single = [*ends["bos"], "$A", *ends["eos"]]
        backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(used.items()))


def _chat_template(metadata: dict[str, Any]) -> str | dict[str, str] | None:
    """tokenizer.chat_template, with the named ones beside it where there are some, e.g. tool_use."""
    default, prefix = metadata.get("tokenizer.chat_template"), "tokenizer.chat_template."
    named = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    return {**named, **({"default": default} if default else {})} if named else default
