"""docker-compose.yml and the Dockerfile say what the services understand, and agree with each other."""

import re
from typing import Any, Final

import pytest
import yaml
from compose_file import DOCKERFILE, ROOT, Container, container, load_compose, seconds, variables_of_file

from services.config import ExecutorConfig, SchedulerConfig, TelemetryConfig, TokenizerConfig
from services.process import STOP_GRACE_S
from services.settings import Settings, describe, load

CONFIGS: Final[dict[str, type[Settings]]] = {
    "executor": ExecutorConfig,
    "executor-gpu": ExecutorConfig,
    "scheduler": SchedulerConfig,
    "tokenizer": TokenizerConfig,
}
SHOWN: Final = {"jaeger", "prometheus", "grafana"}
COMPOSE: Final = load_compose()
SERVICES: Final[dict[str, Any]] = COMPOSE["services"]
EXACT_TAG: Final = re.compile(r"^[a-z0-9./-]+:v?\d+\.\d+\.\d+(-[a-z0-9-]+)?$")


def of(name: str) -> Container:
    return container(COMPOSE, name)


def setting(name: str, variable: str) -> str:
    return of(name).environment[variable]


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        ("cpu", {"executor", "scheduler", "tokenizer"} | SHOWN),
        ("gpu", {"executor-gpu", "scheduler", "tokenizer"} | SHOWN),
        ("pull", {"pull"}),
    ],
)
def test_a_profile_is_a_whole_stack(profile: str, expected: set[str]) -> None:
    assert {name for name, service in SERVICES.items() if profile in service["profiles"]} == expected


@pytest.mark.parametrize("name", SERVICES)
def test_ports_are_published_on_loopback_only(name: str) -> None:
    for published in SERVICES[name].get("ports", []):
        assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", published)


@pytest.mark.parametrize("name", SERVICES)
def test_an_image_is_built_here_or_pinned(name: str) -> None:
    service = SERVICES[name]
    if "build" in service:
        assert f"AS {service['build']['target']}\n" in DOCKERFILE.read_text()
    else:
        assert EXACT_TAG.match(service["image"])


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_is_hardened(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["init"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]


@pytest.mark.parametrize("name", [name for name in SERVICES if name != "pull"])
def test_a_container_that_stays_is_checked(name: str) -> None:
    check = SERVICES[name]["healthcheck"]
    assert check["test"][0] == "CMD"
    assert seconds(check["timeout"]) <= seconds(check["interval"])
    assert check["retries"] >= 1


@pytest.mark.parametrize("name", CONFIGS)
def test_every_variable_is_a_setting_of_its_service(name: str) -> None:
    known = {variable for row in describe(CONFIGS[name]) for variable in row.variables}
    assert set(of(name).environment) <= known
    assert all(isinstance(value, str) for value in of(name).environment.values())


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "executor-gpu"])
def test_a_service_takes_its_environment(name: str) -> None:
    load(CONFIGS[name], of(name).environment, {})


def test_the_gpu_profile_asks_for_the_gpu_and_another_back_end_can_be_named() -> None:
    assert load(ExecutorConfig, of("executor-gpu").environment, {}).backend == "gpu"
    on_cpu = container(load_compose({"TERCET_EXECUTOR_BACKEND": "cpu"}), "executor-gpu")
    assert load(ExecutorConfig, on_cpu.environment, {}).backend == "cpu"


def test_users_set_variables_that_exist() -> None:
    known = {variable for config in CONFIGS.values() for row in describe(config) for variable in row.variables}
    assert variables_of_file() - known == {"TORCH_INDEX"}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_grace_outlasts_the_drain(name: str) -> None:
    drain = float(setting(name, "TERCET_DRAIN_S")) + STOP_GRACE_S + TelemetryConfig().otlp_timeout_s
    assert seconds(SERVICES[name]["stop_grace_period"]) > drain


@pytest.mark.parametrize("name", CONFIGS)
def test_the_check_looks_where_the_service_listens(name: str) -> None:
    listen = setting(name, f"TERCET_{CONFIGS[name].process.upper()}_LISTEN")
    assert listen == f"0.0.0.0:{of(name).port}"
    assert of(name).health == ("python", "-m", "services.health", f"127.0.0.1:{of(name).port}")
    assert of(name).command == ("python", "-m", f"services.{CONFIGS[name].process}")


def test_the_services_find_each_other() -> None:
    assert of("executor").port == of("executor-gpu").port
    assert setting("scheduler", "TERCET_SCHEDULER_EXECUTORS") == f"executor:{of('executor').port}"
    assert SERVICES["executor-gpu"]["networks"]["chain"]["aliases"] == ["executor"]
    assert setting("tokenizer", "TERCET_TOKENIZER_SCHEDULER") == f"scheduler:{of('scheduler').port}"
    gateway = setting("tokenizer", "TERCET_TOKENIZER_HTTP").rpartition(":")[2]
    assert SERVICES["tokenizer"]["ports"] == [f"127.0.0.1:{port}:{port}" for port in (gateway, of("tokenizer").port)]


def test_scheduler_and_executor_are_not_reached_from_outside() -> None:
    assert COMPOSE["networks"]["chain"] == {"internal": True}
    assert SERVICES["scheduler"]["networks"] == ["chain"]
    assert SERVICES["executor"]["networks"] == ["chain"]
    assert list(SERVICES["executor-gpu"]["networks"]) == ["chain"]


def test_spans_reach_jaeger() -> None:
    config = yaml.safe_load((ROOT / "deploy/jaeger/config.yaml").read_text())
    port = config["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].rpartition(":")[2]
    for name in CONFIGS:
        assert setting(name, "TERCET_OTLP_ENDPOINT") == f"http://jaeger:{port}"
    assert "chain" in SERVICES["jaeger"]["networks"]
    assert config["extensions"]["healthcheckv2"]["http"]["endpoint"].endswith(":13133")
    assert of("jaeger").health[-1] == "http://127.0.0.1:13133/status"


def test_prometheus_scrapes_every_service() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in config["scrape_configs"]}
    expected = {}
    for name in ("tokenizer", "scheduler", "executor"):
        port = setting(name, f"TERCET_{name.upper()}_METRICS_LISTEN").rpartition(":")[2]
        expected[name] = [f"{name}:{port}"]
    assert targets == expected
    assert config["rule_files"] == ["alerts.yml"]
    assert "--enable-feature=exemplar-storage" in SERVICES["prometheus"]["command"]


def test_the_model_lies_where_the_image_looks() -> None:
    (cache,) = re.findall(r"TERCET_CACHE=(\S+)", DOCKERFILE.read_text())
    assert SERVICES["pull"]["volumes"] == [f"models:{cache}"]
    for name in ("executor", "executor-gpu", "tokenizer"):
        assert SERVICES[name]["volumes"] == [f"models:{cache}:ro"]
    assert SERVICES["pull"]["command"] == ["tercet", "pull", setting("executor", "TERCET_MODEL")]


def test_mounted_files_are_in_the_repository() -> None:
    mounts = [mount for service in SERVICES.values() for mount in service.get("volumes", []) if mount.startswith("./")]
    assert len(mounts) == 4
    for mount in mounts:
        source, _, mode = mount.split(":")
        assert (ROOT / source).exists()
        assert mode == "ro"


def test_the_images_run_as_nobody_and_without_a_shell() -> None:
    text = DOCKERFILE.read_text()
    stages = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM |\Z)", text, re.DOTALL | re.MULTILINE))
    for target in ("edge", "executor"):
        assert re.search(r"^USER 10001$", stages[target], re.MULTILINE)
        assert re.search(r'^CMD \["python", "-m", "services\.\w+"\]$', stages[target], re.MULTILINE)
        assert re.search(r"^HEALTHCHECK ", stages[target], re.MULTILINE)
    assert "STOPSIGNAL SIGTERM" in stages["runtime"]
    assert "torch" not in stages["build-edge"]
    assert "[executor]" not in stages["build-edge"]
    assert "'.[executor]'" in stages["build-executor"]
    for image in re.findall(r"^FROM (\S+:\S+)", text, re.MULTILINE):
        assert EXACT_TAG.match(image)
