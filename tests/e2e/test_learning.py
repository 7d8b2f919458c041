"""One run as a newcomer starts it, shortened: two ranks, asynchronous. It must learn, and leave what it promises.

    python -m pytest tests/e2e/test_learning.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT, lines, steps, succeed
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

NUM_STEPS = 40
FLAGS = ("--seed", 1, "--eval-samples", 2, "--eval-prompts", 100)
EVAL = ("eval/sort/pass@1", "eval/sort/pass@2", "eval/sort/reward_mean", "eval/sort/not_ok_frac")
ALWAYS = {
    "train": "loss pg_loss entropy clip_frac ratio_mean ratio_max grad_norm lr tokens staleness_mean staleness_max logp_diff_tokens "
    "route_diff_frac route_diff_frac/layer_0 expert_entropy expert_entropy/layer_2 expert_peak expert_peak/layer_1",
    "rollout": "reward_mean reward_std pass@8 response_len_mean response_len_max truncated_frac zero_std_frac verdict/ok verdict/timeout "
    "verdict/infra_error verdict/no_verdict prefix_hit_rate version_span_max r3_bytes_per_token",
    "perf": "r3_fetch_s step_time gen_tokens_per_s train_tokens_per_s weight_sync_s trainer_wait_frac producer_blocked_frac",
    "ring": "ready in_flight reclaimed bytes",
}  # DESIGN section 5, less what needs a flag (kl)
FRESH = {f"train/logp_diff_{name}" for name in ("max", "p99", "mean", "frac")}  # of a step that had a token of the newest version


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cwd = tmp_path_factory.mktemp("learning")
    ended = succeed(cwd, "--steps", NUM_STEPS, "--save-every", 30, "--run-dir", "run", *FLAGS, ranks=2)
    assert ended.err == ""
    (cwd / "run/stdout").write_text(ended.out)
    return cwd / "run"


def evaluations(run_dir: Path) -> list[dict]:
    return [line for line in lines(run_dir) if EVAL[0] in line]


def test_learns(run_dir: Path) -> None:
    before, after = (evaluation["eval/sort/pass@1"] for evaluation in evaluations(run_dir))
    assert before <= 0.4 and after >= 0.6, (before, after)
    rewards = [step["rollout/reward_mean"] for step in steps(run_dir)]
    assert sum(rewards[-5:]) - sum(rewards[:5]) > 5 * 0.2, rewards


def test_sampler_and_trainer_agree_to_the_bit(run_dir: Path) -> None:
    fresh = [step for step in steps(run_dir) if step["train/logp_diff_tokens"]]
    assert fresh, "no step had a token that was sampled from the weights being trained"
    for step in fresh:
        assert [step[name] for name in sorted(FRESH)] == [0.0] * 4, step
    assert max(step["train/staleness_max"] for step in steps(run_dir)) == 1


def test_metrics(run_dir: Path) -> None:
    always = {f"{kind}/{name}" for kind, names in ALWAYS.items() for name in names.split()}
    assert [step["step"] for step in steps(run_dir)] == list(range(1, NUM_STEPS + 1))
    for step in steps(run_dir):
        fresh = FRESH if step["train/logp_diff_tokens"] else set()
        assert always | fresh <= step.keys(), sorted((always | fresh) - step.keys())
        assert not [name for name in always | fresh if step[name] is None], step
    assert [evaluation["step"] for evaluation in evaluations(run_dir)] == [0, NUM_STEPS]
    assert all(set(EVAL) <= evaluation.keys() for evaluation in evaluations(run_dir))


def test_tensorboard_holds_the_same(run_dir: Path) -> None:
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    for name in ("rollout/reward_mean", "train/loss", "perf/step_time"):
        written = [(event.step, event.value) for event in events.Scalars(name)]
        assert written == [(step["step"], pytest.approx(step[name])) for step in steps(run_dir)]


def test_run_directory_says_what_was_run(run_dir: Path) -> None:
    config = json.loads((run_dir / "config.json").read_text())
    assert (config["steps"], config["seed"]) == (NUM_STEPS, 1)
    assert (config["rollout_ranks_per_node"], config["max_staleness"]) == (1, 1)  # resolved from -1
    for script in ("train.py", "rollout.py"):
        assert (run_dir / "code" / script).read_bytes() == (ROOT / script).read_bytes()
    assert (run_dir / "code/git.txt").read_text()
    checkpoints = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert checkpoints == ["latest", "step_000030", "step_000040"]


def test_output_is_readable(run_dir: Path) -> None:
    out = (run_dir / "stdout").read_text()
    shown = [line for line in out.splitlines() if line.startswith("step ") and "/40 [" in line]
    assert len(shown) == NUM_STEPS
    for words in ("no sample is more than (B + W - 2) // P = 1 version old", "bottleneck", "tensorboard --logdir run/tensorboard"):
        assert words in out


LOAD = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer, model = (kind.from_pretrained(sys.argv[1]) for kind in (AutoTokenizer, AutoModelForCausalLM))
text = tokenizer.apply_chat_template([{"role": "user", "content": "539214="}], add_generation_prompt=True, tokenize=False)
ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
out = model.generate(ids, attention_mask=ids * 0 + 1, do_sample=False, max_new_tokens=16, pad_token_id=tokenizer.pad_token_id)
print(tokenizer.decode(out[0, ids.shape[1]:], skip_special_tokens=True))
"""


def test_checkpoint_loads_in_transformers(run_dir: Path) -> None:
    """Without our code on the path: it must be a plain model directory. Greedy, the trained policy sorts."""
    command = [sys.executable, "-c", LOAD, str(run_dir / "checkpoints/latest")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=run_dir)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "123459"


@pytest.mark.parametrize("ranks", [0, 2])
def test_evaluation_alone_repeats_that_of_the_run(run_dir: Path, ranks: int) -> None:
    flags = ("--model", "run/checkpoints/latest", "--task", "sort", "--eval", *FLAGS)
    ended = succeed(run_dir.parent, *flags, script="rollout.py", ranks=ranks)
    shown = dict(line.split() for line in ended.out.splitlines())
    assert shown == {name: f"{evaluations(run_dir)[-1][name]:.4f}" for name in EVAL}
