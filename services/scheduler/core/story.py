"""The last calls of an object's verbs, told when one of its invariants breaks. Knows nothing of what they do."""

from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, Final, ParamSpec, TypeVar

from services.scheduler.core.calls import InvariantError

LENGTH: Final = 64  # calls kept

_P = ParamSpec("_P")
_R = TypeVar("_R")
_S = TypeVar("_S", bound="Storied")


# What hears of every call: verb, arguments, options, and the answer or the exception.
Listener = Callable[[str, tuple[object, ...], dict[str, object], object], None]


class Storied:
    def __init__(self) -> None:
        self.listener: Listener | None = None
        self._story: deque[tuple[str, tuple[object, ...], dict[str, object]]] = deque(maxlen=LENGTH)

    def story(self) -> tuple[str, ...]:
        """The last calls, oldest first."""
        return tuple(
            f"{verb}({', '.join([*map(repr, args), *(f'{name}={value!r}' for name, value in kwargs.items())])})"
            for verb, args, kwargs in self._story
        )


def told(verb: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
    """Keeps the call for the story, and puts the story into an InvariantError on its way out."""

    @wraps(verb)
    def call(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        self._story.append((verb.__name__, args, kwargs))
        try:
            answer = verb(self, *args, **kwargs)
        except InvariantError as error:
            error.story = self.story()
            raise
        except Exception as refusal:
            if self.listener is not None:
                self.listener(verb.__name__, args, kwargs, refusal)
            raise
        if self.listener is not None:
            self.listener(verb.__name__, args, kwargs, answer)
        return answer

    return call
