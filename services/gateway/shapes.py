"""The JSON that OpenAI's clients read, as types. Nothing but shapes.

`finish_reason` has one value beyond OpenAI's: "time_limit", when a time limit passed after the first token.
`system_fingerprint` is the hash under which tokens are drawn: equal seeds give equal answers where it is equal.
"""

from typing import Literal, NotRequired, TypedDict

FinishReason = Literal["stop", "length", "time_limit", "tool_calls"]


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[PromptTokensDetails]


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CalledFunction(TypedDict):
    """arguments: JSON."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class CalledFunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """The first of a call has its id, type and name; further ones more of the arguments."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CalledFunctionDelta


class Message(TypedDict):
    """content: None where the answer is calls alone. reasoning_content: not OpenAI's own, but what its clients read."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class Delta(TypedDict, total=False):
    role: Literal["assistant"]
    content: str
    reasoning_content: str
    tool_calls: list[ToolCallDelta]


class ChatChoice(TypedDict):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatChunkChoice(TypedDict):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


Choice = ChatChoice | ChatChunkChoice | CompletionChoice


class Reply(TypedDict):
    """A whole answer, or one chunk of it. usage: absent from chunks unless asked for; null but in the last."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk", "text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[Choice]
    usage: NotRequired[Usage | None]


class Model(TypedDict):
    """max_model_len: tokens; absent while no executor has told it."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: NotRequired[int]


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[Model]


class Error(TypedDict):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(TypedDict):
    error: Error
