"""Which compiled form of a kernel a launch takes, and whether it was there before.

Owns: the count of forms. Must not know: what the compiler makes of one.
Triton compiles a kernel anew for other types, constants, and integers that are 1 or multiples of 16 where they were
not; so a launch after `seal` that has a form of its own is one that would stop a server to compile.
"""

import logging
from collections.abc import Callable
from typing import Any, Final

import torch
import triton.language as tl

from kernels.gpu.launch import Launch

Form = tuple[object, ...]
# Numbers of rows: 1 and multiples of 16 are told apart by the compiler, up to 16, up to 64 and more by the tiles.
SIZE_CLASSES: Final = (1, 2, 16, 17, 32, 65, 80)
log = logging.getLogger(__name__)


class UnpreparedError(RuntimeError):
    """A launch whose form was not compiled ahead: the message names the kernel and what is new."""


def form(launch: Launch) -> Form:
    """Equal for two launches that share their compiled code."""
    annotated = launch.kernel.fn.__annotations__  # also of a function that is interpreted
    constant = {name for name, kind in annotated.items() if kind is tl.constexpr}
    arguments = tuple(
        (name, str(value) if name in constant else _kind(value)) for name, value in sorted(launch.arguments.items())
    )
    return (launch.kernel.__name__, arguments, launch.warps, launch.stages, launch.fused)


class Variants:
    """A `Target.launch` that counts forms on their way to another one. refuse: whether new ones raise once sealed;
    they are counted as late in any case."""

    def __init__(self, launch: Callable[[Launch], None], *, refuse: bool = False) -> None:
        self._launch = launch
        self._refuse = refuse
        self._forms: set[Form] = set()
        self._sealed = False
        self.late: list[str] = []

    def __call__(self, launch: Launch) -> None:
        own = form(launch)
        if own not in self._forms:
            if self._sealed:
                self.late.append(launch.kernel.__name__)
                log.warning("%s is compiled late: %s", launch.kernel.__name__, _news(own, self._forms))
                if self._refuse:
                    raise UnpreparedError(f"{launch.kernel.__name__} would be compiled now: {_news(own, self._forms)}")
            self._forms.add(own)
        self._launch(launch)

    @property
    def compiled(self) -> int:
        return len(self._forms)

    def seal(self) -> None:
        """From here on nothing should be compiled."""
        self._sealed = True

    def unseal(self) -> None:
        """Another model is being prepared."""
        self._sealed = False


def _kind(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.device.type == "meta" or value.data_ptr() % 16 == 0
    if isinstance(value, int) and not isinstance(value, bool):
        return "one" if value == 1 else ("int64" if abs(value) >= 2**31 else "int32", value % 16 == 0)
    return type(value).__name__


def _news(own: Form, others: set[Form]) -> str:
    """The arguments in which it differs from the nearest form of the same kernel."""
    mine = dict(own[1])  # type: ignore[call-overload]
    near: dict[str, object] | None = None
    for other in others:
        if other[0] != own[0]:
            continue
        differing = {name: mine[name] for name, value in dict(other[1]).items() if mine[name] != value}  # type: ignore[call-overload]
        if near is None or len(differing) < len(near):
            near = differing
    return "the kernel was not launched before" if near is None else ", ".join(f"{k} {v}" for k, v in near.items())
