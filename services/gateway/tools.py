"""OpenAI's `tools`, `tool_choice` and `parallel_tool_calls` to what the engine is asked and how its answer is read.

Pure. Owns these parameters' shapes. Invariant: where the caller demands a call, a grammar holds, so that the arguments
are of the tool's schema; a model whose form of calls is not known is not asked for any.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Final, Literal

from services.errors import InvalidArgument, Unimplemented
from services.gateway import fields
from services.gateway.json_body import JsonObject, JsonValue, shown
from services.gateway.speech import TOOL_FORMATS, ToolFormat, calls_grammar
from tercet.v1 import common_pb2, tokenizer_pb2

MAX_TOOLS: Final = 128
NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
Choice = Literal["auto", "none", "required"]


@dataclass(slots=True)
class ToolUse:
    """schemas: of the arguments, by name. named: the one tool that must be called."""

    schemas: dict[str, JsonObject] = field(default_factory=dict)
    tools_json: list[str] = field(default_factory=list)
    choice: Choice | None = None
    named: str | None = None
    parallel: bool = True

    @property
    def offered(self) -> bool:
        return bool(self.schemas) and self.choice != "none"

    @property
    def demanded(self) -> bool:
        return self.choice == "required"

    def check(self) -> None:
        """Once all parameters are read."""
        if self.choice in ("auto", "required") and not self.schemas:
            raise fields.invalid("tool_choice", '"none" or absent where there are no tools')
        if self.named is not None and self.named not in self.schemas:
            raise fields.invalid("tool_choice.function.name", f"a tool's name; {shown(self.named)} is none")

    def format(self, name: str) -> ToolFormat:
        """name: as the engine describes it. Raises Unimplemented where there is none."""
        form = TOOL_FORMATS.get(name)
        if form is None:
            raise Unimplemented(
                "tools: how this model writes calls is not known (--tool-format says it)",
                reason="UNSUPPORTED_PARAMETER",
                field="tools",
            )
        return form

    def apply(self, request: tokenizer_pb2.TokenizerServiceGenerateRequest, form: ToolFormat) -> None:
        """Asks the engine for it."""
        request.chat.tools_json.extend(self.tools_json)
        if self.demanded:
            wanted = self.schemas if self.named is None else {self.named: self.schemas[self.named]}
            source = calls_grammar(form, wanted, parallel=self.parallel and self.named is None)
            request.sampling.grammar.CopyFrom(common_pb2.Grammar(kind=common_pb2.GRAMMAR_KIND_EBNF, source=source))
        elif form.control:
            request.keep_special_tokens = True


def read_tools(use: ToolUse, name: str, value: JsonValue) -> None:
    for index, item in enumerate(fields.array(name, value, 0, MAX_TOOLS)):
        _tool(use, f"{name}[{index}]", fields.mapping(f"{name}[{index}]", item))


def _tool(use: ToolUse, path: str, tool: JsonObject) -> None:
    kind = fields.text(f"{path}.type", tool.get("type"))
    if kind != "function":
        raise Unimplemented(
            f"{path}.type: a tool of type {shown(kind)} is not supported",
            reason="UNSUPPORTED_PARAMETER",
            field=f"{path}.type",
        )
    function = fields.mapping(f"{path}.function", tool.get("function"))
    for key in tool.keys() - {"type", "function"}:
        raise _unknown(f"{path}.{fields.printable(key)}")
    for key in function.keys() - {"name", "description", "parameters", "strict"}:
        raise _unknown(f"{path}.function.{fields.printable(key)}")
    name = fields.text(f"{path}.function.name", function.get("name"))
    if NAME.fullmatch(name) is None:
        raise fields.invalid(f"{path}.function.name", "1 to 64 of A-Z a-z 0-9 _ -", limit=64)
    if name in use.schemas:
        raise fields.invalid(f"{path}.function.name", f"another than before: {shown(name)} comes twice")
    if function.get("description") is not None:
        fields.text(f"{path}.function.description", function["description"])
    if function.get("strict") is not None:
        fields.boolean(f"{path}.function.strict", function["strict"])
    parameters = function.get("parameters")
    none: JsonObject = {"type": "object", "properties": {}}
    use.schemas[name] = none if parameters is None else fields.mapping(f"{path}.function.parameters", parameters)
    use.tools_json.append(json.dumps(tool, ensure_ascii=False))


def read_tool_choice(use: ToolUse, name: str, value: JsonValue) -> None:
    if isinstance(value, str):
        if value not in ("auto", "none", "required"):
            raise fields.invalid(name, f'"auto", "none", "required" or an object, not {shown(value)}')
        use.choice = value  # type: ignore[assignment]
        return
    given = fields.mapping(name, value)
    if given.get("type") != "function":
        raise fields.invalid(f"{name}.type", '"function"')
    function = fields.mapping(f"{name}.function", given.get("function"))
    use.choice, use.named = "required", fields.text(f"{name}.function.name", function.get("name"), empty=False)


def read_parallel(use: ToolUse, name: str, value: JsonValue) -> None:
    use.parallel = fields.boolean(name, value)


def _unknown(path: str) -> InvalidArgument:
    return InvalidArgument(f"unknown parameter {path}", reason="UNKNOWN_PARAMETER", field=path)
