"""Tokenizer: text to token ids and back, and the chat template, over a tokenizer of transformers."""

from __future__ import annotations

import inspect
import json
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxserve.detokenizer import IncrementalDetokenizer, text_stream

__all__ = ["IncrementalDetokenizer", "Tokenizer", "load_tokenizer", "read_chat_template"]

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
# transformers is imported where it is used: it costs a second, which `jaxserve --help` and engines without a tokenizer need not pay.
# Its word on import that PyTorch is missing would only alarm: nothing here needs it.
logging.getLogger("transformers").addFilter(lambda record: "PyTorch was not found" not in record.getMessage())


def load_tokenizer(source: str | Path, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer of a directory, a .gguf file or a hub id; `chat_template` (a file or Jinja text) replaces its own template.

    FileNotFoundError or ValueError names the source and what is wrong with it.
    """
    if str(source).endswith(".gguf"):
        return Tokenizer.from_gguf(source, chat_template)
    return Tokenizer.from_pretrained(source, chat_template)


class Tokenizer:
    """Wraps a transformers tokenizer; safe to use from several threads at once."""

    def __init__(self, hf: Any, chat_template: str | None = None):
        self.hf = hf
        self._backend = getattr(hf, "backend_tokenizer", None)
        self._chat_template = read_chat_template(chat_template)
        self._cache: dict[int, bytes] = {}
        self._to_bytes: Callable[[str], bytes] | None = None
        self.strips_first_space = False
        special = set(hf.all_special_ids)
        self._added: dict[int, str] = {}
        if self._backend is not None:
            self._backend.no_truncation()  # prompts are cut nowhere; too long ones are refused
            self._backend.no_padding()
            added = self._backend.get_added_tokens_decoder()
            self._added = {i: token.content for i, token in added.items()}
            special |= {i for i, token in added.items() if token.special}
            self._to_bytes, self.strips_first_space = byte_rule(self._backend.decoder)
        self.all_special_ids = frozenset(special)
        self.decode_window = None if self._to_bytes else self._decode_by_transformers
        self.vocab_size = len(hf)

    @classmethod
    def from_pretrained(cls, name: str | Path, chat_template: str | None = None) -> Tokenizer:
        """Load a directory or hub id as transformers does; ValueError if there is no tokenizer that it can load."""
        from transformers import AutoTokenizer

        try:
            hf = AutoTokenizer.from_pretrained(str(name))
        except Exception as error:  # transformers and tokenizers raise many kinds, some of them bare Exception
            reason = " ".join(str(error).split())
            raise ValueError(
                f"no tokenizer can be loaded from {str(name)!r} ({type(error).__name__}: {reason}); "
                "give a directory or hub id with a tokenizer by --tokenizer"
            ) from error
        return cls(hf, chat_template)

    @classmethod
    def from_gguf(cls, path: str | Path, chat_template: str | None = None) -> Tokenizer:
        """The tokenizer and chat template in a GGUF file's metadata; ValueError names the kind if it is not supported."""
        from jaxserve.gguf_tokenizer import tokenizer_from_metadata
        from jaxserve.loader.gguf_file import open_gguf

        return cls(tokenizer_from_metadata(open_gguf(Path(path)).metadata, str(path)), chat_template)

    @property
    def bos_token_id(self) -> int | None:
        return self.hf.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        return self.hf.eos_token_id

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids; special tokens written out in the text count as such. ValueError if the text is not valid Unicode."""
        try:
            if self._backend is not None:
                return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            return self.hf.encode(text, add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError):
            lone = next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None) if isinstance(text, str) else None
            if lone is None:
                raise
            message = f"the text holds half of a surrogate pair (U+{ord(text[lone]):04X}) at position {lone}; send whole characters"
            raise ValueError(message) from None

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; those outside the vocabulary (padding of the embedding) are left out, broken characters become U+FFFD."""
        hidden = self.all_special_ids if skip_special_tokens else frozenset()
        stream = text_stream(self)
        return "".join([*(stream.push(t) for t in token_ids if t not in hidden), stream.flush()])

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds to a text, special tokens' too; none for an id outside the vocabulary."""
        data = self._cache.get(token_id)
        if data is None:
            data = self._cache[token_id] = self._bytes_of(token_id)
        return data

    def token_text(self, token_id: int) -> str:
        """One token's own text, with its leading space; U+FFFD stands for a part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def convert_id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token; None outside the vocabulary."""
        return self.hf.convert_ids_to_tokens(token_id) if 0 <= token_id < self.vocab_size else None

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self.convert_id_to_token(token_id)
        if token is None:
            return b""
        return self._to_bytes(token) if self._to_bytes else self._decode_by_transformers([token_id]).encode()

    def _decode_by_transformers(self, token_ids: Sequence[int]) -> str:
        known = [t for t in token_ids if 0 <= t < self.vocab_size]
        if self._backend is not None:
            return self._backend.decode(known, skip_special_tokens=False)
        return self.hf.decode(known, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        /,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        **options: Any,
    ) -> list[int]:
        """Token ids of a conversation. The template alone decides about the BOS token: none is added to what it writes.

        ValueError if there is no template, if it refuses the messages (its own words are kept), or if it fails on them.
        """
        text = self.render_chat(messages, add_generation_prompt, tools, chat_template, **options)
        return self.encode(text, add_special_tokens=False)

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        /,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        **options: Any,
    ) -> str:
        """The text that the chat template makes; errors as in apply_chat_template."""
        if not messages:
            raise ValueError("messages is empty; give at least one message")
        template = chat_template or self._chat_template
        if template is None and not self.hf.chat_template:
            raise ValueError("the model has no chat template; give one with --chat-template (a file or the template's text)")
        from jinja2 import TemplateError, TemplateRuntimeError, TemplateSyntaxError

        reserved = {"self", "messages", *inspect.signature(self.hf.apply_chat_template).parameters}
        if taken := sorted(reserved & set(options)):
            raise ValueError(f"chat_template_kwargs must not set {taken[0]}; give variables of the template")
        keywords = {"tools": tools, "chat_template": template, "add_generation_prompt": add_generation_prompt, "tokenize": False}
        try:
            return self.hf.apply_chat_template(messages, **keywords, **options)
        except ImportError:
            raise
        except TemplateSyntaxError as error:
            raise ValueError(f"the chat template has a syntax error in line {error.lineno}: {error.message}") from error
        except Exception as error:  # the template is a program of the model's: it may fail in any way
            refused = isinstance(error, TemplateError) and not isinstance(error, TemplateRuntimeError)
            what = "refuses" if refused else "fails on"
            raise ValueError(f"the chat template {what} these messages: {error}") from error


def read_chat_template(option: str | None) -> str | None:
    """The template that an option names: a file's text, or the option itself if it holds Jinja marks.

    ValueError if it is neither, or if it has a syntax error: it names the file and the line.
    """
    if option is None:
        return None
    text, where = option, "the chat template given as text"
    if "{%" not in option and "{{" not in option:
        path = Path(option).expanduser()
        if not path.is_file():
            raise ValueError(f"chat_template {option!r} is neither a file nor a Jinja template; give a path, or text with {{{{ or {{%")
        text, where = path.read_text(encoding="utf-8"), f"the chat template {path}"
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template([], chat_template=text)  # no conversation: it is only compiled
    except TemplateSyntaxError as error:
        raise ValueError(f"{where} has a syntax error in line {error.lineno}: {error.message}") from error
    return text


def byte_rule(decoder: Any) -> tuple[Callable[[str], bytes] | None, bool]:
    """(how a token's spelling becomes bytes, whether the first space of a text is dropped), from a `tokenizers` decoder.

    None where the decoder does more than to put together what single tokens stand for; then only it can decode.
    """
    spec: dict[str, Any] = json.loads(decoder.__getstate__()) if decoder is not None else {"type": "None"}
    steps: list[dict[str, Any]] = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level, False
    strip, fallback, replace = False, "ByteFallback" in kinds, []
    for step in steps:
        if step["type"] == "Replace" and "String" in step["pattern"]:
            replace.append((step["pattern"]["String"], step["content"]))
        elif step["type"] == "Metaspace":
            replace.append((step["replacement"], " "))
            strip = step["prepend_scheme"] != "never"
        elif step["type"] == "Strip" and (step["content"], step["start"], step["stop"]) == (" ", 1, 0) and "Fuse" in kinds:
            strip = True
        elif step["type"] not in ("ByteFallback", "Fuse"):
            return None, False
    return lambda token: _sentencepiece(token, replace, fallback), strip


def _sentencepiece(token: str, replace: list[tuple[str, str]], fallback: bool) -> bytes:
    for old, new in replace:
        token = token.replace(old, new)
    if fallback and (match := _BYTE_TOKEN.fullmatch(token)):
        return bytes([int(match[1], 16)])
    return token.encode()


def _byte_level(token: str) -> bytes:
    """Byte-level BPE spells each byte as one printable character; a token with any other character stands for itself."""
    try:
        return bytes([_BYTE_OF[c] for c in token])
    except KeyError:
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes of Latin-1 spell themselves, the others are the characters from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()
