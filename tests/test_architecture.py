"""What keeps the shape: import contracts, light processes, generated code, documentation that is made from code."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import executor
import kernels
import services
from services.config import PROCESSES
from services.settings import markdown_table

ROOT = Path(services.__file__).parent.parent
GENERATED = ROOT / "clients/python/tercet/v1"
LONGEST = 400


def test_the_packages_are_ours() -> None:
    for package in (kernels, executor, services):
        assert package.__file__ is not None
        assert Path(package.__file__).parent.parent == ROOT


def test_package_files_are_empty() -> None:
    for package in ("services", "executor", "kernels"):
        for file in (ROOT / package).rglob("__init__.py"):
            assert not file.read_text().strip(), file


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("services.tokenizer.__main__", ("torch", "transformers", "smg_grpc_proto")),
        ("services.scheduler.__main__", ("torch", "transformers", "tokenizers")),
        ("services.gateway.__main__", ("torch", "transformers")),
        ("services.cli", ("torch", "grpc", "tokenizers")),
        ("tercet", ("torch", "services", "executor", "kernels", "tokenizers")),
    ],
)
def test_a_process_imports_no_more_than_it_needs(module: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([name for name in {absent!r} if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert answer.stdout.strip() == "[]"


def test_the_generated_code_is_what_the_contract_makes(tmp_path: Path) -> None:
    protos = sorted(str(path.relative_to(ROOT / "protos")) for path in (ROOT / "protos/tercet/v1").glob("*.proto"))
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I", "protos", *outputs, *protos],
        check=True,
        cwd=ROOT,
        capture_output=True,
        env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"},
    )
    made = {path.name: path.read_text() for path in (tmp_path / "tercet/v1").iterdir()}
    kept = {path.name: path.read_text() for path in GENERATED.iterdir() if "_pb2" in path.name}
    assert kept.keys() == made.keys()
    stale = [name for name in made if made[name] != kept[name]]
    assert not stale, f"run `make protos`: {stale}"


def test_the_documentation_has_the_settings_as_they_are() -> None:
    text = (ROOT / "docs/configuration.md").read_text()
    begin, end = "<!-- config:begin -->\n", "<!-- config:end -->"
    shown = text[text.index(begin) + len(begin) : text.index(end)]
    assert shown.strip() == markdown_table(*PROCESSES).strip(), "put the output of `tercet config` there"


def test_files_hold_one_room() -> None:
    long = {}
    for package in ("services", "executor", "kernels", "clients/python/tercet"):
        for file in (ROOT / package).rglob("*.py"):
            lines = len(file.read_text().splitlines())
            if lines > LONGEST and "_pb2" not in file.name:
                long[str(file.relative_to(ROOT))] = lines
    assert not long, f"over {LONGEST} lines: split them along their ideas"


def test_nothing_speaks_of_how_it_was_made() -> None:
    words = ("/work" + "/", "TO" + "DO", "FIX" + "ME", "NotImplemented" + "Error")
    found = []
    for folder in ("services", "executor", "kernels", "clients", "protos", "docs", "deploy", "tests"):
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in {".py", ".md", ".proto", ".yml", ".yaml", ".toml"} and "_pb2" not in file.name:
                text = file.read_text()
                found += [f"{file.relative_to(ROOT)}: {word}" for word in words if word in text]
    assert not found


def test_no_service_forks() -> None:
    """A fork behind gRPC or OpenTelemetry hangs: other processes are programs, or spawned."""
    wrong = []
    for package in ("services", "executor", "kernels", "clients/python/tercet"):
        for file in (ROOT / package).rglob("*.py"):
            text = file.read_text()
            if re.search(r"\bfork\(|forkpty|preexec_fn|get_context\(\)|context\(.fork.\)", text):
                wrong.append(str(file.relative_to(ROOT)))
            if re.search(r"\b(multiprocessing|ProcessPoolExecutor)\b", text) and '"spawn"' not in text:
                wrong.append(str(file.relative_to(ROOT)))
    assert not wrong


def test_the_tests_that_the_documentation_names_are_there() -> None:
    text = (ROOT / "docs" / "testing.md").read_text()
    section = text[text.index("## Reports of users") : text.index("## Chaos and mutations")]
    sources = {file.name: file.read_text() for file in (ROOT / "tests").rglob("test_*.py")}
    missing, seen = [], 0
    for row in section.splitlines():
        for shown in re.findall(r"`([^`]+)`", row):
            name, _, test = shown.rpartition(": ")
            if not (name or "_" in shown) or shown.startswith("<"):
                continue
            seen += 1
            if test.endswith(".py"):
                found = test in sources
            elif name:
                found = f"def test_{test.removesuffix('...')}" in sources.get(name, "")
            else:
                found = any(f"def test_{test.removesuffix('...')}" in source for source in sources.values())
            missing += [] if found else [shown]
    assert not missing
    assert seen > 80
