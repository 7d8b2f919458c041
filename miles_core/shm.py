"""Shared memory between the ranks of a node: anonymous (memfd), so it has no name that could be left behind.

The kernel frees it with the last process that maps it, however that process ends. It is not limited by the size of /dev/shm, which
containers often set to 64 MiB. Other processes of the same user attach through /proc/<pid>/fd/<fd> while the creator lives.
"""

from __future__ import annotations

import mmap
import os
import weakref
from pathlib import Path

import numpy as np


class Segment:
    """`buffer` is the whole memory, zero at first; pages take memory only when they are first touched.

    It lives as long as the object and every view of it.
    """

    def __init__(self, fd: int, path: str):
        self.fd, self.path = fd, path
        weakref.finalize(self, os.close, fd)
        self.nbytes = os.fstat(fd).st_size
        self.buffer = memoryview(mmap.mmap(fd, self.nbytes))

    @classmethod
    def create(cls, name: str, nbytes: int, fix: str = "") -> Segment:
        """Raises ValueError when the machine has less memory left than `nbytes`; `fix`: what the user can do then."""
        free = available_memory()
        if nbytes > free:
            needs = f"needs {nbytes / 2**30:.1f} GiB, but only {free / 2**30:.1f} GiB of memory are free"
            raise ValueError(f"shared memory for {name} {needs}{fix}")
        fd = os.memfd_create(f"miles-{name}", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        return cls(fd, f"/proc/{os.getpid()}/fd/{fd}")

    @classmethod
    def attach(cls, path: str) -> Segment:
        """Raises RuntimeError when the creator is gone, even if another process has its pid and descriptor number by now."""
        try:
            if not os.readlink(path).startswith("/memfd:miles-"):
                raise FileNotFoundError(path)
            return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), path)
        except OSError as error:
            raise RuntimeError(f"no shared memory at {path}: the rank that made it has ended, or its /proc is not visible here") from error

    def words(self, offset: int, *shape: int) -> np.ndarray:
        """int64 array over the bytes from `offset` (a multiple of 8). One element is one aligned 8-byte store: it never tears."""
        assert offset % 8 == 0, offset
        return np.frombuffer(self.buffer, np.int64, int(np.prod(shape)), offset).reshape(shape)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can still be used: MemAvailable, or less if a control group of ours (version 1 or 2), or one around it, has less left.

    Page cache counts as free: the kernel drops it when a limit is reached. `root` is another file system root, for tests.
    """
    fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, limit_name, used_name = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top, limit_name, used_name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = top / path.strip("/")
        for folder in (group, *group.parents):
            limit = folder / limit_name
            if folder.is_relative_to(top) and limit.exists() and (text := limit.read_text().strip()) != "max":
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                cache = int(stat["inactive_file"]) + int(stat["active_file"])
                free = min(free, int(text) - int((folder / used_name).read_text()) + cache)
    return max(0, free)


def process_start(pid: int) -> int:
    """Start time of a process in clock ticks since boot, 0 if there is none: with the pid it names a process for ever."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    fields = stat.rpartition(")")[2].split()  # the name in parentheses may hold spaces
    return 0 if fields[0] in "ZX" else int(fields[19])
