"""One frozen Config: the command line, its help, its checks and the values derived from it.

Every field below is one flag (`prompts_per_step` is `--prompts-per-step`). The default stands here and nowhere else. No module below
train.py and rollout.py sees a Config: functions take the values they need.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

MAX_ATTEMPTS = 16  # at a sample: its number has room for so many, see Player.add


def _flag(default: Any, group: str, text: str, *, choices: tuple | None = None, only: str | None = None) -> Any:
    return dataclasses.field(default=default, metadata={"group": group, "help": text, "choices": choices, "only": only})


@dataclass(frozen=True)
class Config:
    # what to train on what
    model: str = _flag("tiny", "task and model", "'tiny' (the embedded policy), a directory in Hugging Face layout, or a hub id")
    task: str = _flag("sort", "task and model", "sort, arithmetic, gsm8k, reasoning-gym:NAME, or a .py file that defines task(seed, data)")
    data: str = _flag("", "task and model", "JSONL file of training problems, for tasks that read one")
    eval_data: str = _flag("", "task and model", "JSONL file of held-out problems")
    device: str = _flag("auto", "task and model", "auto = a GPU for every rank where there are GPUs", choices=("auto", "cpu", "cuda"))
    dtype: str = _flag(
        "auto",
        "task and model",
        "what the model computes in: auto = bfloat16 on GPUs, float32 on CPUs; master weights are float32",
        choices=("auto", "float32", "bfloat16"),
    )
    seed: int = _flag(0, "task and model", "fixes prompts, sampling noise and the order of everything")
    # the run
    steps: int = _flag(150, "run", "optimizer steps")
    run_dir: str = _flag("", "run", "where everything goes; one that holds checkpoints is resumed. Default: runs/<date-time>")
    resume: str = _flag("auto", "run", "auto = from the newest whole checkpoint in --run-dir; none = from the beginning; or a checkpoint")
    replay: str = _flag(
        "",
        "run",
        "directory of a run: train on the groups in its journal, the same in each step, and generate nothing. Its flags are the defaults; "
        "--steps A:B replays a part",
        only="train.py",
    )
    save_every: int = _flag(50, "run", "optimizer steps between checkpoints (0 = only the last one)")
    keep_checkpoints: int = _flag(2, "run", "how many checkpoints to keep")
    journal_keep: int = _flag(
        2, "run", "the journal goes back to the oldest of so many checkpoints, as does --replay; 0 = to the beginning"
    )  # fmt: skip
    journal_fsync: str = _flag(
        "interval",
        "run",
        "when finished groups are forced to disk: before they are trained on; within a second, and at checkpoints; or when the system "
        "likes. Only a machine that loses power can tell the difference",
        choices=("always", "interval", "off"),
    )
    eval_prompts: int = _flag(200, "run", "held-out prompts evaluated before and after training (0 = none)")
    eval_samples: int = _flag(1, "run", "samples per held-out prompt, at the training temperature")
    dry_run: bool = _flag(False, "run", "print who would do what and the derived sizes, then exit")
    # topology and pacing
    rollout_ranks_per_node: int = _flag(
        -1, "topology", "ranks of each node that generate; 0 = every rank does both in turn; -1 = half of them"
    )
    max_staleness: int = _flag(
        -1, "topology", "oldest weights a sample may come from, in optimizer steps; 0 = synchronous; -1 = 0 when colocated, else 1"
    )
    weight_transport: str = _flag("shm", "topology", "how new weights reach rollout ranks", choices=("shm", "broadcast"))
    on_update: str = _flag(
        "recompute",
        "topology",
        "sequences in flight when weights change: re-prefill them, or keep their KV cache",
        choices=("recompute", "keep"),
    )
    timeout: float = _flag(300.0, "topology", "seconds that any rank waits for another before the job stops and says for whom")
    parity: str = _flag(
        "strict",
        "topology",
        "sampler against trainer, token by token under the same weights: strict stops the run at the first bit of difference and finds the "
        "op, report logs it, off does not compare and uses faster ops, whose results depend on the batch",
        choices=("strict", "report", "off"),
    )
    # mixture of experts
    routing_replay: str = _flag(
        "on",
        "mixture of experts",
        "on: training visits the experts that rollout has recorded for each token; record: it only compares; off: nothing is recorded. "
        "Without effect on dense models",
        choices=("on", "record", "off"),
    )
    router_balance_coef: float = _flag(0.0, "mixture of experts", "weight of the load-balance loss, per sequence and layer; 0 = off")
    router_z_coef: float = _flag(0.0, "mixture of experts", "weight of the squared log-sum-exp of the router's logits; 0 = off")
    router_bias_rate: float = _flag(
        0.0, "mixture of experts", "after each step the correction bias of an expert moves by this much towards an even load; 0 = off"
    )
    expert_parallel: int = _flag(1, "mixture of experts", "training ranks that share the experts of a layer between them")
    freeze_router: bool = _flag(False, "mixture of experts", "do not train the routers")
    # rollout
    prompts_per_step: int = _flag(16, "rollout", "groups that one optimizer step trains on, over all nodes")
    samples_per_prompt: int = _flag(8, "rollout", "samples in a group")
    max_new_tokens: int = _flag(16, "rollout", "longest answer, tokens")
    max_context: int = _flag(1024, "rollout", "longest prompt + answer, tokens (never more than the model's own limit)")
    temperature: float = _flag(1.0, "rollout", "sampling temperature; the trainer scores under the same")
    top_p: float = _flag(1.0, "rollout", "nucleus sampling, 1 = off")
    top_k: int = _flag(0, "rollout", "sample from the k likeliest tokens, 0 = off")
    max_sequences: int = _flag(256, "rollout", "sequences that one rollout rank decodes at once")
    prefill_tokens: int = _flag(1024, "rollout", "tokens in one forward of the engine, decode and prefill chunks together")
    kv_tokens: int = _flag(0, "rollout", "KV cache size in tokens; 0 = room for every sequence in flight at its longest, at most 65536")
    agent: str = _flag(
        "",
        "rollout",
        "module:function or file.py:function that plays an episode of several turns; http = harnesses of other processes do, which ask for "
        "episodes at --serve-port; none = that of the task, if it has one",
    )
    serve_port: int = _flag(
        0,
        "rollout",
        "every rollout rank serves its sessions over HTTP, at this port + its local rank; 0 = none does (--serve: any free port)",
    )
    serve_host: str = _flag("127.0.0.1", "rollout", "address to serve on; any but this machine's own needs a token in MILES_SERVE_TOKEN")
    max_turns: int = _flag(8, "rollout", "answers of the model in one episode of an agent")
    max_branches: int = _flag(
        4, "rollout", "most branches of one episode that are trained, where its agent forks the conversation; the latest are kept"
    )
    episode_timeout: float = _flag(60.0, "rollout", "seconds before an episode is ended and its sample gets the verdict 'timeout'")
    reward_workers: int = _flag(1, "rollout", "reward processes of one rollout rank")
    reward_timeout: float = _flag(10.0, "rollout", "seconds before a reward is killed and its sample gets the verdict 'timeout'")
    reward_memory: float = _flag(8.0, "rollout", "GiB that a reward process may allocate; beyond them its sample gets 'infra_error'")
    resample: int = _flag(
        1,
        "rollout",
        "how often the samples of a group that got no reward are drawn again, if they are more than half of it; then they are left out",
    )
    # loss
    advantage: str = _flag("grpo", "loss", "rewards of a group -> advantages", choices=("grpo", "grpo_no_std", "rloo", "reinforce_pp"))
    loss: str = _flag("ppo_clip", "loss", "policy loss", choices=("ppo_clip", "gspo", "cispo"))
    anchor: str = _flag(
        "sampler",
        "loss",
        "old policy of the ratio: the sampler's log-probs, or the trainer's at step start with an importance weight",
        choices=("sampler", "decoupled"),
    )
    aggregation: str = _flag("token_mean", "loss", "how token losses are averaged", choices=("token_mean", "sequence_mean", "fixed_length"))
    clip_low: float = _flag(0.2, "loss", "the ratio is clipped below 1 - clip_low")
    clip_high: float = _flag(0.2, "loss", "the ratio is clipped above 1 + clip_high")
    dual_clip: float = _flag(0.0, "loss", "bound of the loss at negative advantages, > 1; 0 = off")
    importance_cap: float = _flag(2.0, "loss", "--anchor decoupled: the importance weight is truncated here")
    icepop_low: float = _flag(0.0, "loss", "tokens whose trainer / sampler ratio lies below are masked; 0 = off")
    icepop_high: float = _flag(0.0, "loss", "tokens whose trainer / sampler ratio lies above are masked; 0 = off")
    kl_coef: float = _flag(0.0, "loss", "weight of the KL to the initial model; 0 = no reference model")
    kl_kind: str = _flag("k3", "loss", "KL estimator", choices=("k1", "k2", "k3"))
    skip_zero_std: bool = _flag(False, "loss", "leave groups whose rewards are all equal out of the batch")
    # optimizer
    lr: float = _flag(2e-4, "optimizer", "peak learning rate")
    lr_schedule: str = _flag("constant", "optimizer", "after the warm-up", choices=("constant", "linear", "cosine"))
    warmup_steps: int = _flag(5, "optimizer", "optimizer steps of linear warm-up")
    beta1: float = _flag(0.9, "optimizer", "AdamW")
    beta2: float = _flag(0.99, "optimizer", "AdamW")
    weight_decay: float = _flag(0.0, "optimizer", "AdamW, on matrices only")
    max_grad_norm: float = _flag(1.0, "optimizer", "gradients are scaled down to this global norm; 0 = off")
    micro_batch_tokens: int = _flag(8192, "optimizer", "packed tokens in one forward and backward")
    reshard_after_forward: bool = _flag(
        False, "optimizer", "ZeRO-3: gather a block's weights for each forward and backward, free them after: less memory, more traffic"
    )
    activation_checkpointing: bool = _flag(False, "optimizer", "recompute activations in the backward pass: less memory, a third more time")
    # rollout.py alone
    eval: bool = _flag(False, "alone", "evaluate --model on the held-out prompts of --task: pass@1 and pass@k", only="rollout.py")
    serve: bool = _flag(
        False, "alone", "serve --model as an OpenAI-compatible endpoint of sessions, until Ctrl-C", only="rollout.py"
    )  # fmt: skip
    generate: str = _flag("", "alone", "answer this user message", only="rollout.py")
    # of --replay; not on the command line
    first_step: int = _flag(1, "", "the first step to replay: A of --steps A:B", only="--steps")
    schedule_steps: int = _flag(0, "", "--steps of the recorded run, for the learning rate; 0 = --steps", only="--steps")

    def __post_init__(self) -> None:
        at_least = {
            1: "steps keep_checkpoints prompts_per_step samples_per_prompt eval_samples max_new_tokens max_context max_sequences "
            "prefill_tokens micro_batch_tokens reward_workers expert_parallel max_turns max_branches first_step",
            0: "journal_keep resample schedule_steps seed save_every eval_prompts temperature top_k kv_tokens "
            "clip_low clip_high icepop_low icepop_high kl_coef lr beta1 beta2 "
            "serve_port router_balance_coef router_z_coef router_bias_rate weight_decay warmup_steps max_grad_norm",
            -1: "rollout_ranks_per_node max_staleness",
        }
        for low, names in at_least.items():
            for name in names.split():
                value = getattr(self, name)
                self._require(math.isfinite(value) and value >= low, name, f"must be a number >= {low}")
        for name in ("timeout", "reward_timeout", "reward_memory", "episode_timeout", "importance_cap"):
            self._require(0 < getattr(self, name) < math.inf, name, "must be > 0")
        self._require(0 < self.top_p <= 1, "top_p", "must lie in (0, 1]")
        self._require(self.beta1 < 1 and self.beta2 < 1, "beta2", "(and --beta1) must be < 1")
        self._require(self.dual_clip == 0 or self.dual_clip > 1, "dual_clip", "must be > 1, or 0 for off")
        self._require(
            self.max_new_tokens < self.max_context, "max_new_tokens", f"must leave room for a prompt in --max-context {self.max_context}"
        )
        self._require(
            self.advantage == "reinforce_pp" or self.samples_per_prompt > 1,
            "samples_per_prompt",
            f"must be > 1 for --advantage {self.advantage}, which compares samples",
        )
        self._require(self.agent != "http" or self.serve_port > 0, "agent", "http needs --serve-port, for example --serve-port 8000")
        keep = self.keep_checkpoints
        self._require(self.journal_keep <= keep, "journal_keep", f"must be at most --keep-checkpoints {keep}")
        self._require(self.resample < MAX_ATTEMPTS, "resample", f"must be below {MAX_ATTEMPTS}")
        self._require(self.first_step <= self.steps, "steps", f"{self.first_step}:{self.steps} is empty: the second is the last step")
        self._require(self.first_step == 1 or bool(self.replay), "steps", "A:B is for --replay; give the last step alone")
        alone = self.eval or self.serve or bool(self.generate)
        self._require(self.temperature > 0 or alone, "temperature", "must be > 0: greedy samples carry no learning signal")
        self._require(
            not (self.skip_zero_std and self.advantage == "reinforce_pp"),
            "skip_zero_std",
            "compares samples of one prompt, --advantage reinforce_pp does not: leave one of them out",
        )
        self._require(not (self.icepop_high and self.icepop_low >= self.icepop_high), "icepop_low", "must be below --icepop-high")

    @staticmethod
    def _require(condition: bool, name: str, text: str) -> None:
        if not condition:
            raise ValueError(f"--{name.replace('_', '-')} {text}")

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


class _Parser(argparse.ArgumentParser):
    """argparse that raises ValueError, and names the nearest flag for one it does not know."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)

    def parse(self, argv: list[str]) -> argparse.Namespace:
        known = [flag for action in self._actions for flag in action.option_strings]
        for word in argv:
            flag = word.split("=")[0]
            if flag.startswith("--") and flag not in known:
                near = difflib.get_close_matches(flag, known, n=1, cutoff=0.5)
                raise ValueError(f"unknown flag {flag}" + (f"; did you mean {near[0]}?" if near else "; see --help"))
        return self.parse_args(argv)


def parse_args(argv: list[str], program: str, description: str) -> Config:
    """Command line -> Config. Raises ValueError (one sentence, naming the flag) for anything wrong with it."""
    parser = _Parser(
        prog=program,
        usage="%(prog)s [--flag value ...]",
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    groups: dict[str, Any] = {}
    for f in dataclasses.fields(Config):
        if f.metadata["only"] not in (None, program):
            continue
        group = groups.setdefault(
            f.metadata["group"], parser.add_argument_group(f.metadata["group"]) if f.metadata["group"] not in groups else None
        )
        flag, shown = f"--{f.name.replace('_', '-')}", f.default if f.default != "" else "none"
        text = f.metadata["help"].replace("%", "%%")
        if isinstance(f.default, bool):
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=f.default, help=text)
        else:
            group.add_argument(
                flag,
                type=_steps if f.name == "steps" else type(f.default),
                default=f.default,
                choices=f.metadata["choices"],
                metavar=type(f.default).__name__.upper() if not f.metadata["choices"] else None,
                help=f"{text} (default: {shown})",
            )
    given = vars(parser.parse(argv))
    if given.get("replay"):
        recorded = _recorded(given["replay"])
        parser.set_defaults(**{name: value for name, value in recorded.items() if name in given and name not in _OF_ONE_RUN})
        given = vars(parser.parse(argv)) | {"schedule_steps": recorded.get("schedule_steps") or recorded["steps"], "eval_prompts": 0}
    if isinstance(given["steps"], tuple):
        given["first_step"], given["steps"] = given["steps"]
    return Config(**given)


_OF_ONE_RUN = ("run_dir", "resume", "replay")  # what a replay does not take over from the recorded run


def _steps(text: str) -> int | tuple[int, int]:
    """"50", or "20:50"."""
    first, colon, last = text.rpartition(":")
    try:
        return (int(first), int(last)) if colon else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid int value: {text!r}") from None


def _recorded(run_dir: str) -> dict[str, Any]:
    """The flags of a run. ValueError when there is none."""
    try:
        return json.loads((Path(run_dir) / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--replay {run_dir} is no run directory: its config.json cannot be read ({error})") from error
