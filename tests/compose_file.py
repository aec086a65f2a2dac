"""docker-compose.yml as data, and the one substitution that lets its commands run as plain processes.

`Container` holds what the file says. `on_loopback` rewrites addresses and nothing else: a container's name and port,
and 0.0.0.0 or 127.0.0.1 within a container, become loopback ports of this machine.
"""

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).resolve().parents[1]
COMPOSE: Final = ROOT / "docker-compose.yml"
DOCKERFILE: Final = ROOT / "Dockerfile"

Ports = Callable[[str, int], int]
"""(container, port inside it) -> port on this machine's loopback."""

_VARIABLE: Final = re.compile(r"\$\{([A-Z_]+):-([^}]*)\}")
_ADDRESS: Final = re.compile(r"^(?P<host>[a-z0-9.-]+):(?P<port>\d+)$")


@dataclass(frozen=True, slots=True)
class Container:
    """health: the check's command. port: where the check looks."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    health: tuple[str, ...]

    @property
    def port(self) -> int:
        return int(self.health[-1].rpartition(":")[2])

    def on_loopback(self, port_of: Ports, names: Mapping[str, str]) -> "Container":
        """names: host name as others write it -> container that answers to it."""

        def rewrite(text: str) -> str:
            found = _ADDRESS.match(text)
            if found is None:
                return text
            host, port = found["host"], int(found["port"])
            owner = self.name if host in ("0.0.0.0", "127.0.0.1") else names[host]
            return f"127.0.0.1:{port_of(owner, port)}"

        def run_here(words: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(sys.executable if word == "python" else rewrite(word) for word in words)

        return replace(
            self,
            command=run_here(self.command),
            health=run_here(self.health),
            environment={name: rewrite(value) for name, value in self.environment.items()},
        )


def load_compose(variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The file with its variables filled in: from `variables`, else by their defaults.

    The only form in use is ${NAME:-default}; another one is an error here, and so is one that this does not know.
    """
    chosen = variables or {}

    def fill(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: fill(item) for key, item in value.items()}
        if isinstance(value, list):
            return [fill(item) for item in value]
        if not isinstance(value, str):
            return value
        filled = _VARIABLE.sub(lambda found: chosen.get(found[1]) or found[2], value)
        if "$" in filled:
            raise ValueError(f"{value!r} has a variable of another form")
        return filled

    loaded: dict[str, Any] = fill(yaml.safe_load(COMPOSE.read_text()))
    return loaded


def container(compose: Mapping[str, Any], name: str) -> Container:
    service = compose["services"][name]
    kind, *health = service["healthcheck"]["test"]
    assert kind == "CMD", f"{name}: the check goes through a shell"
    return Container(name, tuple(service["command"]), service.get("environment", {}), tuple(health))


def variables_of_file() -> set[str]:
    """Names of the variables that a user may set."""
    return {found[1] for found in _VARIABLE.finditer(COMPOSE.read_text())}


def seconds(duration: str) -> float:
    """Of `45s` or `2m`."""
    return float(duration[:-1]) * {"s": 1, "m": 60}[duration[-1]]
