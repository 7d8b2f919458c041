"""Our folder `kernels` beside Hugging Face's package of that name (DESIGN section 2).

    python -m pytest tests/core/test_hub_kernels.py

With that package's metadata installed, transformers believes it is there, finds our folder first and imports from it names that
we do not have. The tokenizer is all we use of transformers, and must not come to that.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers.utils import import_utils

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def fake_site(tmp_path: Path) -> Path:
    """A folder for sys.path where a version of `kernels` that transformers accepts seems to be installed."""
    version = getattr(import_utils, "KERNELS_MIN_VERSION", "0.9.0")
    info = tmp_path / f"kernels-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n")
    return tmp_path


def python(*arguments: str, site: Path) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if name != "USE_HUB_KERNELS"} | {"PYTHONPATH": str(site)}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


def test_the_fake_is_believed(fake_site: Path) -> None:
    run = python("-c", "from transformers.utils import is_kernels_available; assert is_kernels_available()", site=fake_site)
    assert run.returncode == 0, run.stderr


def test_help_works(fake_site: Path) -> None:
    run = python("train.py", "--help", site=fake_site)
    assert run.returncode == 0 and "--samples-per-prompt" in run.stdout, run.stderr


def test_model_and_tokenizer_load(fake_site: Path) -> None:
    code = """
from miles_core.assets import TINY
from miles_core.model import hf
model, tokenizer = hf.load(TINY), hf.load_tokenizer(TINY)
assert len(tokenizer) <= model.config.vocab_size and len(tokenizer.encode("539214=")) >= 7
"""
    run = python("-c", code, site=fake_site)
    assert run.returncode == 0, run.stderr
