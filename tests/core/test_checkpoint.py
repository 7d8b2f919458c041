"""A checkpoint is whole or it is not there; what is loaded is what was there at the moment of the save; failures are sentences.

One training rank; tests/dist/test_checkpoint_dist.py has several.

    python -m pytest tests/core/test_checkpoint.py
"""

from __future__ import annotations

import json
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save
from torch import nn

from miles_core.checkpoint import Checkpointer, Damaged, Tensors, consumed, latest, load_optimizer, read_meta, set_aside

CONSUMED = (*range(12), 17, 14)
META = {"version": 7, "base": 12, "beyond": [14, 17]}


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def write_model(path: Path, tensors: Tensors) -> None:
    path.mkdir()
    (path / "model.safetensors").write_bytes(save(dict(tensors)))


class Run:
    """A small model in training: 3 steps are taken, each with its own gradient."""

    def __init__(self, directory: Path, group: dist.ProcessGroup, keep: int = 2, timeout_s: float = 20.0):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(200, 100), nn.Linear(100, 3))
        self.adamw = torch.optim.AdamW(self.model.parameters(), lr=0.1, fused=True)
        self.directory, self.group, self.taken = directory, group, 0
        self.checkpoints = Checkpointer(directory, keep, group, timeout_s)
        for _ in range(3):
            self.step()

    def step(self) -> None:
        generator = torch.Generator().manual_seed(self.taken)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        self.adamw.step()
        self.taken += 1

    def save(self, step: int, write=write_model) -> None:
        tensors = ((name, p.detach()) for name, p in self.model.named_parameters())
        self.checkpoints.save(step, dict(self.model.named_parameters()), self.adamw, tensors, {"version": 7}, CONSUMED, write)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def resume(path: Path, group: dist.ProcessGroup) -> Run:
    """Another process as it were: fresh objects, then everything from the checkpoint."""
    run = Run(path.parent, group)
    run.model.load_state_dict(load_file(path / "model.safetensors"))
    run.adamw.state.clear()
    load_optimizer(path, dict(run.model.named_parameters()), run.adamw, group)
    return run


def same(left: dict, right: dict) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """The kernel refuses to let files grow beyond this: the same path through the code as a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_is_loaded_is_what_was_saved(tmp_path: Path, group: dist.ProcessGroup) -> None:
    run = Run(tmp_path, group)
    assert latest(tmp_path) is None and latest(tmp_path / "nowhere") is None
    torch.manual_seed(5)
    run.save(100)
    run.checkpoints.finish()
    noise = torch.rand(3)
    assert names(tmp_path) == ["latest", "step_000100"] and (tmp_path / "latest").resolve() == latest(tmp_path)
    assert names(latest(tmp_path)) == ["manifest.json", "model.safetensors", "train_state"]
    assert read_meta(latest(tmp_path)) == META and sorted(consumed(META)) == sorted(CONSUMED)
    other = resume(latest(tmp_path), group)
    assert torch.equal(torch.rand(3), noise), "the generator goes on where it was"
    assert same(other.weights(), run.weights())
    run.step()
    other.step()
    assert same(other.weights(), run.weights()), "the next step is the same to the bit"


def test_training_goes_on_while_the_checkpoint_is_written(tmp_path: Path, group: dist.ProcessGroup) -> None:
    run, go_on = Run(tmp_path, group), threading.Event()

    def slow(path: Path, tensors: Tensors) -> None:
        assert go_on.wait(20)
        write_model(path, tensors)

    run.save(3, slow)
    weights = run.weights()
    for _ in range(3):
        run.step()
    after = run.weights()
    run.checkpoints.check()
    assert latest(tmp_path) is None, "still being written"
    go_on.set()
    run.checkpoints.finish()
    other = resume(latest(tmp_path), group)
    assert same(other.weights(), weights)
    for _ in range(3):
        other.step()
    assert same(other.weights(), after)


def test_the_last_k_are_kept_and_latest_is_the_highest_step(tmp_path: Path, group: dist.ProcessGroup) -> None:
    run = Run(tmp_path, group, keep=2)
    for step in (50, 100, 999_999, 1_000_000):
        run.save(step)
        run.checkpoints.finish()
        assert latest(tmp_path).name == f"step_{step:06d}" == (tmp_path / "latest").readlink().name
    assert names(tmp_path) == ["latest", "step_1000000", "step_999999"]


def test_at_no_moment_is_a_checkpoint_visible_that_is_not_whole(tmp_path: Path, group: dist.ProcessGroup) -> None:
    """Looks just before every file-system call of the writing thread, which is where a kill would leave things."""
    run, found, faults, armed = Run(tmp_path, group, keep=1), [], [], threading.Event()

    def look(event: str, _: tuple) -> None:
        in_writer = threading.current_thread().name.startswith("checkpoint")
        if armed.is_set() and in_writer and event.startswith(("open", "os.", "shutil.")):
            armed.clear()  # this very function opens files
            try:
                found.append(sorted(int(path.name[5:]) for path in tmp_path.glob("step_*") if read_meta(path)))
            except ValueError as error:
                faults.append(f"{event}: {error}")
            armed.set()

    sys.addaudithook(look)  # cannot be taken back, only disarmed
    armed.set()
    for step in (50, 100):
        run.save(step)
        run.checkpoints.finish()
    armed.clear()
    assert not faults, faults
    seen = [steps for i, steps in enumerate(found) if i == 0 or steps != found[i - 1]]
    assert seen == [[], [50], [50, 100], [100]] and len(found) > 30


def test_what_a_killed_save_left_is_ignored_and_removed_at_the_next_start(tmp_path: Path, group: dist.ProcessGroup) -> None:
    run = Run(tmp_path, group)
    run.save(50)
    run.checkpoints.finish()
    (tmp_path / ".tmp_step_000100" / "train_state").mkdir(parents=True)
    (tmp_path / ".tmp_step_000100" / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".tmp_latest").symlink_to("step_000100")
    assert latest(tmp_path).name == "step_000050"
    Run(tmp_path, group)
    assert names(tmp_path) == ["latest", "step_000050"] and read_meta(latest(tmp_path)) == META


def test_a_changed_or_missing_file_is_named(tmp_path: Path, group: dist.ProcessGroup) -> None:
    run = Run(tmp_path, group)
    run.save(50)
    run.checkpoints.finish()
    path = latest(tmp_path)
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name != "manifest.json")
    assert {str(file.relative_to(path)) for file in files} >= {"model.safetensors", "train_state/.metadata", "train_state/meta.json"}
    for file in files:
        good = file.read_bytes()
        middle = len(good) // 2
        for bad in (good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :], good[:-1], good + b"\0", None):
            file.unlink()
            if bad is not None:
                file.write_bytes(bad)
            with pytest.raises(Damaged, match=f"{file} is"):
                read_meta(path)
        file.write_bytes(good)
    assert read_meta(path) == META
    (path / "manifest.json").write_text("{")
    with pytest.raises(Damaged, match="manifest.json cannot be read"):
        read_meta(path)


def test_what_is_set_aside_is_not_found_and_not_lost(tmp_path: Path, group: dist.ProcessGroup) -> None:
    run = Run(tmp_path, group)
    for step in (50, 100):
        run.save(step)
    run.checkpoints.finish()
    assert set_aside(latest(tmp_path), "damaged").name == "damaged_step_000100"
    assert latest(tmp_path).name == "step_000050" == (tmp_path / "latest").readlink().name
    run.save(100)
    run.checkpoints.finish()
    assert set_aside(latest(tmp_path), "damaged").name == "damaged_step_000100.1"
    set_aside(latest(tmp_path), "erased_3")
    assert names(tmp_path) == ["damaged_step_000100", "damaged_step_000100.1", "erased_3_step_000050"]
    assert latest(tmp_path) is None and read_meta(tmp_path / "erased_3_step_000050") == META


def test_another_format_and_another_model_are_refused(tmp_path: Path, group: dist.ProcessGroup) -> None:
    run = Run(tmp_path, group)
    run.save(50)
    run.checkpoints.finish()
    path = latest(tmp_path)
    model = nn.Sequential(nn.Linear(200, 100), nn.Linear(100, 3, bias=False), nn.LayerNorm(3))
    with pytest.raises(ValueError, match=f"{path} was saved from another model: .* differ in 1.bias, 2.bias, 2.weight$"):
        load_optimizer(path, dict(model.named_parameters()), torch.optim.AdamW(model.parameters()), group)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["train_state/meta.json"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    (path / "train_state" / "meta.json").write_text(json.dumps({"format": 2, **META}))
    with pytest.raises(ValueError, match="another format than 1"):
        read_meta(path)


# model.safetensors has 82 kB, the shard of the optimizer state 176 kB
@pytest.mark.parametrize("limit", [0, 40_000, 120_000], ids=["at the start", "in the model", "in the shards"])
def test_a_full_disk_is_one_sentence_and_costs_only_the_new_checkpoint(tmp_path: Path, group: dist.ProcessGroup, limit: int) -> None:
    run = Run(tmp_path, group)
    run.save(50)
    run.checkpoints.finish()
    with largest_file(limit):
        run.save(100)
        with pytest.raises(ValueError) as error:
            run.checkpoints.finish()
    sentence = str(error.value)
    assert sentence.startswith(f"checkpoint of step 100 in {tmp_path} (") and " MiB free) could not be written: " in sentence, sentence
    assert "File too large" in sentence and "\n" not in sentence, sentence
    assert names(tmp_path) == ["latest", "step_000050"] and latest(tmp_path).name == "step_000050"
    assert read_meta(latest(tmp_path)) == META
    run.checkpoints.finish()
    run.save(150)
    run.checkpoints.finish()
    assert read_meta(latest(tmp_path)) == META and latest(tmp_path).name == "step_000150"


def test_a_failed_save_surfaces_at_the_next_call_whichever_it_is(tmp_path: Path, group: dist.ProcessGroup) -> None:
    for call in ("save", "check", "finish"):
        run = Run(tmp_path, group)
        with largest_file(40_000):
            run.save(100)
            run.checkpoints.pending[1].exception(20)
        with pytest.raises(ValueError, match="checkpoint of step 100"):
            run.save(150) if call == "save" else getattr(run.checkpoints, call)()
        run.checkpoints.check()
    assert names(tmp_path) == []


def test_a_bug_in_writing_is_not_taken_for_a_full_disk(tmp_path: Path, group: dist.ProcessGroup) -> None:
    run = Run(tmp_path, group)
    run.save(100, lambda path, tensors: path.no_such_method())
    with pytest.raises(RuntimeError, match="checkpoint of step 100 .* AttributeError: .*no_such_method"):
        run.checkpoints.finish()


def test_waiting_for_a_write_has_a_deadline(tmp_path: Path, group: dist.ProcessGroup) -> None:
    run, go_on = Run(tmp_path, group, timeout_s=0.2), threading.Event()
    run.save(100, lambda path, tensors: (go_on.wait(20), write_model(path, tensors)))
    with pytest.raises(TimeoutError, match=f"waited 0.2 s for the checkpoint of step 100 in {tmp_path}"):
        run.checkpoints.finish()
    go_on.set()
    run.checkpoints.pending[1].result(20)
    run.checkpoints.finish()
    assert latest(tmp_path).name == "step_000100"
