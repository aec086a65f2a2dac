"""What is measured: an interface that both kinds of server are reached through."""

from dataclasses import dataclass
from typing import Protocol

from services.bench.record import Reply


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """kind: which server it is, as far as it tells. max_model_len: tokens of prompt and output; None: untold.
    exact: it is asked not to end before the wanted number of tokens, and another number is a failure."""

    kind: str
    model: str
    max_model_len: int | None
    exact: bool


@dataclass(frozen=True, slots=True)
class Drawing:
    """How tokens are drawn: equal for every request."""

    temperature: float
    seed: int


class TargetError(Exception):
    """The server can't be measured; the message says why."""


class Target(Protocol):
    """One server. `describe` comes first."""

    async def describe(self) -> ServerFacts:
        """Raises TargetError."""

    async def count(self, text: str) -> int:
        """Tokens of a prompt, with what the server puts around it. Raises TargetError."""

    async def ask(self, text: str, output: int, timeout_s: float) -> Reply:
        """One request to its end. Whatever goes wrong is in the reply."""

    async def close(self) -> None: ...
