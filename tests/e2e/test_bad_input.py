"""What a user can get wrong, and what can go wrong around a run: one clear sentence, the right exit code, nothing left behind.

    python -m pytest tests/e2e/test_bad_input.py
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness import Job, sentence
from safetensors.torch import load_file, save_file

from miles_core.assets import TINY
from miles_core.model import hf
from rollout import choose_kernels

SMALL = ("--prompts-per-step", 2, "--samples-per-prompt", 4, "--eval-prompts", 2, "--run-dir", "run")
ENDLESS = (*SMALL, "--steps", 100000, "--save-every", 0)
WORLD_OF_TWO_NODES = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "RANK": "0"}
UNEVEN_WORLD = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2", "RANK": "0"}


def refused(cwd: Path, *arguments: object, **kwargs: object) -> str:
    """The sentence with which a job refuses to run."""
    return sentence(Job(cwd, *arguments, **kwargs).end())


# ---- flags and sizes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["--prompts-per-stepp", 4], {}, "unknown flag --prompts-per-stepp; did you mean --prompts-per-step?"),
        (["--steps", "many"], {}, "--steps: invalid int value: 'many'"),
        (["--prompts-per-step", 3], WORLD_OF_TWO_NODES, "--prompts-per-step 3 is not divisible by the 2 nodes"),
        (["--rollout-ranks-per-node", 0], UNEVEN_WORLD, "--nproc-per-node 2 does not divide the world of 3 ranks"),
        (["--rollout-ranks-per-node", 1], {}, "--rollout-ranks-per-node 1 leaves no training rank among the 1 of a node: use 0"),
        (["--max-new-tokens", 1024], {}, "--max-new-tokens must leave room for a prompt in --max-context 1024"),
        (["--max-new-tokens", 4096, "--max-context", 9000], {}, "4096 leaves no room for a prompt: --model tiny takes 4096"),
        (["--device", "cpu", "--dtype", "bfloat16"], {}, "--dtype bfloat16 needs a GPU: the CPU kernels compute in float32"),
        (["--device", "cuda"], {"CUDA_VISIBLE_DEVICES": ""}, "--device cuda: torch sees no CUDA device here"),
        (["--micro-batch-tokens", 100], {}, "--micro-batch-tokens 100 cannot hold one sample of --max-context 1024"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, list) else "",
)
def test_flags(tmp_path: Path, arguments: list, environment: dict[str, str], said: str) -> None:
    assert said in refused(tmp_path, "--dry-run", *arguments, **environment)
    assert not (tmp_path / "runs").exists()


def test_every_rank_of_a_torchrun_has_the_mistake_and_one_says_it(tmp_path: Path) -> None:
    assert refused(tmp_path, "--stepz", 2, ranks=2) == "unknown flag --stepz; did you mean --steps?"


def test_head_size_that_no_kernel_takes() -> None:
    config = dataclasses.replace(hf.load_config(TINY), head_dim=20)
    with pytest.raises(ValueError, match="attention: head size 20 is not supported on cpu; supported: multiples of 8"):
        choose_kernels(config, torch.device("cpu"), torch.float32, "report")


# ---- model directories --------------------------------------------------------------------------------------------------------------


def without_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def with_tensors(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def spoil(model: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        change(tensors)
        save_file(tensors, model / "model.safetensors")

    return spoil


def of_gpt2(model: Path) -> None:
    raw = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(raw | {"architectures": ["GPT2LMHeadModel"]}))


def truncated(model: Path) -> None:
    os.truncate(model / "model.safetensors", 100_000)


LAYER = "model.layers.1.self_attn.k_norm.weight"
MODELS = [
    (without_weights, "no weights: model.safetensors not found"),
    (with_tensors(lambda t: t.pop(LAYER)), "lacks tensors: layers.1.self_attn.k_norm.weight"),
    (with_tensors(lambda t: t.update(extra=t[LAYER].clone())), "has tensors that the model does not: extra"),
    (with_tensors(lambda t: t.update({LAYER: t[LAYER][:5].clone()})), "layers.1.self_attn.k_norm.weight [5] instead of [24]"),
    (of_gpt2, "GPT2LMHeadModel is not supported; supported are LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"),
    (truncated, "is not a whole safetensors file"),
    (shutil.rmtree, "--model model: no such directory"),
]


@pytest.mark.parametrize(("spoil", "said"), MODELS, ids=[said[:24] for _, said in MODELS])
def test_model_directory(tmp_path: Path, spoil: Callable[[Path], None], said: str) -> None:
    shutil.copytree(TINY, tmp_path / "model")
    spoil(tmp_path / "model")
    assert said in refused(tmp_path, "--model", "model")


# ---- data files ---------------------------------------------------------------------------------------------------------------------

GOOD = [json.dumps({"question": f"What is {a} + 4?", "answer": f"{a} + 4 = {a + 4}\n#### {a + 4}"}) for a in range(40)]
LONG = json.dumps({"question": "one " * 200, "answer": "#### 1"})
GSM8K = ("--task", "gsm8k", "--data", "data.jsonl")


@pytest.mark.parametrize(
    ("lines", "arguments", "said"),
    [
        (GOOD[:2] + ['{"question": "broken'], [], "--data data.jsonl, line 3: not JSON"),
        (GOOD[:4] + ['{"question": "What is 1 + 1?"}'], [], "--data data.jsonl, line 5: the field 'answer' is missing"),
        ([], [], "--data data.jsonl holds no problem"),
        (GOOD + 40 * [LONG], ["--max-context", 300], "tokens, but --max-context 300 less --max-new-tokens 16 leaves 284"),
    ],
    ids=["not-json", "no-answer", "empty", "prompt-too-long"],
)
def test_data_file(tmp_path: Path, lines: list[str], arguments: list, said: str) -> None:
    (tmp_path / "data.jsonl").write_text("".join(line + "\n" for line in lines))
    assert said in refused(tmp_path, *SMALL, *GSM8K, *arguments)


# ---- reward functions ---------------------------------------------------------------------------------------------------------------

REWARDS = {
    "raises": ("raise KeyError('no such answer')", "first with infra_error (KeyError: 'no such answer'); fix its reward function"),
    "nan": ("return float('nan')", "first with no_verdict (the reward is nan, not a finite number); fix its reward function"),
    "hangs": ("time.sleep(1000)", "first with timeout (no answer within 0.2 s); fix its reward function, or raise --reward-timeout 0.2"),
}
TASK_FILE = """
import time
from miles_core.tasks import Task, sort

def task(seed, data):
    def reward(answer, text):
        {body}
    return Task("broken", sort.task(seed, "", "").prompt, reward, 10)
"""


@pytest.mark.parametrize(("fault", "ranks"), [("raises", 2), ("nan", 0), ("hangs", 0)])
def test_reward_function(tmp_path: Path, fault: str, ranks: int) -> None:
    body, said = REWARDS[fault]
    (tmp_path / "my_task.py").write_text(TASK_FILE.format(body=body))
    arguments = (*SMALL, "--eval-prompts", 0, "--task", "my_task.py", "--reward-timeout", 0.2)
    assert refused(tmp_path, *arguments, ranks=ranks) == f"--task my_task.py: 16 rewards in a row failed, {said}"


# ---- what happens to a running job --------------------------------------------------------------------------------------------------


def running(cwd: Path, *arguments: object, ranks: int = 2) -> Job:
    """A job that would go on for a long time, in its third step."""
    job = Job(cwd, *ENDLESS, *arguments, ranks=ranks)
    job.wait_until(lambda: "step      2/" in job.out, "two steps")
    return job


@pytest.mark.parametrize(("rank", "flags"), [(0, ()), (1, ()), (1, ("--rollout-ranks-per-node", 0))], ids=["rollout", "training", "both"])
def test_killed_rank(tmp_path: Path, rank: int, flags: tuple) -> None:
    job = running(tmp_path, *flags)
    pid, killed = job.rank_pid(rank), time.monotonic()
    os.kill(pid, signal.SIGKILL)
    ended = job.end()
    assert time.monotonic() - killed < 20, str(ended)
    assert ended.code == 128 + signal.SIGKILL, str(ended)
    assert ended.err.splitlines() == [
        f"torchrun: rank {rank} (pid {pid}) was killed by SIGKILL (out of memory? see dmesg); the other ranks were ended"
    ]


def test_killed_launcher(tmp_path: Path) -> None:
    """Then nobody is there to restart anything: the ranks leave at once. How a run is asked to stop is in test_stop.py."""
    job = running(tmp_path)
    sent = time.monotonic()
    os.kill(job.process.pid, signal.SIGKILL)
    ended = job.end()
    assert ended.code == -signal.SIGKILL and time.monotonic() - sent < 20, str(ended)
    assert "Traceback" not in ended.err, str(ended)


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (600_000, r"checkpoint of step 10 in run/checkpoints \(\d+ MiB free\) could not be written: .*File too large"),
        (5_000, r"File too large.*: make room on the disk of --run-dir, then resume the run from its last checkpoint"),
    ],
    ids=["checkpoint", "metrics"],
)
def test_full_disk(tmp_path: Path, limit: int, said: str) -> None:
    """From the third step on no file may grow beyond `limit` bytes: a checkpoint does not fit, or not even a line of metrics."""
    job = running(tmp_path, "--save-every", 10, ranks=0)
    resource.prlimit(job.process.pid, resource.RLIMIT_FSIZE, (limit, limit))
    ended = job.end()
    assert ended.code == 2, str(ended)
    assert re.search(said, ended.err.splitlines()[-1]), str(ended)  # TensorBoard's own thread may complain before
    assert list((tmp_path / "run/checkpoints").iterdir()) == []
