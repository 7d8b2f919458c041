"""Checkpoints: written in the background, whole or not there, resumed on any number of training ranks.

    checkpoints/
      step_000100/            a Hugging Face model directory (config.json, model.safetensors, tokenizer), and
        train_state/            optimizer moments: torch.distributed.checkpoint, resharded on load
        state.json              step = version, consumed groups, random seeds: what `meta` held
        manifest.json           digest of every file above
      latest -> step_000100

Training stops for the copy only. A checkpoint is written under a temporary name and renamed when every file is on disk, so a directory
named step_* is complete; its digests are checked when it is loaded.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from miles_core.digest import file_digest

FORMAT = 1
Tensors = list[tuple[str, torch.Tensor]]


def latest(directory: Path) -> Path | None:
    """The newest complete checkpoint of a run, or None."""
    return max((p for p in directory.glob("step_*") if p.is_dir()), default=None)


def read_meta(path: Path) -> dict:
    """`meta` of a checkpoint, after checking every file against the manifest. Raises ValueError naming the file that differs."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        for name, expected in manifest.items():
            if file_digest(path / name) != expected:
                raise ValueError(
                    f"checkpoint {path} is damaged: {name} does not match its digest; remove the directory to resume from the one before"
                )
        meta = json.loads((path / "state.json").read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"checkpoint {path} is damaged: {error}; remove the directory to resume from the one before") from error
    if meta.pop("format") != FORMAT:
        raise ValueError(f"checkpoint {path} has another format than this code reads ({FORMAT})")
    return meta


def load_optimizer(path: Path, model: nn.Module, adamw: torch.optim.Optimizer, group: dist.ProcessGroup) -> None:
    """Fill the optimizer's state (collective over the training ranks, which may be more or fewer than those that saved)."""
    state = {"optimizer": get_optimizer_state_dict(model, adamw)}
    dcp.load(state, checkpoint_id=path / "train_state", process_group=group)
    set_optimizer_state_dict(model, adamw, state["optimizer"])


class Checkpointer:
    """Saves one checkpoint at a time. `group` must be used by nothing else: the writer's thread runs its collectives on it."""

    def __init__(self, directory: Path, keep: int, group: dist.ProcessGroup):
        self.directory, self.keep, self.group = directory, keep, group
        self.is_leader = dist.get_rank(group) == 0
        self.pending: Future | None = None
        if self.is_leader:
            for leftover in directory.glob(".writing-*"):
                shutil.rmtree(leftover)

    def save(
        self, step: int, model: nn.Module, adamw: torch.optim.Optimizer, named_tensors: Iterable[tuple[str, torch.Tensor]],
        meta: dict, write_model: Callable[[Path, Tensors], None],
    ) -> None:  # fmt: skip
        """Copy, then write in the background (collective over the training ranks). `write_model(directory, tensors)` runs on the leader.

        `named_tensors` are full tensors in a collective iteration. Waits for the checkpoint before this one.
        """
        self.finish()
        temporary = self.directory / f".writing-step_{step:06d}"
        tensors: Tensors = []
        for name, tensor in named_tensors:  # every rank iterates: gathering is collective
            if self.is_leader:
                tensors.append((name, tensor.clone()))
        state = {"optimizer": get_optimizer_state_dict(model, adamw)}
        written = dcp.async_save(state, checkpoint_id=temporary / "train_state", process_group=self.group)
        if not self.is_leader:
            self.pending = written
            return
        done = self.pending = Future()

        def complete() -> None:
            try:
                written.result()
                write_model(temporary, tensors)
                (temporary / "state.json").write_text(json.dumps({"format": FORMAT, **meta}) + "\n")
                self._publish(temporary, self.directory / f"step_{step:06d}")
            except BaseException as error:  # handed to whoever calls finish()
                shutil.rmtree(temporary, ignore_errors=True)
                done.set_exception(error)
            else:
                done.set_result(None)

        threading.Thread(target=complete, name="checkpoint", daemon=True).start()

    def check(self) -> None:
        """Raise what went wrong in the background, if anything has."""
        if self.pending is not None and self.pending.done():
            self.finish()

    def finish(self) -> None:
        """Wait until the last checkpoint is on disk. Raises ValueError when it could not be written; the one before stays."""
        pending, self.pending = self.pending, None
        try:
            if pending is not None:
                pending.result()
        except Exception as error:
            free = shutil.disk_usage(self.directory).free / 2**20
            raise ValueError(
                f"the checkpoint in {self.directory} could not be written: {error} ({free:.0f} MiB free); make room and start again with the "
                "same --run-dir: the checkpoint before it is whole"
            ) from error

    def _publish(self, temporary: Path, final: Path) -> None:
        files = sorted(p for p in temporary.rglob("*") if p.is_file())
        manifest = {str(p.relative_to(temporary)): file_digest(p) for p in files}
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
        for path in [*files, temporary / "manifest.json", *(p for p in temporary.rglob("*") if p.is_dir()), temporary]:
            _fsync(path)
        shutil.rmtree(final, ignore_errors=True)  # a run that starts again from an older checkpoint comes by here twice
        os.rename(temporary, final)
        link = self.directory / ".writing-latest"
        link.unlink(missing_ok=True)
        link.symlink_to(final.name)
        os.rename(link, self.directory / "latest")
        _fsync(self.directory)
        for old in sorted(self.directory.glob("step_*"))[: -self.keep]:
            shutil.rmtree(old)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
