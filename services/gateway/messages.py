"""OpenAI's chat messages to the contract's.

Pure. Owns the shape of one message. Parts of type text are joined with nothing between them. The role "developer",
OpenAI's newer name, becomes "system". What a message can hold beside text is refused by name.
"""

from collections.abc import Mapping
from typing import Final

from services.errors import InvalidArgument, Unimplemented
from services.gateway import fields
from services.gateway.json_body import JsonValue, shown
from tercet.v1 import tokenizer_pb2

ROLES: Final[Mapping[str, str]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
UNSERVED_ROLES: Final = frozenset({"tool", "function"})
UNSERVED_KEYS: Final = frozenset(
    {"tool_calls", "tool_call_id", "function_call", "audio", "refusal", "reasoning_content"}
)
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
        elif key not in ("role", "content", "name"):
            raise InvalidArgument(f"unknown parameter {path}", reason="UNKNOWN_PARAMETER", field=path)
    role = _role(f"{name}.role", given.get("role"))
    message = tokenizer_pb2.ChatMessage(role=role, content=_content(f"{name}.content", given.get("content")))
    if given.get("name") is not None:
        message.name = fields.text(f"{name}.name", given["name"], MAX_NAME_BYTES, empty=False)
    return message


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
