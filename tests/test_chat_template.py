"""Chat templates: the ids of transformers, one BOS at most, and clear refusals."""

from pathlib import Path

import pytest
from vocabularies import USER, build, byte_level_metadata

from jaxserve.tokenizer import Tokenizer, load_tokenizer, read_chat_template

SYSTEM = [{"role": "system", "content": "Be brief."}, *USER]
BYTE_LEVEL = build(byte_level_metadata())


@pytest.fixture(scope="module")
def checkpoints(shared_dir: Path) -> Path:
    return shared_dir / "conformance" / "checkpoints"


@pytest.mark.parametrize("name", ["tiny", "spm", "tiny-nobos", "tiny-bos-template-nobos", "nosys", "tooltemplate"])
@pytest.mark.parametrize("generate", [True, False])
def test_chat_ids_are_those_of_transformers(checkpoints: Path, name: str, generate: bool) -> None:
    """Whether tokenizer, template, both or none of them write BOS."""
    tokenizer = load_tokenizer(checkpoints / name)
    ids = tokenizer.apply_chat_template(USER, add_generation_prompt=generate)
    assert ids == tokenizer.hf.apply_chat_template(USER, tokenize=True, add_generation_prompt=generate, return_dict=False)
    assert ids.count(0) == (0 if "nobos" in name else 1)


def test_a_refusal_keeps_the_templates_words(checkpoints: Path) -> None:
    tokenizer = load_tokenizer(checkpoints / "nosys")
    with pytest.raises(ValueError, match="the chat template refuses these messages: NOSYS"):
        tokenizer.apply_chat_template(SYSTEM)
    assert tokenizer.apply_chat_template(USER)


def test_a_model_without_a_template_says_how_to_give_one(checkpoints: Path) -> None:
    tokenizer = load_tokenizer(checkpoints / "notemplate")
    with pytest.raises(ValueError, match="no chat template; give one with --chat-template"):
        tokenizer.apply_chat_template(USER)
    assert tokenizer.decode(tokenizer.encode("text")) == "text"
    assert load_tokenizer(checkpoints / "notemplate", "{{ messages[0].content }}").render_chat(USER) == "Hello"


def test_a_broken_template_of_the_model_is_an_error_of_the_chat_only(checkpoints: Path) -> None:
    tokenizer = load_tokenizer(checkpoints / "badtemplate")
    assert tokenizer.encode("Hello")
    with pytest.raises(ValueError, match="the chat template has a syntax error in line 1: "):
        tokenizer.apply_chat_template(USER)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 1 // 0 }}", "fails on these messages: integer division or modulo by zero"),
        ("{{ messages[0].nothing.at_all }}", "fails on these messages: .*nothing"),
        ("{{ 'a' + messages }}", "fails on these messages: can only concatenate"),
        ("{{ messages.__class__.__mro__ }}", "fails on these messages: .*unsafe"),
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
    ],
)
def test_any_failure_of_a_template_is_a_value_error(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BYTE_LEVEL.apply_chat_template(USER, chat_template=template)


def test_no_messages_are_an_error() -> None:
    with pytest.raises(ValueError, match="messages is empty"):
        BYTE_LEVEL.apply_chat_template([], chat_template="{{ 'x' }}")


def test_template_variables_reach_the_template() -> None:
    template = "{{ enable_thinking }} {{ add_generation_prompt }} {{ tools[0].name }}"
    tokenizer = Tokenizer(BYTE_LEVEL.hf, chat_template=template)
    assert tokenizer.render_chat(USER, False, [{"name": "f"}], enable_thinking=True) == "True False f"


def test_template_option_is_a_file_or_the_text(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{{ 'é' }}", encoding="utf-8")
    assert read_chat_template(str(path)) == read_chat_template("{{ 'é' }}") == "{{ 'é' }}"
    assert read_chat_template(None) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [("{{ 'a' }}\n{% for %}", "chat.jinja has a syntax error in line 2: "), ("a\n\n{% if x %}", "line 3: .*endif|line 3: Unexpected end")],
)
def test_a_syntax_error_in_the_option_names_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_chat_template(str(path))
    with pytest.raises(ValueError, match="given as text has a syntax error in line"):
        Tokenizer(BYTE_LEVEL.hf, chat_template=text)


def test_a_template_option_that_is_neither_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"'no/such\.jinja' is neither a file nor a Jinja template"):
        read_chat_template("no/such.jinja")


@pytest.mark.parametrize("name", ["self", "messages", "conversation", "return_tensors", "tokenize", "padding"])
def test_names_that_are_no_variables_of_a_template(name):
    with pytest.raises(ValueError, match=f"chat_template_kwargs must not set {name}; give variables of the template"):
        BYTE_LEVEL.apply_chat_template(USER, chat_template="{{ 'x' }}", **{name: 1})
