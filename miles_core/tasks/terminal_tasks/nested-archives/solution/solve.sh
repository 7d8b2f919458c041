#!/bin/bash
set -euo pipefail
cat > /tmp/unpack.py <<'END'
import os, pathlib, tarfile, zipfile
def unpack(archive, target):
    target.mkdir(parents=True)
    (zipfile.ZipFile(archive) if archive.suffix == ".zip" else tarfile.open(archive)).extractall(target)
    for path in list(target.rglob("*")):
        if path.is_file() and path.name.endswith((".zip", ".tar", ".tar.gz")):
            archive = path.with_name("packed-" + path.name)
            os.rename(path, archive)
            unpack(archive, path)
            os.remove(archive)
unpack(pathlib.Path("delivery.tar.gz"), pathlib.Path("plain"))
END
python3 /tmp/unpack.py
