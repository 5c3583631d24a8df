"""Saves through adapters of Lightning in ways that its example does not: `lightning_worker.py CASE
PATH`, under torchrun. Prints one line of JSON; test_lightning.py has a test for each case.
"""

from __future__ import annotations

import concurrent.futures
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from train_lightning import RANKS, Module

from torch_dcpx import DcpxError, WriteOptions
from torch_dcpx.integrations import lightning as adapters
from torch_dcpx.integrations._beside import WriterWithFiles
from torch_dcpx.integrations._lightning_saves import Saves
from torch_dcpx.integrations.lightning import DcpxCheckpointIO, DcpxModelParallelStrategy


def trainer_of(path: Path, steps: int = 6, **more: Any) -> lightning.Trainer:
    saves = ModelCheckpoint(
        path, "step_{step}", auto_insert_metric_name=False, every_n_train_steps=2, save_top_k=1
    )
    return lightning.Trainer(
        accelerator="cpu", devices=RANKS, max_steps=steps, callbacks=[saves], logger=False,
        enable_progress_bar=False, use_distributed_sampler=False, **more,
    )  # fmt: skip


def module_of(strategy: str) -> Module:
    return Module(SimpleNamespace(width=16, layers=2, strategy=strategy))


def fit(trainer: lightning.Trainer, module: Module, *, raises: bool = False) -> str:
    """Returns the error of a training."""
    try:
        trainer.fit(module, torch.utils.data.DataLoader(range(6), batch_size=None))
    except (DcpxError, OSError) as error:
        if raises:
            raise
        return f"{type(error).__name__}: {error}"
    return ""


def failing(path: Path) -> Any:
    """The second save fails on the last rank. It would have replaced the first."""
    begun = []

    def fail(done: int, _all: int) -> None:
        if done == 0:
            begun.append(done)
        if len(begun) == 2 and dist.get_rank() == RANKS - 1:
            raise OSError("the disk is gone")

    strategy = DcpxModelParallelStrategy(
        data_parallel_size=RANKS, tensor_parallel_size=1, options=WriteOptions(progress=fail)
    )
    error = fit(trainer_of(path, strategy=strategy), module_of("model_parallel"))
    dist.barrier()
    names = sorted(one.name for one in path.iterdir() if (one / ".metadata").exists())
    return {"error": error, "whole": names}


def refused(path: Path) -> Any:
    """What the adapters refuse, by name."""
    linked = SimpleNamespace(checkpoint_callbacks=[ModelCheckpoint(path, save_last="link")])
    calls: dict[str, Callable[[], Any]] = {
        "save_distributed_checkpoint": lambda: DcpxModelParallelStrategy(
            save_distributed_checkpoint=False
        ),
        "state_dict_type": lambda: adapters.DcpxFSDPStrategy(state_dict_type="full"),
        "on_busy": lambda: DcpxModelParallelStrategy(options=WriteOptions(on_busy="skip")),
        "overlap": lambda: DcpxModelParallelStrategy(options=WriteOptions(overlap=True)),
        "link": lambda: DcpxModelParallelStrategy().setup(linked),
        "plain link": lambda: fit(
            lightning.Trainer(
                accelerator="cpu",
                logger=False,
                plugins=[DcpxCheckpointIO()],
                max_steps=1,
                callbacks=[ModelCheckpoint(path, save_last="link")],
            ),
            module_of(""),
            raises=True,
        ),
        "storage_options": lambda: DcpxModelParallelStrategy().save_checkpoint({}, path, {"a": 1}),
        "plain storage_options": lambda: DcpxCheckpointIO().save_checkpoint({}, path, {"a": 1}),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except DcpxError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def plain(path: Path) -> Any:
    """Plain checkpoints of a Trainer: each side's, and those of one that goes on from ours."""
    sides = {"stock": [], "ours": [DcpxCheckpointIO()]}
    for name, plugins in sides.items():
        trainer = trainer_of(path / name, strategy="ddp", plugins=plugins)
        assert fit(trainer, module_of("")) == ""
        dist.barrier()
    loaded = [torch.load(path / name / "step_6.ckpt") for name in sides]
    files = {name: sorted(one.name for one in (path / name).iterdir()) for name in sides}
    states = [json.dumps(told(one)) for one in loaded]
    trainer, module = trainer_of(path / "again", strategy="ddp", steps=8), module_of("")
    trainer.fit(
        module, torch.utils.data.DataLoader(range(8), batch_size=None),
        ckpt_path=path / "ours" / "step_6.ckpt", weights_only=False,
    )  # fmt: skip
    return {"files": files, "equal": states[0] == states[1], "steps": trainer.global_step}


def told(value: Any) -> Any:
    """Returns a checkpoint as plain values, all bits of tensors included; without paths."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, dict):
        return {str(k): told(v) for k, v in value.items() if "path" not in str(k)}
    if isinstance(value, (list, tuple)):
        return [told(one) for one in value]
    return str(value) if "ckpt" not in str(value) else ""


def plain_calls(path: Path) -> Any:
    """A checkpoint changes after its save; one fails; removals come behind saves."""
    plugin, kept = DcpxCheckpointIO(), {"a": [1, {"b": 2}], "t": torch.zeros(1 << 20)}
    plugin.save_checkpoint(kept, path / "one.ckpt")
    kept["a"][1]["b"] = 3
    kept["t"].fill_(7)
    kept["late"] = True
    found: dict[str, Any] = {}
    loaded = plugin.load_checkpoint(path / "one.ckpt")
    found["one"] = [loaded["a"], loaded["t"].abs().max().item(), len(loaded)]
    found["bytes"] = (path / "one.ckpt").stat().st_size
    plugin.save_checkpoint({"a": lambda: 0}, path / "one.ckpt")  # no pickle takes it
    plugin.remove_checkpoint(path / "one.ckpt")
    try:
        plugin.teardown()
    except Exception as error:  # noqa: BLE001  (pickle's own)
        found["error"] = type(error).__name__
    found["left"] = sorted(one.name for one in path.iterdir())
    plugin.save_checkpoint({"a": 2}, path / "two.ckpt")
    plugin.remove_checkpoint(path / "one.ckpt")
    plugin.teardown()
    found["end"] = sorted(one.name for one in path.iterdir())
    return found


class ByHand(lightning.Callback):
    """Saves behind the second step, on some ranks."""

    def __init__(self, path: Path, ranks: range) -> None:
        self.path, self.ranks = path, ranks

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2 and dist.get_rank() in self.ranks:
            trainer.save_checkpoint(self.path)


def by_hand(path: Path, ranks: range, steps: int, options: WriteOptions) -> str:
    """Returns the error of a training in which a callback saves once."""
    strategy = DcpxModelParallelStrategy(
        data_parallel_size=RANKS, tensor_parallel_size=1, options=options
    )
    trainer = lightning.Trainer(
        accelerator="cpu", devices=RANKS, max_steps=steps, callbacks=[ByHand(path, ranks)],
        logger=False, enable_progress_bar=False, use_distributed_sampler=False, strategy=strategy,
        enable_checkpointing=False,
    )  # fmt: skip
    return fit(trainer, module_of("model_parallel"))


def at_once(path: Path) -> Any:
    """The only save fails before anybody asks for it."""

    def fail(_done: int, _all: int) -> None:
        raise OSError("the disk is gone")

    saved_by = WriterWithFiles.saved_by

    def ended(*args: Any, **more: Any) -> Any:
        handle = saved_by(*args, **more)
        concurrent.futures.wait([handle.durable])
        return handle

    with patch.object(WriterWithFiles, "saved_by", ended):
        return by_hand(path, range(RANKS), 2, WriteOptions(progress=fail))


def skips(path: Path) -> Any:
    """One rank does not save. The error of the other ends the training of both."""
    error = by_hand(path, range(RANKS - 1), 2, WriteOptions(save_timeout_s=3))
    return error if dist.get_rank() == 0 else ""


class Migrated(torch.nn.Module):
    """Loads states of its first version another way."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def _load_from_state_dict(self, state: Any, prefix: str, meta: Any, *more: Any) -> None:
        if meta.get("version", 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2
        super()._load_from_state_dict(state, prefix, meta, *more)


def versions(path: Path) -> Any:
    """What `torch.save` keeps besides tensors is kept."""
    plugin, module = DcpxCheckpointIO(), Migrated()
    state: dict[str, Any] = {"state_dict": module.state_dict(), "own": [module.weight]}
    state["itself"] = state
    plugin.save_checkpoint(state, path / "one.ckpt")
    loaded = plugin.load_checkpoint(path / "one.ckpt", weights_only=False)
    module.load_state_dict(loaded["state_dict"])
    return [module.weight.tolist(), type(loaded["own"][0]).__name__]


def removed(path: Path) -> Any:
    """What a save was to replace stays where that has failed before the removal is asked for."""

    def fail(_done: int, _all: int) -> None:
        raise OSError("the disk is gone")

    saves, found = Saves(WriteOptions(progress=fail), is_async=True), []
    saves.save({"a": torch.ones(3)}, {}, str(path / "one"))
    concurrent.futures.wait([saves._unfinished[0].handle.durable])
    saves.remove(path / "zero", lambda: found.append("removed"))
    for _ in range(2):
        try:
            saves.wait()
        except OSError as error:
            found.append(str(error))
    return found


CASES: dict[str, Callable[[Path], Any]] = {
    "removed": removed,
    "at_once": at_once,
    "skips": skips,
    "versions": versions,
    "failing": failing,
    "refused": refused,
    "plain": plain,
    "plain_calls": plain_calls,
}


def main() -> None:
    found = CASES[sys.argv[1]](Path(sys.argv[2]))
    every: list[Any] = [found]
    if dist.is_initialized():
        every = [None] * RANKS
        dist.all_gather_object(every, found)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(json.dumps({"found": every}))


if __name__ == "__main__":
    main()
