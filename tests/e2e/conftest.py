"""One build of the CPU kernels before any job starts, so that no deadline of a job covers a compiler."""

import pytest

from kernels import cpu


@pytest.fixture(scope="session", autouse=True)
def built_kernels() -> None:
    cpu.implementation()
