"""Segments: lazy, nameless, refused when memory is short or the creator is gone. Run: python -m pytest tests/core/test_shm.py"""

import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from miles_core.shm import Segment, available_memory, process_start

GIB = 2**30


def test_pages_take_memory_only_when_touched_and_nothing_has_a_name() -> None:
    before = set(os.listdir("/dev/shm"))
    segment = Segment.create("test", GIB)
    assert os.fstat(segment.fd).st_blocks == 0
    segment.words(GIB // 2, 4)[:] = 7
    assert os.fstat(segment.fd).st_blocks * 512 == 4096
    assert set(os.listdir("/dev/shm")) == before


def test_two_mappings_see_the_same_bytes() -> None:
    mine = Segment.create("test", 8192)
    theirs = Segment.attach(mine.path)
    mine.words(4096, 2, 3)[:] = np.arange(6).reshape(2, 3)
    assert theirs.words(4096, 6).tolist() == list(range(6))
    assert bytes(theirs.buffer[:8]) == bytes(8)


def test_descriptor_is_closed_with_the_segment_and_views_keep_the_memory() -> None:
    segment = Segment.create("test", 4096)
    path, words = segment.path, segment.words(0, 1)
    words[0] = 5
    del segment
    gc.collect()
    assert words[0] == 5
    with pytest.raises(RuntimeError, match="has ended"):
        Segment.attach(path)


def test_memory_of_a_killed_creator_can_still_be_read_by_who_has_it_and_cannot_be_attached_any_more() -> None:
    code = "from miles_core.shm import Segment; s = Segment.create('test', 4096); s.words(0, 1)[0] = 9; print(s.path, flush=True); input()"
    root = Path(__file__).resolve().parents[2]
    child = subprocess.Popen([sys.executable, "-c", code], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    path = child.stdout.readline().strip()
    segment = Segment.attach(path)
    child.kill()
    child.communicate()
    assert segment.words(0, 1)[0] == 9
    with pytest.raises(RuntimeError, match="has ended"):
        Segment.attach(path)


def test_a_path_that_by_now_belongs_to_another_file_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "other").open("w") as file, pytest.raises(RuntimeError, match="no shared memory at"):
        Segment.attach(f"/proc/{os.getpid()}/fd/{file.fileno()}")


def test_too_much_is_refused_and_says_how_much_is_needed() -> None:
    with pytest.raises(ValueError, match=r"ring needs 1048576\.0 GiB, but only [0-9.]+ GiB of memory are free"):
        Segment.create("ring", 2**50)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def fake_machine(root: Path, cgroup: str) -> Path:
    write(root / "proc/meminfo", f"MemTotal: {64 * 2**20} kB\nMemAvailable:   {32 * 2**20} kB\n")
    write(root / "proc/self/cgroup", cgroup)
    return root


def test_control_groups_of_both_versions_limit_the_memory(tmp_path: Path) -> None:
    root = fake_machine(tmp_path / "v2", "0::/job/step\n")
    assert available_memory(root) == 32 * GIB
    for name, limit, used, cache in (("job/step", "max", 3 * GIB, 0), ("job", 8 * GIB, 5 * GIB, 2 * GIB)):
        folder = root / "sys/fs/cgroup" / name
        write(folder / "memory.max", f"{limit}\n")
        write(folder / "memory.current", f"{used}\n")
        write(folder / "memory.stat", f"anon 1\ninactive_file {cache}\nactive_file 0\n")
    assert available_memory(root) == 5 * GIB, "the group around ours has the limit, and its page cache can be dropped"

    root = fake_machine(tmp_path / "v1", "5:cpu,cpuacct:/x\n4:memory:/job\n0::/\n")
    write(root / "sys/fs/cgroup/memory/job/memory.limit_in_bytes", f"{4 * GIB}\n")
    write(root / "sys/fs/cgroup/memory/job/memory.usage_in_bytes", f"{5 * GIB}\n")
    write(root / "sys/fs/cgroup/memory/job/memory.stat", "inactive_file 0\nactive_file 0\n")
    assert available_memory(root) == 0


def test_process_start_tells_processes_apart_and_zombies_from_the_living() -> None:
    child = subprocess.Popen(["sleep", "60"])
    started = process_start(child.pid)
    assert started > process_start(os.getpid()) > 0
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert Path(f"/proc/{child.pid}").exists() and process_start(child.pid) == 0, "a zombie"
    child.wait()
    assert process_start(child.pid) == 0
