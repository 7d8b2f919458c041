"""Command line and Config. Run: python -m pytest tests/core/test_config.py"""

import dataclasses
import json
import re

import pytest

from miles_core.config import Config, parse_args


def parse(*argv, program="train.py"):
    return parse_args(list(argv), program, "test")


def test_flags_override_defaults_and_nothing_else():
    config = parse("--lr", "3e-4", "--prompts-per-step=4", "--skip-zero-std")
    changed = {f.name for f in dataclasses.fields(Config) if getattr(config, f.name) != f.default}
    assert changed == {"lr", "prompts_per_step", "skip_zero_std"}
    assert (config.lr, config.prompts_per_step, config.skip_zero_std) == (3e-4, 4, True)


def test_config_is_frozen_and_round_trips_through_json():
    config = parse("--top-p", "0.9")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.lr = 1.0
    assert Config(**json.loads(config.to_json())) == config


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--stepz", "3"], "unknown flag --stepz; did you mean --steps?"),
        (["--qqqqqqqqqq"], "unknown flag --qqqqqqqqqq; see --help"),
        (["--steps", "many"], "--steps: invalid int value: 'many'"),
        (["--steps", "0"], "--steps must be a number >= 1"),
        (["--loss", "dpo"], "--loss: invalid choice: 'dpo'"),
        (["--top-p", "0"], "--top-p must lie in (0, 1]"),
        (["--lr", "nan"], "--lr must be a number >= 0"),
        (["--max-new-tokens", "1024"], "--max-new-tokens must leave room for a prompt in --max-context 1024"),
        (["--samples-per-prompt", "1"], "--samples-per-prompt must be > 1 for --advantage grpo"),
        (["--temperature", "0"], "--temperature must be > 0"),
        (["--dual-clip", "0.5"], "--dual-clip must be > 1"),
        (["--agent", "http"], "--agent http needs --serve-port"),
        (["--eval"], "unknown flag --eval"),
    ],
)
def test_mistakes_are_one_sentence_that_names_the_flag(argv, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        parse(*argv)
    assert "\n" not in str(caught.value)


def test_modes_of_rollout_alone_exist_only_there():
    assert parse("--eval", "--temperature", "0", program="rollout.py").eval


def test_help_lists_every_flag_under_a_group(capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    text = capsys.readouterr().out
    assert caught.value.code == 0
    for f in dataclasses.fields(Config):
        if f.metadata["only"] is None:
            assert f"--{f.name.replace('_', '-')}" in text
    assert text.index("topology:") < text.index("--max-staleness INT")
