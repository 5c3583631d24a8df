"""DCP's calls with all their arguments, on two ranks that DCPX_INSTALL has hooked.

Each case saves and loads through the hook, and says which roles must have been ours. What the cases
leave is in LEFT: at the end the hook is switched off, and stock reads all of it.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.rank_fixture import StartRanks
from support.states import assert_same, blank_like, mixed_state
from torch.distributed.checkpoint._checkpointer import _Checkpointer
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter as HFWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import torch_dcpx
from torch_dcpx.hook.autoload import autoload
from torch_dcpx.reports import REPLACED

FLAGS = (False, True)
LEFT: list[tuple[Path, dict[str, Any], dict[str, Any]]] = []  # (path, state, arguments of a load)


def whole_state(seed: int = 0) -> dict[str, Any]:
    """Returns a state with a tensor that the ranks share out, and values that all of them have."""
    state = mixed_state(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(seed)
    full = torch.randn(13, 40, generator=generator)
    return {**state, "sharded": distribute_tensor(full, mesh, [Shard(0)])}


def local(state: Any) -> Any:
    """Returns a state with this rank's part of each DTensor."""
    if isinstance(state, DTensor):
        return state.to_local()
    if isinstance(state, dict):
        return {key: local(value) for key, value in state.items()}
    return [local(value) for value in state] if isinstance(state, list) else state


def blank(state: Any) -> Any:
    """Returns the same structure to load into."""
    if isinstance(state, DTensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    return blank_like(state)


def assert_holds(path: Path, state: dict[str, Any], **arguments: Any) -> None:
    """Asserts that `dcp.load` finds the state."""
    target = blank(state)
    dcp.load(target, checkpoint_id=path, **arguments)
    assert_same(local(state), local(target), str(path))


def leave(path: Path, state: dict[str, Any], **arguments: Any) -> None:
    """Asserts the same, through the hook; at the end stock will be asked."""
    with replaced("reader"):
        assert_holds(path, state, **arguments)
    LEFT.append((path, state, arguments))


@contextlib.contextmanager
def replaced(*roles: str) -> Iterator[None]:
    """Asserts that objects of these roles were made, and were ours."""
    before = REPLACED.copy()
    yield
    more = REPLACED - before
    assert set(roles) <= more.keys(), (roles, more)


def own(root: Path) -> Path:
    """Returns a directory of this rank's own."""
    return root / f"rank{dist.get_rank()}"


# ---- save and load ------------------------------------------------------------------------------


def save_takes_all_its_arguments(root: Path) -> None:
    state, group = whole_state(), dist.group.WORLD
    with replaced("writer", "planners"):
        dcp.save(state, checkpoint_id=str(root / "text"))
    leave(root / "text", state, storage_reader=None, planner=None, process_group=None)
    with replaced("writer", "planners"):
        dcp.save(
            state, checkpoint_id=root / "all", storage_writer=FileSystemWriter(root / "elsewhere"),
            planner=DefaultSavePlanner(), process_group=group, no_dist=False, use_collectives=True,
        )  # fmt: skip
    assert not (root / "elsewhere").exists()
    reader = FileSystemReader(root / "elsewhere")
    leave(root / "all", state, process_group=group, no_dist=False)
    assert_holds(root / "all", state, storage_reader=reader, planner=DefaultLoadPlanner())
    with replaced("writer", "planners"):
        dcp.save(state, storage_writer=FileSystemWriter(root / "writer"))
    leave(root / "writer", state)
    plain = mixed_state(1 + dist.get_rank())
    with replaced("writer", "planners"):
        dcp.save(plain, checkpoint_id=own(root), no_dist=True)
    leave(own(root), plain, no_dist=True)


def old_names_of_save_and_load_work(root: Path) -> None:
    state, path = whole_state(), root / "old"
    with replaced("writer", "planners"):
        dcp.save_state_dict(state, FileSystemWriter(path), None, 0, False, DefaultSavePlanner())
    target = blank(state)
    with replaced("reader", "planners"):
        dcp.load_state_dict(target, FileSystemReader(path), None, 0, False, DefaultLoadPlanner())
    assert_same(local(state), local(target))
    keeper = _Checkpointer(FileSystemWriter(root / "keeper"), FileSystemReader(root / "keeper"))
    keeper.async_save(state).result()  # its `save` gives an argument that stock's does not take
    keeper.load(target := blank(state))
    assert_same(local(state), local(target))
    leave(root / "keeper", state)


def ranks_save_by_themselves_without_collectives(root: Path) -> None:
    state = {**mixed_state(dist.get_rank()), "whose": dist.get_rank()}
    for name, save in (("sync", dcp.save), ("async", dcp.async_save)):
        with replaced("writer", "planners"):
            done: Any = save(state, checkpoint_id=root / name, use_collectives=False)
            if name == "async":
                done.result()
        assert (root / name / f"__{dist.get_rank()}.metadata").exists()
        assert not (root / name / ".metadata").exists()
        leave(root / name, state)


# ---- async_save ---------------------------------------------------------------------------------

STAGERS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "blocking": lambda: BlockingAsyncStager(type_check=False),  # a cached one needs a device
    "default": DefaultStager,
    **{
        f"default{flags}": lambda flags=flags: DefaultStager(StagingOptions(*flags))
        for flags in itertools.product(FLAGS, repeat=4)
    },
}


def save_in_background(state: dict[str, Any], kind: Any, stager: Any, **arguments: Any) -> Any:
    """Saves, and overwrites the tensors as soon as they are staged; returns DCP's metadata."""
    given: Any = dcp.async_save(
        state, async_checkpointer_type=kind, async_stager=stager, **arguments
    )
    if isinstance(given, AsyncSaveResponse):
        given.staging_completion.result()
        given = given.upload_completion
    for tensor in (state["large"], state["sharded"].to_local()):
        tensor.zero_()
    return given.result()


def background_saves(root: Path, kind: AsyncCheckpointerType) -> None:
    is_here = kind is AsyncCheckpointerType.THREAD
    at_save = ("writer", "planners") if is_here else ()
    for name, make in STAGERS.items():
        own_stager = () if name.startswith("blocking") else ("stager",)
        with replaced(*own_stager, *at_save):
            stager = make()
            metadata = save_in_background(whole_state(), kind, stager, checkpoint_id=root / name)
        assert {"writer", "planners"} <= reported(metadata).keys()  # in the process that saved
        if stager is not None:
            stager.close()
        leave(root / name, whole_state())
    for at, (has_writer, has_planner) in enumerate(itertools.product(FLAGS, repeat=2)):
        arguments = {
            "checkpoint_id": root / str(at),
            "storage_writer": FileSystemWriter("elsewhere") if has_writer else None,
            "planner": DefaultSavePlanner() if has_planner else None,
            "process_group": dist.group.WORLD,
            "no_dist": False,
            "use_collectives": True,
        }
        save_in_background(whole_state(), kind, None, **arguments)
        leave(root / str(at), whole_state())
    state = whole_state()
    del state["sharded"]
    dcp.async_save(
        state, checkpoint_id=own(root), no_dist=True, async_checkpointer_type=kind
    ).result()
    leave(own(root), state, no_dist=True)


def reported(metadata: Any) -> dict[str, int]:
    """Returns what had been replaced in the process that saved; the coordinator's says it."""
    if dist.get_rank():
        return dict.fromkeys(("writer", "planners"), 1)
    counts: dict[str, int] = metadata.dcpx_report.replaced
    return counts


def async_save_takes_all_its_arguments_in_a_thread(root: Path) -> None:
    background_saves(root / "thread", AsyncCheckpointerType.THREAD)


def async_save_takes_all_its_arguments_in_a_process(root: Path) -> None:
    background_saves(root / "process", AsyncCheckpointerType.PROCESS)


# ---- States that are no dicts of tensors --------------------------------------------------------


class AppState(Stateful):
    """Of PyTorch's tutorial: a model and an optimizer as one Stateful."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(24, 24) for _ in range(3)))
        for layer in (*self.model, self.model):
            fully_shard(layer)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.model(torch.randn(4, 24)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optimizer,
            model_state_dict=state_dict["model"], optim_state_dict=state_dict["optim"],
        )  # fmt: skip


def stateful_objects_are_saved_and_loaded(root: Path) -> None:
    saved = AppState(0)
    with replaced("writer", "planners"):
        dcp.save({"app": saved}, checkpoint_id=root / "app")
    with replaced("writer", "planners", "stager"):
        dcp.async_save({"app": saved}, checkpoint_id=root / "async").result()
    for name in ("app", "async"):
        other = AppState(1)
        with replaced("reader", "planners"):
            dcp.load({"app": other}, checkpoint_id=root / name)
        assert_same(local(saved.state_dict()), local(other.state_dict()))
        LEFT.append((root / name, {"app": saved.state_dict()}, {}))


# ---- Other ways into DCP ------------------------------------------------------------------------


def storage_that_is_not_ours_works_with_our_planners(root: Path) -> None:
    state = whole_state()
    with replaced("planners"):
        dcp.save(state, checkpoint_id=f"file://{root}/url")
    with replaced("planners"):
        assert_holds(f"file://{root}/url", state)  # type: ignore[arg-type]
    leave(root / "url", state)  # files of stock, through ours
    tensors = {name: state[name] for name in ("sharded", "large", "bf16")}
    with replaced("planners"):
        dcp.save(tensors, storage_writer=HFWriter(str(root / "hf"), save_distributed=True))
    target = blank(tensors)
    with replaced("planners"):
        dcp.load(target, storage_reader=HuggingFaceStorageReader(str(root / "hf")))
    assert_same(local(tensors), local(target))


# ---- Without the hook ---------------------------------------------------------------------------


def stock_reads_all_that_was_left(root: Path) -> None:
    torch_dcpx.uninstall()
    before = REPLACED.copy()
    assert len(LEFT) > 20
    for path, state, arguments in LEFT:
        made = {name: give() if callable(give) else give for name, give in arguments.items()}
        assert_holds(path, state, **made)
        if dist.get_rank() == 0 and path.name != "url":
            assert torch_dcpx.verify(path).ok  # and so has our footers
    assert before == REPLACED
    assert type(FileSystemReader(path)) is FileSystemReader


def hook_reads_what_stock_writes(root: Path) -> None:
    state = whole_state(5)
    flat = {"flatten_state_dict": False, "flatten_sharded_tensors": False}
    dcp.save(state, checkpoint_id=root / "stock")
    dcp.save(
        state, storage_writer=FileSystemWriter(root / "files", single_file_per_rank=False),
        planner=DefaultSavePlanner(**flat),
    )  # fmt: skip
    by_rank = mixed_state(dist.get_rank())
    dcp.save(by_rank, checkpoint_id=root / "ranks", use_collectives=False)
    torch_dcpx.install()
    with replaced("reader", "planners"):
        assert_holds(root / "stock", state)
        assert_holds(root / "files", state, planner=DefaultLoadPlanner(**flat))
        assert_holds(root / "ranks", by_rank)


def all_cases(root: Path) -> None:
    warnings.simplefilter("ignore")
    autoload()
    for case in (
        save_takes_all_its_arguments,
        old_names_of_save_and_load_work,
        ranks_save_by_themselves_without_collectives,
        async_save_takes_all_its_arguments_in_a_thread,
        async_save_takes_all_its_arguments_in_a_process,
        stateful_objects_are_saved_and_loaded,
        storage_that_is_not_ours_works_with_our_planners,
        stock_reads_all_that_was_left,
        hook_reads_what_stock_writes,
    ):
        case(root / case.__name__)
        dist.barrier()


@pytest.mark.slow  # a minute
def test_all_calls_work_through_the_hook_and_stock_reads_the_result(
    ranks: StartRanks,
    hook_off: None,
    entry_point: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DCPX_INSTALL", "1")
    ranks(2, anew=True)(all_cases, tmp_path)
