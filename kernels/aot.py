"""Compiles every variant of every Triton kernel ahead of time, with no GPU, and reads what it needs from the result.

    python -m kernels.aot                             # all architectures, both dtypes: the table on stdout
    python -m kernels.aot --arch sm_90 --op linear    # some of them
    python -m kernels.aot --write                     # the table into kernels/README.md, between the two markers

Triton's wheel carries the assembler and the disassembler of NVIDIA. What a column says: registers a thread; spills: bytes of registers kept
in memory (NVIDIA: the stack frame; AMD: registers); shared memory a program; the matrix instruction; atomic instructions.
"""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.compiler.compiler import CompiledKernel
from triton.runtime.jit import create_function_from_signature

from kernels.tiles import ALIGNMENT, ARCHES, DTYPES, Spec, interpreted

OPS = ("linear", "rmsnorm", "rope", "swiglu", "embedding", "attention", "logprob", "sample")
OPS += ("router", "expert_order", "grouped_linear", "combine")
README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- python -m kernels.aot --write: begin -->", "<!-- python -m kernels.aot --write: end -->"
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Bytes of shared memory that a program may ask for: 163 KiB on 8.0, but 99 on 8.6, 8.9 and 12.0, which run the tiles of 8.0. Registers are
# 255 a thread and 65536 a program on all of NVIDIA's.
SHARED_LIMIT = {"sm_80": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
REGISTER_LIMIT = {"sm_80": 255, "sm_90": 255, "sm_100": 255, "gfx942": 512}
MATRIX = {"sm_80": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05.mma", "gfx942": "mfma"}  # what a bfloat16 dot must become

# nvdisasm prints `/*0120*/  @!P0 STG.E.128 [R2], R4 ;`. REDUX is a reduction among registers, in a fixed order, and not meant.
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
_SASS_ATOMIC = re.compile(r"^(ATOM|ATOMG|ATOMS|RED|REDG|REDAS|UTMAREDG|UBLKRED)(\.|$)")
_PTX_ATOMIC = re.compile(r"(?<![\w.])(?:atom|red|multimem\.red)\.[\w.:]+")
_AMD_ATOMIC = re.compile(r"\b(?:(?:global|flat|buffer)_atomic|ds_(?:add|sub|min|max|and|or|xor|cmpst|wrxchg))_\w+")
# How the assembler allocates tensor memory for tcgen05: bits of a mask in shared memory, no result depends on their order.
_ALLOCATION = {"sm_100": ("ATOMS.OR", "ATOMS.AND")}


@dataclass(frozen=True)
class Report:
    """What the compiled code of one variant on one architecture needs."""

    op: str
    spec: Spec
    arch: str
    registers: int
    spills: int
    shared: int
    matrix: str  # the matrix instruction, or ""
    atomics: tuple[str, ...]  # the instructions

    @property
    def row(self) -> str:
        dtype = DTYPES[self.spec.dtype]
        cells = [self.op, self.spec.label, dtype, self.arch, self.spec.warps, self.registers, self.spills, self.shared]
        return "| " + " | ".join(map(str, [*cells, self.matrix or "-", " ".join(self.atomics) or "none"])) + " |"


def specs(op: str, dtype: torch.dtype, arch: str) -> list[Spec]:
    """The variants of an op: what kernels/<op>/triton.py says."""
    return importlib.import_module(f"kernels.{op}.triton").specs(dtype, arch)


def compile_spec(spec: Spec, arch: str) -> CompiledKernel:
    """What the JIT would compile when the wrapper launches this variant on a GPU of that architecture."""
    assert not interpreted(), "with TRITON_INTERPRET=1 there is no compiler"
    pointers = [i for i, kind in enumerate(spec.signature.values()) if kind.startswith("*")]
    aligned = {(i,): [["tt.divisibility", ALIGNMENT]] for i in pointers}
    source = ASTSource(spec.kernel, spec.signature, spec.constants, aligned)
    options = {"num_warps": spec.warps, "num_stages": spec.stages, **spec.options}
    return triton.compile(source, target=TARGETS[arch], options=options)


@cache
def backend_of(arch: str) -> object:
    return make_backend(TARGETS[arch])


def specialise(kernel: triton.JITFunction, arch: str, *args: object, **kwargs: object) -> tuple[dict, dict, dict, dict]:
    """(signature, constants, attributes, options): what the JIT makes of a launch with these arguments, and compiles one variant for."""
    backend = backend_of(arch)
    bound, kinds, options = create_function_from_signature(kernel.signature, kernel.params, backend)(*args, **kwargs)
    pairs = list(zip(bound.items(), kinds, strict=True))
    signature = {name: kind[0] for (name, _), kind in pairs}
    constants = {name: value for (name, value), kind in pairs if kind[0] == "constexpr"}
    attributes = {name: backend.parse_attr(kind[1]) for (name, _), kind in pairs if kind[0] != "constexpr" and isinstance(kind[1], str)}
    return signature, constants, {name: value for name, value in attributes.items() if value}, options


def inspect(op: str, spec: Spec, arch: str) -> Report:
    """Compile and read."""
    return _read(op, spec, arch, compile_spec(spec, arch))


def _read(op: str, spec: Spec, arch: str, compiled: CompiledKernel) -> Report:
    if arch == "gfx942":
        text = compiled.asm["amdgcn"]
        spills = sum(int(n) for n in re.findall(r"\.[sv]gpr_spill_count:\s+(\d+)", text))
        registers = int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1])
        atomics = _AMD_ATOMIC.findall(text)
    else:
        text, allowed = compiled.asm["ptx"], _ALLOCATION.get(arch, ())
        registers, spills, instructions = _read_cubin(compiled.asm["cubin"])
        atomics = _PTX_ATOMIC.findall(text) + [name for name in instructions if _SASS_ATOMIC.match(name) and name not in allowed]
    matrix = MATRIX[arch] if MATRIX[arch] in text else ""
    return Report(op, spec, arch, registers, spills, compiled.metadata.shared, matrix, tuple(atomics))


def _read_cubin(cubin: bytes) -> tuple[int, int, list[str]]:
    """Registers a thread, bytes of its stack and local memory, and the names of its instructions."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, sass = _tool("cuobjdump", "-res-usage", file.name), _tool("nvdisasm", "--print-code", "--no-dataflow", file.name)
    registers, stack, local = (max(int(n) for n in re.findall(rf"\b{key}:(\d+)", usage)) for key in ("REG", "STACK", "LOCAL"))
    instructions = _INSTRUCTION.findall(sass)
    assert "EXIT" in instructions, "nvdisasm prints instructions in another form than expected"
    return registers, stack + local, instructions


def _tool(name: str, *arguments: str) -> str:
    run = subprocess.run([Path(triton.__file__).parent / "backends/nvidia/bin" / name, *arguments], capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{name}: {run.stderr}")
    return run.stdout


def reports(ops: tuple[str, ...], arches: tuple[str, ...], dtypes: tuple[torch.dtype, ...]) -> Iterator[Report]:
    """Every variant, once if it is the same for both dtypes. Each is read in a second thread while the next one compiles."""
    with ThreadPoolExecutor(1) as reader:
        waiting = []
        for op, arch in product(ops, arches):
            variants = {f"{s.kernel} {s.signature} {s.constants}": s for dtype in reversed(dtypes) for s in specs(op, dtype, arch)}
            waiting += [reader.submit(_read, op, spec, arch, compile_spec(spec, arch)) for spec in variants.values()]
        yield from (report.result() for report in waiting)


def table(rows: list[str]) -> str:
    """Markdown."""
    head = ["op", "variant", "dtype", "arch", "warps", "registers", "spills", "shared bytes", "matrix", "atomics"]
    note = f"Compiled ahead of time with triton {triton.__version__}, on no GPU; `python -m kernels.aot --write` renews it."
    return "\n".join([note, "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|", *rows])


def write(text: str, path: Path = README) -> None:
    """Put the table between the markers, which are added at the end of the page where they are missing."""
    page = path.read_text()
    if BEGIN not in page:
        page = f"{page.rstrip()}\n\n## Compiled code\n\n{BEGIN}\n{END}\n"
    before, rest = page.split(BEGIN)
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile the Triton kernels ahead of time and print what they need.")
    parser.add_argument("--arch", nargs="+", choices=ARCHES, default=list(ARCHES))
    parser.add_argument("--op", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--write", action="store_true", help=f"put the table into {README.name}; needs all ops and architectures")
    args = parser.parse_args()
    if args.write and (set(args.arch) != set(ARCHES) or set(args.op) != set(OPS)):
        parser.error("--write needs all ops and architectures")
    text = table([report.row for report in reports(tuple(args.op), tuple(args.arch), tuple(DTYPES))])
    print(text)
    if args.write:
        write(text)


if __name__ == "__main__":
    main()
