"""What is journalled can be read back to the bit; whatever is cut or flipped is found, counted and never read.

    python -m pytest tests/core/test_journal.py
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from samples import trajectory

from miles_core import journal
from miles_core.assets import TINY
from miles_core.journal import Journal
from miles_core.journal_file import Damaged, load, scan
from miles_core.model import hf
from miles_core.routing import encode
from miles_core.schema import FIELDS, Trajectory

ROOT = Path(__file__).resolve().parents[2]
RECIPE = {"task": "sort", "temperature": 1.0}


def group_of(number: int, num_samples: int = 3, with_routes: bool = True) -> tuple[list[Trajectory], list[np.ndarray]]:
    """A group whose samples differ in length, and the routes of each."""
    random = np.random.default_rng(number)
    group, routes = [], []
    for sample in range(num_samples):
        length = int(random.integers(1, 50)) if with_routes else 0
        routes.append(random.integers(0, 256, length).astype(np.uint8))
        version = np.array([[number, 2], [number + 1, 3]], np.int32)
        group.append(trajectory(3 + sample, 5, group=number, sample=sample, reward=sample / 4, version=version, route_bytes=length))
    return group, routes


def written(directory: Path, numbers: range, *, incarnation: int = 1, rank: int = 0, **changes: object) -> Path:
    """One file with these groups."""
    writer = Journal(directory, incarnation, rank, RECIPE, **changes)
    for number in numbers:
        writer.append(*group_of(number))
    writer.close()
    return journal.files(directory)[-1]


def assert_same(entry: journal.Entry) -> None:
    group, routes = load(entry)
    expected, expected_routes = group_of(entry.group)
    for a, b in zip(group, expected, strict=True):
        assert all(np.array_equal(getattr(a, f.name), getattr(b, f.name)) for f in FIELDS), a.name
    assert all(np.array_equal(a, b) for a, b in zip(routes, expected_routes, strict=True))


@pytest.mark.parametrize("fsync", journal.FSYNC)
def test_a_group_comes_back_bit_for_bit(tmp_path: Path, fsync: str) -> None:
    path = written(tmp_path / "journal", range(5), incarnation=3, rank=12, fsync=fsync)
    contents = scan(path)
    assert path.name == "000003-r0012-000000.journal"
    assert (contents.header["incarnation"], contents.header["rank"], contents.header["recipe"]) == (3, 12, RECIPE)
    assert [f[0] for f in contents.header["fields"]] == [f.name for f in FIELDS], "the file says what it holds"
    assert [(e.group, e.oldest, e.newest) for e in contents.entries] == [(n, n, n + 1) for n in range(5)]
    assert (contents.num_damaged, contents.torn) == (0, 0)
    for entry in contents.entries:
        assert_same(entry)


def test_groups_without_routes(tmp_path: Path) -> None:
    writer = Journal(tmp_path, 1, 0, RECIPE)
    writer.append(*group_of(4, with_routes=False))
    writer.close()
    group, routes = load(scan(journal.files(tmp_path)[0]).entries[0])
    assert len(group) == 3 and [len(r) for r in routes] == [0, 0, 0]


def test_files_follow_each_other_at_checkpoints_and_when_they_are_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Journal(tmp_path, 1, 0, RECIPE)
    writer.rotate()
    assert journal.files(tmp_path) == [], "no empty files"
    for number in range(4):
        writer.append(*group_of(number))
        if number == 1:
            writer.rotate()
    monkeypatch.setattr(journal, "MAX_FILE_BYTES", 0)
    writer.append(*group_of(4))
    writer.close()
    assert [[e.group for e in scan(path).entries] for path in journal.files(tmp_path)] == [[0, 1], [2, 3], [4]]


def test_what_append_has_returned_for_survives_a_kill(tmp_path: Path) -> None:
    code = (
        "import os, sys; sys.path[:0] = ['tests/core']; from pathlib import Path; from test_journal import Journal, RECIPE, group_of\n"
        f"writer = Journal(Path({str(tmp_path)!r}), 1, 0, RECIPE)\n"
        "for number in range(10_000):\n    writer.append(*group_of(number)); print(number, flush=True)\n"
    )
    for life in range(2):
        process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        process.stdout.readline()
        time.sleep(0.05 * (life + 1))
        process.send_signal(signal.SIGKILL)
        said = [int(line) for line in process.communicate()[0].split()]
        (path,) = journal.files(tmp_path)
        contents = scan(path)
        assert contents.num_damaged == 0 and len(said) > 1
        assert [e.group for e in contents.entries][: len(said) + 1] == [0, *said]
        assert len(contents.entries) <= len(said) + 2
        for entry in contents.entries:
            assert_same(entry)
        path.unlink()


def test_every_cut_is_a_torn_tail(tmp_path: Path) -> None:
    """Whatever the length of the file: groups before the cut are whole, the rest is counted, and repair makes a whole file of it."""
    path = written(tmp_path / "journal", range(3))
    data, entries = path.read_bytes(), scan(path).entries
    for length in range(entries[0].offset, len(data), 13):
        path.write_bytes(data[:length])
        contents, whole = scan(path), [e for e in entries if e.end <= length]
        assert contents.entries == whole and contents.num_damaged == 0, length
        assert contents.torn == length - (whole[-1].end if whole else entries[0].offset)
        journal.repair([contents])
        again = scan(path)
        assert (again.entries, again.torn) == (whole, 0)
    for length in (0, 7, 23, 24, entries[0].offset - 1):
        path.write_bytes(data[:length])
        with pytest.raises(Damaged):
            scan(path)


def test_every_flipped_bit_is_found_and_costs_one_group(tmp_path: Path) -> None:
    """300 random bits: at most the group in which it lies is lost, and no group is ever read that was not written."""
    path = written(tmp_path / "journal", range(6))
    data, entries, random = path.read_bytes(), scan(path).entries, np.random.default_rng(0)
    for bit in random.integers(8 * entries[0].offset, 8 * len(data), 300).tolist():
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        contents, read, lost = scan(path), [], 0
        for entry in contents.entries:
            try:
                assert_same(entry)
                read.append(entry.group)
            except Damaged:
                lost += 1
        victim = next(e.group for e in entries if e.offset <= bit // 8 < e.end)
        assert read == [g for g in range(6) if g != victim], bit
        assert lost + contents.num_damaged + (contents.torn > 0) == 1, "and it is counted once"


def test_a_damaged_header_makes_the_file_unreadable_and_says_so(tmp_path: Path) -> None:
    path = written(tmp_path / "journal", range(2))
    data = path.read_bytes()
    for byte in range(0, scan(path).entries[0].offset - 8, 7):
        path.write_bytes(data[:byte] + bytes([data[byte] ^ 4]) + data[byte + 1 :])
        found, unreadable = journal.read(tmp_path / "journal")
        assert found == [] and str(path) in unreadable[0]


def test_a_full_disk_leaves_whole_groups(tmp_path: Path) -> None:
    writer = Journal(tmp_path, 1, 0, RECIPE)
    writer.append(*group_of(0))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for room in (0, 8, 64, 100, 400):
        resource.setrlimit(resource.RLIMIT_FSIZE, (writer.size + room, hard))
        try:
            with pytest.raises(OSError, match="while writing the journal in") as caught:
                writer.append(*group_of(1))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert caught.value.errno == errno.EFBIG
        contents = scan(journal.files(tmp_path)[0])
        assert [e.group for e in contents.entries] == [0] and (contents.torn, contents.num_damaged) == (0, 0)
    writer.append(*group_of(1))
    writer.close()
    assert [e.group for e in scan(journal.files(tmp_path)[0]).entries] == [0, 1]


def test_a_write_that_is_cut_short_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal.os, "writev", lambda fd, pieces: os.write(fd, b"".join(pieces)[:37]))
    path = written(tmp_path / "journal", range(3))
    contents = scan(path)
    assert [e.group for e in contents.entries] == [0, 1, 2] and (contents.torn, contents.num_damaged) == (0, 0)
    for entry in contents.entries:
        assert_same(entry)


def test_a_slow_fsync_does_not_hold_up_the_writer_and_a_failed_one_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, fail, go = [], False, threading.Event()
    writer = Journal(tmp_path, 1, 0, RECIPE)

    def fsync(fd: int) -> None:
        if not os.path.isdir(f"/proc/self/fd/{fd}"):
            assert go.wait(60)
            synced.append(fd)
            if fail:
                raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(journal.os, "fsync", fsync)
    for number in range(20):
        writer.append(*group_of(number))
        writer.rotate()
    assert not synced  # all of it was written while the first fsync waits
    with pytest.raises(TimeoutError, match=r"waited 0.1 s for the fsync of the journal in .*: its disk does not answer"):
        writer.close(0.1)
    fail = True
    go.set()
    with pytest.raises(OSError, match="while fsyncing the journal in"):
        writer.close()
    assert len(synced) == 20, "closing waits until everything is on disk"


# ---- the command


def command(*arguments: object) -> tuple[int, str]:
    """(exit code, what it prints)."""
    out = io.StringIO()
    with mock.patch.object(sys, "argv", ["journal", *map(str, arguments)]), contextlib.redirect_stdout(out):
        try:
            journal.main()
        except SystemExit as ended:
            return ended.code, out.getvalue()
    return 0, out.getvalue()


def test_the_command_lists_verifies_and_repairs(tmp_path: Path) -> None:
    first, second = written(tmp_path / "journal", range(3)), written(tmp_path / "journal", range(7, 9), rank=1)
    code, said = command(tmp_path)
    assert code == 0 and first.name in said and "3 groups, 0 to 2" in said and "5 groups in 2 files" in said
    code, said = command(tmp_path, "--verify")
    assert code == 0 and said.rstrip().endswith("bytes a token: all as written")
    os.truncate(second, second.stat().st_size - 9)
    data = bytearray(first.read_bytes())
    data[-20] ^= 1
    first.write_bytes(data)
    code, said = command(tmp_path, "--verify")
    assert code == 1 and "torn: " in said and f"group 2 at byte {scan(first).entries[2].offset}" in said
    assert "its checksum does not match" in said
    code, said = command(tmp_path, "--repair")
    assert code == 0 and f"{second.name}: cut" in said and scan(second).torn == 0
    assert [e.group for e in scan(second).entries] == [7]


def test_the_command_exports_every_field(tmp_path: Path) -> None:
    written(tmp_path / "journal", range(2), incarnation=4)
    assert command(tmp_path, "--jsonl", tmp_path / "out.jsonl")[0] == 0
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(line["group"], line["sample"], line["incarnation"]) for line in lines] == [(g, s, 4) for g in range(2) for s in range(3)]
    for line in lines:
        original = group_of(line["group"])[0][line["sample"]]
        for f in FIELDS:
            value = getattr(original, f.name)
            assert np.array_equal(np.asarray(line[f.name], np.asarray(value).dtype).reshape(np.shape(value)), value), f.name


def test_the_command_prints_a_group_as_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model": "tiny"}))
    moe = hf.load_config(TINY).moe
    plain, _ = group_of(5, with_routes=False)
    rows = torch.arange(8 * len(moe.layers) * moe.top_k).view(8, len(moe.layers), moe.top_k) % moe.num_experts
    payload = encode(rows[:7].to(torch.uint8), np.arange(8) < 7).numpy()  # 3 + 5 tokens; the last has no row
    plain[0].route_bytes = len(payload)
    writer = Journal(tmp_path / "journal", 2, 0, RECIPE)
    writer.append(plain, [payload, payload[:0], payload[:0]])
    writer.close()
    code, said = command(tmp_path, "--group", 5)
    assert code == 0 and "group 5: incarnation 2" in said and "group 5 sample 2: ok, " in said
    versions = iter(plain[0].version_M.tolist())
    for position, line in enumerate(said.split("group 5 sample 0")[1].splitlines()[1:9]):
        assert line.split()[:2] == [str(position), str(plain[0].tokens[position])]
        expected = f"log-prob {plain[0].logp_roll[position]:+.6f}  version {next(versions)}" if plain[0].loss_mask[position] else ""
        assert expected in line and ("log-prob" in line) == bool(expected)
        assert (f"experts {rows[position].tolist()}" in line) == (position < 7)
    with pytest.raises(ValueError, match=f"--group 9 is not in the journal of {tmp_path}"):
        command(tmp_path, "--group", 9)


def test_the_command_needs_a_run(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, "-m", "miles_core.journal", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    said = f"error: {tmp_path} has no journal: give the directory of a run, runs/<date-time>\n"
    assert (run.returncode, run.stdout, run.stderr) == (2, "", said)
