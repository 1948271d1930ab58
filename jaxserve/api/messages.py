"""Chat messages in the form that chat templates expect: string content, tool arguments as mappings."""

from __future__ import annotations

import json
from typing import Any

from jaxserve.api.errors import bad_request

_FIELDS = {
    "system": {"content", "name"},
    "user": {"content", "name"},
    "assistant": {"content", "name", "tool_calls", "reasoning_content"},
    "tool": {"content", "name", "tool_call_id"},
}


def normalise(messages: list[Any]) -> list[dict[str, Any]]:
    """The messages with text parts joined by newlines, null assistant content as '' and tool arguments parsed; 400 names what is wrong.

    The role developer is OpenAI's newer word for system and becomes it, as templates know only the older one.
    """
    if not messages:
        raise bad_request("messages is empty; give at least one message", "messages", "invalid_value")
    return [_message(m, f"messages[{i}]") for i, m in enumerate(messages)]


def _message(message: Any, at: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise bad_request(f"{at} is not an object with role and content", at, "invalid_type")
    role = message.get("role")
    role = "system" if role == "developer" else role
    if not isinstance(role, str) or role not in _FIELDS:
        raise bad_request(f"{at}.role is {role!r}; give one of developer, {', '.join(_FIELDS)}", f"{at}.role", "invalid_value")
    out: dict[str, Any] = {"role": role}
    for name, value in message.items():
        if name in ("role", "content") or value is None:
            continue
        if name not in _FIELDS[role]:
            raise bad_request(f"{at}.{name} is not a known field of a message with role {role}", f"{at}.{name}", "unknown_parameter")
        out[name] = _tool_calls(value, f"{at}.{name}") if name == "tool_calls" else _string(value, f"{at}.{name}")
    out["content"] = _content(message.get("content"), f"{at}.content", optional=role == "assistant")
    return out


def _content(content: Any, at: str, optional: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and optional:
        return ""
    if isinstance(content, list) and content:
        return "\n".join(_part(p, f"{at}[{i}]") for i, p in enumerate(content))
    raise bad_request(f"{at} is {content!r:.80}; give a string or a list of text parts", at, "invalid_type")


def _part(part: Any, at: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else part
    if kind != "text":
        raise bad_request(f"{at} is of type {kind!r:.80}; this model takes only parts of type 'text'", f"{at}.type", "invalid_value")
    unknown = next((k for k in part if k not in ("type", "text")), None)
    if unknown is not None:
        raise bad_request(f"{at}.{unknown} is not a known field of a text part", f"{at}.{unknown}", "unknown_parameter")
    return _string(part.get("text"), f"{at}.text")


def _tool_calls(calls: Any, at: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise bad_request(f"{at} is {calls!r:.80}; give a list", at, "invalid_type")
    return [_tool_call(call, f"{at}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, at: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise bad_request(f"{at} is {call!r:.80}; give an object with id, type 'function' and function", at, "invalid_type")
    name = _string(function.get("name"), f"{at}.function.name")
    arguments = _arguments(function.get("arguments"), f"{at}.function.arguments")
    identity = {} if call.get("id") is None else {"id": _string(call["id"], f"{at}.id")}
    return {**identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(arguments: Any, at: str) -> dict[str, Any]:
    try:
        value = json.loads(arguments or "null") if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as e:
        raise bad_request(f"{at} is not JSON: {e}", at, "invalid_value") from None
    if value is not None and not isinstance(value, dict):
        raise bad_request(f"{at} is {value!r:.80}; give a JSON object", at, "invalid_value")
    return value or {}


def _string(value: Any, at: str) -> str:
    if not isinstance(value, str):
        raise bad_request(f"{at} is {value!r:.80}; give a string", at, "invalid_type")
    return value
