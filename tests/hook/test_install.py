"""`install`, `uninstall` and `use` in one process: what comes out of DCP's constructors."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.states import assert_same, blank_like, mixed_state
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import torch_dcpx
from torch_dcpx import (
    DcpxLoadPlanner,
    DcpxReader,
    DcpxSavePlanner,
    DcpxStager,
    DcpxWriter,
    OptionError,
    ReadOptions,
    WriteOptions,
)
from torch_dcpx.hook.settings import VARIABLES
from torch_dcpx.reports import REPLACED

try:
    from torch.distributed.checkpoint.fsspec_filesystem import FsspecReader, FsspecWriter
except ImportError:  # before torch 2.15
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

pytestmark = pytest.mark.usefixtures("hook_off")

OURS = {
    FileSystemWriter: DcpxWriter,
    FileSystemReader: DcpxReader,
    DefaultSavePlanner: DcpxSavePlanner,
    DefaultLoadPlanner: DcpxLoadPlanner,
}
ARGUMENTS: dict[type, tuple[Any, ...]] = {
    FileSystemWriter: ("somewhere", False, True, 3, 1 << 20, True, True),
    FileSystemReader: ("somewhere",),
    DefaultSavePlanner: (True, True, None, True, False),
    DefaultLoadPlanner: (False, False, True),
}


class OwnWriter(FileSystemWriter):
    """Of a framework, made before `install`."""


class OwnPlanner(DefaultSavePlanner):
    """Likewise."""


# ---- What is replaced -------------------------------------------------------------------------


@pytest.mark.parametrize("stock", OURS, ids=lambda cls: cls.__name__)
def test_stock_class_gives_exactly_ours_with_the_callers_arguments_while_the_hook_is_on(
    stock: type,
) -> None:
    plain = stock(*ARGUMENTS[stock])
    assert type(plain) is stock
    torch_dcpx.install()
    torch_dcpx.install()  # a second time is no other
    ours = stock(*ARGUMENTS[stock])
    assert type(ours) is OURS[stock]
    assert isinstance(ours, stock)
    names = [name for name, value in vars(plain).items() if type(value) in (bool, int)]
    assert names or stock is FileSystemReader
    for name in set(names) - {"_enable_plan_caching"}:  # of ours' own
        assert getattr(ours, name) == getattr(plain, name), name
    with pytest.raises(TypeError, match="no_such_argument"):
        stock(no_such_argument=1)
    torch_dcpx.uninstall()
    torch_dcpx.uninstall()
    assert type(stock(*ARGUMENTS[stock])) is stock


def test_subclasses_urls_and_safetensors_stay_stock() -> None:
    torch_dcpx.install()

    class LateWriter(FileSystemWriter):
        """Made after `install`."""

    assert [type(cls("x")) for cls in (OwnWriter, LateWriter, FsspecWriter, FsspecReader)] == [
        OwnWriter, LateWriter, FsspecWriter, FsspecReader,
    ]  # fmt: skip
    assert type(OwnPlanner(True)) is OwnPlanner
    form = SerializationFormat.SAFETENSORS
    assert type(FileSystemWriter("x", serialization_format=form)) is FileSystemWriter
    assert type(FileSystemWriter("x", *ARGUMENTS[FileSystemWriter][1:], None, form)) is (
        FileSystemWriter
    )
    assert type(FileSystemReader("s3://bucket/x")) is FileSystemReader
    assert not REPLACED


def test_subclass_with_a_new_of_another_base_gets_its_arguments() -> None:
    class Keeps:
        def __new__(cls, *args: Any) -> Any:
            made = object.__new__(cls)
            made.given = args
            return made

    class Both(DefaultLoadPlanner, Keeps):  # type: ignore[misc]
        """Its `__new__` comes after DCP's class."""

    for switch in (torch_dcpx.install, torch_dcpx.uninstall):
        switch()
        assert Both(True, False).given == (True, False)


def test_only_the_named_roles_are_replaced(tmp_path: Path) -> None:
    torch_dcpx.install(planners=False, stager=False)
    assert type(FileSystemWriter(tmp_path)) is DcpxWriter
    assert type(DefaultSavePlanner()) is DefaultSavePlanner
    assert type(DefaultStager(StagingOptions(False, False, False, False))) is DefaultStager
    torch_dcpx.install(writer=False, reader=False)  # a later call says it all
    assert type(FileSystemWriter(tmp_path)) is FileSystemWriter
    assert type(DefaultSavePlanner()) is DcpxSavePlanner
    assert dict(REPLACED) == {"writer": 1, "planners": 1}


class Trainer:
    """Of the user: what is copied or pickled with it is too much."""

    def progress(self, _done: int, _total: int) -> None:
        """Of a save."""

    def __reduce_ex__(self, _protocol: Any) -> Any:
        raise AssertionError("the trainer is copied")


def test_objects_of_ours_carry_no_more_than_they_need() -> None:
    """Stock's can be pickled, and are by DCP's saving process, whatever the options are."""
    torch_dcpx.install(
        write_options=WriteOptions(progress=Trainer().progress),
        read_options=ReadOptions(safe_globals=[lambda: None]),
    )
    planners = [DefaultSavePlanner(), DefaultLoadPlanner(), DefaultStager()]
    for again in (pickle.loads(pickle.dumps(planners)), copy.deepcopy(planners)):
        assert [type(each) for each in again] == [type(each) for each in planners]
    for each in planners:
        own = str(vars(each)).lower()
        assert "settings" not in own and "options" not in own.replace("stagingoptions", ""), own
    writer, reader = copy.deepcopy((FileSystemWriter("x"), FileSystemReader("x")))
    assert writer.options.progress.__self__ is not None and type(reader) is DcpxReader


def test_objects_of_stock_that_were_pickled_before_work_on(tmp_path: Path) -> None:
    data = pickle.dumps((FileSystemWriter(tmp_path), DefaultSavePlanner(), DefaultLoadPlanner()))
    state = mixed_state()
    torch_dcpx.install()
    writer, save_planner, load_planner = pickle.loads(data)
    dcp.save(state, storage_writer=writer, planner=save_planner, no_dist=True)
    target = blank_like(state)
    dcp.load(target, checkpoint_id=tmp_path, planner=load_planner, no_dist=True)
    assert_same(state, target)


# ---- Options and arguments that say two things --------------------------------------------------


@pytest.mark.parametrize(
    ("durability", "sync_files", "options", "expected"),
    [
        ("caller", None, WriteOptions(), "full"),
        ("caller", False, WriteOptions(), "none"),
        ("caller", True, WriteOptions(durability="none"), "full"),
        ("caller", None, WriteOptions(durability="none"), "none"),
        ("full", False, WriteOptions(), "full"),
    ],
)
def test_durability_is_the_callers_or_full(
    durability: Any, sync_files: bool | None, options: WriteOptions, expected: str
) -> None:
    torch_dcpx.install(durability=durability, write_options=options)
    given = {} if sync_files is None else {"sync_files": sync_files}
    writer: Any = FileSystemWriter("x", **given)
    assert writer.options.durability == expected
    assert writer.sync_files is (expected == "full")


def test_options_of_install_count_where_callers_say_something_else() -> None:
    torch_dcpx.install(write_options=WriteOptions(workers=2, files_per_rank=3))
    writer: Any = FileSystemWriter("x", single_file_per_rank=False, thread_count=16)
    assert (writer.options.workers, writer.thread_count) == (2, 2)
    assert (writer.options.files_per_rank, writer.single_file_per_rank) == (3, True)


def test_thread_count_of_a_caller_is_kept_within_the_memory() -> None:
    torch_dcpx.install()
    writer: Any = FileSystemWriter("x", thread_count=16)
    assert writer.options.workers == 16
    torch_dcpx.install(write_options=WriteOptions(host_memory_bytes=8 << 20))
    writer = FileSystemWriter("x", thread_count=16)
    assert (writer.options.workers, writer.options.host_memory_bytes) == (4, 8 << 20)


def test_readers_get_the_options_and_the_safe_globals() -> None:
    options = ReadOptions(workers=3, safe_globals=[Path])
    torch_dcpx.install(read_options=options, safe_globals=["pkg.module.Name"])
    reader: Any = FileSystemReader("x")
    assert reader.options == ReadOptions(workers=3, safe_globals=[Path, "pkg.module.Name"])
    torch_dcpx.install(trusted=True)
    reader = FileSystemReader("x")
    assert reader.options.trusted is True


def test_contradictions_and_nothing_to_replace_are_refused() -> None:
    with pytest.raises(OptionError, match=r"contradicts write_options\.durability='none'"):
        torch_dcpx.install(durability="full", write_options=WriteOptions(durability="none"))
    with pytest.raises(OptionError, match="nothing is left to replace"):
        torch_dcpx.install(writer=False, reader=False, planners=False, stager=False)
    assert type(FileSystemWriter("x")) is FileSystemWriter
    assert not any(name in os.environ for name in VARIABLES)


def test_uninstall_leaves_variables_of_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCPX_SAFE_GLOBALS", "their.own.Name")
    monkeypatch.setenv("DCPX_INSTALL", "1")
    torch_dcpx.install(safe_globals=["a.module.Other"])
    assert os.environ["DCPX_SAFE_GLOBALS"] == "their.own.Name,a.module.Other"
    torch_dcpx.uninstall()
    assert os.environ["DCPX_SAFE_GLOBALS"] == "their.own.Name"
    assert "DCPX_INSTALL" not in os.environ  # of a child's hook


# ---- DCP's calls --------------------------------------------------------------------------------


def test_save_and_load_by_path_alone_go_through_ours(tmp_path: Path) -> None:
    state = mixed_state()
    torch_dcpx.install()
    metadata: Any = dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    target = blank_like(state)
    dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    assert_same(state, target)
    counts = {"planners": 2, "reader": 1, "writer": 1}
    assert dict(REPLACED) == counts
    assert metadata.dcpx_report.replaced == {"planners": 1, "writer": 1}
    torch_dcpx.uninstall()
    target = blank_like(state)
    dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    assert_same(state, target)
    assert dict(REPLACED) == counts


def test_format_utils_convert_both_ways(tmp_path: Path) -> None:
    state = {"w": torch.arange(12.0).view(3, 4), "epoch": 7}
    torch_dcpx.install()
    torch.save(state, tmp_path / "a.pt")
    torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "dcp")
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "b.pt")
    assert_same(state, torch.load(tmp_path / "b.pt", weights_only=True))
    assert REPLACED["writer"] == REPLACED["reader"] == 1


def test_default_stager_works_with_all_its_options() -> None:
    torch_dcpx.install()
    flags = itertools.product((False, True), repeat=4)
    for options in [None, *(StagingOptions(*each) for each in flags)]:
        stager = DefaultStager() if options is None else DefaultStager(config=options)
        assert isinstance(stager, DcpxStager)
        assert isinstance(stager, DefaultStager)
        weights = torch.ones(1000)
        staged: Any = stager.stage({"w": weights})
        is_async = options is None or options.use_async_staging
        stager.synchronize_staging()
        assert hasattr(staged, "result") is is_async, options
        weights.zero_()
        found = staged.result() if is_async else staged
        assert found["w"].sum() == 1000, options
        stager.close()
