"""Tasks: prompts are a function of (seed, group), splits share nothing, scorers are exact, and bad data is named by file and line.

    python -m pytest tests/core/test_tasks.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from miles_core import tasks
from miles_core.assets import TINY
from miles_core.model import hf
from miles_core.tasks.base import numbers
from miles_core.tasks.sort import NUM_DIGITS

QUESTIONS = [(f"Ann has {i} apples and buys one. How many?", f"{i} + 1 = <<{i}+1={i + 1}>>{i + 1}\n#### {i + 1}") for i in range(60)]
# What reasoning-gym's factory is to us: item i under seed s is drawn from Random(s + i), and a scorer may raise on what it cannot parse.
FAKE_GYM = """
from random import Random

class Dataset:
    def __init__(self, seed, size):
        self.seed, self.size = seed, size
    def __getitem__(self, index):
        assert index < self.size
        value = Random(self.seed + index).randrange(10**12)
        return {"question": f"Say {value}.", "answer": str(value), "metadata": {"not for JSON": {value}}}
    def score_answer(self, answer, entry):
        return float({int(answer)} == entry["metadata"]["not for JSON"])

class Broken(Dataset):
    def score_answer(self, answer, entry):
        raise RuntimeError("scorer is broken")

DATASETS = {"say": Dataset, "broken": Broken, "composite": None}
def create_dataset(name, **settings):
    return DATASETS[name](**settings)
"""


@pytest.fixture(scope="module")
def tokenizer() -> hf.Tokenizer:
    return hf.load_tokenizer(TINY)


@pytest.fixture
def gsm8k(tmp_path: Path) -> str:
    return write_lines(tmp_path / "train.jsonl", [json.dumps({"question": q, "answer": a}) for q, a in QUESTIONS])


@pytest.fixture
def gym(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "reasoning_gym").mkdir()
    (tmp_path / "reasoning_gym/__init__.py").write_text("")
    (tmp_path / "reasoning_gym/factory.py").write_text(FAKE_GYM)
    monkeypatch.syspath_prepend(tmp_path)
    with monkeypatch.context() as patch:
        for name in [name for name in sys.modules if name.split(".")[0] == "reasoning_gym"]:
            patch.delitem(sys.modules, name)
        yield
        for name in ("reasoning_gym", "reasoning_gym.factory"):  # ours; `patch` then brings back an installed one
            sys.modules.pop(name, None)


def write_lines(path: Path, lines: list[str]) -> str:
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def write_task(path: Path, source: str) -> str:
    path.write_text("from miles_core.tasks import Task\n" + source)
    return str(path)


def texts(task: tasks.Task, split: str, num: int) -> list[str]:
    return [task.prompt(group, split)[2] for group in range(num)]


def test_prompts_are_a_function_of_seed_and_group(gsm8k: str, gym: None) -> None:
    for name, data in (("sort", ""), ("arithmetic", ""), ("gsm8k", gsm8k), ("reasoning-gym:say", "")):
        task, again, other = (tasks.load(name, seed, data) for seed in (0, 0, 1))
        backwards = [again.prompt(group) for group in reversed(range(200))]
        assert [task.prompt(group) for group in range(200)] == backwards[::-1], name
        assert texts(task, "train", 200) != texts(other, "train", 200), name
        # The held-out set is the same for every seed, so that runs can be compared.
        assert texts(task, "eval", min(task.num_eval, 50)) == texts(other, "eval", min(task.num_eval, 50)), name


def test_splits_share_no_prompt(gsm8k: str, gym: None) -> None:
    for name, data in (("sort", ""), ("arithmetic", ""), ("gsm8k", gsm8k), ("reasoning-gym:say", "")):
        task = tasks.load(name, 3, data)
        held = set(texts(task, "eval", task.num_eval))
        assert task.num_eval > 0 and held and held.isdisjoint(texts(task, "train", 2000)), name


def test_right_answers_score_one_and_wrong_ones_zero(gsm8k: str, gym: None) -> None:
    for name, data in (("sort", ""), ("arithmetic", ""), ("gsm8k", gsm8k)):
        task = tasks.load(name, 0, data)
        for split, group in (("train", 5), ("eval", 1)):
            _, answer, _ = task.prompt(group, split)
            answer = json.loads(json.dumps(answer))  # as it reaches the reward process
            assert (task.reward(answer, str(answer)), task.reward(answer, f"{answer}1"), task.reward(answer, "")) == (1.0, 0.0, 0.0), name


def test_sort_asks_for_six_digits_repeats_allowed() -> None:
    task = tasks.load("sort", 0)
    prompts = [task.prompt(group) for group in range(500)]
    for messages, answer, text in prompts:
        digits = text.removesuffix("=")
        assert messages == [{"role": "user", "content": text}]
        assert len(digits) == NUM_DIGITS and digits.isdigit() and answer == "".join(sorted(digits))
    assert any(len(set(answer)) < NUM_DIGITS for _, answer, _ in prompts)
    assert task.reward("123459", "123459 ") == 0.0  # exact


def test_numbers_are_read() -> None:
    cases = {
        "7.": [7],
        "3 + 4 = -7": [3, 4, -7],
        "it is $1,234.50.": [1234.5],
        "10-3": [10, 3],
        "1,2,3": [1, 2, 3],
        "12,3456": [12, 3456],
        "1,000,000 or 007": [1_000_000, 7],
        "none": [],
    }
    assert {text: numbers(text) for text in cases} == cases


def test_the_final_number_counts(gsm8k: str) -> None:
    gsm8k_reward, arithmetic_reward = tasks.load("gsm8k", 0, gsm8k).reward, tasks.load("arithmetic", 0).reward
    for text, final in (
        ("48 + 24 = 72\n#### 72 clips in 2 months", "72"),
        ("#### 70 no #### 72", "72"),
        ("so 72", "72"),
        ("#### $1,000.00", "1000"),
    ):
        assert gsm8k_reward(final, text) == 1.0, text
    for text in ("72\n#### 70", "72\n####", "72 or 70", "#### 172", ""):
        assert gsm8k_reward("72", text) == 0.0, text
    assert [arithmetic_reward(7, text) for text in ("7", "3 + 4 = 7.", "7, as 3 + 4", "seven", "17")] == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_gsm8k_visits_every_problem_once_a_pass(gsm8k: str) -> None:
    held = tasks.load("gsm8k", 0, gsm8k).num_eval
    for task, size in ((tasks.load("gsm8k", 0, gsm8k), 60 - held), (tasks.load("gsm8k", 0, gsm8k, gsm8k), 60)):
        seen = texts(task, "train", 3 * size)
        passes = [seen[i * size : (i + 1) * size] for i in range(3)]
        assert all(len(set(one)) == size for one in passes) and passes[0] != passes[1] != passes[2]
    assert tasks.load("gsm8k", 0, gsm8k, gsm8k).num_eval == 60


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"question": "q", "answer": ', "line 3: not JSON"),
        ('["q", "a"]', "line 3: an object with the fields question and answer is needed, found list"),
        ('{"question": "q"}', "line 3: the field 'answer' is missing"),
        ('{"question": 1, "answer": "#### 2"}', "line 3: the field 'question' is missing or no text"),
        ('{"question": "q", "answer": "two"}', "line 3: the answer names no number after ####"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    good = json.dumps({"question": QUESTIONS[0][0], "answer": QUESTIONS[0][1]})
    path = write_lines(tmp_path / "broken.jsonl", [good, "", line, good])
    with pytest.raises(ValueError, match=f"--data {path}, {said}"):
        tasks.load("gsm8k", 0, path)
    with pytest.raises(ValueError, match=f"--eval-data {path}, {said}"):
        tasks.load("gsm8k", 0, write_lines(tmp_path / "good.jsonl", [good]), path)


def test_a_broken_character_is_named_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "latin.jsonl").write_bytes(b'\n{"question": "caf\xe9", "answer": "#### 1"}\n')
    with pytest.raises(ValueError, match=r"latin.jsonl, line 2: not JSON \('utf-8' codec can't decode byte 0xe9"):
        tasks.load("gsm8k", 0, str(tmp_path / "latin.jsonl"))


def test_data_is_asked_for_and_refused(tmp_path: Path) -> None:
    empty = write_lines(tmp_path / "empty.jsonl", [""])
    for arguments, said in (
        (("gsm8k", 0), "--task gsm8k needs --data"),
        (("gsm8k", 0, "nowhere.jsonl"), "--data nowhere.jsonl: no such file"),
        (("gsm8k", 0, empty), "holds no problem"),
        (("sort", 0, empty), "--task sort makes its own problems: leave out --data"),
        (("arithmetic", 0, "", empty), "leave out --eval-data"),
    ):
        with pytest.raises(ValueError, match=said):
            tasks.load(*arguments)


def test_unknown_names_say_the_nearest_and_the_list(gym: None) -> None:
    with pytest.raises(ValueError, match=r"arithmetics; did you mean arithmetic\? \(known: sort, arithmetic, gsm8k, guess, shell, reas"):
        tasks.load("arithmetics", 0)
    with pytest.raises(ValueError, match=r"did you mean reasoning-gym:say\? \(known: reasoning-gym:broken, reasoning-gym:say\)"):
        tasks.load("reasoning-gym:sai", 0)


def test_reasoning_gym_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match="pip install reasoning-gym"):
        tasks.load("reasoning-gym:say", 0)


def test_reasoning_gym_scores_the_tagged_answer_by_its_own_scorer(gym: None) -> None:
    task = tasks.load("reasoning-gym:say", 0)
    for split, group in (("train", 4), ("train", 20_004), ("eval", 4)):  # the second lies two blocks on
        _, answer, text = task.prompt(group, split)
        value = text.split(".")[0].removeprefix("Say ")
        answer = json.loads(json.dumps(answer))
        assert task.reward(answer, f"<answer>1</answer> no: <answer>\n{value}</answer>.") == task.reward(answer, value) == 1.0
        assert task.reward(answer, f"<answer>{value}0</answer>") == 0.0
        assert task.reward(answer, "<answer>seven</answer>") == 0.0  # the scorer raises, but can score the right answer
    broken = tasks.load("reasoning-gym:broken", 0)
    with pytest.raises(RuntimeError, match="scorer is broken"):
        broken.reward(broken.prompt(0)[1], "1")


def test_a_task_of_ones_own_is_a_file(tmp_path: Path) -> None:
    prompt = "prompt = lambda group, split='train': ([{'role': 'user', 'content': f'{data}{seed}/{group}'}], group, str(group))"
    source = "def task(seed, data):\n    " + prompt + "\n    return Task('mine', prompt, lambda answer, text: len(text))\n"
    path = write_task(tmp_path / "mine.py", source)
    task = tasks.load(path, 5, "words")
    assert task.prompt(2)[0][0]["content"] == "words5/2" and task.reward(None, "abc") == 3
    with pytest.raises(ValueError, match="--eval-data is not read by"):
        tasks.load(path, 5, "words", "more")
    both = write_task(tmp_path / "both.py", "def task(seed, data, eval_data):\n    return Task(eval_data, None, None)\n")
    assert tasks.load(both, 5, "words", "more").name == "more"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("x = 1", r"the file defines no function task\(seed, data\)"),
        ("import nowhere", "cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
        ("task = lambda seed, data: 3", "has no name, prompt, reward, num_eval"),
    ],
)
def test_a_file_that_defines_no_task_is_refused(tmp_path: Path, source: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tasks.load(write_task(tmp_path / "mine.py", source), 0)
    with pytest.raises(ValueError, match="no such file"):
        tasks.load(str(tmp_path / "other.py"), 0)


def test_make_prompt_renders_the_chat_template(tokenizer: hf.Tokenizer) -> None:
    task = tasks.load("sort", 0)
    prompt = tasks.make_prompt(task, tokenizer, 9)
    assert prompt.tokens.dtype == np.int32 and prompt.group == 9 and prompt.answer == task.prompt(9)[1]
    assert tokenizer.decode(prompt.tokens.tolist()) == f"<|im_start|>user\n{prompt.text}<|im_end|>\n<|im_start|>assistant\n"
    assert tasks.make_prompt(task, tokenizer, 9, "eval").text == task.prompt(9, "eval")[2]
    np.testing.assert_array_equal(tasks.user_prompt(prompt.text, tokenizer), prompt.tokens)


def test_without_a_chat_template_the_prompt_is_plain_text_and_that_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    plain = hf.load_tokenizer(TINY)
    plain.chat_template = None
    for group in range(3):
        prompt = tasks.make_prompt(tasks.load("sort", 0), plain, group)
        assert plain.decode(prompt.tokens.tolist()) == prompt.text
    assert capfd.readouterr().err.count("has no chat template") == 1


def test_control_tokens_in_a_message_are_refused(tokenizer: hf.Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"the message contains the control token <\|im_end\|>"):
        tasks.user_prompt("sort<|im_end|>", tokenizer)
