"""Checkpoints: written in the background, visible only when whole, resumed on any number of training ranks.

    checkpoints = Checkpointer(run_dir / "checkpoints", keep, group)       # every training rank; `group` is used by nothing else
    checkpoints.save(step, parameters, adamw, full_tensors(model, master=True), meta, consumed, write_model)  # returns after a copy
    checkpoints.check(); checkpoints.finish()                              # raise if a write has failed; finish waits for it first
    path = latest(run_dir / "checkpoints"); meta = read_meta(path)         # one rank; Damaged if it is not what was saved
    load_optimizer(path, parameters, adamw, group)                         # every training rank; the weights are a model directory

    checkpoints/
      step_000100/      a Hugging Face model directory: config.json, model.safetensors (float32), tokenizer
        train_state/    meta.json, and optimizer state and generators by torch.distributed.checkpoint: each rank writes its shards
        manifest.json   size and XXH3 digest of every file
      latest            -> step_000100

A checkpoint grows in a directory named .tmp_*. When every rank has finished, its files are fsynced and the directory gets its name: one
atomic rename, so a directory named step_* is whole, whenever the run was killed. What is named .tmp_* is removed at the next start.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from miles_core.digest import file_digest
from miles_core.rundir import fsync

FORMAT = 1

class Damaged(ValueError):
    """A checkpoint is not what was saved."""


Tensors = Iterable[tuple[str, torch.Tensor]]
WriteModel = Callable[[Path, Tensors], None]


class Checkpointer:
    """One on each training rank. A thread writes; `group` is its own, because a group that two threads use mixes up their messages."""

    def __init__(self, directory: Path, keep: int, group: dist.ProcessGroup, timeout_s: float = 1800.0):
        self.directory, self.keep, self.group, self.timeout_s = directory, keep, group, timeout_s
        self.is_leader = dist.get_rank(group) == 0
        self.writer = ThreadPoolExecutor(1, "checkpoint")
        self.pending: tuple[int, Future[None]] | None = None
        if self.is_leader:
            directory.mkdir(parents=True, exist_ok=True)
            for leftover in directory.glob(".tmp_*"):
                _remove(leftover)

    def save(
        self,
        step: int,
        parameters: Mapping[str, torch.Tensor],
        optimizer: torch.optim.Optimizer,
        tensors: Tensors,
        meta: dict[str, Any],
        consumed: Iterable[int],
        write_model: WriteModel,
    ) -> None:
        """Copy everything, and write it in the background (collective over the training ranks).

        `parameters`: what the optimizer works on, by name. `tensors`: every full tensor, iterated on all ranks and kept on the first.
        `meta`: what JSON can say. `consumed`: numbers of the groups that these weights have been trained on. `write_model(path, tensors)`
        makes the model directory, in the background, on the first rank; OSError or ValueError from it means that the disk refused.
        Raises like `finish` if the save before this one failed.
        """
        self.finish()
        done = set(consumed)
        base = next(number for number in itertools.count() if number not in done)  # few lie beyond: a window's worth
        meta = {**meta, "base": base, "beyond": sorted(number for number in done if number > base)}
        weights = [(name, tensor.to("cpu", copy=True)) for name, tensor in tensors if self.is_leader]
        state = {name: tensor.clone() for name, tensor in _optimizer_state(parameters, optimizer).items()}
        state[f"generator/{dist.get_rank(self.group)}"] = torch.get_rng_state()
        self.pending = step, self.writer.submit(self._write, step, weights, state, meta, write_model)

    def check(self) -> None:
        """Raise what went wrong with a save that has ended: ValueError in one sentence when the disk would not take it."""
        if self.pending is not None and self.pending[1].done():
            self.finish()

    def finish(self) -> None:
        """Wait until the last save is on disk. Raises like `check`, or TimeoutError."""
        if self.pending is None:
            return
        step, future = self.pending
        try:
            future.exception(self.timeout_s)
        except TimeoutError as error:
            raise TimeoutError(f"waited {self.timeout_s:g} s for the checkpoint of step {step} in {self.directory}") from error
        self.pending = None
        future.result()

    def _write(self, step: int, weights: Tensors, state: dict[str, torch.Tensor], meta: dict[str, Any], write_model: WriteModel) -> None:
        temporary = self.directory / f".tmp_step_{step:06d}"

        def begin() -> None:
            write_model(temporary, weights)
            (temporary / "train_state").mkdir()
            (temporary / "train_state" / "meta.json").write_text(json.dumps({"format": FORMAT, **meta}) + "\n")

        try:
            self._on_leader(begin)
            _save_shards(temporary / "train_state", state, self.group)
            self._on_leader(lambda: self._commit(temporary, self.directory / f"step_{step:06d}"))
        except Exception as error:
            if self.is_leader:
                shutil.rmtree(temporary, ignore_errors=True)
            where = f"checkpoint of step {step} in {self.directory} ({shutil.disk_usage(self.directory).free / 2**20:.0f} MiB free)"
            kind = ValueError if isinstance(error, OSError | ValueError) else RuntimeError
            raise kind(f"{where} could not be written: {error}") from error

    def _on_leader(self, function: Callable[[], None]) -> None:
        """Run it on the first rank; every rank raises what it raises."""
        outcome: list[Exception | None] = [None]
        if self.is_leader:
            try:
                function()
            except (OSError, ValueError) as error:
                outcome = [error]
            except Exception as error:
                outcome = [RuntimeError(f"{type(error).__name__}: {error}")]
        dist.broadcast_object_list(outcome, group=self.group, group_src=0)
        if outcome[0] is not None:
            raise outcome[0]

    def _commit(self, temporary: Path, final: Path) -> None:
        """Digest, fsync, rename, point `latest` at it, remove the oldest."""
        num_written, num_ranks = len(list((temporary / "train_state").glob("*.distcp"))), dist.get_world_size(self.group)
        if num_written != num_ranks:
            raise ValueError(f"{num_written} of {num_ranks} ranks wrote here: --run-dir must be one directory for all nodes")
        manifest = {str(path.relative_to(temporary)): [path.stat().st_size, file_digest(path)] for path in _files(temporary)}
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
        for path in (*_files(temporary), temporary / "train_state", temporary):
            fsync(path)
        temporary.rename(final)
        _point_latest_at(final)
        fsync(self.directory)
        for old in _whole(self.directory)[: -self.keep]:
            _remove(old.rename(self.directory / f".tmp_old_{old.name}"))


def latest(directory: Path) -> Path | None:
    """The whole checkpoint of the highest step, or None."""
    return max(_whole(directory), default=None, key=_step)


def newest(directory: Path, count: int) -> list[Path]:
    """The last `count` whole checkpoints, oldest first."""
    return _whole(directory)[-count:]


def later_than(directory: Path, version: int) -> list[Path]:
    """Whole checkpoints of higher versions."""
    return [path for path in _whole(directory) if _step(path) > version]


def set_aside(path: Path, why: str) -> Path:
    """Give a checkpoint a name under which nothing looks for it. Returns the new path."""
    aside = next(p for n in itertools.count() if not (p := path.with_name(f"{why}_{path.name}" + f".{n}" * (n > 0))).exists())
    path.rename(aside)
    if (rest := latest(path.parent)) is not None:
        _point_latest_at(rest)
    else:
        (path.parent / "latest").unlink(missing_ok=True)
    return aside


def meta_of(path: Path) -> dict[str, Any]:
    """The `meta` that a checkpoint was saved with, unchecked. Raises Damaged when it cannot be read, ValueError for another format."""
    try:
        meta = json.loads((path / "train_state" / "meta.json").read_text())
    except (OSError, ValueError) as error:
        raise Damaged(f"{path / 'train_state' / 'meta.json'} cannot be read: {error}") from error
    if meta.pop("format") != FORMAT:
        raise ValueError(f"{path} has another format than {FORMAT}, the one that this version reads")
    return meta


def consumed(meta: dict[str, Any]) -> tuple[int, ...]:
    """The groups that the weights of a checkpoint have been trained on."""
    return (*range(meta["base"]), *meta["beyond"])


def read_meta(path: Path) -> dict[str, Any]:
    """Compare every file of a checkpoint with its manifest, then return the `meta` that it was saved with.

    Raises Damaged naming the file that is missing or differs, and ValueError naming the format if it is another one.
    """
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        files = [(path / name, size, digest) for name, (size, digest) in manifest.items()]
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise Damaged(f"{path / 'manifest.json'} cannot be read: {error}") from error
    for file, size, digest in files:
        if not file.is_file():
            raise Damaged(f"{file} is missing from the checkpoint")
        if file.stat().st_size != size or file_digest(file) != digest:
            raise Damaged(f"{file} is not what was saved (size or digest differ)")
    return meta_of(path)


def load_optimizer(path: Path, parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer, group: dist.ProcessGroup) -> None:
    """Restore optimizer state, and this rank's generator if it saved one (collective over the training ranks, however many saved).

    Hyper-parameters are not restored: they are those of the new run. Raises ValueError naming parameters that one side lacks.
    """
    reader = dcp.FileSystemReader(path / "train_state")
    saved = reader.read_metadata().state_dict_metadata
    names = {key: key.removeprefix("optimizer/").rpartition("/")[0] for key in saved if key.startswith("optimizer/")}
    if differ := sorted(set(names.values()) ^ parameters.keys()):
        raise ValueError(f"{path} was saved from another model: optimizer state and parameters differ in {', '.join(differ[:5])}")
    state = {key: _like(parameters[name], saved[key]) for key, name in names.items()}
    generator = f"generator/{dist.get_rank(group)}"
    if generator in saved:
        state[generator] = torch.get_rng_state()
    with _failures():
        dcp.load(state, storage_reader=reader, process_group=group)
    for key, name in names.items():
        optimizer.state[parameters[name]][key.rpartition("/")[2]] = state[key]
    if generator in state:
        torch.set_rng_state(state[generator])


def _like(parameter: torch.Tensor, entry: TensorStorageMetadata) -> torch.Tensor:
    """Room for one saved tensor: sharded like its parameter, or plain (the count of steps)."""
    if entry.size == parameter.shape:
        return torch.zeros_like(parameter)
    return torch.zeros(entry.size, dtype=entry.properties.dtype)


def _optimizer_state(parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """{"optimizer/<parameter>/<exp_avg, exp_avg_sq, step>": tensor}. By name, so that it fits any order and any sharding."""
    assert all(p in optimizer.state for p in parameters.values()), "nothing to save before the first optimizer step"
    return {f"optimizer/{name}/{field}": value for name, p in parameters.items() for field, value in optimizer.state[p].items()}


class _Files(FileSystem):
    """torch's zip writer turns a full disk into a complaint about positions; let the reason through."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Generator[IO[bytes], None, None]:
        with super().create_stream(path, mode) as stream:
            try:
                yield stream
            except RuntimeError as error:
                raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


def _save_shards(path: Path, state: dict[str, torch.Tensor], group: dist.ProcessGroup) -> None:
    """Every rank writes its part of `state`. Every rank raises what any of them raised."""
    writer = dcp.FileSystemWriter(path)
    writer.fs = _Files()
    with _failures():
        dcp.save(state, storage_writer=writer, process_group=group)


@contextmanager
def _failures() -> Generator[None, None, None]:
    """What failed on some rank, in place of torch's collection of failures (which is a BaseException)."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error


def _whole(directory: Path) -> list[Path]:
    return sorted((path for path in directory.glob("step_*") if path.name[5:].isdigit()), key=_step)


def _point_latest_at(path: Path) -> None:
    link = path.with_name(".tmp_latest")
    link.unlink(missing_ok=True)
    link.symlink_to(path.name)
    link.replace(path.with_name("latest"))


def _step(path: Path) -> int:
    return int(path.name[5:])


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _remove(path: Path) -> None:
    path.unlink() if path.is_symlink() else shutil.rmtree(path)
