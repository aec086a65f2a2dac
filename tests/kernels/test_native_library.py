"""Building the native library, choosing an instruction set, and the team of threads."""

import logging
import os
import stat
import threading
from pathlib import Path

import pytest

from kernels.backends import BackendSettings, load
from kernels.cpu import build
from kernels.cpu.build import BuildError, NoCompilerError
from kernels.cpu.cores import available_cores
from kernels.cpu.library import INT, LONG, POINTER, Library, Team, load_library
from kernels.cpu.tiles import TILE_FLAGS

MODERN = frozenset(flag for isa in build.INSTRUCTION_SETS for flag in isa.cpu_flags)
RUNNABLE = [isa.name for isa in build.runnable(build.cpu_flags())]


def test_the_best_instruction_set_that_the_cpu_can_run_is_chosen() -> None:
    assert [isa.name for isa in build.runnable(MODERN)] == ["amx", "avx512", "avx2", "generic"]
    assert build.choose(None, MODERN).name == "amx"
    assert build.choose(None, MODERN - {"amx_int8"}).name == "avx512"
    assert build.choose(None, MODERN - {"avx512_vnni"}).name == "avx2"
    assert build.choose(None, frozenset()).name == "generic"
    assert build.choose("generic", MODERN).name == "generic"
    with pytest.raises(ValueError, match="unknown instruction set 'sse'; there are amx, avx512, avx2, generic"):
        build.choose("sse", MODERN)
    with pytest.raises(ValueError, match="cannot run 'avx512': it lacks avx512_bf16, avx512_vnni"):
        build.choose("avx512", MODERN - {"avx512_vnni", "avx512_bf16"})


def test_cpu_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu avx2 fma\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    assert build.cpu_flags(tmp_path / "cpuinfo") == {"fpu", "avx2", "fma"}
    assert build.cpu_flags(tmp_path / "none") == frozenset()
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert build.cpu_flags(tmp_path / "cpuinfo") == frozenset()


@pytest.mark.parametrize("granted", [False, True])
def test_tiles_count_only_where_the_system_grants_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, granted: bool
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(build, "tiles_granted", lambda: granted)
    (tmp_path / "cpuinfo").write_text("flags\t\t: fpu avx2 amx_tile amx_int8\n")
    assert build.cpu_flags(tmp_path / "cpuinfo") == {"fpu", "avx2"} | (TILE_FLAGS if granted else set())
    (tmp_path / "cpuinfo").write_text("flags\t\t: fpu avx2 amx_tile\n")
    assert build.cpu_flags(tmp_path / "cpuinfo") == {"fpu", "avx2"}


@pytest.mark.skipif("amx" not in RUNNABLE, reason="no tiles")
def test_where_tiles_do_not_work_the_next_instruction_set_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(self: Library, name: str, *signature: object) -> object:
        assert name == "tercet_tiles_work"
        assert self.isa is build.AMX
        return lambda: 0

    assert load_library().isa is build.AMX
    monkeypatch.setattr(Library, "bind", bind)
    assert load_library().isa.name == "avx512"
    with pytest.raises(ValueError, match="grants tiles but cannot run 'amx'"):
        load_library("amx")


def test_cache_directory() -> None:
    assert build.cache_directory({"TERCET_CACHE": "/a", "HOME": "/h"}) == Path("/a/kernels")
    assert build.cache_directory({"XDG_CACHE_HOME": "/x", "HOME": "/h"}) == Path("/x/tercet/kernels")
    assert build.cache_directory({"XDG_CACHE_HOME": "relative", "HOME": "/h"}) == Path("/h/.cache/tercet/kernels")
    with pytest.raises(BuildError, match="none of TERCET_CACHE"):
        build.cache_directory({})


def test_every_source_counts_for_the_digest(tmp_path: Path) -> None:
    (tmp_path / "a.h").write_text("1")
    digests = {build.source_digest(tmp_path)}
    (tmp_path / "b.cpp").write_text("2")
    digests.add(build.source_digest(tmp_path))
    (tmp_path / "a.h").write_text("3")
    digests.add(build.source_digest(tmp_path))
    assert len(digests) == 3


def test_a_source_that_does_not_compile_is_told(tmp_path: Path) -> None:
    (tmp_path / "broken.cpp").write_text("int f() { return nonsense; }\n")
    with pytest.raises(BuildError, match="nonsense"):
        build.compile_library(tmp_path / "out.so", build.find_compiler(), build.FLAGS, tmp_path)
    assert not (tmp_path / "out.so").exists()


def fake_compiler(directory: Path) -> str:
    """Writes what it is told to, slowly, and a line for each time that it links."""
    path = directory / "fake-compiler"
    path.write_text(
        "#!/bin/sh\n"
        'case "$*" in *--version*) echo fake 1; exit;; *-shared*) sleep 0.1; echo >> "$0.links";; esac\n'
        'while [ "$1" != -o ]; do shift; done; echo built > "$2"\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_several_who_need_a_library_build_it_once(tmp_path: Path) -> None:
    compiler = fake_compiler(tmp_path)
    isa = build.INSTRUCTION_SETS[-1]
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(build.built_library(isa, tmp_path / "cache", compiler)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert found[0].read_text() == "built\n"
    assert (tmp_path / "fake-compiler.links").read_text() == "\n"
    assert [path.suffix for path in sorted((tmp_path / "cache").iterdir())] == [".lock", ".so"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match=r"cannot be built in .*file/cache"):
        build.built_library(build.INSTRUCTION_SETS[-1], tmp_path / "file" / "cache", fake_compiler(tmp_path))


def test_without_a_compiler_torch_serves_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = BackendSettings(threads=1, cache=tmp_path, compiler="no-such-compiler")
    with pytest.raises(NoCompilerError, match="no-such-compiler not found"):
        load_library(None, tmp_path, "no-such-compiler")
    with caplog.at_level(logging.WARNING):
        assert load("cpu", settings).name == "cpu-torch"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cpu-torch serves in place of cpu" in caplog.text


def test_threads_must_be_positive() -> None:
    with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
        load("cpu", BackendSettings(threads=0))


def test_unknown_activations_are_named() -> None:
    with pytest.raises(ValueError, match="unknown activations '4bit'; there are 16bit, 8bit"):
        load("cpu", BackendSettings(threads=1, activations="4bit"))


def test_names_of_what_results_depend_on() -> None:
    names = {isa.name: load("cpu", BackendSettings(threads=1, instruction_set=isa.name)).instruction_set()
             for isa in build.runnable(build.cpu_flags())}  # fmt: skip
    names["8bit"] = load("cpu", BackendSettings(threads=1, activations="8bit")).instruction_set()
    assert len(set(names.values())) == len(names)
    assert all(build.source_digest() in name for name in names.values())


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_every_chunk_of_every_phase_is_done_once(size: int) -> None:
    library = load_library()
    team = Team(library, size)
    count = library.bind("tercet_team_count", LONG, POINTER, INT, INT, INT)
    for phases, chunks, spins in ((1, 0, 0), (1, 1, 0), (500, 2, 0), (300, 3, 5), (300, 16, 5), (1, 70_000, 0)):
        assert count(team.handle, phases, chunks, spins) == phases * chunks * (chunks - 1) // 2
    team.close()
    team.close()


def test_cores(tmp_path: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    for cpu in cpus:
        (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(f"{cpu}\n")
    assert available_cores(tmp_path, tmp_path / "none") == tuple(cpus)
    for cpu in cpus:
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text("0-1\n")
    assert available_cores(tmp_path, tmp_path / "none") == (cpus[0],)
    for text, cores in (("max 100000", cpus), ("100000 100000", cpus[:1]), ("150000 100000", cpus[:2])):
        (tmp_path / "cpu.max").write_text(text)
        assert available_cores(tmp_path / "none", tmp_path / "cpu.max") == tuple(cores)
