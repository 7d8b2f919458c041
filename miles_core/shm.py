"""Shared memory between the ranks of a node: anonymous (memfd), so it has no name that could be left behind.

The kernel frees it with the last process that maps it, however that process ends. It is not limited by the size of /dev/shm, which
containers often set to 64 MiB. Other processes of the same user attach through /proc/<pid>/fd/<fd> while the creator lives.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np


class Segment:
    """`buffer` is the whole memory; pages take memory only when they are first touched."""

    def __init__(self, fd: int, path: str):
        self.fd, self.path = fd, path
        self.nbytes = os.fstat(fd).st_size
        self.buffer = memoryview(mmap.mmap(fd, self.nbytes))

    @classmethod
    def create(cls, name: str, nbytes: int) -> Segment:
        """Raises ValueError when the machine has less memory left than `nbytes`."""
        free = available_memory()
        if nbytes > free:
            raise ValueError(f"shared memory for {name} needs {nbytes / 2**30:.1f} GiB, but only {free / 2**30:.1f} GiB of memory are free")
        fd = os.memfd_create(f"miles-{name}", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        return cls(fd, f"/proc/{os.getpid()}/fd/{fd}")

    @classmethod
    def attach(cls, path: str) -> Segment:
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), path)

    def words(self, offset: int, *shape: int) -> np.ndarray:
        """int64 array over the bytes from `offset` (a multiple of 8). One element is one aligned 8-byte store: it never tears."""
        assert offset % 8 == 0, offset
        return np.frombuffer(self.buffer, np.int64, int(np.prod(shape)), offset).reshape(shape)


def available_memory() -> int:
    """Bytes that can still be used: MemAvailable, or what the cgroup's limit leaves if that is less."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return free
