"""One synchronous GRPO step on real weights against TRL's GRPOTrainer, on the same work and the same two cores.

    pip install '.[bench]'            (TRL; best in an environment of its own: --trl-python)
    python tests/bench/bench_grpo_step.py --model models/smollm2-135m [--steps 4] [--trl-python OTHER/bin/python]

The work: 4 prompts x 4 samples x 32 new tokens. The prompts ask for long stories, so that every answer takes its 32 tokens on either
side. TRL: one process with two threads. Ours: the same, and also two colocated data-parallel ranks of one thread each. The first step
of each run is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROMPTS, SAMPLES, NEW_TOKENS = 4, 4, 32
TASK = """
from miles_core.tasks import Task

ANIMALS = ("fox", "owl", "crab", "horse", "ant", "whale", "goat", "bee")

def task(seed, data):
    def prompt(group, split="train"):
        text = f"Write a long story of at least ten sentences about a {ANIMALS[group % len(ANIMALS)]} who travels."
        return [{"role": "user", "content": text}], "", text
    return Task("story", prompt, lambda answer, text: text.count("e") / 100, num_eval=1)
"""
TRL = """
import json, sys, time, torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

model, steps, prompts, samples, tokens, out = sys.argv[1], *map(int, sys.argv[2:6]), sys.argv[6]
animals = ("fox", "owl", "crab", "horse", "ant", "whale", "goat", "bee")
text = "Write a long story of at least ten sentences about a {} who travels."
rows = [{"prompt": [{"role": "user", "content": text.format(animals[i % 8])}]} for i in range(prompts * steps)]
times = []
class Clock(TrainerCallback):
    def on_step_begin(self, *args, **kwargs): self.start = time.perf_counter()
    def on_step_end(self, *args, **kwargs): times.append(time.perf_counter() - self.start)
def reward(completions, **kwargs): return [c[0]["content"].count("e") / 100 for c in completions]
config = GRPOConfig(out, per_device_train_batch_size=prompts * samples, num_generations=samples, max_completion_length=tokens,
    max_steps=steps, learning_rate=1e-6, beta=0.0, use_cpu=True, bf16=False, fp16=False, report_to=[],
    gradient_checkpointing=False, logging_steps=1, save_strategy="no", temperature=1.0, num_iterations=1,
    steps_per_generation=1, shuffle_dataset=False, disable_tqdm=True)
policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
trainer = GRPOTrainer(policy, reward_funcs=reward, args=config, train_dataset=Dataset.from_list(rows),
    processing_class=AutoTokenizer.from_pretrained(model), callbacks=[Clock()])
trainer.train()
lengths = [line["completions/mean_length"] for line in trainer.state.log_history if "completions/mean_length" in line]
print("RESULT", json.dumps({"seconds": times, "length": sum(lengths) / len(lengths)}))
"""


def ours(model: str, steps: int, work: Path, ranks: int) -> tuple[list[float], float]:
    """(seconds of every step but the first, mean answer length)."""
    (work / "story.py").write_text(TASK)
    flags = {
        "model": model, "task": work / "story.py", "run-dir": work / f"run{ranks}", "rollout-ranks-per-node": 0,
        "prompts-per-step": PROMPTS, "samples-per-prompt": SAMPLES, "max-new-tokens": NEW_TOKENS, "max-context": 256, "lr": 1e-6,
        "steps": steps, "eval-prompts": 0, "save-every": 0,
    }  # fmt: skip
    command = [sys.executable, str(ROOT / "launch/torchrun.py"), "--standalone", "--nproc-per-node", str(ranks), str(ROOT / "train.py")]
    command += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    environment = os.environ | {"OMP_NUM_THREADS": str(2 // ranks), "USE_HUB_KERNELS": "0"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=1800, env=environment)
    lines = [json.loads(line) for line in (work / f"run{ranks}/metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "perf/step_time" in line]
    return [line["perf/step_time"] for line in lines][1:], statistics.fmean(line["rollout/response_len_mean"] for line in lines)


def trl(python: str, model: str, steps: int, work: Path) -> tuple[list[float], float]:
    command = [python, "-c", TRL, model, *map(str, (steps, PROMPTS, SAMPLES, NEW_TOKENS)), str(work / "trl")]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "2"}
    run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=1800, env=environment, cwd=work)
    result = json.loads(next(line for line in run.stdout.splitlines() if line.startswith("RESULT"))[7:])
    return result["seconds"][1:], result["length"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--trl-python", default=sys.executable)
    options = parser.parse_args()
    model = str(Path(options.model).resolve())
    runs = {
        "ours, 1 rank x 2 threads": lambda work: ours(model, options.steps, work, 1),
        "ours, 2 ranks x 1 thread": lambda work: ours(model, options.steps, work, 2),
        "TRL, 1 process x 2 threads": lambda work: trl(options.trl_python, model, options.steps, work),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory() as work:
            for name, run in runs.items():
                seconds, length = run(Path(work))
                times[name] += seconds
                print(f"{name:26s} {' '.join(f'{s:.1f}' for s in seconds)} s a step, {length:.1f} tokens an answer", flush=True)
    *mine, theirs = (statistics.median(seconds) for seconds in times.values())
    print(f"median of TRL: {theirs:.1f} s; ours / TRL = {mine[0] / theirs:.2f} (1 rank), {mine[1] / theirs:.2f} (2 ranks)")


if __name__ == "__main__":
    main()
