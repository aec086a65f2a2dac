"""Builds the native kernels with the system's compiler, once for each state of their sources, and finds what is built.

Owns: the table of instruction sets, the compiler's flags, and the place of a built library. Must not know: what the
kernels compute, ctypes, torch.
Invariant: a library's name says all that its code depends on, and a file under that name is whole: it is written
beside and renamed.
"""

import argparse
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kernels.cpu.tiles import TILE_FLAGS, tiles_granted

NATIVE: Final = Path(__file__).parent / "native"
READY_MADE: Final = Path(__file__).parent / "built"  # of an installation that brings its libraries along
X86: Final = ("x86_64", "AMD64")
COMPILERS: Final = ("g++", "clang++", "c++")
# -ffp-contract=off: no multiplication is fused into an addition that the source does not fuse. Nothing allows to
# reassociate, so the order of every sum is the source's.
FLAGS: Final = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-pthread",
    "-Wall",
    "-Wextra",
)
_ERROR_LINES: Final = 12


class BuildError(RuntimeError):
    """The kernels can't be built: the message says why, or holds the compiler's first lines."""


class NoCompilerError(BuildError):
    """There is none, and no library that is ready-made."""


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """cpu_flags: as /proc/cpuinfo has them, all are needed. compiler_flags: what turns them on."""

    name: str
    cpu_flags: frozenset[str]
    compiler_flags: tuple[str, ...]


_AVX2: Final = ("-mavx2", "-mfma", "-mf16c")
_AVX512: Final = InstructionSet(
    "avx512",
    frozenset(("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16")),
    (
        *_AVX2,
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mavx512bf16"),
        "-DTERCET_AVX512",
    ),
)
AMX: Final = InstructionSet(
    "amx",
    _AVX512.cpu_flags | TILE_FLAGS,
    (*_AVX512.compiler_flags, "-mamx-tile", "-mamx-int8", "-DTERCET_AMX"),
)
# The first that a CPU can run is the best for it.
INSTRUCTION_SETS: Final = (
    AMX,
    _AVX512,
    InstructionSet("avx2", frozenset(("avx2", "fma", "f16c")), (*_AVX2, "-DTERCET_AVX2")),
    InstructionSet("generic", frozenset(), ()),
)


@dataclass(frozen=True, slots=True)
class Compiler:
    path: str
    version: str  # what it says of itself


def runnable(cpu_flags: frozenset[str]) -> tuple[InstructionSet, ...]:
    """The instruction sets that such a CPU can run, the best first."""
    return tuple(one for one in INSTRUCTION_SETS if one.cpu_flags <= cpu_flags)


def choose(name: str | None, cpu_flags: frozenset[str]) -> InstructionSet:
    """The named instruction set, or the best one. Raises ValueError if it is unknown or the CPU lacks it."""
    known = {one.name: one for one in INSTRUCTION_SETS}
    if name is not None and name not in known:
        raise ValueError(f"unknown instruction set {name!r}; there are {', '.join(known)}")
    possible = runnable(cpu_flags)
    if name is None:
        return possible[0]
    missing = known[name].cpu_flags - cpu_flags
    if missing:
        raise ValueError(f"this CPU cannot run {name!r}: it lacks {', '.join(sorted(missing))}")
    return known[name]


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """What this process may use. Empty where the system does not tell: then all but `generic` is out of reach."""
    if platform.machine() not in X86:
        return frozenset()
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    lists = (line.partition(":")[2].split() for line in lines if line.startswith("flags"))
    flags = frozenset(next(lists, ()))
    return flags if flags >= TILE_FLAGS and tiles_granted() else flags - TILE_FLAGS


def find_compiler(wanted: str | None = None) -> Compiler:
    """wanted: a name or path, as in $CXX; None: the first of COMPILERS on the PATH. Raises NoCompilerError."""
    names = COMPILERS if wanted is None else (wanted,)
    path = next((found for name in names if (found := shutil.which(name)) is not None), None)
    if path is None:
        raise NoCompilerError(f"no C++ compiler: {', '.join(names)} not found")
    return Compiler(path, _run((path, "--version")).partition("\n")[0])


def source_digest(native: Path = NATIVE) -> str:
    """Of the sources and the flags: what the bits of a result may depend on beside the instruction set."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sorted((*native.glob("*.h"), *native.glob("*.cpp"))):
        content = path.read_bytes()
        digest.update(f"\0{path.name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def cache_directory(environ: Mapping[str, str]) -> Path:
    """Where libraries go if nobody says where. Raises BuildError if there is not even a HOME."""
    if chosen := environ.get("TERCET_CACHE"):
        return Path(chosen) / "kernels"
    shared = Path(environ.get("XDG_CACHE_HOME", ""))
    if shared.is_absolute():
        return shared / "tercet" / "kernels"
    if home := environ.get("HOME"):
        return Path(home) / ".cache" / "tercet" / "kernels"
    raise BuildError("no cache directory for kernels: none of TERCET_CACHE, XDG_CACHE_HOME (absolute) and HOME is set")


def built_library(isa: InstructionSet, cache: Path, compiler: str | None = None) -> Path:
    """The shared library of these sources for an instruction set: ready-made, of an earlier call, or built now.

    cache: made if missing. Waits for another process that builds the same. Raises BuildError.
    """
    digest = source_digest()
    ready = READY_MADE / f"{isa.name}-{digest}.so"
    if ready.is_file():
        return ready
    found = find_compiler(compiler)
    flags = (*FLAGS, *isa.compiler_flags)
    key = hashlib.sha256("\0".join((digest, found.path, found.version, *flags)).encode()).hexdigest()[:16]
    target = cache / f"{isa.name}-{key}.so"
    if not target.is_file():
        _build_once(target, found, flags)
    return target


def _build_once(target: Path, compiler: Compiler, flags: Sequence[str]) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if target.is_file():
                return
            with tempfile.TemporaryDirectory(prefix=f".{target.stem}-", dir=target.parent) as scratch:
                built = Path(scratch) / target.name
                compile_library(built, compiler, flags)
                os.replace(built, target)
    except OSError as error:
        raise BuildError(f"the native kernels cannot be built in {target.parent}: {error}") from error


def compile_library(target: Path, compiler: Compiler, flags: Sequence[str], native: Path = NATIVE) -> None:
    """One object for each .cpp, beside the target, then one library. Raises BuildError."""
    sources = sorted(native.glob("*.cpp"))
    objects = [target.with_name(f"{source.stem}.o") for source in sources]

    def compile_one(source: Path, object_file: Path) -> None:
        _run((compiler.path, *flags, "-c", str(source), "-o", str(object_file)))

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(compile_one, sources, objects))
    _run((compiler.path, *flags, "-shared", *map(str, objects), "-o", str(target)))


def _run(command: Sequence[str]) -> str:
    environ = os.environ | {"LC_ALL": "C"}
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, env=environ)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        told = "\n".join(lines[:_ERROR_LINES])
        raise BuildError(f"{command[0]} ended with {done.returncode}:\n{told}")
    return done.stdout


def main(argv: Sequence[str]) -> int:
    """Builds libraries that need no compiler later: every instruction set, or those named, into READY_MADE."""
    parser = argparse.ArgumentParser(prog="python -m kernels.cpu.build", description=main.__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(one.name for one in INSTRUCTION_SETS))
    parser.add_argument("--compiler", help="name or path; the default is the first of " + ", ".join(COMPILERS))
    chosen = parser.parse_args(argv)
    unknown = set(chosen.names) - {one.name for one in INSTRUCTION_SETS}
    if unknown:
        parser.error(f"unknown instruction set {', '.join(sorted(unknown))}")
    compiler = find_compiler(chosen.compiler)
    x86 = platform.machine() in X86
    for isa in INSTRUCTION_SETS if x86 else (INSTRUCTION_SETS[-1],):
        if not chosen.names or isa.name in chosen.names:
            target = READY_MADE / f"{isa.name}-{source_digest()}.so"
            _build_once(target, compiler, (*FLAGS, *isa.compiler_flags))
            print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
