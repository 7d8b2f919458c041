"""Builds the C++ library at first use, caches it, loads it. Or, where there is no compiler, decides for the torch path.

    MILES_CPU_KERNELS=cpp    the C++ library, or an error
    MILES_CPU_KERNELS=torch  the definitions in ref.py: no compiler needed, several times slower
    MILES_CPU_KERNELS=auto   (default) cpp where g++ and an AVX2 processor are, else torch

The torch path relies on how this machine's torch happens to add, so it stays closed until `kernels.invariance.self_test` has passed.

The library lies in $XDG_CACHE_HOME/miles (or ~/.cache/miles) under a name made of everything that decides its code: sources, flags,
compiler, processor. Ranks that start together take turns at a file lock; a file that does not match its checksum is built again.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

_NAMES = ("ops.cpp", "linear.h", "experts.h", "router.h", "attention.h", "tokens.h", "simd.h")
SOURCES = tuple(Path(__file__).parent / name for name in _NAMES)
FLAGS = "-O3 -march=native -ffp-contract=off -fno-math-errno -std=c++17 -fopenmp -fvisibility=hidden -fPIC -shared".split()
DEADLINE_S = 180.0  # for the compiler, and for a rank that waits for another's compiler

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "pack": (None, [_P, _I, _I, _P, _I]),
    "linear": (None, [_P, _P, _P, _P, _P, _I, _I, _I, _I]),
    "rmsnorm": (None, [_P, _P, _F, _P, _I, _I]),
    "rmsnorm_residual": (None, [_P, _P, _P, _F, _P, _P, _I, _I]),
    "rope": (None, [_P, _P, _P, _P, _I, _I, _I, _I]),
    "swiglu": (None, [_P, _P, _P, _I]),
    "write_kv": (_I, [_P, _P, _P, _P, _P, _I, _I, _I, _I]),
    "paged_attention": (_I, [_P, _P, _P, _P, _P, _P, _F, _P, _I, _I, _I, _I, _I, _I, _I, _I]),
    "packed_attention": (_I, [_P, _P, _P, _P, _F, _P, _P, _I, _I, _I, _I, _I, _I]),
    "token_rows": (_I, [_P, _I, _I, _P, _P, _P, _P, _P, _P, _P, _P, _I]),
    "select_experts": (None, [_P, _P, _P, _I, _I, _I, _I, _I, _I]),
    "weigh_experts": (_I, [_P, _P, _P, _I, _I, _I, _I, _I, _F]),
    "expert_order": (_I, [_P, _P, _P, _P, _I, _I]),
    "pack_experts": (None, [_P, _I, _I, _I, _P, _I]),
    "grouped_linear": (_I, [_P, _P, _P, _P, _P, _P, _I, _I, _I, _I, _I, _I]),
    "combine": (_I, [_P, _P, _P, _P, _I, _I, _I]),
    "uniform": (None, [ctypes.c_uint64, _P, _P, _P, _P, _I]),
}

_library: ctypes.CDLL | None = None  # set once the C++ library is in use; read without the lock on every call
_choice: str | None = None  # "cpp" or "torch" once decided
_torch_open = False  # whether the torch path may run
_lock = Lock()


def load() -> ctypes.CDLL | None:
    """The C++ library, or None where the torch path is in use. Any thread may call it."""
    if _library is not None:
        return _library
    if implementation() == "torch":
        assert _torch_open, (
            "the torch path of the CPU kernels is unchecked here: first call kernels.invariance.self_test with the model's shapes"
        )
    return _library


def implementation() -> str:
    """ "cpp" or "torch": what this process uses. The first call decides, and builds."""
    if _choice is None:
        with _lock:
            if _choice is None:
                _decide()
    return _choice


def select(name: str) -> None:
    """Use "cpp" or "torch" from now on, whatever the environment says. The torch path keeps needing a self-test."""
    global _library, _choice
    assert name in ("cpp", "torch"), name
    library = _open_library() if name == "cpp" else None
    with _lock:
        _library, _choice = library, name


@contextmanager
def torch_on_trial() -> Iterator[None]:
    """The torch path is open inside, and stays open if no exception leaves: for the self-test."""
    global _torch_open
    before, _torch_open = _torch_open, True
    try:
        yield
    except BaseException:
        _torch_open = before
        raise


def _decide() -> None:
    global _library, _choice
    wanted = os.environ.get("MILES_CPU_KERNELS", "auto")
    if wanted not in ("cpp", "torch", "auto"):
        raise ValueError(f"MILES_CPU_KERNELS={wanted}: must be cpp, torch or auto")
    obstacle = _obstacle() if wanted != "torch" else None
    if obstacle and wanted == "cpp":
        raise ValueError(f"MILES_CPU_KERNELS=cpp, but {obstacle}; install g++, or set MILES_CPU_KERNELS=torch (slower)")
    if obstacle:
        print(f"kernels: {obstacle}: using the torch path, several times slower", file=sys.stderr, flush=True)
    if wanted == "torch" or obstacle:
        _choice = "torch"
    else:
        _library = _open_library()
        _choice = "cpp"


def _obstacle() -> str | None:
    """Why the C++ library cannot be built here, or None."""
    if shutil.which("g++") is None:
        return "there is no C++ compiler (g++)"
    missing = {"avx2", "fma"} - set(_processor()[1].split())
    return f"the processor lacks {' and '.join(sorted(missing))}" if missing else None


def _processor() -> tuple[str, str]:
    """Model name and instruction flags of the first processor."""
    lines = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines())
    fields = {name.strip(): value.strip() for name, value in lines.items()}
    return fields.get("model name", ""), fields.get("flags", "")


def _open_library() -> ctypes.CDLL:
    """Load the cached library, building it first where needed."""
    compiler = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True, timeout=DEADLINE_S).stdout
    parts = [source.read_bytes() for source in SOURCES] + [repr((FLAGS, compiler, _processor())).encode()]
    key = hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "miles"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = open(directory / f"kernels-{key}.lock", "w")
    except OSError as error:
        raise ValueError(
            f"cannot write {directory} ({error.strerror}); set XDG_CACHE_HOME to a directory for the compiled kernels"
        ) from error
    path = directory / f"kernels-{key}.so"
    with lock:
        _wait_for(lock)
        if not _intact(path):
            _build(path)
        library = ctypes.CDLL(str(path))
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _wait_for(lock) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # held by another process
            assert time.monotonic() < deadline, f"waited {DEADLINE_S:.0f} s for the process that holds {lock.name} to build the CPU kernels"
            time.sleep(0.05)


def _intact(path: Path) -> bool:
    """Whether the library and its checksum agree. Says so where they do not."""
    checksum = path.with_suffix(".sha256")
    if not path.exists() or not checksum.exists():
        return False
    intact = hashlib.sha256(path.read_bytes()).hexdigest() == checksum.read_text()
    if not intact:
        print(f"kernels: {path} is damaged, building it again", file=sys.stderr, flush=True)
    return intact


def _build(path: Path) -> None:
    """Compile into a temporary file, then rename: a reader sees a whole library or none."""
    print("kernels: compiling the CPU library (some seconds, once)", file=sys.stderr, flush=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    command = ["g++", *FLAGS, str(SOURCES[0]), "-o", str(temporary)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
        if done.returncode != 0:
            advice = "g++ could not build the CPU kernels; fix the compiler, or set MILES_CPU_KERNELS=torch (slower)"
            raise ValueError(f"{advice}\n{' '.join(command)}\n{done.stderr[-4000:]}")
        path.with_suffix(".sha256").write_text(hashlib.sha256(temporary.read_bytes()).hexdigest())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
