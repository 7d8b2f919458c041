"""One file of the journal: its bytes, how they are read back, and what is made of damage. journal.py writes them.

    file       8 bytes MAGIC, words LENGTH and DIGEST of the header, the header (JSON, padded to 8), then records
    record     HEAD: eight int64 words (see below), then the group as in a slot of the ring (schema.write_group), then its routes

The header says what the file holds: format, the rows of FIELDS, incarnation and rank of its writer, and the flags that shape a group.
Everything stands at multiples of 8 bytes. The head of a record has a digest of its own, so a flipped bit in a length can't hide the records
behind it: reading goes on at the next head that is whole. What is damaged is counted, never read.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from miles_core.digest import digest
from miles_core.schema import FIELDS, Trajectory, group_nbytes, read_group, write_group

MAGIC = b"MILES-J1"
FORMAT = 1
FIELDS_HERE = [list(f) for f in FIELDS]
# words of a record's head; OLDEST and NEWEST are versions of its sampled tokens
MARK, GROUP, OLDEST, NEWEST, GROUP_BYTES, ROUTE_BYTES, DIGEST, HEAD_DIGEST = range(8)
_MARK = int.from_bytes(b"\xd7MILES\xb5\x16", "little", signed=True)
_HEAD_BYTES, _START_BYTES = 64, 24


class Damaged(Exception):
    """A record is not what was written."""


class Entry(NamedTuple):
    """Where one group stands, and what its head says of it."""

    path: Path
    offset: int
    incarnation: int
    group: int
    oldest: int  # versions of its sampled tokens
    newest: int
    group_bytes: int
    route_bytes: int
    digest: int

    @property
    def end(self) -> int:
        return self.offset + _HEAD_BYTES + aligned(self.group_bytes + self.route_bytes)


@dataclass
class Contents:
    """What a look at the heads of one file has found. `torn`: bytes of an unfinished record at its end."""

    path: Path
    header: dict[str, Any]
    entries: list[Entry] = field(default_factory=list)
    num_damaged: int = 0
    torn: int = 0
    size: int = 0


def aligned(nbytes: int) -> int:
    return (nbytes + 7) & ~7


def encode_header(incarnation: int, rank: int, recipe: dict[str, Any]) -> bytes:
    """The beginning of a file."""
    text = json.dumps({"format": FORMAT, "fields": FIELDS_HERE, "incarnation": incarnation, "rank": rank, "recipe": recipe}).encode()
    words = np.array([len(text), digest(text)], np.int64)
    return MAGIC + words.tobytes() + text.ljust(aligned(len(text)))


def encode_record(group: list[Trajectory], routes: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, int]:
    """A group and the routes of each of its trajectories (uint8, maybe empty) -> head, body, and how much of the body is the group."""
    sizes = [len(r) for r in routes]
    assert len(routes) == len(group) and all(n in (0, t.route_bytes) for n, t in zip(sizes, group, strict=True)), sizes
    nbytes, num_routes = group_nbytes(group), sum(sizes)
    body = np.zeros(aligned(nbytes + num_routes), np.uint8)
    write_group(group, memoryview(body)[:nbytes])
    if num_routes:
        np.concatenate(routes, out=body[nbytes : nbytes + num_routes])
    versions = np.concatenate([t.version[:, 0] for t in group])
    head = np.array([_MARK, group[0].group, versions.min(), versions.max(), nbytes, num_routes, digest(body), 0], np.int64)
    head[HEAD_DIGEST] = digest(head[:HEAD_DIGEST])
    return head.view(np.uint8), body, nbytes


def scan(path: Path) -> Contents:
    """The heads of a file, without its groups. Raises Damaged when not even its header can be read."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < _START_BYTES:
            raise Damaged(f"{path} ends within its header")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            start, header = _header(path, data)
            found = Contents(path, header, size=size)
            for entry in _entries(found, data, start):
                found.entries.append(entry)
    return found


def _header(path: Path, data: mmap.mmap) -> tuple[int, dict[str, Any]]:
    length, expected = np.frombuffer(data[8:_START_BYTES], np.int64).tolist()
    text = data[_START_BYTES : _START_BYTES + length] if 0 < length <= len(data) else b""
    if data[:8] != MAGIC or digest(text) != expected:
        raise Damaged(f"{path} is no journal, or its header is damaged")
    return _START_BYTES + aligned(length), json.loads(text)


def _entries(found: Contents, data: mmap.mmap, offset: int) -> Iterator[Entry]:
    """Every whole head. Fills in what is damaged and torn."""
    mark = np.int64(_MARK).tobytes()
    while offset < len(data):
        head = np.frombuffer(data[offset : offset + _HEAD_BYTES].ljust(_HEAD_BYTES, b"\0"), np.int64)
        if head[MARK] == _MARK and head[HEAD_DIGEST] == digest(head[:HEAD_DIGEST]):
            group, oldest, newest, nbytes, num_routes, expected = head[GROUP:HEAD_DIGEST].tolist()
            entry = Entry(found.path, offset, found.header["incarnation"], group, oldest, newest, nbytes, num_routes, expected)
            if entry.end > len(data):
                found.torn = len(data) - offset
                return
            yield entry
            offset = entry.end
            continue
        following = offset  # what stands here is no head: go on at the next one that is whole
        while (following := data.find(mark, following + 1)) >= 0:
            words = np.frombuffer(data[following : following + _HEAD_BYTES].ljust(_HEAD_BYTES, b"\0"), np.int64)
            if following % 8 == 0 and words[HEAD_DIGEST] == digest(words[:HEAD_DIGEST]):
                break
        if following < 0:
            if len(data) - offset < _HEAD_BYTES:  # not even a head: what a kill leaves behind
                found.torn = len(data) - offset
            else:
                found.num_damaged += 1
            return
        found.num_damaged += 1
        offset = following


def load(entry: Entry) -> tuple[list[Trajectory], list[np.ndarray]]:
    """The group and the routes of each trajectory (uint8, empty where none are recorded). Raises Damaged, naming the group and the file."""
    what = f"group {entry.group} at byte {entry.offset} of {entry.path}"
    try:
        body = np.fromfile(entry.path, np.uint8, entry.end - entry.offset - _HEAD_BYTES, offset=entry.offset + _HEAD_BYTES)
    except FileNotFoundError as error:
        raise Damaged(f"{what} is gone") from error
    if digest(body) != entry.digest:
        raise Damaged(f"{what} is damaged: its checksum does not match")
    group = read_group(memoryview(body)[: entry.group_bytes])
    routes, at = [], entry.group_bytes
    for t in group:
        length = t.route_bytes if entry.route_bytes else 0
        routes.append(body[at : at + length])
        at += length
    return group, routes
