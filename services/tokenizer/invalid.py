"""The domain errors of the text edge: a wrong request, a wrong model file, a template that fails.

Owns only these types, so that every pure module raises the same ones. Invariant: the message starts with
the name of the field at fault and never holds more than `MAX_PROBLEM_CHARS` characters of explanation.
"""

MAX_PROBLEM_CHARS = 512


class InvalidField(ValueError):
    """Base: `field` names what is wrong, `problem` says why and gives the limit."""

    def __init__(self, field: str, problem: str) -> None:
        if len(problem) > MAX_PROBLEM_CHARS:
            problem = problem[: MAX_PROBLEM_CHARS - 1] + "…"
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class InvalidText(InvalidField):
    """A request's text, messages, stop strings or token ids cannot be accepted."""


class InvalidTokenizer(InvalidField):
    """The model file's tokenizer or chat template is malformed or of a kind that is not supported."""


class TemplateFailure(InvalidField):
    """The model's chat template failed on this request, or went beyond a limit."""


def require_scalar_values(field: str, text: str) -> None:
    """Refuse a lone surrogate: such a `str` is no Unicode text and has no UTF-8 form.

    Raises:
        InvalidText: names the field and the position.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidText(field, f"character {error.start} is a lone surrogate") from None
