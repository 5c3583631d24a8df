"""Saves and loads at every sort of path: the driver of test_paths.py. Prints a table.

python paths_worker.py DIRECTORY
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from forks import Table, alone, in_child
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


def good_paths(root: Path) -> dict[str, Any]:
    as_bytes = os.fsencode(root)
    return {
        "str": str(root / "text"),
        "bytes": as_bytes + b"/bytes",
        "PathLike": Named(str(root / "named")),
        "PathLike of bytes": Named(as_bytes + b"/named bytes"),
        "spaces, newlines, quotes": root / " a b\nc\t'd' \"e\" `f` $g ",
        "non-ASCII": root / "é日本\u202e😀",
        "non-UTF-8": os.fsdecode(as_bytes + b"/\xff\xfe\x80"),
        "non-UTF-8 as bytes": as_bytes + b"/\xff\xfe\x81",
        "250 bytes": root / ("n" * 250),
        "255 bytes": root / ("é" * 127 + "x"),
        "deep": root / "/".join(["d"] * 400),
        "formats": root / "%s%d{}{0}\\n",
        "a dash": root / "-rf",
        "a tilde": root / "~",
        "a colon": root / "a:b",
        "slashes": f"{root}//slashes///",
        "dots": f"{root}/x/../dots/.",
    }


def bad_paths(root: Path) -> dict[str, Any]:
    return {
        "256 bytes": root / ("n" * 256),
        "beyond PATH_MAX": root / "/".join(["d" * 200] * 21),
        "a NUL": f"{root}/a\0b",
        "below a file": root / "file" / "x",
        "empty": "",
    }


def try_good(table: Table, name: str, path: Any) -> None:
    here = Path(os.fsdecode(path))
    for way, save in SAVES.items():
        shutil.rmtree(here, ignore_errors=True)

        def body(save: Any = save) -> str:
            save(STATE, path, None)
            save(STATE, path, None)
            wrong = [one for one in LOADS if not is_same(STATE, loaded(one, STATE, path))]
            wrong += [] if is_same(STATE, stock_loaded(STATE, here)) else ["stock"]
            return ", ".join(wrong)

        ended = in_child(body)
        table.add(name, way, None if ended.said.get("value") == "" else str(ended))


def try_bad(table: Table, name: str, path: Any) -> None:
    ways: dict[str, Any] = {**SAVES, **LOADS}
    for way, act in ways.items():
        if name == "empty" and way.startswith("dcp."):
            continue  # stock's reader and writer mean "." by it, and so do ours
        ended = in_child(lambda act=act: act(dict(STATE), path, None))
        is_well = ended.said.get("is_typed")
        table.add(f"refused: {name}", way, None if is_well else str(ended))


# ---- Relative paths, and a process that goes elsewhere ------------------------------------------


def gate() -> tuple[threading.Event, WriteOptions]:
    """A save with these options writes when the event is set."""
    opened = threading.Event()

    def hold(_done: int, _total: int) -> None:
        assert opened.wait(seconds(60))

    return opened, WriteOptions(progress=hold)


def at_the_call(save: Callable[[], object]) -> None:
    """The process has gone to `first` and saves there."""
    os.chdir("first")
    save()


def async_and_away(begin: Callable[[WriteOptions], Any]) -> None:
    """It saves in `first`, and goes to `second` before a byte is written."""
    os.chdir("first")
    opened, options = gate()
    pending = begin(options)
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

    pending: Any = dcp.async_save(
        STATE, checkpoint_id="ckpt", storage_writer=Late("other"), no_dist=True
    )
    os.chdir("../second")
    moved.set()
    pending.result(seconds(60))


def elsewhere_between(make: Callable[[], Any], save: Callable[[Any], object]) -> None:
    """The writer is made in `second`: where the save is asked for counts, as with stock."""
    os.chdir("second")
    writer = make()
    os.chdir("../first")
    save(writer)


def in_a_thread(target: Callable[[], object]) -> None:
    """Another thread saves with what this one has made; the process is elsewhere by then."""
    thread = threading.Thread(target=target)
    thread.start()
    thread.join(seconds(60))
    assert not thread.is_alive()


def made_then_away_and_saved_by_a_thread() -> None:
    os.chdir("first")
    writer = DcpxWriter("ckpt")
    os.chdir("../second")
    in_a_thread(lambda: dcp.save(STATE, storage_writer=writer, no_dist=True))


def resaved_elsewhere() -> None:
    """One writer, and each save where the process then is."""
    os.chdir("second")
    writer = DcpxWriter("ckpt")
    dcp.save(STATE, storage_writer=writer, no_dist=True)
    shutil.rmtree("ckpt")
    os.chdir("../first")
    dcp.save(STATE, storage_writer=writer, no_dist=True)


def relative() -> dict[str, Callable[[], object]]:
    def dcpx(way: str) -> Callable[[], object]:
        return lambda: at_the_call(lambda: SAVES[way](STATE, "ckpt", None))

    def dcp_async(writer: Any, **kwargs: Any) -> Any:
        return dcp.async_save(STATE, storage_writer=writer, no_dist=True, **kwargs)

    return {
        **{f"{way} at the call": dcpx(way) for way in SAVES},
        "async_save, then away": lambda: async_and_away(
            lambda o: torch_dcpx.async_save(STATE, "ckpt", no_dist=True, options=o)
        ),
        "dcp.async_save, then away": lambda: async_and_away(
            lambda o: dcp_async(DcpxWriter("ckpt", options=o))
        ),
        "dcp.async_save with an id, then away": lambda: async_and_away(
            lambda o: dcp_async(DcpxWriter("other", options=o), checkpoint_id="ckpt")
        ),
        "dcp.async_save with an id that comes late": async_with_id_and_away,
        "async_save with a writer, then away": lambda: async_and_away(
            lambda o: torch_dcpx.async_save(
                STATE, storage_writer=DcpxWriter("ckpt", options=o), no_dist=True
            )
        ),
        "dcp.save, writer made elsewhere": lambda: elsewhere_between(
            lambda: DcpxWriter("ckpt"),
            lambda writer: dcp.save(STATE, storage_writer=writer, no_dist=True),
        ),
        "save, writer made elsewhere": lambda: elsewhere_between(
            lambda: DcpxWriter("ckpt"),
            lambda writer: torch_dcpx.save(STATE, storage_writer=writer, no_dist=True),
        ),
        "dcp.async_save, writer made elsewhere": lambda: elsewhere_between(
            lambda: DcpxWriter("ckpt"), lambda writer: dcp_async(writer).result(seconds(60))
        ),
        "dcp.save by a thread": made_then_away_and_saved_by_a_thread,
        "dcp.save again, elsewhere": resaved_elsewhere,
        "stock's dcp.save, writer made elsewhere": lambda: elsewhere_between(
            lambda: dcp.FileSystemWriter("ckpt"),
            lambda writer: dcp.save(STATE, storage_writer=writer, no_dist=True),
        ),
    }


def try_relative(table: Table, root: Path, name: str, act: Callable[[], object]) -> None:
    """What is saved lies in `first/ckpt`, and nowhere else is anything."""
    base = root / f"relative {name}"
    for folder in ("first", "second"):
        (base / folder).mkdir(parents=True)

    def body() -> list[str]:
        os.chdir(base)
        act()
        os.chdir(base)
        assert is_same(STATE, loaded("load", STATE, "first/ckpt"))
        assert is_same(STATE, loaded("dcp.load", STATE, "first/ckpt"))
        return [str(p) for p in (*Path().glob("second/*"), *Path().glob("first/*"))]

    ended = in_child(body)
    is_well = ended.said.get("value") == ["first/ckpt"]
    table.add("relative, with a chdir", name, None if is_well else str(ended))


def try_removed(table: Table, root: Path) -> None:
    """The process's directory is gone: a relative path is refused, an absolute one works."""
    for way, save in SAVES.items():
        gone, path = root / "gone", root / f"absolute {way}"

        def body(save: Any = save, gone: Path = gone, path: Path = path) -> bool:
            gone.mkdir()
            os.chdir(gone)
            gone.rmdir()
            save(STATE, path, None)
            return is_same(STATE, loaded("load", STATE, path))

        ended = in_child(body)
        is_well = ended.said.get("value") is True
        table.add("directory gone", f"{way}, absolute", None if is_well else str(ended))

        def relative_body(save: Any = save, gone: Path = gone) -> None:
            gone.mkdir()
            os.chdir(gone)
            gone.rmdir()
            save(STATE, "ckpt", None)

        ended = in_child(relative_body)
        is_well = bool(ended.said.get("is_typed"))
        table.add("directory gone", f"{way}, relative", None if is_well else str(ended))
    reads: dict[str, Callable[[], object]] = {
        "load": lambda: loaded("load", STATE, "ckpt"),
        "load_tensors": lambda: torch_dcpx.load_tensors("ckpt"),
        "export": lambda: torch_dcpx.export(root / "warm", "exported"),
        "manager": lambda: torch_dcpx.CheckpointManager("root", no_dist=True),
    }
    for name, read in reads.items():

        def read_body(read: Any = read) -> None:
            SAVES["save"](STATE, root / "saved before", None)
            gone.mkdir()
            os.chdir(gone)
            gone.rmdir()
            read()

        ended = in_child(read_body)
        is_well = bool(ended.said.get("is_typed"))
        table.add("directory gone", f"{name}, relative", None if is_well else str(ended))


def main() -> None:
    alone()
    root, table = Path(sys.argv[1]), Table()
    for way in ("save", "dcp.save"):
        SAVES[way](STATE, root / "warm", None)
    (root / "file").touch()
    for name, path in good_paths(root).items():
        try_good(table, name, path)
    for name, path in bad_paths(root).items():
        try_bad(table, name, path)
    for name, act in relative().items():
        try_relative(table, root, name, act)
    try_removed(table, root)
    table.print()


if __name__ == "__main__":
    main()
