#!/bin/bash
set -euo pipefail
python3 - <<'END'
import tarfile
archive = tarfile.open("project.tar", "r:")
members = archive.getmembers()
names = ["project", "project/.gitignore", "project/B", "project/B/b.txt", "project/a.txt", "project/src", "project/src/s.py"]
assert [m.name for m in members] == names, [m.name for m in members]
for m in members:
    assert (m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) == (0, 0, 0, "", "", 0o755 if m.isdir() else 0o644), (m.name, m.get_info())
assert [archive.extractfile(m).read() for m in members if m.isfile()] == [b"g\n", b"b\n", b"a\n", b"s\n"]
END
[ -f project/src/x.tmp ] && [ -d project/.git ] || exit 1
