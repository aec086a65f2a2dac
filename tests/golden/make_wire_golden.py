"""Writes `wire_v1.json`: every message of the released contract, each field filled, as bytes and as what they mean.

Entries that are there already are never rewritten: what was released stays readable. Run it after a message was added,
from the root of the repository: `.venv/bin/python tests/golden/make_wire_golden.py`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from tercet.v1 import common_pb2, executor_pb2, scheduler_pb2, tokenizer_pb2

GOLDEN = Path(__file__).parent / "wire_v1.json"
MODULES = (common_pb2, tokenizer_pb2, scheduler_pb2, executor_pb2)


def descriptors() -> Iterator[Descriptor]:
    for module in MODULES:
        yield from module.DESCRIPTOR.message_types_by_name.values()


def samples(kind: Descriptor) -> dict[str, Message]:
    """One message with everything in it; where there are choices, one for each, by its name."""
    choices = [one for group in kind.oneofs for one in group.fields if len(group.fields) > 1]
    return {one.name: _filled(kind, one) for one in choices} or {"": _filled(kind, None)}


def meaning(message: Message) -> dict[str, Any]:
    """Names and values, without numbers: what must stay the same whatever happens to the contract."""
    found: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True)
    return found


def _filled(kind: Descriptor, choice: FieldDescriptor | None) -> Message:
    message = GetMessageClass(kind)()
    for field in kind.fields:
        group = field.containing_oneof
        if group is not None and len(group.fields) > 1 and field is not choice:
            continue
        if field.message_type is not None:
            inner = _filled(field.message_type, _first_choice(field.message_type))
            if field.is_repeated:
                getattr(message, field.name).extend([inner, inner])
            else:
                getattr(message, field.name).CopyFrom(inner)
        elif field.is_repeated:
            getattr(message, field.name).extend([_value(field, 0), _value(field, 1)])
        else:
            setattr(message, field.name, _value(field, 0))
    return message


def _first_choice(kind: Descriptor) -> FieldDescriptor | None:
    return next((group.fields[0] for group in kind.oneofs if len(group.fields) > 1), None)


def _value(field: FieldDescriptor, more: int) -> Any:
    """Differs from field to field, so that two that change places show."""
    number = 100 * field.number + more
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            text = f"{field.name}-{more}"
            return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
        case FieldDescriptor.CPPTYPE_BOOL:
            return True
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return number / 8
        case FieldDescriptor.CPPTYPE_ENUM:
            return field.enum_type.values[1 + more % (len(field.enum_type.values) - 1)].number
        case FieldDescriptor.CPPTYPE_UINT64:
            return number + 2**60
        case _:
            return number


def main() -> None:
    kept: dict[str, Any] = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    for kind in descriptors():
        for name, message in samples(kind).items():
            key = f"{kind.full_name}/{name}" if name else kind.full_name
            entry = {"bytes": message.SerializeToString(deterministic=True).hex(), "means": meaning(message)}
            kept.setdefault(key, entry)
    lines = [f" {json.dumps(key)}: {json.dumps(kept[key], sort_keys=True)}" for key in sorted(kept)]
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
