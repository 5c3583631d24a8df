"""Names that lead elsewhere, and things in place of files: read by a load, written by a save."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from hostile.corpus import Case, ours, rewritten_ours, stock
from torch.distributed.checkpoint.metadata import Metadata

from torch_dcpx.storage.names import FileEntry

DATA = "__0_0.distcp"
NAMES = [
    *(f"{before}{DATA}" for before in ("../outside/", "../../", "sub/../../outside/", "sub/../")),
    *(f"{before}{DATA}" for before in ("./", "sub//", "linked/")),
    *(f"{DATA}{behind}" for behind in ("/", "/.", "\0", f"\0/../../outside/{DATA}", "\n")),
    *("", ".", "..", "/", "/etc/passwd", "/dev/zero", "/proc/self/mem", "/proc/self/fd/0"),
    "OUTSIDE",  # the absolute path of a data file there
    *(
        "\0",
        "__0_0\ud800.distcp",
        "__0_0\udcff.distcp",
        "x" * 256,
        "x" * 5000,
        "/".join("x" * 2000),
    ),
    *(".metadata", ".dcpx.lock", "sub", "missing.distcp", "\\..\\outside"),
]


def _resolved(name: str, root: Path) -> str:
    return str(root / "outside" / DATA) if name == "OUTSIDE" else name


def _named(layout: str, name: str, root: Path) -> None:
    name = _resolved(name, root)

    def change(metadata: Metadata) -> None:
        for index, info in metadata.storage_data.items():
            metadata.storage_data[index] = dataclasses.replace(info, relative_path=name)

    if layout == "stock":
        stock(root, change=change)
    else:
        rewritten_ours(change, lambda entry: FileEntry(name, *entry[1:]), root)
    (root / "ckpt" / "sub").mkdir()
    (root / "ckpt" / "linked").symlink_to(root / "outside")


# ---- Something else in place of a file ----------------------------------------------------------


Plant = Callable[[Path, Path], object]


def _link_to(target: str) -> Plant:
    return lambda path, root: path.symlink_to(root / "outside" / target)


def _socket(path: Path, root: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's name is short
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def _directory(path: Path, root: Path) -> None:
    path.mkdir()
    (path / "inside").write_bytes(b"a file in it")


def _device(major: int, minor: int) -> Plant:
    return lambda path, _: os.mknod(path, 0o666 | 0o020000, os.makedev(major, minor))


def _sparse(path: Path, root: Path) -> None:
    path.write_bytes(b"")
    os.truncate(path, 1 << 40)


PLANTS: dict[str, Plant] = {
    "link": _link_to(DATA),
    "relative link": lambda path, _: path.symlink_to(Path("..") / "outside" / DATA),
    "link to another file": _link_to("secret"),
    "dangling link": _link_to("MARK"),
    "link to itself": lambda path, _: path.symlink_to(path.name),
    "link to /dev/zero": lambda path, _: path.symlink_to("/dev/zero"),
    "hard link": lambda path, root: path.hardlink_to(root / "outside" / "secret"),
    "FIFO": lambda path, _: os.mkfifo(path),
    "socket": _socket,
    "directory": _directory,
    "empty file": lambda path, _: path.write_bytes(b""),
    "hole of a terabyte": _sparse,
}
if os.geteuid() == 0:
    PLANTS |= {
        "/dev/zero": _device(1, 5),
        "/dev/full": _device(1, 7),
        "/dev/random": _device(1, 8),
    }

# Name -> whether a load meets it. What a save makes, finds and removes.
TARGETS = {
    ".metadata": True,
    DATA: True,
    ".dcpx.lock": False,
    "__0_0.0123456789ab.distcp": False,
    "__7_0.0123456789ab.distcp": False,
    ".metadata.0123456789ab.tmp": False,
    "__0.metadata": False,
    "__0.metadata.0123456789ab.tmp": False,
    "notes.txt": False,
    ".hidden": False,
    "optimizer": False,
}


def _planted(layout: str, name: str, plant: Plant, root: Path) -> None:
    ckpt = stock(root) if layout == "stock" else ours(root)
    names = [path.name for path in ckpt.iterdir() if path.name.endswith(".distcp")]
    path = ckpt / (names[0] if name == DATA else name)
    path.unlink(missing_ok=True)
    plant(path, root)


# ---- What a replaced checkpoint names, and a save removes ---------------------------------------

KEPT = ["notes.txt", "sub/x.distcp", ".hidden", "model.safetensors", "meta.pt"]


def _claims_others(layout: str, name: str, root: Path) -> None:
    """The metadata names a file that is none of its own, beside the right ones."""
    _named(layout, name, root)
    ckpt = root / "ckpt"
    for kept in KEPT:
        (ckpt / kept).parent.mkdir(exist_ok=True)
        (ckpt / kept).write_bytes(b"somebody's own")


def cases() -> Iterator[Case]:
    for layout in ("stock", "ours"):
        for name in NAMES:
            label = f"{layout}: {name[:40]!a} of {len(name)}"
            yield Case("names", label, partial(_named, layout, name))
        for target, is_read in TARGETS.items():
            for kind, plant in PLANTS.items():
                # A save removes leftovers that are regular files: a hole or an empty file is one.
                build = partial(_planted, layout, target, plant)
                yield Case("planted", f"{layout}: {kind} as {target}", build, not is_read)
        for name in (*KEPT, "../outside/secret", "OUTSIDE"):
            build = partial(_claims_others, layout, name)
            yield Case("claimed", f"{layout}: {name}", build, is_valid=True)
