"""The journal: every finished group on disk before anyone can train on it, so that a crash costs no group that was paid for (DESIGN 4.4).

    journal = Journal(run_dir / "journal", incarnation, rank, recipe, fsync="interval")     # a rollout rank; nobody else writes its files
    journal.append(group, routes)                                    # returns when the bytes are the kernel's; fsynced within a second
    journal.rotate()                                                 # at checkpoints: a new file, the old one is fsynced
    journal.close()

    journal/000003-r0001-000002.journal     incarnation 3 (third start of the run), rank 1, third file; journal_file.py has its bytes

    python -m miles_core.journal RUN_DIR                     # lists; --verify, --group N, --jsonl FILE, --repair

A killed process loses nothing that `append` has returned for. A machine that loses power may lose what is not fsynced: those groups are
made again. fsync runs in a thread of its own, because a slow disk must not hold up generation; with "always", `append` waits for it.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch

from miles_core import guard, rundir
from miles_core.assets import TINY
from miles_core.journal_file import Contents, Damaged, encode_header, encode_record, load, scan
from miles_core.model import hf
from miles_core.routing import decode, to_ids
from miles_core.schema import FIELDS, FINISH_REASONS, SCALARS, VERDICTS, Trajectory

FSYNC = ("always", "interval", "off")
INTERVAL_S = 1.0
MAX_FILE_BYTES = 64 << 20
_NAME = re.compile(r"(\d+)-r(\d+)-(\d+)\.journal")


class Journal:
    """One writer. OSError from its methods means that the disk refused; what is in the file then is whole."""

    def __init__(self, directory: Path, incarnation: int, rank: int, recipe: dict[str, Any], fsync: str = "interval"):
        assert fsync in FSYNC, fsync
        self.directory, self.stem, self.fsync = directory, f"{incarnation:06d}-r{rank:04d}", fsync
        self.header = encode_header(incarnation, rank, recipe)
        self.fd, self.size, self.num_files = -1, 0, 0
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()  # of what the thread that fsyncs is to do
        self._dirty: set[int] = set()
        self._closing: set[int] = set()
        self._failure: OSError | None = None
        self._wake, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._sync_now_and_then, name="journal", daemon=True)
        self._thread.start()

    def append(self, group: list[Trajectory], routes: list[np.ndarray]) -> np.ndarray:
        """Add a finished group: `routes` of each trajectory, uint8, empty where none were recorded. Returns the group as bytes (uint8)."""
        self._raise_failure()
        if self.fd < 0 or self.size > MAX_FILE_BYTES:
            self._open()
        head, body, nbytes = encode_record(group, routes)
        self._write([memoryview(head), memoryview(body)])
        if self.fsync == "always":
            os.fsync(self.fd)
        elif self.fsync == "interval":
            with self._lock:
                self._dirty.add(self.fd)
        return body[:nbytes]

    def rotate(self) -> None:
        """Close the file, if there is one; the next group begins another. So a checkpoint that has them all can free whole files."""
        self._raise_failure()
        if self.fd >= 0:
            with self._lock:
                self._closing.add(self.fd)
            self.fd = -1
            self._wake.set()

    def close(self, timeout_s: float = 300.0) -> None:
        """Write everything to disk and stop. Raises TimeoutError when the disk has not taken it by then."""
        if self.fd >= 0:
            self._closing.add(self.fd)
            self.fd = -1
        self._ended.set()
        self._wake.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"waited {timeout_s:g} s for the fsync of the journal in {self.directory}: its disk does not answer")
        self._raise_failure()

    def _open(self) -> None:
        self.rotate()
        path = self.directory / f"{self.stem}-{self.num_files:06d}.journal"
        self.fd, self.size = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), 0
        self.num_files += 1
        self._write([memoryview(self.header)])
        if self.fsync != "off":
            rundir.fsync(self.directory)

    def _write(self, pieces: list[memoryview]) -> None:
        """All of it or none: a file that the disk would not take whole is cut back."""
        left = sum(map(len, pieces))
        end = self.size + left
        try:
            while left := left - os.writev(self.fd, pieces):  # a disk that is filling up takes a part first, and refuses the rest then
                pieces = [memoryview(b"".join(pieces))[-left:]]
        except OSError as error:
            os.ftruncate(self.fd, self.size)
            os.lseek(self.fd, self.size, os.SEEK_SET)
            raise OSError(error.errno, f"{os.strerror(error.errno)} while writing the journal in {self.directory}") from error
        self.size = end

    def _sync_now_and_then(self) -> None:
        while True:
            self._wake.wait(INTERVAL_S)
            self._wake.clear()
            ended = self._ended.is_set()
            with self._lock:
                dirty, closing = self._dirty | (self._closing if self.fsync != "off" else set()), self._closing
                self._dirty, self._closing = set(), set()
            for fd in dirty:
                try:
                    os.fsync(fd)
                except OSError as error:  # said by the next call of the writer
                    self._failure = OSError(error.errno, f"{os.strerror(error.errno)} while fsyncing the journal in {self.directory}")
            for fd in closing:
                os.close(fd)
            if ended:
                return

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def files(directory: Path) -> list[Path]:
    """Every file of a journal, oldest incarnation first."""
    return sorted(path for path in directory.glob("*.journal") if _NAME.fullmatch(path.name))


def read(directory: Path) -> tuple[list[Contents], list[str]]:
    """(what the files of a journal hold, a sentence for each that cannot be read at all)."""
    found, unreadable = [], []
    for path in files(directory):
        try:
            found.append(scan(path))
        except Damaged as error:
            unreadable.append(str(error))
        except FileNotFoundError:
            pass  # pruned while we looked
    return found, unreadable


# ---- python -m miles_core.journal


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m miles_core.journal", description="What a run has journalled. Without options: a list.")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--verify", action="store_true", help="read every group and compare its checksum; exit code 1 if any differs")
    choice.add_argument("--group", type=int, metavar="N", help="print a group as text: tokens, masks, log-probs, versions, routes")
    choice.add_argument("--jsonl", type=Path, metavar="FILE", help="write every whole group to FILE, one sample a line")
    choice.add_argument("--repair", action="store_true", help="cut what a killed writer has left unfinished at the end of a file")
    arguments = parser.parse_args()
    directory = arguments.run_dir / "journal"
    found, unreadable = read(directory)
    if not found and not unreadable:
        raise ValueError(f"{arguments.run_dir} has no journal: give the directory of a run, runs/<date-time>")
    if arguments.group is not None:
        show(arguments.run_dir, found, arguments.group)
    elif arguments.jsonl is not None:
        export(found, arguments.jsonl)
    elif arguments.repair:
        repair(found)
    elif not describe(found, unreadable, verify=arguments.verify):
        sys.exit(1)


def describe(found: list[Contents], unreadable: list[str], *, verify: bool) -> bool:
    """A line a file. With `verify`, whether all is as it was written."""
    num_groups = num_bytes = num_tokens = 0
    sound = not unreadable
    for contents in found:
        faults = [f"{contents.num_damaged} damaged places"] if contents.num_damaged else []
        faults += [f"torn: {contents.torn} bytes of an unfinished group"] if contents.torn else []
        for entry in contents.entries if verify else ():
            try:
                num_tokens += sum(len(t.tokens) for t in load(entry)[0])
            except Damaged as error:
                faults.append(str(error))
        numbers = sorted(entry.group for entry in contents.entries)
        span = f"{len(numbers)} groups, {numbers[0]} to {numbers[-1]}" if numbers else "no group"
        print(f"{contents.path.name}  {contents.size / 2**20:8.2f} MiB  {span}{''.join(f'; {fault}' for fault in faults)}")
        num_groups, num_bytes, sound = num_groups + len(numbers), num_bytes + contents.size, sound and not faults
    for sentence in unreadable:
        print(sentence)
    per_token = f", {num_bytes / num_tokens:.1f} bytes a token" if num_tokens else ""
    end = ": all as written" if verify and sound else ""
    print(f"{num_groups} groups in {len(found)} files, {num_bytes / 2**20:.2f} MiB{per_token}{end}")
    return sound or not verify


def show(run_dir: Path, found: list[Contents], number: int) -> None:
    """A group as text, the newest record of it."""
    entries = [entry for contents in found for entry in contents.entries if entry.group == number]
    if not entries:
        raise ValueError(f"--group {number} is not in the journal of {run_dir}")
    group, routes = load(entries[-1])
    name = json.loads((run_dir / "config.json").read_text())["model"]
    model_dir = TINY if name == "tiny" else hf.resolve(name)
    tokenizer, moe = hf.load_tokenizer(model_dir), hf.load_config(model_dir).moe
    print(f"group {number}: incarnation {entries[-1].incarnation}, {entries[-1].path.name} at byte {entries[-1].offset}")
    for t, payload in zip(group, routes, strict=True):
        values = (f"{f.name} {getattr(t, f.name)}" for f in SCALARS if f.name not in ("group", "sample", "verdict", "finish"))
        print(f"\n{t.name}: {VERDICTS[t.verdict]}, {FINISH_REASONS[t.finish]}; {', '.join(values)}; {len(payload)} bytes of routes")
        rows = decode(torch.from_numpy(payload), len(t.tokens), moe) if len(payload) else None
        versions = iter(t.version_M.tolist())
        for position, (token, sampled) in enumerate(zip(t.tokens.tolist(), t.loss_mask.tolist(), strict=True)):
            more = f"  log-prob {t.logp_roll[position]:+.6f}  version {next(versions)}" if sampled else " " * 31
            if rows is not None and rows[1][position]:
                more += f"  experts {to_ids(rows[0][position]).tolist()}"
            print(f"  {position:5d}  {token:7d}  {tokenizer.decode([token])!r:16}{more}".rstrip())


def export(found: list[Contents], path: Path) -> None:
    """Every whole group, one sample a line: the fields by name, arrays as lists."""
    with path.open("w") as file:
        for entry in (entry for contents in found for entry in contents.entries):
            try:
                group, routes = load(entry)
            except Damaged as error:
                print(f"left out: {error}", file=sys.stderr)
                continue
            for t, payload in zip(group, routes, strict=True):
                values = {f.name: getattr(t, f.name) for f in FIELDS}
                line = {"incarnation": entry.incarnation} | {n: v.tolist() if isinstance(v, np.ndarray) else v for n, v in values.items()}
                file.write(json.dumps(line | {"routes": base64.b64encode(payload).decode()}) + "\n")


def repair(found: list[Contents]) -> None:
    """Cut torn tails. Not while the run runs: a record that is being written looks the same."""
    for contents in (contents for contents in found if contents.torn):
        os.truncate(contents.path, contents.size - contents.torn)
        print(f"{contents.path.name}: cut {contents.torn} bytes")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # into `head`, say
    guard.run(main)
