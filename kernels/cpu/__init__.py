"""The CPU implementation of every op: one C++ library, and what builds it at first use and loads it (`loader.py`)."""

from kernels.cpu.loader import implementation, load, select

__all__ = ["implementation", "load", "select"]
