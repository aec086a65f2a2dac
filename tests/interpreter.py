"""Triton's interpreter, without what makes it slow for kernels made of many small functions."""

from typing import Any

from triton.runtime.interpreter import InterpretedFunction


def call_directly() -> None:
    """A call of one decorated function by another replaces all of the language's functions anew, which takes 1 ms. For
    ours the kernel around it has done so already; Triton's own see the language under other names."""
    usual = InterpretedFunction.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__.startswith("kernels."):
            return self.rewrite()(*args, **kwargs)
        return usual(self, *args, **kwargs)

    InterpretedFunction.__call__ = call
