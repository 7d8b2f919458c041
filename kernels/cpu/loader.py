"""Builds and loads the C++ library (stub)."""

import ctypes


def load() -> ctypes.CDLL | None:
    return None


def implementation() -> str:
    return "torch"


def select(name: str) -> None:
    assert name == "torch"
