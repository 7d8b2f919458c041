#!/bin/bash
set -euo pipefail
python3 - <<'END'
import pathlib, tarfile
def plain(info):
    info.mtime = info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mode = 0o755 if info.isdir() else 0o644
    return info
paths = sorted([pathlib.Path("project"), *pathlib.Path("project").rglob("*")], key=lambda path: str(path).encode())
with tarfile.open("project.tar", "w") as archive:
    for path in paths:
        if ".git" not in path.parts and not path.name.endswith(".tmp"):
            archive.add(path, recursive=False, filter=plain)
END
