"""The CPU implementation of every op: one C++ library built at first use (`loader.py`), and the test that a machine's results are invariant."""

from kernels.cpu.loader import implementation, load, select
from kernels.cpu.self_test import self_test

__all__ = ["implementation", "load", "select", "self_test"]
