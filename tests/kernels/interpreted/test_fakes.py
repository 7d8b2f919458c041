"""Shapes and dtypes of every custom op without running it: on the meta device, under FakeTensorMode, and through torch.compile.

python -m pytest tests/kernels/interpreted/test_fakes.py
"""

from importlib import import_module

import pytest
import torch
from conftest import DTYPES, assert_same_bits

from kernels.aot import OPS
from kernels.attention import PAGE

for op in OPS:
    import_module(f"kernels.{op}.triton")
OURS = torch.ops.miles_spmd


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def arguments(dtype: torch.dtype) -> dict[str, list[tuple]]:
    """Every custom op, and calls of it that differ in what comes out."""
    torch.manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(dtype)

    ids, angle, ones = torch.tensor([0, 2, 2]), torch.randn(5, 8), torch.ones(5)
    cache = (normal(2, 1, 16, PAGE), normal(2, 1, PAGE, 16))
    logits, setting = torch.randn(5, 30), (ones, ones, torch.zeros(5, dtype=torch.int64))
    counters = (torch.arange(5), torch.arange(5), torch.arange(5))
    return {
        "linear": [(normal(5, 8), normal(3, 8), normal(3)), (normal(5, 8), normal(3, 8)), (normal(5, 8), normal(3, 8), None, True)],
        "rmsnorm": [(normal(5, 8), normal(8), 1e-6)],
        "rmsnorm_residual": [(normal(5, 8), normal(5, 8), normal(8), 1e-6)],
        "rope": [(normal(5, 2, 16), angle.cos(), angle.sin(), True)],
        "swiglu": [(normal(5, 8), normal(5, 8))],
        "embedding": [(ids, normal(3, 8))],
        "embedding_backward": [(normal(3, 8), ids, 4)],
        "write_kv": [(normal(3, 1, 16), normal(3, 1, 16), *cache, torch.tensor([0, 1, PAGE]))],
        "paged_attention": [(normal(3, 2, 16), *cache, int32(1, 0).view(2, 1), int32(0, 1, 3), int32(40, 3), 0.25)],
        "token_rows": [
            (logits, *setting, torch.arange(5), None, True),
            (logits, *setting, None, torch.rand(5, dtype=torch.float64), False),
        ],
        "uniform": [(7, 0, *counters)],
        "router_select": [(logits, 4, False), (logits, 4, True, torch.randn(30), 6, 3)],
        "router_weigh": [(logits, torch.arange(10).view(5, 2), False, True, 2.5)],
        "expert_order": [(torch.tensor([[0, 2], [1, 1]]), 3)],
        "grouped_linear": [
            (normal(5, 8), normal(2, 3, 8), int32(0, 4, 5), None, False),
            (normal(5, 8), normal(2, 3, 8), int32(0, 4, 7), torch.tensor([0, 4, 2, 2, 1, 3, 0]), False),
            (normal(5, 3), normal(2, 3, 8), int32(0, 4, 5), None, True),
        ],
        "grouped_weight_grad": [(normal(5, 3), normal(5, 8), int32(0, 4, 5), None)],
        "combine": [(normal(10, 8), torch.rand(5, 2), torch.arange(10).view(5, 2))],
    }


CASES = [(name, number) for name, calls in arguments(torch.float32).items() for number in range(len(calls))]


def as_tuple(result: object) -> tuple:
    return result if isinstance(result, tuple) else () if result is None else (result,)


def moved(args: tuple, to) -> tuple:
    return tuple(to(x) if isinstance(x, torch.Tensor) else x for x in args)


def test_no_op_is_left_out() -> None:
    registered = {schema.name.split("::")[1] for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("miles_spmd::")}
    assert registered == set(arguments(torch.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "number"), CASES)
def test_the_fake_has_the_shapes_and_dtypes_of_the_op(name: str, number: int, dtype: torch.dtype) -> None:
    """On the meta device, where nothing runs, and under FakeTensorMode (opcheck, which also sees an undeclared change of an input)."""
    args, op = arguments(dtype)[name][number], getattr(OURS, name).default
    real, meta = as_tuple(op(*moved(args, torch.clone))), as_tuple(op(*moved(args, lambda x: x.to("meta"))))
    assert all(y.device.type == "meta" for y in meta)
    assert [(y.shape, y.dtype, y.stride()) for y in meta] == [(y.shape, y.dtype, y.stride()) for y in real]
    torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(("name", "number"), CASES)
def test_torch_compile_keeps_the_op(name: str, number: int) -> None:
    """One graph, with nothing of the op taken apart: compiled code calls the same kernel."""
    args, op = arguments(torch.float32)[name][number], getattr(OURS, name).default
    before, after = moved(args, torch.clone), moved(args, torch.clone)
    expected = as_tuple(op(*before))
    torch.compiler.reset()
    found = as_tuple(torch.compile(op, backend="aot_eager", fullgraph=True)(*after))
    assert_same_bits(found, expected)
    assert_same_bits(tuple(x for x in after if isinstance(x, torch.Tensor)), tuple(x for x in before if isinstance(x, torch.Tensor)))
