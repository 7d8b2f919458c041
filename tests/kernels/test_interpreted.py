"""Runs each file of interpreted/ in a process of its own, where Triton interprets. Run: pytest tests/kernels/test_interpreted.py"""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

HERE = Path(__file__).parent
FILES = sorted((HERE / "interpreted").glob("test_*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_interpreted(path, tmp_path):
    results = tmp_path / "results.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={results}", path]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, cwd=HERE.parents[1], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert run.returncode == 0, run.stdout
    suite = ElementTree.parse(results).getroot().find("testsuite")
    assert int(suite.get("tests")) > 0 and int(suite.get("skipped")) == 0, run.stdout


def test_every_kernel_has_its_file():
    ops = {path.parent.name for path in (HERE.parents[1] / "kernels").glob("*/triton.py")}
    assert ops and ops <= {path.stem.removeprefix("test_") for path in FILES}
