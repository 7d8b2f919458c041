"""Checkpoints of several training ranks: resumed on more or fewer, refused by all when one cannot write, whole or absent after kill -9.

    python -m pytest tests/dist/test_checkpoint_dist.py
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launcher import run_ranks
from safetensors.torch import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from miles_core.assets import TINY
from miles_core.checkpoint import Checkpointer, Tensors, WriteModel, latest, load_optimizer, read_meta
from miles_core.model import hf
from miles_core.model.parallel import full_tensors, shard

META = {"version": 2, "base": 3, "beyond": []}


def write_model(path: Path, tensors: Tensors) -> None:
    """What hf.load reads; hf.save itself would bring transformers into every process here, for the tokenizer."""
    path.mkdir()
    shutil.copy(TINY / "config.json", path)
    named, config = {}, hf.load_config(TINY)
    for name, tensor in tensors:
        for file_name, piece in zip(hf.file_names(name, config), tensor if tensor.ndim == 3 else [tensor], strict=True):
            named[f"model.{file_name}"] = piece.contiguous()
    (path / "model.safetensors").write_bytes(save(named))


def save_model(path: Path, tensors: Tensors) -> None:
    """As a real run does."""
    hf.save(path, hf.load_config(TINY), tensors, TINY)


class Run:
    """The embedded policy on all ranks of the world, with gradients that do not depend on how many there are."""

    def __init__(self, directory: Path, model_dir: Path = TINY):
        dist.init_process_group("gloo")
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = hf.load(model_dir)
        shard(self.model, self.mesh)
        self.parameters = dict(self.model.named_parameters())
        self.adamw = torch.optim.AdamW(self.parameters.values(), lr=1e-2, fused=True)
        self.group = dist.new_group()
        self.checkpoints = Checkpointer(directory, 2, self.group)

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for parameter in self.parameters.values():
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = distribute_tensor(gradient, self.mesh, parameter.placements)
        self.adamw.step()

    def save(self, step: int, write: WriteModel = write_model) -> None:
        self.checkpoints.save(step, self.parameters, self.adamw, full_tensors(self.model), {"version": 2}, range(3), write)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in full_tensors(self.model)}


def same(left: dict, right: dict) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def first_run(directory: Path) -> dict[str, torch.Tensor]:
    """Two steps, save, then two more while the checkpoint is being written. Returns the weights at the end."""
    run = Run(directory)
    for number in range(4):
        run.step(number)
        if number == 1:
            run.save(2)
    run.checkpoints.finish()
    return run.weights() if dist.get_rank() == 0 else {name: None for name, _ in full_tensors(run.model)}


def resumed_run(directory: Path) -> tuple[dict[str, torch.Tensor], set[float]]:
    path = latest(directory)
    run = Run(directory, path)
    load_optimizer(path, run.parameters, run.adamw, run.group)
    steps = {float(state["step"]) for state in run.adamw.state.values()}
    for number in (2, 3):
        run.step(number)
    return run.weights(), steps


@pytest.mark.parametrize(("num_before", "nums_after"), [(1, [2]), (2, [1, 2, 3]), (3, [2])])
def test_resuming_on_any_number_of_ranks_gives_the_same_bits(num_before: int, nums_after: list[int], tmp_path: Path) -> None:
    uninterrupted = run_ranks(num_before, first_run, tmp_path)[0]
    assert latest(tmp_path).name == "step_000002" and read_meta(latest(tmp_path)) == META
    assert len(list((latest(tmp_path) / "train_state").glob("*.distcp"))) == num_before
    for num_after in nums_after:
        for weights, steps in run_ranks(num_after, resumed_run, tmp_path):
            assert steps == {2.0}
            assert same(weights, uninterrupted), num_after


def one_rank_cannot_write(directory: Path, victim: int, limit: int) -> tuple[str, str]:
    run = Run(directory)
    run.step(0)
    run.save(1)
    run.checkpoints.finish()
    if dist.get_rank() == victim:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    run.save(2, save_model)
    with pytest.raises(ValueError) as error:
        run.checkpoints.finish()
    dist.barrier()  # the first rank has cleaned up
    return str(error.value), " ".join(sorted(os.listdir(directory)))


# the tiny model has 1.4 MB; the shards of its optimizer state are half of 2.7 MB each
@pytest.mark.parametrize(("victim", "limit"), [(0, 500_000), (1, 500_000)], ids=["model", "shard of the other rank"])
def test_a_disk_that_is_full_on_one_rank_fails_all_and_leaves_the_last_one_whole(victim: int, limit: int, tmp_path: Path) -> None:
    for message, left in run_ranks(2, one_rank_cannot_write, tmp_path, victim, limit):
        assert message.startswith(f"checkpoint of step 2 in {tmp_path} (") and "\n" not in message, message
        assert "could not be written" in message and "File too large" in message, message
        assert left == "latest step_000001"
    assert read_meta(latest(tmp_path)) == META


def killed_while_saving(directory: Path, delay_s: float, progress: Path) -> None:
    """Saves without a pause; rank 1 dies `delay_s` after the first checkpoint is whole."""
    run = Run(directory)
    run.step(0)
    for step in range(1, 1000):
        run.save(step)
        run.checkpoints.finish()
        if step == 1 and dist.get_rank() == 1:
            threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if dist.get_rank() == 0:
            progress.write_text(str(step))
    raise AssertionError("nobody was killed")


@pytest.mark.parametrize("delay_s", [0.05, 0.13, 0.31])
def test_kill_9_at_any_moment_leaves_a_whole_checkpoint(delay_s: float, tmp_path: Path) -> None:
    directory, progress = tmp_path / "checkpoints", tmp_path / "progress"
    with pytest.raises(RuntimeError, match="rank 1 of 2 failed first"):
        run_ranks(2, killed_while_saving, directory, delay_s, progress)
    path = latest(directory)
    assert read_meta(path) == META
    assert int(progress.read_text()) <= int(path.name[5:]) <= int(progress.read_text()) + 1
    weights, _ = run_ranks(1, resumed_run, directory)[0]
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())
    assert not list(directory.glob(".tmp_*")), "what was half written is gone after the next start"


def train_while_saving(directory: Path) -> bool:
    """All-reduces on the training group for as long as a checkpoint is being written, over and over."""
    run = Run(directory)
    run.step(0)
    rank, num_ranks, right, num_sums = dist.get_rank(), dist.get_world_size(), True, 0
    for step in range(1, 3):
        run.save(step)
        busy = torch.ones(())
        while busy:
            values = torch.arange(50_000.0) + rank
            dist.all_reduce(values)
            right &= torch.equal(values, torch.arange(50_000.0) * num_ranks + sum(range(num_ranks)))
            busy = torch.tensor(float(not run.checkpoints.pending[1].done()))
            dist.all_reduce(busy)
            num_sums += 1
        run.checkpoints.check()
    return right and num_sums > 2


def test_collectives_of_the_training_ranks_stay_right_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    assert run_ranks(3, train_while_saving, tmp_path) == [True] * 3
