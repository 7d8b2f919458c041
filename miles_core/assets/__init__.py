"""Files shipped with the code. `TINY` is the embedded policy: 0.34 M parameters in Hugging Face layout, made by `tiny_sft.py`."""

from pathlib import Path

TINY = Path(__file__).parent / "tiny"
