"""What Triton's compiler makes of the GPU kernels, read from the code for a real GPU that need not be here."""

import math
import os
import re
import struct

import pytest

from kernels.gpu.compiled import SHARED_LIMIT, Compiled, compile_launch, inspect
from kernels.gpu.launches import Case, cases

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("this process interprets kernels", allow_module_level=True)

ARCHES = (90,)  # what the tiles are chosen for; benchmarks/kernel_report.py shows the others
CASES = [(arch, case) for arch in ARCHES for case in {case.name: case for case in cases(arch)}.values()]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("arch", "case"), CASES, ids=[f"sm_{arch} {case.name}" for arch, case in CASES])
def test_resources_and_instructions(arch: int, case: Case) -> None:
    found = inspect(case.launch, arch)
    assert found.registers > 16, f"a trap: {found}"
    assert found.spills == 0, found
    assert found.shared <= SHARED_LIMIT[arch], found
    if is_large_product(case):
        assert found.tensor, f"no tensor cores: {found}"
    if case.bound == "memory":
        assert found.wide > 0, f"no loads of 16 bytes: {found}"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name",
    [
        "gated linear W8, 4096 rows",
        "gated linear W4, 64 rows",
        "gated linear W4, 4096 rows",
        "attention bf16 D=128",
        "attention int8 D=128",
        "attention bf16 D=256",
    ],
)
def test_tiles_of_older_targets(name: str) -> None:
    """Those that spill with the tiles of sm_90."""
    found = inspect({case.name: case for case in cases(80)}[name].launch, 80)
    assert found.spills == 0, found
    assert set(found.tensor) == {"mma"}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("arch", "name", "instruction"),
    [
        (80, "linear W8, 4096 rows", "mma"),
        (80, "linear int8 by int8, 4096 rows", "mma"),
        (89, "linear fp8 by fp8, 4096 rows", "mma"),
        (100, "gated linear W4, 1 rows", "tcgen05"),
        (100, "gated linear W4, 64 rows", "tcgen05"),
        (100, "linear W8, 4096 rows", "tcgen05"),
        (100, "gated linear W8, 4096 rows", "tcgen05"),
        (100, "linear W4, 4096 rows", "tcgen05"),
        (100, "gated linear W4, 4096 rows", "tcgen05"),
        (100, "gated linear W4 with minima, 4096 rows", "tcgen05"),
        (100, "linear fp8 by fp8, 4096 rows", "tcgen05"),
    ],
)
def test_no_product_is_a_trap(arch: int, name: str, instruction: str) -> None:
    """Where a tile does not fit sm_100's tensor memory, Triton drops the kernel's code: 4 registers are left."""
    found = inspect({case.name: case for case in cases(arch)}[name].launch, arch)
    assert found.registers > 16, found
    assert found.spills == 0, found
    assert found.shared <= SHARED_LIMIT[arch], found
    assert set(found.tensor) == {instruction}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("arch", "kind", "pattern"),
    [
        (80, "int8", r"mma\.sync\S*\.s8\.s8"),
        (89, "fp8", r"mma\.sync\S*\.e4m3\.e4m3"),
        (90, "fp8", r"wgmma\.mma_async\S*\.e4m3\.e4m3"),
        (90, "int8", r"wgmma\.mma_async\S*\.s8\.s8"),
    ],
)
def test_products_of_8_bits_are_multiplied_as_such(arch: int, kind: str, pattern: str) -> None:
    launch = {case.name: case for case in cases(arch)}[f"linear {kind} by {kind}, 4096 rows"].launch
    assert re.search(pattern, compile_launch(launch, arch).asm["ptx"])


def is_large_product(case: Case) -> bool:
    return case.bound == "products" or case.name.startswith("attention")


def test_a_spill_and_a_missing_instruction_would_show() -> None:
    """The reader of machine code tells them apart: a kernel without products has no tensor instruction."""
    by_name = {case.name: case for case in cases(90)}
    plain: Compiled = inspect(by_name["rms_norm"].launch, 90)
    product = inspect(by_name["linear bf16, 4096 rows"].launch, 90)
    assert not plain.tensor
    assert set(product.tensor) == {"wgmma"}
    older = {case.name: case for case in cases(80)}["linear bf16, 4096 rows"]
    assert set(inspect(older.launch, 80).tensor) == {"mma"}


def test_a_draw_rounds_as_the_cpu_does() -> None:
    """Its float64 has no fused multiply-add, divides exactly, and holds the constants of `kernels.written_out`, some
    with the other sign where the compiler adds instead of subtracting."""
    code = compile_launch({case.name: case for case in cases(90)}["draw"].launch, 90).asm["ptx"]
    assert "fma.rn.f64" not in code
    assert set(re.findall(r"\bdiv\S*", code)) == {"div.rn.f64"}
    series = [1 / odd for odd in range(3, 22, 2)] + [1 / math.factorial(n) for n in range(14)]
    named = (math.log(2), 1 / math.log(2), 0.6931467056274414, 4.7493250390316726e-07)
    for value in (*series, *named):
        written = [f"0d{struct.pack('>d', each).hex().upper()}" for each in (value, -value)]
        assert any(each in code for each in written), value
