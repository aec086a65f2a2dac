"""What the compiler makes of a launch, read without a GPU.

Owns: compiling for a target that is not here, and reading resources and instructions from PTX and machine code. Must
not know: which launches there are.
Works in a process that does not interpret, with the tools that Triton's package brings (cuobjdump, nvdisasm).
"""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.gpu.launch import Launch
from kernels.ops import require

_POINTERS: Final = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float64: "*fp64",
}
# Bytes of shared memory that one program may have (CUDA C++ Programming Guide, table of technical specifications).
SHARED_LIMIT: Final[Mapping[int, int]] = MappingProxyType({80: 166912, 89: 101376, 90: 232448, 100: 232448})
REGISTERS: Final = 65536  # of a multiprocessor
_SHARED_OF_PROCESSOR: Final = {80: 167936, 89: 102400, 90: 233472, 100: 233472}
_THREADS_OF_PROCESSOR: Final = {80: 2048, 89: 1536, 90: 2048, 100: 2048}
_RESERVED_SHARED: Final = 1024  # of each program


@dataclass(frozen=True, slots=True)
class Compiled:
    """registers, spills: of a thread; spills in bytes. shared: bytes of a program. programs: that a multiprocessor
    holds.

    tensor: names of tensor-core instructions with their number in the code; wide: loads of 16 bytes a thread, plain or
    asynchronous; narrow: shorter ones; asynchronous: copies to shared memory that no thread waits for.
    """

    arch: int
    registers: int
    spills: int
    shared: int
    programs: int
    warps: int
    tensor: Mapping[str, int]
    wide: int
    narrow: int
    asynchronous: int


def compile_launch(launch: Launch, arch: int) -> Any:
    """Triton's compiled kernel, for the types, sizes and alignments of the launch, as its own dispatch would."""
    names = launch.kernel.arg_names
    constants = {name: value for name, value in launch.arguments.items() if _is_constant(launch, name, value)}
    signature, attributes = {}, {}
    for index, name in enumerate(names):
        value = launch.arguments[name]
        signature[name] = "constexpr" if name in constants else _type(value)
        aligned = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
        if aligned and name not in constants:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=launch.kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=attributes,
    )
    options = {"num_warps": launch.warps, "num_stages": launch.stages, "enable_fp_fusion": launch.fused}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def inspect(launch: Launch, arch: int) -> Compiled:
    require(arch in SHARED_LIMIT, f"no limits are known for sm_{arch}")
    kernel = compile_launch(launch, arch)
    registers, stack = _resources(kernel.asm["cubin"])
    code = _machine_code(kernel.asm["cubin"])
    ptx = kernel.asm["ptx"]
    warps = kernel.metadata.num_warps
    tensor = {name: count for name, pattern in _TENSOR.items() if (count := len(re.findall(pattern, ptx)))}
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global\S* \[[^\]]*\], \[[^\]]*\], (0x[0-9a-f]+|\d+)", ptx)
    sizes = [int(size, 0) for size in copies]
    loads = re.findall(r"\bLDG\.E(\S*)", code)
    wide_loads = sum(".128" in load for load in loads)
    shared = kernel.metadata.shared
    return Compiled(
        arch=arch,
        registers=registers,
        spills=stack,
        shared=shared,
        programs=_programs(arch, registers, shared, warps),
        warps=warps,
        tensor=MappingProxyType(tensor),
        wide=wide_loads + sum(size == 16 for size in sizes),
        narrow=len(loads) - wide_loads + sum(size < 16 for size in sizes),
        asynchronous=len(sizes),
    )


_TENSOR: Final = {
    "mma": r"\bmma\.sync",
    "wgmma": r"\bwgmma\.mma_async",
    "tcgen05": r"\btcgen05\.mma",
}


def _is_constant(launch: Launch, name: str, value: object) -> bool:
    """Constants of the kernel, and the integers that Triton makes constant."""
    parameter = launch.kernel.params[launch.kernel.arg_names.index(name)]
    return bool(parameter.is_constexpr) or (isinstance(value, int) and not isinstance(value, bool) and value == 1)


def _type(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    raise ValueError(f"an argument of type {type(value).__name__} is none of a kernel's")


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and its bytes of local memory: stack and spills."""
    text = _tool("cuobjdump", cubin, "--dump-resource-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of resources: {text[:200]}")
    registers, stack, local = (int(number) for number in found.groups())
    return registers, stack + local


def _machine_code(cubin: bytes) -> str:
    return _tool("nvdisasm", cubin, "-c")


def _tool(name: str, cubin: bytes, *flags: str) -> str:
    tool = Path(getattr(triton.knobs.nvidia, name).path)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([str(tool), *flags, file.name], capture_output=True, text=True, check=True)
    return done.stdout


def _programs(arch: int, registers: int, shared: int, warps: int) -> int:
    """That a multiprocessor holds: by registers (given to warps in units of 256), shared memory, threads."""
    by_registers = REGISTERS // (-(-registers * 32 // 256) * 256 * warps)
    by_shared = _SHARED_OF_PROCESSOR[arch] // (shared + _RESERVED_SHARED)
    return min(by_registers, by_shared, _THREADS_OF_PROCESSOR[arch] // (32 * warps), 32)
