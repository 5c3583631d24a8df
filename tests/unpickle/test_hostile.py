"""Checkpoints made to attack the reader: nothing of them is executed, nothing outside is opened.

Every attack makes a canary directory. `trusted=True` runs the same files and must make it: that is
how each test proves that it could fail.
"""

from __future__ import annotations

import builtins
import dataclasses
import io
import os
import pickle
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.rows import check_rows
from support.saves import load, raises_one, save
from support.states import assert_same
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from torch_dcpx import CorruptionError, ReadOptions, ShortReadError, UnsafePickleError
from torch_dcpx.metadata.file import decode_metadata, encode_metadata
from torch_dcpx.storage.names import FileEntry

STATE = {"weight": torch.arange(20_000), "value": "harmless"}


@dataclasses.dataclass
class Config:
    """A user's own class in a byte item."""

    width: int
    name: str


class Attack:
    """Pickles to a call of `function`; unpickling it makes the call."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def attacks(canary: Path) -> dict[str, tuple[Any, str]]:
    """Returns name -> (object whose unpickling makes the canary, global that must be named)."""
    code = f"__import__('os').mkdir({str(canary)!r})"
    return {
        "mkdir": (Attack(os.mkdir, str(canary)), f"{os.mkdir.__module__}.mkdir"),
        "system": (Attack(os.system, f"mkdir '{canary}'"), f"{os.system.__module__}.system"),
        "exec": (Attack(builtins.exec, code), "builtins.exec"),
        "resolve_name": (  # lazy: it shows what would be asked for, and makes no canary
            Attack(map, Attack(pkgutil.resolve_name, "os:mkdir"), [str(canary)]),
            "builtins.map",
        ),
    }


def rewrite_metadata(directory: Path, change: Callable[[Metadata], None]) -> None:
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def plant_byte_item(directory: Path, fqn: str, item: Any) -> None:
    """Replaces a byte item of a stock checkpoint, at the end of its file, with its length."""
    data = io.BytesIO()
    torch.save(item, data)
    index = MetadataIndex(fqn)

    def change(metadata: Metadata) -> None:
        info = metadata.storage_data[index]
        path = directory / info.relative_path
        moved = dataclasses.replace(info, offset=path.stat().st_size, length=len(data.getvalue()))
        path.write_bytes(path.read_bytes() + data.getvalue())
        metadata.storage_data[index] = moved

    rewrite_metadata(directory, change)


# ---- Pickles ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(attacks(Path("x"))))
def test_hostile_metadata_is_refused_by_the_name_of_what_it_would_call_and_runs_where_trusted(
    tmp_path: Path, name: str
) -> None:
    canary, ckpt = tmp_path / "canary", tmp_path / "ckpt"
    save(STATE, ckpt)
    attack, global_name = attacks(canary)[name]
    (ckpt / ".metadata").write_bytes(pickle.dumps(attack))
    with raises_one(UnsafePickleError) as raised:
        load(STATE, ckpt)
    assert raised.error.global_name == global_name
    assert global_name in str(raised.error)
    assert raised.error.path == str(ckpt / ".metadata")
    assert not canary.exists()
    with pytest.raises(CheckpointException):
        load(STATE, ckpt, options=ReadOptions(trusted=True))
    assert canary.is_dir() is (name != "resolve_name")


@pytest.mark.parametrize("name", list(attacks(Path("x"))))
def test_hostile_byte_item_is_refused_by_name_and_runs_where_trusted_as_in_stock(
    tmp_path: Path, name: str
) -> None:
    canary, ckpt = tmp_path / "canary", tmp_path / "ckpt"
    save(STATE, ckpt, "stock")
    attack, global_name = attacks(canary)[name]
    plant_byte_item(ckpt, "value", attack)
    with raises_one(UnsafePickleError) as raised:
        load(STATE, ckpt)
    # torch.save writes protocol 2, in which Python gives the names of Python 2.
    assert raised.error.global_name == global_name.replace("builtins", "__builtin__").replace(
        "__builtin__.map", "itertools.imap"
    )
    assert (raised.error.fqn, raised.error.path) == ("value", str(ckpt / "__0_0.distcp"))
    assert "weight" in raised.error.touched
    assert not canary.exists()
    if name != "resolve_name":
        load(STATE, ckpt, options=ReadOptions(trusted=True))
        assert canary.is_dir()


def test_byte_item_of_our_own_checkpoint_is_decoded_the_same_way(tmp_path: Path) -> None:
    """Checksums say who damaged a file, never who wrote it."""
    canary, ckpt = tmp_path / "canary", tmp_path / "ckpt"
    save({"value": Attack(os.mkdir, str(canary))}, ckpt)
    with raises_one(UnsafePickleError) as raised:
        load({"value": None}, ckpt)
    assert raised.error.global_name == f"{os.mkdir.__module__}.mkdir"
    assert not canary.exists()


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_users_class_loads_with_safe_globals_and_only_with_it(tmp_path: Path, writer: str) -> None:
    state = {"config": Config(3, "x"), "weight": torch.arange(9)}
    save(state, tmp_path, writer)
    with raises_one(UnsafePickleError) as raised:
        load(state, tmp_path)
    assert raised.error.global_name == f"{Config.__module__}.Config"
    assert "safe_globals" in str(raised.error)
    assert_same(state, load(state, tmp_path, options=ReadOptions(safe_globals=(Config,))))


# ---- Names --------------------------------------------------------------------------------------

OUTSIDE = [
    "../outside/__0_0.distcp",
    "sub/../../outside/__0_0.distcp",
    "./__0_0.distcp",
    "sub//__0_0.distcp",
    "__0_0.distcp/",
    "..",
    "",
    "/etc/passwd",
    "__0_0.distcp\0.txt",
    "x" * 5000,
]


def redirect(directory: Path, relative_path: str) -> None:
    def change(metadata: Metadata) -> None:
        for index, info in metadata.storage_data.items():
            metadata.storage_data[index] = dataclasses.replace(info, relative_path=relative_path)

    rewrite_metadata(directory, change)


def redirect_ours(directory: Path, relative_path: str) -> None:
    """The same in the columns, with the right size, id and checksum of the file it points to."""
    path = directory / ".metadata"
    found = decode_metadata(path.read_bytes(), str(path))
    entries = [FileEntry(relative_path, *entry[1:]) for entry in (found.files or {}).values()]
    for index, info in found.metadata.storage_data.items():
        changed = dataclasses.replace(info, relative_path=relative_path)
        found.metadata.storage_data[index] = changed
    path.write_bytes(encode_metadata(found.metadata, entries, "save"))


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A valid data file next to the checkpoint, which the checkpoint may not reach."""
    save(STATE, tmp_path / "outside", "stock")
    (tmp_path / "ckpt" / "sub").mkdir(parents=True)
    return tmp_path / "outside"


@pytest.mark.parametrize("format_of", ["ours", "stock"])
def test_name_that_leaves_the_directory_is_refused(
    tmp_path: Path, outside: Path, format_of: str
) -> None:
    ckpt = tmp_path / "ckpt"
    save(STATE, ckpt, format_of)
    whole = (ckpt / ".metadata").read_bytes()

    def check(name: str) -> None:
        (ckpt / ".metadata").write_bytes(whole)
        (redirect if format_of == "stock" else redirect_ours)(ckpt, name)
        with raises_one(CorruptionError) as raised:
            load(STATE, ckpt)
        path = raised.error.path or ""
        assert path.endswith(name) or path == str(ckpt / ".metadata") or "\ud800" in name

    names = OUTSIDE + (["__0_0\ud800.distcp"] if format_of == "stock" else [])
    check_rows({ascii(name[:30]): name for name in names}, check)


def test_name_in_a_folder_of_the_checkpoint_is_opened(tmp_path: Path, outside: Path) -> None:
    ckpt = tmp_path / "ckpt"
    save(STATE, ckpt, "stock")
    (ckpt / "__0_0.distcp").rename(ckpt / "sub" / "__0_0.distcp")
    redirect(ckpt, "sub/__0_0.distcp")
    assert_same(STATE, load(STATE, ckpt))


@pytest.mark.parametrize("link", ["file", "folder"])
def test_link_that_leads_outside_is_refused(tmp_path: Path, outside: Path, link: str) -> None:
    ckpt = tmp_path / "ckpt"
    save(STATE, ckpt, "stock")
    (ckpt / "__0_0.distcp").unlink()
    name = "__0_0.distcp"
    if link == "file":
        (ckpt / name).symlink_to(outside / name)
    else:
        (ckpt / "linked").symlink_to(outside)
        name = "linked/__0_0.distcp"
        redirect(ckpt, name)
    assert_same(STATE, load(STATE, ckpt, "stock"))
    with raises_one(CorruptionError) as raised:
        load(STATE, ckpt)
    assert raised.error.path == str(ckpt / name)


def test_impossible_place_in_a_file_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    save(STATE, tmp_path, "stock")
    whole = (tmp_path / ".metadata").read_bytes()
    big = 2**62
    for place in ((-1, 10), (0, -1), (0, big), (big, big), (2**63 - 1, 1), (2**64, 1), (1.5, 1),
                  ("0", 1)):  # fmt: skip

        def change(metadata: Metadata, place: tuple[Any, Any] = place) -> None:
            for index, info in metadata.storage_data.items():
                moved = dataclasses.replace(info, offset=place[0], length=place[1])
                metadata.storage_data[index] = moved

        (tmp_path / ".metadata").write_bytes(whole)
        rewrite_metadata(tmp_path, change)
        with raises_one(CorruptionError, ShortReadError):
            load(STATE, tmp_path)
