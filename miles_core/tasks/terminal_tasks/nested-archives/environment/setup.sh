#!/bin/bash
set -euo pipefail
python3 - <<'END'
import io, tarfile, zipfile
def tar(files, mode):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()
def zipped(files):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return out.getvalue()
inner = zipped({"deep/three.txt": b"3\n", "last.tar": tar({"four.txt": b"4\n"}, "w")})
middle = tar({"two.txt": b"2\n", "inner.zip": inner}, "w:gz")
open("delivery.tar.gz", "wb").write(tar({"one.txt": b"1\n", "data/middle.tar.gz": middle, "data/not-a.zip.txt": b"text\n"}, "w:gz"))
END
