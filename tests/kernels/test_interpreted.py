"""Runs each file of interpreted/ in a process of its own, where Triton interprets; as many at a time as there are cores.

Run: pytest tests/kernels/test_interpreted.py
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

import pytest

HERE = Path(__file__).parent
FILES = sorted((HERE / "interpreted").glob("test_*.py"))
LONGEST_FIRST = ("test_chain", "test_router", "test_invariance", "test_logprob", "test_attention")


def interpret(path: Path, results: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={results}", path]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    return subprocess.run(command, cwd=HERE.parents[1], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Path, tuple[Future, Path]]]:
    """The files that are wanted, all of them under way."""
    where = tmp_path_factory.mktemp("interpreted")
    wanted = [item.callspec.params["path"] for item in request.session.items if item.name.startswith("test_interpreted[")]
    wanted.sort(key=lambda path: LONGEST_FIRST.index(path.stem) if path.stem in LONGEST_FIRST else len(LONGEST_FIRST))
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        yield {path: (pool.submit(interpret, path, where / path.stem), where / path.stem) for path in wanted}
        pool.shutdown(wait=False, cancel_futures=True)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_interpreted(path: Path, runs: dict[Path, tuple[Future, Path]]) -> None:
    future, results = runs[path]
    run = future.result()
    assert run.returncode == 0, run.stdout
    suite = ElementTree.parse(results).getroot().find("testsuite")
    assert int(suite.get("tests")) > 0 and int(suite.get("skipped")) == 0, run.stdout


def test_every_kernel_has_its_file():
    ops = {path.parent.name for path in (HERE.parents[1] / "kernels").glob("*/triton.py")}
    assert ops and ops <= {path.stem.removeprefix("test_") for path in FILES}
