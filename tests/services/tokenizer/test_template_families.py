"""Chat templates in the shapes of the families that people run, each a short one of our own, with prompts worked out by
hand: BOS is there once or not at all, and no control token comes out of what a request says."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pytest

from services.tokenizer.invalid import InvalidText
from services.tokenizer.templates import ChatMessage, ChatTemplate, RenderedChat, TemplateLimits

NOW = datetime(2024, 7, 26)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
WEATHER_JSON = '{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}'
CALL = {"id": "call12345", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}


@dataclass(frozen=True)
class Family:
    """bos, eos: what the template is given for them."""

    source: str
    control: tuple[str, ...]
    bos: str
    eos: str
    has_system: bool = True

    def render(self, messages: Sequence[ChatMessage], **more: Any) -> RenderedChat:
        template = ChatTemplate(
            self.source, control_tokens=self.control, bos_token=self.bos, eos_token=self.eos, limits=TemplateLimits()
        )
        return template.render_chat(messages, now=NOW, **more)


LLAMA3 = Family(
    """{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now("%d %b %Y") %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Date: " + date_string + "\\n" + system + "<|eot_id|>" }}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + m.content | tojson + "<|eot_id|>" }}
    {%- elif m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}{{- raise_exception("one call at a time") }}{% endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson + "}<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}""",
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "<|begin_of_text|>",
    "<|eot_id|>",
)

CHATML = Family(
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}{% if m['role'] == 'assistant' %}"
    "<|im_start|>assistant\n{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}\n{% else %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    "<|endoftext|>",
    "<|im_end|>",
)

QWEN3 = Family(
    """{%- macro said(role, text) -%}<|im_start|>{{ role }}\n{{ text }}<|im_end|>{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
    {{- '<tools>' }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{% endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- said('system', messages[0].content) + '\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages[::-1] %}
    {%- set index = messages | length - 1 - loop.index0 %}
    {%- if m.role == 'user' %}{% set ns.last = index %}{% break %}{% endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'system' and loop.first %}{% continue %}{% endif %}
    {%- if m.role == 'assistant' %}
        {%- set content = m.content if m.content is string else '' %}
        {%- if '</think>' in content and loop.index0 < ns.last %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' + content }}
        {%- for call in m.tool_calls or [] %}
            {%- if not loop.first or content %}{{- '\\n' }}{% endif %}
            {{- '<tool_call>\\n{"name": "' }}{{- call.function.name }}{{- '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
    {%- else %}
        {{- said(m.role, m.content) + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}""",
    ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    "",
    "<|im_end|>",
)

MISTRAL = Family(
    """{%- if messages[0]["role"] == "system" %}
    {%- set system = messages[0]["content"] %}{% set rest = messages[1:] %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{%- set users = rest | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for m in rest %}
    {%- if m.role == "user" %}
        {%- if tools is not none and m == users[-1] %}{{- "[AVAILABLE_TOOLS]" + tools | tojson + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST]" + (system + "\\n\\n" if loop.last and system is defined else "") + m.content + "[/INST]" }}
    {%- elif m.tool_calls is defined %}
        {{- "[TOOL_CALLS][" }}
        {%- for call in m.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception("ids have 9 characters") }}{% endif %}
            {%- set out = call.function | tojson %}
            {{- out[:-1] + ', "id": "' + call.id + '"}' + (", " if not loop.last else "]" + eos_token) }}
        {%- endfor %}
    {%- elif m.role == "tool" %}
        {{- '[TOOL_RESULTS]{"content": ' + m.content | tojson }}
        {{- ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- elif m.role == "assistant" %}
        {{- m.content + eos_token }}
    {%- else %}
        {{- raise_exception("only user, assistant and tool may follow") }}
    {%- endif %}
{%- endfor %}""",
    (
        *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    ),
    "<s>",
    "</s>",
)

GEMMA = Family(
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if (m['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = m['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
    ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    "<bos>",
    "<eos>",
    has_system=False,
)

DEEPSEEK_R1 = Family(
    "{% set ns = namespace(system='', is_first=true) %}{% for m in messages %}{% if m['role'] == 'system' %}"
    "{% if ns.is_first %}{% set ns.system = ns.system + m['content'] %}{% set ns.is_first = false %}"
    "{% else %}{% set ns.system = ns.system + '\n\n' + m['content'] %}{% endif %}{% endif %}{% endfor %}"
    "{{ bos_token }}{{ ns.system }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '<｜User｜>' + m['content'] }}{% elif m['role'] == 'assistant' %}{% set content = m['content'] %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}",
    ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
)

FAMILIES = {
    "llama3": LLAMA3,
    "chatml": CHATML,
    "qwen3": QWEN3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "deepseek-r1": DEEPSEEK_R1,
}
SYSTEM = ChatMessage("system", "Be brief.")
USER = ChatMessage("user", "Hi ")
THOUGHT = ChatMessage("assistant", "<think>\nhm\n</think>\n\nHello")
AGAIN = ChatMessage("user", "Bye")
TOOLS_USED = [
    ChatMessage("user", "Oslo?"),
    ChatMessage("assistant", None, tool_calls=(CALL,)),
    ChatMessage("tool", "rain", tool_call_id="call12345"),
]


@pytest.mark.parametrize(
    ("family", "messages", "more", "prompt"),
    [
        (
            "llama3",
            [SYSTEM, USER],
            {},
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nDate: 26 Jul 2024\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            "llama3",
            TOOLS_USED,
            {"add_generation_prompt": False, "variables": {"date_string": "today"}},
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nDate: today\n<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nOslo?<|eot_id|><|start_header_id|>assistant<|end_header_id|>"
            '\n\n{"name": "weather", "parameters": {"city": "Oslo"}}<|eot_id|>'
            '<|start_header_id|>ipython<|end_header_id|>\n\n"rain"<|eot_id|>',
        ),
        (
            "chatml",
            [USER, ChatMessage("assistant", "Hello"), AGAIN],
            {},
            "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi <|im_end|>\n"
            "<|im_start|>assistant\nHello<|im_end|><|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "qwen3",
            [SYSTEM, USER, THOUGHT, AGAIN],
            {"variables": {"enable_thinking": False}},
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <|im_end|>\n"
            "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n",
        ),
        (
            "qwen3",
            [SYSTEM, *TOOLS_USED, ChatMessage("tool", "wind", tool_call_id="x")],
            {"tools": [WEATHER]},
            f"<|im_start|>system\nBe brief.\n\n<tools>\n{WEATHER_JSON}\n</tools><|im_end|>\n"
            "<|im_start|>user\nOslo?<|im_end|>\n"
            '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
            "<|im_end|>\n<|im_start|>user\n<tool_response>\nrain\n</tool_response>"
            "\n<tool_response>\nwind\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "mistral",
            [SYSTEM, USER, ChatMessage("assistant", "Hello"), AGAIN],
            {},
            "<s>[INST]Hi [/INST]Hello</s>[INST]Be brief.\n\nBye[/INST]",
        ),
        (
            "mistral",
            TOOLS_USED,
            {"tools": [WEATHER]},
            f"<s>[AVAILABLE_TOOLS][{WEATHER_JSON}][/AVAILABLE_TOOLS][INST]Oslo?[/INST]"
            '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}, "id": "call12345"}]</s>'
            '[TOOL_RESULTS]{"content": "rain", "call_id": "call12345"}[/TOOL_RESULTS]',
        ),
        (
            "gemma",
            [USER, ChatMessage("assistant", " Hello"), AGAIN],
            {},
            "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
            "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n",
        ),
        (
            "deepseek-r1",
            [SYSTEM, ChatMessage("system", "Be kind."), USER, THOUGHT, AGAIN],
            {},
            "<｜begin▁of▁sentence｜>Be brief.\n\nBe kind.<｜User｜>Hi <｜Assistant｜>\n\nHello<｜end▁of▁sentence｜>"
            "<｜User｜>Bye<｜Assistant｜><think>\n",
        ),
    ],
)
def test_prompts_by_hand(family: str, messages: list[ChatMessage], more: dict[str, Any], prompt: str) -> None:
    chosen = FAMILIES[family]
    rendered = chosen.render(messages, **more)
    assert rendered.text == prompt
    control = [one.text for one in rendered.segments if one.is_control_allowed]
    assert control.count(chosen.bos) == (1 if chosen.bos and prompt.startswith(chosen.bos) else 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_request_says_stays_text(family: str) -> None:
    chosen = FAMILIES[family]
    forged = "".join(chosen.control)
    call = {"id": "call12345", "type": "function", "function": {"name": "f" + forged, "arguments": {forged: forged}}}

    def chat(text: str, calls: dict[str, Any]) -> list[ChatMessage]:
        head = [ChatMessage("system", text)] if chosen.has_system else []
        if family in ("gemma", "chatml", "deepseek-r1"):  # their templates know no tools
            return [*head, ChatMessage("user", text), ChatMessage("assistant", text), ChatMessage("user", text)]
        tool = ChatMessage("tool", text, tool_call_id=text[:40] or "1")
        return [*head, ChatMessage("user", text), ChatMessage("assistant", None, tool_calls=(calls,)), tool]

    def scaffold(rendered: RenderedChat) -> list[str]:
        return [one.text for one in rendered.segments if one.is_control_allowed]

    benign = chosen.render(chat("hello", CALL), tools=[WEATHER])
    rendered = chosen.render(chat(forged, call), tools=[{"name": forged, "about": [forged]}])
    assert scaffold(rendered) == scaffold(benign)
    assert rendered.text.count(chosen.control[0]) > scaffold(rendered).count(chosen.control[0])


@pytest.mark.parametrize(
    ("family", "messages", "said"),
    [
        ("gemma", [SYSTEM, USER], "no system role"),
        ("gemma", [USER, AGAIN], "roles must alternate"),
        ("llama3", [USER, ChatMessage("assistant", None, tool_calls=(CALL, CALL))], "one call at a time"),
        ("mistral", [USER, SYSTEM], "only user, assistant and tool may follow"),
        ("mistral", [USER, ChatMessage("assistant", None, tool_calls=({"id": "1"},))], "ids have 9 characters"),
    ],
)
def test_a_family_refuses_in_its_own_words(family: str, messages: list[ChatMessage], said: str) -> None:
    with pytest.raises(InvalidText, match=said):
        FAMILIES[family].render(messages)
