"""Files that weigh more in memory than on disk, and the doors at which they are tried.

    python tests/hostile/heavy.py [--short] SCRATCH [MB [KIND ...]]

A child is forked for each door and each file: its peak of memory and its seconds make a row. More
than 256 MiB and twice the file is a fault, and the exit status is 1.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from click.testing import CliRunner
from hostile import pickles as hp
from hostile import watch
from hostile.corpus import ours, plant_planner_data, plant_root, sealed, stock

import torch_dcpx as dcpx
from torch_dcpx.cli.app import app

ROOM_BYTES = 256 << 20
DEADLINE_S = 300


def _repeated(unit: bytes, nbytes: int) -> bytes:
    return unit * (nbytes // len(unit))


def _batches(unit: bytes, nbytes: int) -> bytes:
    batch = b"(" + unit * 1000 + b"e"
    return b"]" + _repeated(batch, nbytes)


_INSTANCE = b"ctorch.distributed.checkpoint.metadata\nChunkStorageMetadata\nq\x010"
PICKLES: dict[str, Callable[[int], bytes]] = {
    "lists": lambda n: _batches(b"]", n),
    "dicts": lambda n: _batches(b"}", n),
    "sets": lambda n: _batches(b"\x8f", n),
    "tuples": lambda n: _batches(b"N\x85\x85\x85", n),
    "gets": lambda n: b"]q\x000" + _batches(b"h\x00", n),
    "memo": lambda n: b"N" + b"\x94" * n,
    "places": lambda n: b"(" + b"N" * min(n, 16_000_000) + b"l",
    "flags": lambda n: _batches(b"\x88", n),
    "long ints": lambda n: _batches(b"\x8a\x09" + b"\x7f" * 9, n),
    "numbers and lists": lambda n: _batches(b"Jabcd]", n),
    "small numbers and lists": lambda n: _batches(b"K\x07K\x07K\x07]", n),
    "a list of one": lambda n: _batches(b"]Na", n),
    "a dict of one": lambda n: _batches(b"}NNs", n),
    "texts and lists": lambda n: _batches(b"\x8c\x02ab]", n),
    "wide text": lambda n: hp.text("a" * n + "\U0001f600"),
    "deep": lambda n: b"]" + b"]" * n + b"a" * n,
    "ordered": lambda n: hp.ORDERED + b"q\x010" + _batches(b"h\x01)R", n),
    "states": lambda n: _INSTANCE + _batches(b"h\x01)\x81}NNsb", n // 2) + b"0" + _batches(b"]", n),
    "well-formed states": lambda n: (
        _INSTANCE + hp.name("torch", "Size") + b"q\x020" + hp.text("offsets") + b"q\x030"
        + hp.text("sizes") + b"q\x040" + _batches(b"h\x01)\x81}(h\x03h\x02)Rh\x04Nub", n)
    ),
    "long key": lambda n: b"}" + hp.text("n" * n) + b"]s",
}  # fmt: skip
JSONS: dict[str, Callable[[int], bytes]] = {
    "lists": lambda n: b"[" + b"[]," * (n // 3) + b"[]]",
    "dicts": lambda n: b"[" + b"{}," * (n // 3) + b"{}]",
    "numbers": lambda n: b"[" + b"1e9," * (n // 4) + b"1]",
    "texts": lambda n: b"[" + b'"ab",' * (n // 5) + b'""]',
    "pairs": lambda n: b"{" + b",".join(b'"%x":1' % i for i in range(n // 10)) + b"}",
    "keys twice": lambda n: b"{" + b'"a":1,' * (n // 6) + b'"a":2}',
    "deep": lambda n: b"[" * n,
    "wide": lambda n: b'["' + b"a" * n + "\U0001f600".encode() + b'"]',
    "long key": lambda n: b'{"' + b"n" * n + b'":1}',
}


class Heavy(NamedTuple):
    """One file, in a folder of its own."""

    name: str
    doors: tuple[str, ...]
    build: Callable[[Path, int], Path]  # gets a new folder and bytes; returns what doors are given


def _command(*arguments: str) -> Callable[[Path], Any]:
    def run(path: Path) -> Any:
        given = [one.format(path=path, out=path.parent / "out") for one in arguments]
        found = CliRunner().invoke(app, given)
        if found.exception is not None and not isinstance(found.exception, SystemExit):
            raise found.exception
        if found.exit_code:
            raise dcpx.DcpxError(f"exit code {found.exit_code}: {found.output[-400:]}")
        return found.output

    return run


def _load(path: Path) -> None:
    dcpx.load({"weight": torch.zeros(3000), "value": None}, path, no_dist=True)


def _resume(path: Path) -> None:
    with dcpx.CheckpointManager(path, no_dist=True) as manager:
        manager.resume(model=torch.nn.Linear(2, 2))


DOORS: dict[str, Callable[[Path], Any]] = {
    "load": _load,
    "load_tensors": dcpx.load_tensors,
    "open_checkpoint": lambda path: dict(dcpx.open_checkpoint(path)),
    "load_pretrained": lambda path: dcpx.load_pretrained(torch.nn.Linear(2, 2), path),
    "export": lambda path: dcpx.export(path, path.parent / "out", no_dist=True),
    "export for torch": lambda path: dcpx.export(
        path, path.parent / "out", format="torch", no_dist=True
    ),
    "merge_lora": lambda path: dcpx.export(
        ours(path.parent / "base"), path.parent / "out", merge_lora=path, no_dist=True
    ),
    "resume": _resume,
    "ls": _command("ls", "{path}"),
    "inspect": _command("inspect", "{path}"),
    "verify": _command("verify", "{path}"),
    "repair": _command("repair", "{path}"),
    "gc": _command("gc", "{path}"),
    "diff": _command("diff", "{path}", "{path}"),
    "stats": _command("stats", "{path}"),
    "cat": _command("cat", "{path}", "value"),
    "doctor": _command("doctor", "{path}"),
    "trace": _command("trace", "{path}", "--out", "{out}"),
}
_TENSORS = ("load_tensors", "open_checkpoint", "load_pretrained", "export", "inspect", "ls", "diff")
_CHECKPOINT = (
    *("load", *_TENSORS, "export for torch", "verify", "repair", "gc", "stats", "cat", "doctor"),
)


def _metadata(make: Callable[[int], bytes], root: Path, nbytes: int) -> Path:
    plant_planner_data(root, b"\x80\x04" + make(nbytes) + b".")
    return root / "ckpt"


def _pickle_root(make: Callable[[int], bytes], root: Path, nbytes: int) -> Path:
    plant_root(root, b"\x80\x04" + make(nbytes) + b".")
    return root / "ckpt"


def _item(make: Callable[[int], bytes], root: Path, nbytes: int) -> Path:
    return stock(root, value=hp.torch_zip(b"\x80\x04" + make(nbytes) + b"."))


def _tensor_item(make: Callable[[int], bytes], root: Path, nbytes: int) -> Path:
    return stock(root, weight=hp.torch_zip(b"\x80\x04" + make(nbytes) + b"."))


def _torch_file(make: Callable[[int], bytes], root: Path, nbytes: int) -> Path:
    root.mkdir(parents=True)
    body = b"\x80\x04}" + hp.text("many") + make(nbytes) + b"s."
    (root / "file.pt").write_bytes(hp.torch_zip(body))
    return root / "file.pt"


def _own_header(make: Callable[[int], bytes], root: Path, nbytes: int) -> Path:
    path = ours(root) / ".metadata"
    other: Any = {"x": "MARK"}
    text = make(nbytes).decode()
    dumps = json.dumps
    json.dumps = lambda value, **how: dumps(value, **how).replace('"MARK"', text)  # type: ignore[assignment]
    try:
        whole = sealed(path.read_bytes(), header=lambda fields: fields.update(other))
    finally:
        json.dumps = dumps
    path.write_bytes(whole)
    return path.parent


def _beside(name: str, before: bytes, after: bytes, make: Any, root: Path, nbytes: int) -> Path:
    """A file of JSON in a folder: at the name, and nothing beside it."""
    path = root / "ckpt" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(before + make(nbytes) + after)
    return root / "ckpt"


def _in_root(name: str, make: Callable[[int], bytes], root: Path, nbytes: int) -> Path:
    """A file of a manager's root, in the root or in its checkpoint."""
    path = root / "ckpt"
    with dcpx.CheckpointManager(path, no_dist=True, async_save=False) as manager:
        manager.save(1, model=torch.nn.Linear(2, 2))
    (path / name).write_bytes(make(nbytes))
    return path


def _header(make: Callable[[int], bytes], root: Path, nbytes: int) -> Path:
    (root / "ckpt").mkdir(parents=True)
    text = make(nbytes)
    whole = len(text).to_bytes(8, "little") + text + bytes(4)
    (root / "ckpt" / "model.safetensors").write_bytes(whole)
    return root / "ckpt"


_ROW = b'"t%d":{"dtype":"F32","shape":[1],"data_offsets":[%d,%d]}'
HEADERS: dict[str, Callable[[int], bytes]] = {
    **{name: (lambda n, make=make: b'{"n":' + make(n) + b"}") for name, make in JSONS.items()},
    "claims": lambda _: b'{"w":{"dtype":"F32","shape":[%d],"data_offsets":[0,4]}}' % 2**60,
    "tiny tensors": lambda n: (
        b"{" + b",".join(_ROW % (i, 4 * i, 4 * i + 4) for i in range(n // 60)) + b"}"
    ),
    "a note": lambda n: (
        b'{"__metadata__":{"DCP_SHARDING_INFO":' + json.dumps("[" + "[]," * (n // 3)).encode()
        + b'},"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    ),
}  # fmt: skip


def _claimed_length(root: Path, nbytes: int) -> Path:
    path = _header(lambda _: b"{}", root, nbytes)
    (path / "model.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + bytes(nbytes))
    return path


def heavy() -> list[Heavy]:
    """Returns all of them."""
    made = [Heavy("a header's length", _TENSORS, _claimed_length)]
    places = {
        "planner data": (_metadata, _CHECKPOINT),
        ".metadata": (_pickle_root, ("load", "ls", "verify", "repair")),
        "item": (_item, ("load", "export for torch", "verify", "repair", "diff", "cat")),
        "tensor item": (_tensor_item, ("load", "load_tensors", "verify", "repair", "stats")),
        "file.pt": (_torch_file, _TENSORS),
    }
    for place, (build, doors) in places.items():
        for name, make in PICKLES.items():
            made.append(Heavy(f"{place}: {name}", doors, _with(build, make)))
    for name, make in HEADERS.items():
        made.append(Heavy(f"header: {name}", _TENSORS, _with(_header, make)))
    for name, make in JSONS.items():
        made.append(
            Heavy(f"own header: {name}", ("load", "ls", "verify"), _with(_own_header, make))
        )
        index = b'{"weight_map":{"a":"b.safetensors"},"x":'
        for file, before, after, doors in (
            ("model.safetensors.index.json", index, b"}", _TENSORS),
            ("a.json", b'{"traceEvents":', b"}", ("trace",)),
            ("adapter_config.json", b'{"r":1,"lora_alpha":1,"x":', b"}", ("merge_lora",)),
        ):
            build = _with(lambda make, root, n, a=(file, before, after): _beside(*a, make, root, n),
                          make)  # fmt: skip
            made.append(Heavy(f"{file}: {name}", doors, build))
        for file in ("newest", "step-1/.dcpx.lock", ".dcpx.root", "step-1/.dcpx.deleted"):
            build = _with(lambda make, root, n, file=file: _in_root(file, make, root, n), make)
            doors = ("resume", "ls", "verify", "gc", "doctor")
            made.append(Heavy(f"{file}: {name}", doors, build))
    return made


def _with(build: Any, make: Any) -> Callable[[Path, int], Path]:
    return lambda root, nbytes: build(make, root, nbytes)


class Row(NamedTuple):
    """What a file took at a door."""

    heavy: str
    door: str
    nbytes: int
    grown: int
    seconds: float  # of the processor
    outcome: str

    @property
    def is_too_much(self) -> bool:
        if self.outcome == "hung" or "n" * 201 in self.outcome:  # of a name
            return True
        return self.grown > ROOM_BYTES + 2 * self.nbytes

    def __str__(self) -> str:
        allowed = (ROOM_BYTES + 2 * self.nbytes) >> 20
        verdict = "TOO MUCH" if self.is_too_much else "ok"
        verdict += " SLOW" if self.seconds > 1 + self.nbytes / 10e6 else ""
        return (
            f"{self.heavy:40} {self.door:16} {self.nbytes >> 20:4} MiB {self.grown >> 20:5} of "
            f"{allowed:4} MiB {self.seconds:6.1f} s  {verdict:8} {self.outcome[:160]!r}"
        )


def _child(door: str, path: Path, pipe: int) -> None:
    """Never returns. Writes peak, seconds and outcome."""
    before = watch.begin_peak()
    began = time.process_time()
    try:
        DOORS[door](path)
        outcome = "taken"
    except BaseException as error:  # noqa: BLE001  a child reports all of them
        outcome = f"{type(error).__name__}: {error}"
    seconds = time.process_time() - began
    os.write(pipe, json.dumps([watch.peak() - before, seconds, outcome[:4000]]).encode())
    os._exit(0)


def measured(heavy: Heavy, door: str, root: Path, nbytes: int) -> Row:
    """Builds a file anew and tries a door in a child."""
    shutil.rmtree(root, ignore_errors=True)
    path = heavy.build(root / "made", nbytes)
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    size = sum(one.stat().st_size for one in files)
    ours_end, childs_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours_end)
        _child(door, path, childs_end)
    os.close(childs_end)
    until = time.monotonic() + DEADLINE_S
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            break
        time.sleep(0.01)
    data = os.read(ours_end, 1 << 16)
    os.close(ours_end)
    grown, seconds, outcome = json.loads(data) if data else (0, DEADLINE_S, "hung")
    return Row(heavy.name, door, size, grown, seconds, outcome)


def rows(
    scratch: Path, nbytes: int, kinds: tuple[str, ...] = (), *, is_short: bool = False
) -> list[Row]:
    """Tries files of about this size whose names begin with one of `kinds` (none: all): each at all
    doors, or, to be short, at one door, in turn.
    """
    root = scratch / "heavy"
    for door in DOORS:  # imports what it needs
        with contextlib.suppress(BaseException):
            DOORS[door](stock(scratch / "warm" / door))
    shutil.rmtree(scratch / "warm", ignore_errors=True)
    found = []
    for one in heavy():
        if kinds and not one.name.startswith(kinds):
            continue
        doors = [one.doors[len(found) % len(one.doors)]] if is_short else one.doors
        for door in doors:
            found.append(measured(one, door, root, nbytes))
            print(found[-1], flush=True)
    shutil.rmtree(root, ignore_errors=True)
    return found


if __name__ == "__main__":
    is_short = "--short" in sys.argv
    scratch, *more = [one for one in sys.argv[1:] if one != "--short"]
    size = int(more[0]) * 1_000_000 if more else 20_000_000
    tried = rows(Path(scratch), size, tuple(more[1:]), is_short=is_short)
    print(f"{len(tried)} rows, {sum(row.is_too_much for row in tried)} too much")
    sys.exit(any(row.is_too_much for row in tried))
