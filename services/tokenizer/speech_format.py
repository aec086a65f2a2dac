"""In which form a model writes calls of tools and its reasoning, told from its chat template. Pure."""

from typing import Final

from services.gateway.speech import REASONING_FORMATS
from services.tokenizer.templates import ChatTemplate

AUTO: Final = "auto"
NONE: Final = "none"
_TOOL_MARKS: Final = (("<tool_call>", "hermes"), ("[TOOL_CALLS]", "mistral"), ("<|python_tag|>", "llama3"))


def tool_format(setting: str, template: ChatTemplate | None) -> str:
    """A key of `TOOL_FORMATS`, or "" where the model knows no tools."""
    if setting != AUTO:
        return "" if setting == NONE else setting
    source = "" if template is None else template.source
    if "tools" not in source:
        return ""
    return next((name for mark, name in _TOOL_MARKS if mark in source), "llama3" if "ipython" in source else "")


def reasoning_format(setting: str, template: ChatTemplate | None, sample: str | None) -> str:
    """A key of `REASONING_FORMATS`, or "" where the model writes none. sample: what the template writes for one short
    message."""
    if setting != AUTO:
        return "" if setting == NONE else setting
    form = REASONING_FORMATS["think"]
    if template is None or form.end not in template.source:
        return ""
    if sample is None:  # it wants more than one message; what it writes before an answer stays unknown
        return "think"
    return "think-open" if sample.rstrip().endswith(form.begin) else "think"
