"""constraints.txt pins every package that an install brings, and is what this environment was made from."""

import re
import tomllib
from importlib.metadata import distribution, distributions
from typing import Final

import pytest
from compose_file import ROOT
from packaging.requirements import Requirement

OURS: Final = {"tercet", "tercet-server"}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    found = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            assert version, f"{line!r} is no exact pin"
            assert canonical(name) not in found, f"{name} is pinned twice"
            found[canonical(name)] = version
    return found


def installed() -> dict[str, str]:
    return {canonical(each.metadata["Name"]): each.version.partition("+")[0] for each in distributions()}


@pytest.mark.parametrize("project", ["pyproject.toml", "clients/python/pyproject.toml"])
def test_every_declared_dependency_is_pinned_within_its_bounds(project: str) -> None:
    about = tomllib.loads((ROOT / project).read_text())["project"]
    extras = about.get("optional-dependencies", {})
    for text in (*about["dependencies"], *(text for group in extras.values() for text in group)):
        requirement = Requirement(text)
        if canonical(requirement.name) not in OURS:
            assert requirement.specifier.contains(pins()[canonical(requirement.name)]), text


def test_this_environment_is_the_pinned_one() -> None:
    """A package that is missing here was not needed here: triton comes with torch's CUDA build alone."""
    pinned, here = pins(), installed()
    differing = {name: here[name] for name in pinned.keys() & here.keys() if here[name] != pinned[name]}
    assert differing == {}


def test_what_dependencies_depend_on_is_pinned() -> None:
    """Except NVIDIA's packages, whose versions torch's CUDA build names itself, and what a new environment holds."""
    ahead = [("tercet-server", "dev")]
    reached = set(ahead)
    while ahead:
        name, extra = ahead.pop()
        for text in distribution(name).requires or ():
            requirement = Requirement(text)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
                continue
            below = {(canonical(requirement.name), each) for each in (requirement.extras or {""})} - reached
            reached |= below
            ahead += below
    names = {name for name, _ in reached}
    assert {"torch", "sympy", "certifi"} <= names
    loose = {name for name in names - pins().keys() if not name.startswith(("nvidia-", "cuda-"))}
    assert loose <= OURS | {"setuptools"}
