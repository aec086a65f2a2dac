"""OpenAI's chat messages to the contract's.

Pure. Owns the shape of one message. Parts of type text are joined with nothing between them. The role "developer",
OpenAI's newer name, becomes "system". What a message can hold beside text is refused by name.
"""

import json
from collections.abc import Mapping
from typing import Final

from services.errors import InvalidArgument, Unimplemented
from services.gateway import fields
from services.gateway.json_body import JsonObject, JsonValue, shown
from tercet.v1 import tokenizer_pb2

ROLES: Final[Mapping[str, str]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
UNSERVED_ROLES: Final = frozenset({"function"})
UNSERVED_KEYS: Final = frozenset({"function_call", "audio", "refusal", "reasoning_content"})
MAX_CALLS: Final = 128
MAX_NAME_BYTES: Final = 256


def read_messages(name: str, value: JsonValue) -> list[tokenizer_pb2.ChatMessage]:
    """At least one message. Raises InvalidArgument or Unimplemented naming the place, such as messages[0].role."""
    return [_message(f"{name}[{i}]", item) for i, item in enumerate(fields.array(name, value, 1))]


def _message(name: str, value: JsonValue) -> tokenizer_pb2.ChatMessage:
    given = fields.mapping(name, value)
    for key, part in given.items():
        path = f"{name}.{fields.printable(key)}"
        if key in UNSERVED_KEYS:
            if part not in (None, []):
                raise _unsupported(path, "this part of a message")
        elif key not in ("role", "content", "name", "tool_calls", "tool_call_id"):
            raise InvalidArgument(f"unknown parameter {path}", reason="UNKNOWN_PARAMETER", field=path)
    role = _role(f"{name}.role", given.get("role"))
    calls = given.get("tool_calls") or None
    message = tokenizer_pb2.ChatMessage(role=role)
    if calls is None or given.get("content") is not None:
        message.content = _content(f"{name}.content", given.get("content"))
    if calls is not None:
        if role != "assistant":
            raise fields.invalid(f"{name}.tool_calls", "absent but in a message of the assistant")
        message.tool_calls_json = _tool_calls(f"{name}.tool_calls", calls)
    if role == "tool":
        message.tool_call_id = fields.text(f"{name}.tool_call_id", given.get("tool_call_id"), MAX_NAME_BYTES)
    elif given.get("tool_call_id") is not None:
        raise fields.invalid(f"{name}.tool_call_id", "absent but in a message of a tool")
    if given.get("name") is not None:
        message.name = fields.text(f"{name}.name", given["name"], MAX_NAME_BYTES, empty=False)
    return message


def _tool_calls(path: str, value: JsonValue) -> str:
    """As templates read them: the arguments an object, where the string holds one."""
    calls: list[JsonValue] = []
    for index, item in enumerate(fields.array(path, value, 1, MAX_CALLS)):
        place = f"{path}[{index}]"
        call = fields.mapping(place, item)
        if call.get("type", "function") != "function":
            raise _unsupported(f"{place}.type", "a call of this type")
        function = fields.mapping(f"{place}.function", call.get("function"))
        written = fields.text(f"{place}.function.arguments", function.get("arguments"))
        called: JsonObject = {
            "name": fields.text(f"{place}.function.name", function.get("name"), MAX_NAME_BYTES, empty=False),
            "arguments": _arguments(written),
        }
        identity = fields.text(f"{place}.id", call.get("id"), MAX_NAME_BYTES)
        calls.append({"id": identity, "type": "function", "function": called})
    return json.dumps(calls, ensure_ascii=False)


def _arguments(written: str) -> JsonValue:
    try:
        value: JsonValue = json.loads(written)
    except (ValueError, RecursionError):
        return written
    return value if isinstance(value, dict) else written


def _role(path: str, value: JsonValue) -> str:
    role = fields.text(path, value)
    if role in UNSERVED_ROLES:
        raise _unsupported(path, f"the role {shown(role)}")
    if role not in ROLES:
        raise fields.invalid(path, f"one of {', '.join(ROLES)}, not {shown(role)}")
    return ROLES[role]


def _content(path: str, value: JsonValue) -> str:
    if not isinstance(value, list):
        return fields.text(path, value)
    return "".join(_part(f"{path}[{i}]", part) for i, part in enumerate(fields.array(path, value, 1)))


def _part(path: str, value: JsonValue) -> str:
    part = fields.mapping(path, value)
    kind = fields.text(f"{path}.type", part.get("type"))
    if kind != "text":
        raise _unsupported(f"{path}.type", f"a part of type {shown(kind)}")
    for key in part:
        if key not in ("type", "text"):
            unknown = f"{path}.{fields.printable(key)}"
            raise InvalidArgument(f"unknown parameter {unknown}", reason="UNKNOWN_PARAMETER", field=unknown)
    return fields.text(f"{path}.text", part.get("text"))


def _unsupported(path: str, what: str) -> Unimplemented:
    return Unimplemented(f"{path}: {what} is not supported", reason="UNSUPPORTED_PARAMETER", field=path)
