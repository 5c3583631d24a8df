"""Subclasses of DcpxWriter and DcpxReader: what they override works as with stock, or is refused.

docs/howto/planners.md, "Subclasses", is the table that these tests hold true.
"""

from __future__ import annotations

import itertools
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.machine import seconds
from support.saves import assert_loads, data_files, load, raises_one
from support.states import assert_same, blank_like
from support.subclasses import (
    LabelledReader,
    LabelledWriter,
    NegatingSavePlanner,
    seen,
)
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    SerializationFormat,
    _StorageReaderTransforms,
    _StorageWriterTransforms,
)
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from torch_dcpx import (
    DcpxReader,
    DcpxWriter,
    OptionError,
    ReadOptions,
    UnsupportedError,
    WriteOptions,
    _hooks,
)
from torch_dcpx._hooks import _bypassed

STATE = {"weight": torch.arange(9000.0).view(90, 100), "step": 3}


def save(writer: Any, **kwargs: Any) -> Any:
    return dcp.save(STATE, storage_writer=writer, no_dist=True, **kwargs)


def loaded(reader: Any) -> dict[str, Any]:
    target = blank_like(STATE)
    dcp.load(target, storage_reader=reader, no_dist=True)
    return target


# ---- Refused ------------------------------------------------------------------------------------


def test_private_methods_that_the_engine_bypasses_are_read_from_stock() -> None:
    assert "_write_data" in set(_bypassed(DcpxWriter))
    assert "_slice_file" in set(_bypassed(DcpxReader))
    assert not {"_get_metadata_path", "__init__"} & {*_bypassed(DcpxWriter), *_bypassed(DcpxReader)}


@pytest.mark.parametrize("ours", [DcpxWriter, DcpxReader])
def test_override_that_would_not_be_called_is_refused_by_name(tmp_path: Path, ours: Any) -> None:
    save(DcpxWriter(tmp_path))
    before = data_files(tmp_path)
    for name in _bypassed(ours):
        subclass = type("Mine", (ours,), {name: lambda *_: None})
        with pytest.raises(UnsupportedError, match=f"Mine overrides `{name}`"):
            subclass(tmp_path)
        plugin = ours(tmp_path)
        setattr(plugin, name, lambda *_: None)  # after its construction: at first use
        with raises_one(UnsupportedError) as raised:
            save(plugin) if ours is DcpxWriter else loaded(plugin)
        assert f"overrides `{name}`" in str(raised.error)
    assert data_files(tmp_path) == before
    assert_loads(STATE, tmp_path)


def test_private_method_of_a_newer_torch_is_refused_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subclass = type("Mine", (DcpxReader,), {"_read_data_parallel": lambda *_: None})
    subclass(tmp_path)  # a method of its own
    stock = dcp.FileSystemReader
    monkeypatch.setattr(stock, "_read_data_parallel", lambda *_: None, raising=False)
    monkeypatch.setattr(_hooks, "_bypassed", _bypassed.__wrapped__)  # torch never changes so late
    with pytest.raises(UnsupportedError, match="_read_data_parallel"):
        subclass(tmp_path)


def test_replaced_part_of_the_engine_is_refused_by_name(tmp_path: Path) -> None:
    save(DcpxWriter(tmp_path / "old"))
    parts = {
        "fs": (FileSystem, FileSystem),
        "transforms": (_StorageWriterTransforms, _StorageReaderTransforms),
    }
    for name, bases in parts.items():
        for_writer, for_reader = (type(f"Mine{base.__name__}", (base,), {})() for base in bases)
        writer, reader = DcpxWriter(tmp_path / "new"), DcpxReader(tmp_path / "old")
        setattr(writer, name, for_writer)
        setattr(reader, name, for_reader)
        with raises_one(UnsupportedError) as raised:
            save(writer)
        assert f"`{name}` (" in str(raised.error)
        assert f".{type(for_writer).__name__})" in str(raised.error)
        with raises_one(UnsupportedError) as raised:
            loaded(reader)
        assert f"`{name}` (" in str(raised.error)
        assert f".{type(for_reader).__name__})" in str(raised.error)
    writer = DcpxWriter(tmp_path / "new")
    writer.fs.create_stream = None  # type: ignore[assignment]
    with raises_one(UnsupportedError):
        save(writer)
    assert not (tmp_path / "new").exists()


def test_url_is_refused_wherever_it_comes_in(tmp_path: Path) -> None:
    writer, reader = DcpxWriter(tmp_path), DcpxReader(tmp_path)
    entries: list[Callable[[str], Any]] = [
        DcpxWriter,
        DcpxReader,
        writer.reset,
        reader.reset,
        lambda url: save(writer, checkpoint_id=url),
        lambda url: dcp.load({}, checkpoint_id=url, storage_reader=reader, no_dist=True),
    ]
    for url, entry in itertools.product(("gs://bucket/step-1", "memory://x"), entries):
        with pytest.raises(UnsupportedError, match=url):
            entry(url)
    assert (writer.path, reader.path) == (tmp_path, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_safetensors_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="SAFETENSORS"):
        DcpxWriter(tmp_path, serialization_format=SerializationFormat.SAFETENSORS)
    writer = DcpxWriter(tmp_path)
    writer.serialization_format = SerializationFormat.SAFETENSORS
    with raises_one(UnsupportedError):
        save(writer)
    assert list(tmp_path.iterdir()) == []


def test_sync_files_set_later_is_refused_and_overwrite_is_used(tmp_path: Path) -> None:
    writer = DcpxWriter(tmp_path, sync_files=False)
    writer.sync_files = True
    with raises_one(OptionError) as raised:
        save(writer)
    assert (raised.error.option, raised.error.value) == ("sync_files", True)
    assert list(tmp_path.iterdir()) == []
    writer.sync_files = False
    save(writer)
    writer.overwrite = False
    with raises_one(RuntimeError) as refused:
        save(writer)
    assert str(refused.error) == "Checkpoint already exists and self.overwrite=False."


# ---- The metadata's name ------------------------------------------------------------------------


class Renamed:
    metadata_name = ".metadata"
    path: Any

    def _get_metadata_path(self, rank: int | None = None) -> Path:
        return Path(self.path) / self.metadata_name


class RenamedWriter(Renamed, DcpxWriter):
    pass


class RenamedReader(Renamed, DcpxReader):
    pass


def test_writer_that_names_the_metadata_otherwise_is_refused(tmp_path: Path) -> None:
    writer = RenamedWriter(tmp_path)
    save(writer)  # the override says what stock says
    writer.metadata_name = "index.metadata"
    with raises_one(UnsupportedError) as raised:
        save(writer)
    assert "_get_metadata_path" in str(raised.error)
    assert_loads(STATE, tmp_path)


def test_reader_that_names_the_metadata_otherwise_reads_that(tmp_path: Path) -> None:
    save(DcpxWriter(tmp_path))
    (tmp_path / "meta").mkdir()
    reader = RenamedReader(tmp_path)
    assert_same(STATE, loaded(reader))
    (tmp_path / ".metadata").rename(tmp_path / "meta" / "index")
    reader.metadata_name = "meta/index"
    assert_same(STATE, loaded(reader))
    for outside in ("../index", ".", "/etc/hostname"):
        reader.metadata_name = outside
        with raises_one(UnsupportedError) as raised:
            loaded(reader)
        assert "_get_metadata_path" in str(raised.error)


# ---- DCP's own hooks ----------------------------------------------------------------------------


def with_log(base: type, root: Path) -> tuple[type, list[Any]]:
    """Returns a subclass that logs every public hook, with what stock's attributes say by then."""
    log: list[Any] = []

    def logging(name: str) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            log.append((name, "called", *seen(self, root)))
            result = getattr(super(made, self), name)(*args, **kwargs)
            log.append((name, "done", *seen(self, root)))
            return result

        return call

    hooks = (
        "reset", "set_up_storage_writer", "prepare_local_plan", "prepare_global_plan", "write_data",
        "finish", "storage_meta", "read_metadata", "set_up_storage_reader", "read_data",
    )  # fmt: skip
    made: Any = type("Logged", (base,), {n: logging(n) for n in hooks if hasattr(base, n)})
    return made, log


@pytest.mark.parametrize("use_collectives", [True, False])
def test_hooks_come_in_stocks_order_and_see_stocks_attributes(
    tmp_path: Path, use_collectives: bool
) -> None:
    logs = []
    for writer, reader in ((dcp.FileSystemWriter, dcp.FileSystemReader), (DcpxWriter, DcpxReader)):
        root = tmp_path / writer.__name__
        made, log = with_log(writer, root)
        saved = made(root / "a")
        save(saved, checkpoint_id=root / "b", use_collectives=use_collectives)
        made, read_log = with_log(reader, root)
        assert_same(STATE, loaded(made(root / "b")))
        logs.append([*log, *read_log])
    assert logs[0] == logs[1]


def test_metadata_holds_what_storage_meta_gives_and_the_save_id(tmp_path: Path) -> None:
    writer = LabelledWriter(tmp_path)
    writer.label = "mine"
    save(writer)
    for reader in (DcpxReader(tmp_path), dcp.FileSystemReader(tmp_path)):
        meta = reader.read_metadata().storage_meta
        assert meta is not None
        assert meta.modules == ["mine", str(os.getpid())]
        assert (meta.save_id, meta.load_id) == (writer.save_id, reader.load_id)
        assert str(meta.checkpoint_id) == str(tmp_path)


def test_plan_hooks_may_drop_items_and_name_files(tmp_path: Path) -> None:
    class Mine(DcpxWriter):
        def prepare_global_plan(self, plans: Any) -> Any:
            plans = super().prepare_global_plan(plans)
            for plan in plans:
                plan.storage_data.prefix = "part-"
            return plans

    class Partial(DcpxReader):
        def prepare_local_plan(self, plan: Any) -> Any:
            plan.items = [item for item in plan.items if item.dest_index.fqn == "step"]
            return super().prepare_local_plan(plan)

    writer = Mine(tmp_path)
    for _ in range(2):
        save(writer)
        assert_loads(STATE, tmp_path)
    assert all(name.startswith("part-0.") for name in data_files(tmp_path))
    assert_same({"weight": torch.zeros(90, 100), "step": 3}, loaded(Partial(tmp_path)))


@pytest.mark.parametrize("stock", [True, False])
def test_read_metadata_may_change_or_make_what_is_loaded(tmp_path: Path, stock: bool) -> None:
    save((dcp.FileSystemWriter if stock else DcpxWriter)(tmp_path))

    class Renames(DcpxReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            metadata = super().read_metadata(*args, **kwargs)
            metadata.state_dict_metadata["w"] = metadata.state_dict_metadata.pop("weight")
            places = metadata.storage_data
            for index in list(places):
                if index.fqn == "weight":
                    places[MetadataIndex("w", index.offset, index.index)] = places.pop(index)
            return metadata

    class Makes(DcpxReader):
        def read_metadata(self) -> Any:  # as up to torch 2.8
            return dcp.FileSystemReader(self.path).read_metadata()

    target = {"w": torch.zeros(90, 100), "step": None}
    dcp.load(target, storage_reader=Renames(tmp_path), no_dist=True)
    assert_same({"w": STATE["weight"], "step": 3}, target)
    assert_same(STATE, loaded(Makes(tmp_path)))


def test_changed_path_and_save_id_are_used_from_then_on(tmp_path: Path) -> None:
    writer, reader = DcpxWriter(tmp_path / "a"), DcpxReader(tmp_path / "a")
    writer.path = reader.path = tmp_path / "b"

    class Named(DcpxWriter):
        def reset(self, checkpoint_id: Any = None) -> None:
            super().reset(checkpoint_id)
            self.save_id = "step-7"

    save(writer)
    assert not (tmp_path / "a").exists()
    assert_same(STATE, loaded(reader))
    save(Named(tmp_path), checkpoint_id=tmp_path / "c")
    meta = dcp.FileSystemReader(tmp_path / "c").read_metadata().storage_meta
    assert meta is not None
    assert meta.save_id == "step-7"


# ---- Pickles ------------------------------------------------------------------------------------


def test_plugins_and_options_pickle_between_saves(tmp_path: Path) -> None:
    options = WriteOptions(workers=2, direct_io=False), ReadOptions(workers=2, safe_globals=(Path,))
    writer = LabelledWriter(tmp_path, overwrite=False, options=options[0])
    writer.label = "mine"
    for protocol in (2, pickle.HIGHEST_PROTOCOL):
        assert pickle.loads(pickle.dumps(options, protocol)) == options
        copy = pickle.loads(pickle.dumps(writer, protocol))
        assert vars(copy).keys() == vars(writer).keys()
        assert (copy.options, copy.label, copy.path) == (options[0], "mine", tmp_path)
        assert (copy.save_id, copy.overwrite) == (writer.save_id, False)
    save(writer)
    reader = LabelledReader(tmp_path, options=options[1])
    for copy in (reader, pickle.loads(pickle.dumps(reader))):
        assert_same(STATE, loaded(copy))
    used = pickle.loads(pickle.dumps(reader))  # with the report and metadata of its load
    assert used.last_report == reader.last_report
    assert_same(STATE, loaded(used))


def test_a_process_of_its_own_saves_with_subclasses(tmp_path: Path) -> None:
    """dcp.async_save's process mode: the child gets the writer and planner by pickle."""
    writer = LabelledWriter(tmp_path / "ckpt", options=WriteOptions(workers=2))
    writer.label = "mine"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dcp.async_save(
            STATE,
            storage_writer=writer,
            planner=NegatingSavePlanner(),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        ).result(timeout=seconds(100))
    finally:
        dist.destroy_process_group()
    assert_same({"weight": -STATE["weight"], "step": 3}, load(STATE, tmp_path / "ckpt"))
    meta = DcpxReader(tmp_path / "ckpt").read_metadata().storage_meta
    assert meta is not None
    assert meta.modules[0] == "mine"
    assert meta.modules[1] != str(os.getpid()), "it was written here, not by the child"
