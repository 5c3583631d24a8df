"""Saves and loads small states through strategies of Megatron-Core: `megatron_worker.py CASE PATH`.

Prints one line of JSON. test_megatron.py has a test for each case, which says what holds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron_on_cpu import use_megatron_on_cpu
from nvidia_resiliency_ext.checkpointing.async_ckpt import core as nvrx

from torch_dcpx import DcpxError, UnsupportedError, WriteOptions
from torch_dcpx.integrations import _megatron_files
from torch_dcpx.integrations.megatron import DcpxLoadStrategy, DcpxSaveStrategy

use_megatron_on_cpu()  # also in workers of Megatron's, which import this file

LOADERS = {"stock": TorchDistLoadShardedStrategy, "ours": DcpxLoadStrategy}
OVERLAP = WriteOptions(overlap=True)
stock_saver = partial(TorchDistSaveShardedStrategy, "torch_dist", 1)


def state_of(fill: float) -> dict[str, Any]:
    """Returns a state whose values all tell `fill`: shards, a copy of all ranks, objects."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows = 8 // ranks
    shards = [torch.full((rows // 2, 4), fill + 0.25 * half) for half in range(2)]
    return {
        "shards": [  # two of a rank
            ShardedTensor.from_rank_offsets("shards", shard, (0, 2 * rank + half, 2 * ranks))
            for half, shard in enumerate(shards)
        ],
        "copies": ShardedTensor.from_rank_offsets(
            "copies", torch.full((8,), fill), replica_id=rank
        ),
        "object": ShardedObject("object", {"fill": fill, "rank": rank}, (ranks,), (rank,)),
        "common": {"fill": fill, "step": torch.tensor(fill)},
    }


def save(path: Path, fill: float, strategy: Any, **more: Any) -> Any:
    if dist.get_rank() == 0:
        path.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    return dist_checkpointing.save(state_of(fill), str(path), strategy, **more)


def load(path: Path, strategy: Any) -> float:
    """Returns the `fill` of a checkpoint, in which all values must tell the same."""
    found, missing, unexpected = dist_checkpointing.load(
        state_of(-1.0), str(path), strategy, strict=StrictHandling.RETURN_ALL
    )
    fill: float = found["common"]["fill"]
    assert not missing, missing
    assert not unexpected, unexpected
    assert found["object"] == {"fill": fill, "rank": dist.get_rank()}
    assert found["common"]["step"] == fill
    for half, shard in enumerate(found["shards"]):
        assert torch.all(shard == fill + 0.25 * half), shard
    assert torch.all(found["copies"] == fill)
    return fill


def pairs(path: Path) -> Any:
    """Each side loads what each has saved; by itself, and with Megatron's wrappers."""
    found = []
    for saver, make in (("stock", stock_saver), ("ours", DcpxSaveStrategy)):
        for wrapper in (None, FullyParallelSaveStrategyWrapper):
            strategy = make() if wrapper is None else wrapper(make())
            folder = path / f"{saver}-{wrapper is None}"
            save(folder, 3.0, strategy)
            for loader in LOADERS.values():
                found.append(load(folder, loader()))
                found.append(load(folder, FullyParallelLoadStrategyWrapper(loader())))
    return found


def plans(path: Path) -> Any:
    """Stock's strategy goes on from the plans that ours has kept, whoever loads them."""
    save(path / "kept", 1.0, DcpxSaveStrategy(cached_metadata=True))
    save(path / "not", 1.0, DcpxSaveStrategy())
    found: dict[str, Any] = {}
    for name, make in LOADERS.items():
        loader = make()
        load(path / "not", loader)
        found[f"{name} without"] = hasattr(loader.cached_global_metadata, "all_local_plans")
        load(path / "kept", loader)
        again = stock_saver(cached_metadata=True)
        again.cached_global_metadata = loader.cached_global_metadata
        save(path / f"again-{name}", 2.0, again)
        found[name] = [again.validated_loaded_metadata_reuse, load(path / f"again-{name}", make())]
    return found


def shapes(path: Path) -> Any:
    """Tensors of other sizes than were saved, where Megatron allows it."""
    save(path, 3.0, DcpxSaveStrategy())
    found: dict[str, Any] = {}
    for name, make in LOADERS.items():
        for size in (6, 10):
            wanted = ShardedTensor.from_rank_offsets(
                "copies",
                torch.full((size,), -1.0),
                replica_id=dist.get_rank(),
                allow_shape_mismatch=True,
            )
            loaded = dist_checkpointing.load({"copies": wanted}, str(path), make())
            found[f"{name} {size}"] = loaded["copies"].tolist()
    return found


def metadata(path: Path) -> Any:
    """What Megatron asks of a checkpoint without loading it."""
    save(path, 3.0, DcpxSaveStrategy())
    found = []
    for make in LOADERS.values():
        tensors = make().load_tensors_metadata(path)
        objects = make().load_sharded_metadata(path)
        found.append([{k: v.global_shape for k, v in tensors.items()}, sorted(objects)])
    return found


class NvrxSaveStrategy(DcpxSaveStrategy):
    """Is called as newer versions of Megatron call it."""

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any, *_: Any) -> Any:
        return super().async_save(sharded_state_dict, checkpoint_dir, "nvrx")


def background(
    path: Path,
    *,
    persistent: bool = False,
    queue: Any = AsyncCallsQueue,
    make_strategy: Any = DcpxSaveStrategy,
) -> Any:
    """Saves in the background: the state changes at once, and the second one fails."""
    calls = queue(persistent=persistent)
    state = state_of(4.0)
    path.mkdir(parents=True, exist_ok=True)
    request = dist_checkpointing.save(state, str(path), make_strategy(), async_sharded_save=True)
    for shard in (*state["shards"], state["copies"]):
        shard.data.fill_(-7.0)
    calls.schedule_async_request(request)
    while not calls.maybe_finalize_async_calls(blocking=False):
        time.sleep(0.01)
    found: dict[str, Any] = {"first": load(path, TorchDistLoadShardedStrategy())}
    calls.schedule_async_request(_failing_save(path, make_strategy, async_sharded_save=True))
    try:
        calls.maybe_finalize_async_calls(blocking=True)
    except DcpxError as error:
        found["error"] = str(error)
    found["after"] = [load(path, make()) for make in LOADERS.values()]
    found["names"] = sorted(entry.name for entry in path.iterdir())
    calls.close()
    return found


def foreground(path: Path) -> Any:
    """A save that fails on the last rank alone, over a checkpoint and in an empty folder."""
    save(path / "over", 4.0, DcpxSaveStrategy())
    found: dict[str, Any] = {}
    for name in ("over", "empty"):
        try:
            _failing_save(path / name)
        except DcpxError as error:
            found[name] = str(error)
    found["after"] = [load(path / "over", make()) for make in LOADERS.values()]
    dist.barrier()
    found["names"] = [sorted(e.name for e in (path / name).iterdir()) for name in ("over", "empty")]
    return found


def _failing_save(path: Path, make_strategy: Any = DcpxSaveStrategy, **more: Any) -> Any:
    def fail(_done: int, _all: int) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            raise OSError("the disk is gone")

    return save(path, 5.0, make_strategy(options=WriteOptions(progress=fail)), **more)


def elsewhere(path: Path) -> Any:
    """One rank saves into another folder."""
    own = path / f"rank-{dist.get_rank()}"
    own.mkdir(parents=True)
    try:
        dist_checkpointing.save(state_of(1.0), str(own), DcpxSaveStrategy())
    except DcpxError as error:
        return type(error).__name__
    return None


def refused(path: Path) -> Any:
    """What the strategies cannot do, or would do wrong, and what the error says."""
    hinted, replicas = DcpxSaveStrategy(), DcpxSaveStrategy()
    hinted.separation_hint = "shards"
    replicas.keep_only_main_replica = False
    calls: dict[str, Callable[[], Any]] = {
        "backend": lambda: DcpxSaveStrategy("zarr"),
        "separation_hint": lambda: save(path / "1", 1.0, hinted),
        "keep_only_main_replica": lambda: save(path / "2", 1.0, replicas),
        "overlap": lambda: save(path / "3", 1.0, DcpxSaveStrategy(options=OVERLAP)),
        "async_strategy": lambda: DcpxSaveStrategy().async_save({}, path, "other"),
        "common.pt": lambda: save(path / "4", 1.0, DcpxSaveStrategy()),
    }
    found = {}
    _megatron_files._WRITES_COMMON = False  # as with versions newer than 0.16
    for name, call in calls.items():
        try:
            call()
        except UnsupportedError as error:
            found[name] = str(error)
    return [found, sorted(str(file) for file in path.glob("*/*.distcp"))]


CASES: dict[str, Callable[[Path], Any]] = {
    "pairs": pairs,
    "plans": plans,
    "shapes": shapes,
    "metadata": metadata,
    "forked": background,
    "persistent": partial(background, persistent=True),
    "nvrx": partial(background, queue=nvrx.AsyncCallsQueue, make_strategy=NvrxSaveStrategy),
    "nvrx-persistent": partial(
        background, persistent=True, queue=nvrx.AsyncCallsQueue, make_strategy=NvrxSaveStrategy
    ),
    "foreground": foreground,
    "elsewhere": elsewhere,
    "refused": refused,
}


def in_child(path: Path, do: Callable[[], Any]) -> str:
    """Returns what `do` returns in a child with a group of its own; "" where that was killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        store = dist.FileStore(str(path.with_suffix(f".{os.getpid()}")), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            told = str(do())
        except Exception as error:  # noqa: BLE001  (the test compares it)
            told = f"{type(error).__name__}: {error}"
        os.write(writer, told.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        told = pipe.read().decode()
    os.waitpid(child, 0)
    return told


def killed_save(path: Path, at: int) -> None:
    """Saves over a checkpoint, and is killed before it renames a file for the `at`-th time."""
    left = at

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event == "os.rename":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), 9)

    sys.addaudithook(count)
    save(path, 2.0, DcpxSaveStrategy())


def kills(root: Path) -> list[Any]:
    """Kills saves over a checkpoint at each of their renames. Returns what each side loads."""
    found = []
    for at in range(1, 100):
        path = root / str(at)
        in_child(path, partial(save, path, 1.0, DcpxSaveStrategy()))
        ended = in_child(path, partial(killed_save, path, at))
        loads = [in_child(path, partial(load, path, make())) for make in LOADERS.values()]
        again = in_child(path, partial(save, path, 3.0, DcpxSaveStrategy()))
        loads.append(in_child(path, partial(load, path, TorchDistLoadShardedStrategy())))
        names = sorted(entry.name for entry in path.iterdir())
        found.append({"ended": ended, "loads": loads, "again": again, "names": names})
        if ended:
            return found
    raise AssertionError("a save never ends")


def main() -> None:
    case, path = sys.argv[1], Path(sys.argv[2])
    if case == "kills":
        path.mkdir()
        print(json.dumps({"found": kills(path)}))
        return
    dist.init_process_group("gloo")
    found = CASES[case](path)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    if dist.get_rank() == 0:
        print(json.dumps({"found": every}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
