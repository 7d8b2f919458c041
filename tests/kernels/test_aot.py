"""The Triton kernels compiled ahead of time for GPUs that are not here, and what the JIT would do. Run: pytest tests/kernels/test_aot.py"""

from functools import cache

import pytest
import torch
import triton
import triton.language as tl

from kernels import aot, tiles
from kernels.aot import MATRIX, OPS, REGISTER_LIMIT, SHARED_LIMIT, Report, inspect, specialise, specs
from kernels.tiles import ARCHES, DTYPES, Spec

NVIDIA = [arch for arch in ARCHES if arch.startswith("sm_")]
ROWS = (1, 2, 15, 16, 17, 64, 1000)
TORCH = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64, "i32": torch.int32, "i64": torch.int64, "i1": torch.bool}


@cache
def everything(op: str) -> list[Report]:
    """Every variant: bfloat16 on all architectures; float32 on one, since its code differs little between them."""
    narrow = aot.reports((op,), tuple(arch for arch in ARCHES if arch != "sm_90"), (torch.bfloat16,))
    return [*narrow, *aot.reports((op,), ("sm_90",), tuple(DTYPES))]


def compiled(op: str, arch: str) -> list[Report]:
    return [report for report in everything(op) if report.arch == arch]


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("op", OPS)
def test_no_atomics(op, arch):
    """Additions in the order in which programs arrive would be other bits in every run."""
    assert [(r.spec.label, r.atomics) for r in compiled(op, arch) if r.atomics] == []


@pytest.mark.parametrize("arch", NVIDIA)
@pytest.mark.parametrize("op", OPS)
def test_registers_and_shared_memory_suffice(op, arch):
    for r in compiled(op, arch):
        assert r.spills == 0, r.row
        assert r.registers <= REGISTER_LIMIT[arch] and r.registers * r.spec.warps * 32 <= 65536, r.row
        assert r.shared <= SHARED_LIMIT[arch], r.row


@pytest.mark.parametrize("arch", NVIDIA)
def test_dots_become_matrix_instructions(arch):
    dots = [r for op in OPS for r in compiled(op, arch) if r.spec.dot]
    assert {"linear", "attention", "grouped_linear"} <= {r.op for r in dots}
    for r in dots:  # float32 has no exact matrix instruction on these: plain fused multiply-adds
        assert r.matrix == (MATRIX[arch] if r.spec.dtype is torch.bfloat16 else ""), r.row


@pytest.mark.parametrize("op", OPS)
def test_the_jit_compiles_one_variant_and_it_is_the_one_checked_here(op):
    """Whatever the counts are: the JIT would otherwise compile anew for 1 and for multiples of 16."""
    for spec in (spec for dtype in DTYPES for spec in specs(op, dtype, "sm_90")):
        for rows in ROWS:
            signature, constants, attributes, _ = specialise(spec.kernel, "sm_90", *[argument(spec, name, rows) for name in spec.signature])
            assert (signature, constants, attributes) == (spec.signature, spec.constants, aligned(spec)), (spec.label, rows)


def argument(spec: Spec, name: str, rows: int):
    kind = spec.signature[name]
    if kind == "constexpr":
        return spec.constants[name]
    return torch.empty(64, dtype=TORCH[kind[1:]]) if kind.startswith("*") else float(rows) if kind.startswith("fp") else rows


def aligned(spec: Spec) -> dict:
    return {name: [["tt.divisibility", 16]] for name, kind in spec.signature.items() if kind.startswith("*")}


@pytest.fixture
def launches(monkeypatch):
    """The launches of the wrappers, on CPU tensors, recorded instead of run: (kernel, positional, keyword arguments)."""
    calls = []
    monkeypatch.setattr(tiles, "interpreted", lambda: True)

    def record(kernel, *args, grid, warmup, **kwargs):
        calls.append((kernel, args, kwargs))

    monkeypatch.setattr(triton.JITFunction, "run", record)
    return calls


def call_linear(rows, dtype):
    from kernels.linear.triton import linear

    linear(torch.zeros(rows, 100, dtype=dtype), torch.zeros(33, 100, dtype=dtype), torch.zeros(33, dtype=dtype))


def call_rmsnorm(rows, dtype):
    from kernels.rmsnorm.triton import rmsnorm_residual

    x = torch.zeros(rows, 5000, dtype=dtype)
    rmsnorm_residual(x, x, torch.zeros(5000, dtype=dtype), 1e-6)


def call_rope(rows, dtype):
    from kernels.rope.triton import rope

    rope(torch.zeros(rows, 3, 80, dtype=dtype), torch.zeros(rows, 40), torch.zeros(rows, 40), True)


def call_swiglu(rows, dtype):
    from kernels.swiglu.triton import swiglu

    swiglu(torch.zeros(rows, 100, dtype=dtype), torch.zeros(rows, 100, dtype=dtype))


def call_embedding(rows, dtype):
    from kernels.embedding.triton import embedding_backward

    embedding_backward(torch.zeros(rows, 100, dtype=dtype), torch.arange(rows), rows)


def call_router(rows, dtype):
    from kernels.router.triton import select

    select(torch.zeros(rows, 128), 8, False)


def call_expert_order(rows, dtype):
    from kernels.expert_order.triton import expert_order

    expert_order(torch.zeros(rows, 3, dtype=torch.int64), 5)


def call_grouped_linear(rows, dtype):
    from kernels.grouped_linear.triton import grouped_linear

    weight, offsets = torch.zeros(5, 33, 100, dtype=dtype), torch.zeros(6, dtype=torch.int32)
    grouped_linear(torch.zeros(7, 100, dtype=dtype), weight, offsets, torch.zeros(rows, dtype=torch.int64), False)


def call_grouped_weight_grad(rows, dtype):
    from kernels.grouped_linear.triton import grouped_weight_grad

    offsets = torch.zeros(6, dtype=torch.int32)
    grouped_weight_grad(torch.zeros(rows, 33, dtype=dtype), torch.zeros(rows, 100, dtype=dtype), offsets, None)


def call_weigh(rows, dtype):
    from kernels.router.triton import weigh

    weigh(torch.zeros(rows, 128), torch.zeros(rows, 8, dtype=torch.int64), False, True, float(rows))


def call_combine(rows, dtype):
    from kernels.combine.triton import combine

    combine(torch.zeros(3 * rows, 100, dtype=dtype), torch.zeros(rows, 3), torch.zeros(rows, 3, dtype=torch.int64))


CALLS = {
    call_linear: "linear",
    call_rmsnorm: "rmsnorm",
    call_rope: "rope",
    call_swiglu: "swiglu",
    call_embedding: "embedding",
    call_router: "router",
    call_weigh: "router",
    call_expert_order: "expert_order",
    call_grouped_linear: "grouped_linear",
    call_grouped_weight_grad: "grouped_linear",
    call_combine: "combine",
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__.removeprefix("call_"))
def test_the_wrapper_launches_one_of_these_variants_whatever_the_rows(launches, call, dtype):
    for rows in ROWS:
        call(rows, dtype)
    variants = [(*specialise(kernel, "sm_90", *args, **kwargs), kernel) for kernel, args, kwargs in launches]
    assert len(variants) == len(ROWS) and all(variant == variants[0] for variant in variants)
    known = [
        (spec.signature, spec.constants, aligned(spec), {"num_warps": spec.warps, "num_stages": spec.stages, **spec.options}, spec.kernel)
        for spec in specs(CALLS[call], dtype, "sm_90")
    ]
    assert variants[0] in known


@triton.jit
def _adds_in_memory(x_ptr, N: tl.constexpr):
    tl.atomic_add(x_ptr + tl.arange(0, N) % 4, 1.0)


@triton.jit
def _needs_many_registers(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(y_ptr + i, x + tl.sum(x))


@pytest.mark.parametrize("arch", ARCHES)
def test_an_atomic_would_be_seen(arch):
    spec = Spec("", _adds_in_memory, {"x_ptr": "*fp32", "N": "constexpr"}, {"N": 128}, 4, 1, torch.float32)
    assert inspect("", spec, arch).atomics


@pytest.mark.parametrize("arch", NVIDIA)
def test_a_spill_would_be_seen(arch):
    signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "N": "constexpr"}
    report = inspect("", Spec("", _needs_many_registers, signature, {"N": 16384}, 1, 1, torch.float32), arch)
    assert report.spills > 0


def test_the_wrappers_want_a_gpu_here():
    from kernels.swiglu.triton import swiglu

    with pytest.raises(ValueError, match="take CUDA tensors, or CPU tensors under TRITON_INTERPRET=1"):
        swiglu(torch.zeros(2, 8), torch.zeros(2, 8))


def test_the_table_goes_between_its_markers(tmp_path):
    page = tmp_path / "README.md"
    page.write_text("# Kernels\n\ntext\n")
    for text in ("one", "two"):
        aot.write(text, page)
    assert page.read_text() == f"# Kernels\n\ntext\n\n## Compiled code\n\n{aot.BEGIN}\ntwo\n{aot.END}\n"
