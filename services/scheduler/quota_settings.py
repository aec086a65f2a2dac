"""Quotas of tenants as text, for flags: `NAME=requests:60+tokens:100000+concurrency:4+weight:2`.

NAME `*` is all others. Knows the notation only; limits of the numbers are those of TenantQuota.
"""

from collections.abc import Sequence

from services.errors import InvalidArgument
from services.scheduler.core.limits import TenantQuota

_FIELDS = {
    "concurrency": "concurrency",
    "requests": "requests_per_minute",
    "tokens": "tokens_per_minute",
    "weight": "weight",
}
OTHERS = "*"


def parse_quota(text: str) -> tuple[str, TenantQuota]:
    """Raises InvalidArgument."""
    name, equals, rest = text.partition("=")
    if not name or not equals:
        raise InvalidArgument(f"{text!r} must be NAME=KEY:NUMBER+..., with keys {', '.join(_FIELDS)}")
    values: dict[str, float] = {}
    for part in rest.split("+"):
        key, _, number = part.partition(":")
        if key not in _FIELDS or _FIELDS[key] in values:
            raise InvalidArgument(f"{part!r} of {text!r} must be one of {', '.join(_FIELDS)}, once, with a number")
        try:
            values[_FIELDS[key]] = float(number) if key == "weight" else int(number)
        except ValueError:
            raise InvalidArgument(f"{number!r} in {text!r} is no number") from None
    try:
        return name, TenantQuota(**values)  # type: ignore[arg-type]  # only the weight is a float
    except ValueError as error:
        raise InvalidArgument(f"{text!r}: {error}") from None


def parse_quotas(texts: Sequence[str]) -> tuple[TenantQuota, dict[str, TenantQuota]]:
    """The one of all others, and those named. Raises InvalidArgument where a name comes twice."""
    quotas: dict[str, TenantQuota] = {}
    for name, quota in map(parse_quota, texts):
        if name in quotas:
            raise InvalidArgument(f"tenant {name} has two quotas")
        quotas[name] = quota
    return quotas.pop(OTHERS, TenantQuota()), quotas
