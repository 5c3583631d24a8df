"""Paths of every sort, relative ones under a `chdir`: right, or refused with a typed error."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from forks import Rows, assert_none_bad, in_child, run_alone
from support.machine import seconds
from ways import LOADS, SAVES, is_same, loaded, stock_loaded

import torch_dcpx
from torch_dcpx import DcpxWriter, WriteOptions

STATE = {"w": torch.arange(5000.0), "step": 3, "name": "déjà vu"}


class Named:
    """An `os.PathLike` of its own."""

    def __init__(self, path: str | bytes) -> None:
        self._path = path

    def __fspath__(self) -> Any:
        return self._path


def good_paths(root: Path) -> list[Any]:
    as_bytes = os.fsencode(root)
    return [
        str(root / "text"),
        as_bytes + b"/bytes",
        Named(str(root / "named")),
        Named(as_bytes + b"/named bytes"),
        root / " a b\nc\t'd' \"e\" `f` $g ",
        root / "é日本\u202e😀",
        os.fsdecode(as_bytes + b"/\xff\xfe\x80"),
        as_bytes + b"/\xff\xfe\x81",
        root / ("n" * 250),
        root / ("é" * 127 + "x"),  # 255 bytes
        root / "/".join(["d"] * 400),
        root / "%s%d{}{0}\\n",
        root / "-rf",
        root / "~",
        root / "a:b",
        f"{root}//slashes///",
        f"{root}/x/../dots/.",
    ]


def bad_paths(root: Path) -> list[Any]:
    beyond_path_max = root / "/".join(["d" * 200] * 21)
    return [root / ("n" * 256), beyond_path_max, f"{root}/a\0b", root / "file" / "x", ""]


def bad_good(path: Any, way: str) -> str:
    here = Path(os.fsdecode(path))
    shutil.rmtree(here, ignore_errors=True)

    def body() -> list[str]:
        SAVES[way](STATE, path, None)
        SAVES[way](STATE, path, None)
        wrong = [one for one in LOADS if not is_same(STATE, loaded(one, STATE, path))]
        return [*wrong, *([] if is_same(STATE, stock_loaded(STATE, here)) else ["stock"])]

    ended = in_child(body)
    return ended.unless(ended.said.get("value") == [])


def bad_refusal(act: Callable[[], object]) -> str:
    ended = in_child(act)
    return ended.unless(ended.said.get("is_typed"))


# ---- Relative paths, and a process that goes elsewhere ------------------------------------------


def async_and_away(begin: Callable[[WriteOptions], Any]) -> None:
    """It saves in `first`, and goes to `second` before a byte is written."""
    opened = threading.Event()
    os.chdir("first")
    pending = begin(WriteOptions(progress=lambda *_: opened.wait(seconds(60)) and None))
    os.chdir("../second")
    opened.set()
    pending.result(seconds(60))


def async_with_id_and_away() -> None:
    """DCP's thread hands the id to the writer; it comes when the process is elsewhere already."""
    os.chdir("first")
    moved = threading.Event()

    class Late(DcpxWriter):
        def reset(self, checkpoint_id: Any = None) -> None:
            assert moved.wait(seconds(60))
            super().reset(checkpoint_id)

    pending = dcp_async(Late("other"), checkpoint_id="ckpt")
    os.chdir("../second")
    moved.set()
    pending.result(seconds(60))


def elsewhere_between(save: Callable[[Any], object], make: Callable[..., Any] = DcpxWriter) -> None:
    """The writer is made in `second`: where the save is asked for counts, as with stock."""
    os.chdir("second")
    writer = make("ckpt")
    os.chdir("../first")
    save(writer)


def by_thread() -> None:
    """Another thread saves with what this one has made; the process is elsewhere by then."""
    os.chdir("first")
    writer = DcpxWriter("ckpt")
    os.chdir("../second")
    thread = threading.Thread(target=dcp_save, args=(writer,))
    thread.start()
    thread.join(seconds(60))
    assert not thread.is_alive()


def resaved_elsewhere() -> None:
    """One writer, and each save where the process then is."""
    os.chdir("second")
    writer = DcpxWriter("ckpt")
    dcp_save(writer)
    shutil.rmtree("ckpt")
    os.chdir("../first")
    dcp_save(writer)


def dcp_save(writer: Any) -> None:
    dcp.save(STATE, storage_writer=writer, no_dist=True)


def dcp_async(writer: Any, **kwargs: Any) -> Any:
    return dcp.async_save(STATE, storage_writer=writer, no_dist=True, **kwargs)


def own_async(**kwargs: Any) -> Any:
    return torch_dcpx.async_save(STATE, no_dist=True, **kwargs)


RELATIVE: dict[str, Callable[[], object]] = {
    **{
        f"{way} at the call": lambda way=way: (os.chdir("first"), SAVES[way](STATE, "ckpt", None))
        for way in SAVES
    },
    "async_save, then away": lambda: async_and_away(
        lambda o: own_async(checkpoint_id="ckpt", options=o)
    ),
    "dcp.async_save, then away": lambda: async_and_away(
        lambda o: dcp_async(DcpxWriter("ckpt", options=o))
    ),
    "dcp.async_save with an id, then away": lambda: async_and_away(
        lambda o: dcp_async(DcpxWriter("other", options=o), checkpoint_id="ckpt")
    ),
    "dcp.async_save with an id that comes late": async_with_id_and_away,
    "async_save with a writer, then away": lambda: async_and_away(
        lambda o: own_async(storage_writer=DcpxWriter("ckpt", options=o))
    ),
    "dcp.save, writer made elsewhere": lambda: elsewhere_between(dcp_save),
    "save, writer made elsewhere": lambda: elsewhere_between(
        lambda writer: torch_dcpx.save(STATE, storage_writer=writer, no_dist=True)
    ),
    "dcp.async_save, writer made elsewhere": lambda: elsewhere_between(
        lambda writer: dcp_async(writer).result(seconds(60))
    ),
    "dcp.save by a thread": by_thread,
    "dcp.save again, elsewhere": resaved_elsewhere,
    "stock's dcp.save, writer made elsewhere": lambda: elsewhere_between(
        dcp_save, dcp.FileSystemWriter
    ),
}


def bad_relative(root: Path, name: str) -> str:
    """What is saved lies in `first/ckpt`, and nowhere else is anything."""
    base = root / f"relative {name}"
    for folder in ("first", "second"):
        (base / folder).mkdir(parents=True)

    def body() -> list[str]:
        os.chdir(base)
        RELATIVE[name]()
        os.chdir(base)
        assert all(is_same(STATE, loaded(way, STATE, "first/ckpt")) for way in LOADS)
        return [str(p) for p in (*Path().glob("second/*"), *Path().glob("first/*"))]

    ended = in_child(body)
    return ended.unless(ended.said.get("value") == ["first/ckpt"])


def without_directory(root: Path) -> Rows:
    """The process's directory is gone: a relative path is refused, an absolute one works."""
    gone, rows = root / "gone", Rows()

    def leave() -> None:
        gone.mkdir()
        os.chdir(gone)
        gone.rmdir()

    for way, save in SAVES.items():

        def absolute(save: Any = save, path: Path = root / f"absolute {way}") -> bool:
            leave()
            save(STATE, path, None)
            return is_same(STATE, loaded("load", STATE, path))

        ended = in_child(absolute)
        rows.append((f"{way}, directory gone", ended.unless(ended.said.get("value") is True)))
    acts: dict[str, Callable[[], object]] = {
        **{way: lambda save=save: save(STATE, "ckpt", None) for way, save in SAVES.items()},
        "load": lambda: loaded("load", STATE, "ckpt"),
        "load_tensors": lambda: torch_dcpx.load_tensors("ckpt"),
        "export": lambda: torch_dcpx.export(root / "warm", "exported"),
        "manager": lambda: torch_dcpx.CheckpointManager("root", no_dist=True),
    }
    for name, act in acts.items():
        bad = bad_refusal(lambda act=act: (leave(), act())[1])
        rows.append((f"{name}, relative, directory gone", bad))
    return rows


def rows_of(root: Path) -> Rows:
    for way in ("save", "dcp.save"):
        SAVES[way](STATE, root / "warm", None)
    (root / "file").touch()
    rows = [
        (f"{way} to {os.fspath(path)!r}", bad_good(path, way))
        for path in good_paths(root)
        for way in SAVES
    ]
    for path in bad_paths(root):
        for way, act in {**SAVES, **LOADS}.items():
            # Stock's reader and writer mean "." by an empty path, and so do ours.
            if path != "" or not way.startswith("dcp."):
                bad = bad_refusal(lambda act=act, path=path: act(dict(STATE), path, None))
                rows.append((f"{way} refuses {path!r}", bad))
    rows += [(name, bad_relative(root, name)) for name in RELATIVE]
    return rows + without_directory(root)


@pytest.mark.slow
def test_every_sort_of_path_serves_or_is_refused_by_a_typed_error(tmp_path: Path) -> None:
    assert_none_bad(run_alone(rows_of, tmp_path))
