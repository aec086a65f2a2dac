"""What is run: scenarios, and how words of the command line change one.

Owns the names of what can be varied. Invariant: a scenario's name says how it differs from its neighbours.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final

from services.scheduler.core.calls import CoreConfig, LaneSpec, Limits
from services.scheduler.core.policies.policy import POLICIES
from services.simulate.cost import PRESETS, CostModel, from_json
from services.simulate.fleet import Fleet, Told

UNBOUNDED: Final = 1_000_000_000_000


class ScenarioError(ValueError):
    """A setting that is unknown or makes no sense. Names it."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """`rate_scale`: the load's arrivals come so many times as fast. `load`: they come at this share of the rate at
    which the first policy `fcfs` saturates; None: as `rate_scale` says."""

    name: str
    fleet: Fleet
    rate_scale: float = 1.0
    load: float | None = None


Change = Callable[[Scenario, str], Scenario]


def _number(name: str, text: str, kind: Callable[[str], float]) -> float:
    try:
        return kind(text)
    except ValueError as error:
        raise ScenarioError(f"{name} is {text!r}; a number is needed") from error


def _lane(field: str) -> Change:
    def change(scenario: Scenario, text: str) -> Scenario:
        value = int(_number(field, text, int))
        lane: LaneSpec = dataclasses.replace(scenario.fleet.lane, **{field: value})
        return dataclasses.replace(scenario, fleet=dataclasses.replace(scenario.fleet, lane=lane))

    return change


def _core(field: str) -> Change:
    def change(scenario: Scenario, text: str) -> Scenario:
        core: CoreConfig = dataclasses.replace(scenario.fleet.core, **{field: _core_value(field, text)})
        return dataclasses.replace(scenario, fleet=dataclasses.replace(scenario.fleet, core=core))

    return change


def _core_value(field: str, text: str) -> Any:
    default = getattr(CoreConfig(), field)
    if isinstance(default, bool):
        if text not in ("true", "false"):
            raise ScenarioError(f"{field} is {text!r}; true or false is needed")
        return text == "true"
    if isinstance(default, int):
        return UNBOUNDED if text == "unbounded" else int(_number(field, text, int))
    return _number(field, text, float) if isinstance(default, float) else text


def _executors(scenario: Scenario, text: str) -> Scenario:
    count = int(_number("executors", text, int))
    return dataclasses.replace(scenario, fleet=dataclasses.replace(scenario.fleet, executors=count))


def _queue(scenario: Scenario, text: str) -> Scenario:
    return _core("max_queued_requests")(scenario, text)


def _rate_scale(scenario: Scenario, text: str) -> Scenario:
    return dataclasses.replace(scenario, rate_scale=_number("rate-scale", text, float), load=None)


def _load(scenario: Scenario, text: str) -> Scenario:
    return dataclasses.replace(scenario, load=_number("load", text, float))


def _cost(scenario: Scenario, text: str) -> Scenario:
    return dataclasses.replace(scenario, fleet=dataclasses.replace(scenario.fleet, cost=read_cost(text)))


def _told(scenario: Scenario, text: str) -> Scenario:
    told = Told(text) if text in list(Told) else int(_number("told", text, int))
    return dataclasses.replace(scenario, fleet=dataclasses.replace(scenario.fleet, told=told))


def _slow(scenario: Scenario, text: str) -> Scenario:
    factors = tuple(_number("slow", part, float) for part in text.split(":"))
    return dataclasses.replace(scenario, fleet=dataclasses.replace(scenario.fleet, slowness=factors))


def _limits(scenario: Scenario, text: str) -> Scenario:
    names = {"queue": "queue_ns", "first_token": "first_token_ns", "between": "between_tokens_ns", "total": "total_ns"}
    limits = {}
    for part in filter(None, text.split(":")):
        name, _, seconds = part.partition("=")
        if name not in names:
            raise ScenarioError(f"limits: {name!r} is none of {', '.join(names)}")
        limits[names[name]] = int(_number(f"limits {name}", seconds, float) * 1e9)
    return dataclasses.replace(scenario, fleet=dataclasses.replace(scenario.fleet, limits=Limits(**limits)))


_PLAIN: Final = (bool, int, float, str)
SETTINGS: Final[Mapping[str, Change]] = {
    **{
        field.name: _core(field.name)
        for field in dataclasses.fields(CoreConfig)
        if isinstance(getattr(CoreConfig(), field.name), _PLAIN)
    },
    "executors": _executors,
    "slots": _lane("max_sequences"),
    "blocks": _lane("total_blocks"),
    "block-size": _lane("block_size"),
    "batch-tokens": _lane("max_batched_tokens"),
    "context": _lane("max_model_len"),
    "queue": _queue,
    "rate-scale": _rate_scale,
    "load": _load,
    "cost": _cost,
    "told": _told,
    "slow": _slow,
    "limits": _limits,
}


def apply(scenario: Scenario, name: str, text: str) -> Scenario:
    """The scenario with one setting changed. Raises ScenarioError."""
    change = SETTINGS.get(name)
    if change is None:
        raise ScenarioError(f"{name!r} can't be set; there are {', '.join(SETTINGS)}")
    try:
        return change(scenario, text)
    except ScenarioError:
        raise
    except ValueError as error:
        raise ScenarioError(f"{name}: {error}") from error


def scenarios(base: Scenario, policies: Sequence[str], varied: Sequence[tuple[str, Sequence[str]]]) -> list[Scenario]:
    """Every policy with every combination of what is varied. Raises ScenarioError."""
    unknown = [policy for policy in policies if policy not in POLICIES]
    if unknown:
        raise ScenarioError(f"policy {', '.join(unknown)} is unknown; there are {', '.join(POLICIES)}")
    made = []
    for policy, *values in product(policies, *(choices for _, choices in varied)):
        scenario = apply(base, "policy", policy)
        words = [policy]
        for (name, _), value in zip(varied, values, strict=True):
            scenario = apply(scenario, name, value)
            words.append(f"{name}={Path(value).stem if name == 'cost' else value}")
        made.append(dataclasses.replace(scenario, name=" ".join(words)))
    return made


def read_cost(text: str) -> CostModel:
    """A preset's name, or the path of a JSON file. Raises CostError or ScenarioError."""
    if text in PRESETS:
        return PRESETS[text]
    try:
        return from_json(Path(text).read_text(encoding="utf-8"))
    except OSError as error:
        raise ScenarioError(
            f"cost {text!r} is no preset ({', '.join(PRESETS)}), and as a file: {error.strerror}"
        ) from error
