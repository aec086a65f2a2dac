"""The deployment files as their own tools read them. `make test-all` puts the tools on PATH."""

import shutil
import subprocess

import pytest
from compose_file import ROOT
from conftest import missing

pytestmark = pytest.mark.external

ALERT_CASES = ROOT / "tests/deploy/alerts_cases.yml"


def run(tool: str, *arguments: str) -> str:
    """Its output; fails with it where the tool is not content."""
    path = shutil.which(tool)
    if path is None:
        missing(f"the tool {tool}")
        raise AssertionError("unreachable")
    done = subprocess.run(
        [path, *arguments], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, f"{tool} {' '.join(arguments)}:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("profile", ["cpu", "gpu", "pull"])
def test_compose_takes_the_file(profile: str) -> None:
    run("docker-compose", "--file", "docker-compose.yml", "--profile", profile, "config", "--quiet")


@pytest.mark.parametrize(("profile", "executor"), [("cpu", "executor"), ("gpu", "executor-gpu")])
def test_compose_starts_one_executor(profile: str, executor: str) -> None:
    listed = run("docker-compose", "--file", "docker-compose.yml", "--profile", profile, "config", "--services")
    assert {"executor", "executor-gpu"} & set(listed.split()) == {executor}


def test_hadolint_has_nothing_to_say() -> None:
    assert run("hadolint", "Dockerfile") == ""


def test_prometheus_takes_its_configuration_and_rules() -> None:
    run("promtool", "check", "config", "deploy/prometheus/prometheus.yml")
    run("promtool", "check", "rules", "deploy/prometheus/alerts.yml")


def test_alerts_fire_when_they_should() -> None:
    run("promtool", "test", "rules", str(ALERT_CASES))
