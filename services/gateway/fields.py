"""One JSON value to one typed value, or a refusal that names the parameter.

Pure. Owns types and ranges, not which parameters exist. Every function takes the parameter's name as the caller
wrote it (`messages[2].content`) and raises InvalidArgument with it as `field`. A boolean is never a number, and a
number with a fraction part or exponent is never an integer.
"""

import math
import struct

from services.errors import InvalidArgument
from services.gateway.json_body import JsonObject, JsonValue, shown

UINT32_MAX = 2**32 - 1
UINT64_MAX = 2**64 - 1


def invalid(name: str, rule: str, limit: object | None = None) -> InvalidArgument:
    """`rule` completes a sentence: must be ..."""
    return InvalidArgument(f"{name} must be {rule}", reason="INVALID_VALUE", field=name, limit=limit)


def boolean(name: str, value: JsonValue) -> bool:
    if not isinstance(value, bool):
        raise invalid(name, f"true or false, not {kind(value)}")
    return value


def integer(name: str, value: JsonValue, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid(name, f"an integer, not {kind(value)}")
    if not low <= value <= high:
        raise invalid(name, f"from {low} to {high}, not {value}", limit=high if value > high else low)
    return value


def single(name: str, value: JsonValue, low: float, high: float, *, above_low: bool = False) -> float:
    """A finite number within the range after rounding to binary32, which is what travels."""
    number = _number(name, value)
    try:
        (rounded,) = struct.unpack("f", struct.pack("f", number))
    except OverflowError:
        rounded = float("inf") if number > 0 else float("-inf")
    inside = low < rounded <= high if above_low else low <= rounded <= high
    if not inside:
        bounds = f"above {low:g} and at most {high:g}" if above_low else f"from {low:g} to {high:g}"
        raise invalid(name, f"{bounds}, not {number:g}", limit=f"{high if number > high else low:g}")
    return float(rounded)


def nanoseconds(name: str, value: JsonValue, high_s: float) -> int:
    """Seconds, as a number, to whole nanoseconds, at least one."""
    seconds = _number(name, value)
    if not 1e-9 <= seconds <= high_s:
        raise invalid(name, f"above 0 and at most {high_s:g} seconds, not {seconds:g}", limit=f"{high_s:g}")
    return round(seconds * 1e9)


def _number(name: str, value: JsonValue) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise invalid(name, f"a number, not {kind(value)}")
    number = float(value)  # at most 40 digits: no overflow
    if not math.isfinite(number):
        raise invalid(name, "a finite number")
    return number


def text(name: str, value: JsonValue, max_bytes: int | None = None, *, empty: bool = True) -> str:
    """A string of Unicode scalar values, which is what UTF-8 can carry."""
    if not isinstance(value, str):
        raise invalid(name, f"a string, not {kind(value)}")
    try:
        size = len(value.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise invalid(name, f"valid Unicode: the surrogate at character {error.start} stands alone") from None
    if max_bytes is not None and size > max_bytes:
        raise invalid(name, f"at most {max_bytes} bytes of UTF-8, not {size}", limit=max_bytes)
    if not empty and size == 0:
        raise invalid(name, "a string that is not empty")
    return value


def array(name: str, value: JsonValue, low: int, high: int | None = None) -> list[JsonValue]:
    if not isinstance(value, list):
        raise invalid(name, f"a list, not {kind(value)}")
    if len(value) < low:
        raise invalid(name, f"a list of at least {low}", limit=low)
    if high is not None and len(value) > high:
        raise invalid(name, f"a list of at most {high}, not {len(value)}", limit=high)
    return value


def mapping(name: str, value: JsonValue) -> JsonObject:
    if not isinstance(value, dict):
        raise invalid(name, f"an object, not {kind(value)}")
    return value


def token_ids(name: str, value: JsonValue, low: int, high: int | None = None) -> list[int]:
    return [integer(f"{name}[{i}]", item, 0, UINT32_MAX) for i, item in enumerate(array(name, value, low, high))]


def printable(key: str) -> str:
    """A key of the caller's as it can stand in a message: printable ASCII, at most 64 characters."""
    return shown(key)[1:-1]


def kind(value: JsonValue) -> str:
    """The JSON type, in words."""
    for python_type, word in _KINDS:
        if isinstance(value, python_type):
            return word
    return "null"


_KINDS = ((bool, "a boolean"), ((int, float), "a number"), (str, "a string"), (list, "a list"), (dict, "an object"))
