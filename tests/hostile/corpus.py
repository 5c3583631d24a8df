"""A corpus of hostile checkpoints: whole directories, each hostile in one way. Payloads are inert.

`cases()` collects the rooms `hostile/gadgets`, `hostile/bombs`, `hostile/lies`, `hostile/places`.
A case makes `root/ckpt`; `root/outside` is what it must not reach, and what a payload would touch.
`hostile/driver` runs them.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hostile import pickles as hp
from support.foreign import Piece, write_foreign
from support.metadata_samples import TAIL, seal
from support.saves import save
from support.zip_samples import saved
from torch.distributed.checkpoint.metadata import Metadata

from torch_dcpx.metadata.file import decode_metadata, encode_metadata
from torch_dcpx.storage.names import FileEntry

STATE: dict[str, Any] = {"weight": torch.arange(3000.0), "value": [1, "two", 3.0]}


class Case(NamedTuple):
    """One hostile checkpoint."""

    kind: str
    name: str
    build: Callable[[Path], None]  # gets `root`; `root/ckpt` does not exist yet
    is_valid: bool = False  # a load may give what the item says, which is not STATE


WEIGHT, VALUE = saved(STATE["weight"]), saved(STATE["value"])
TEMPLATES: dict[str, bytes] = {}  # name of a file of a checkpoint of STATE by "ours" -> its bytes


def stock(root: Path, *, weight: bytes = WEIGHT, value: bytes = VALUE, **kwargs: Any) -> Path:
    """A checkpoint in stock's layout whose items are these bytes."""
    ckpt = root / "ckpt"
    pieces = [Piece("weight", weight, STATE["weight"]), Piece("value", value)]
    write_foreign(ckpt, pieces, **kwargs)
    return ckpt


def ours(root: Path) -> Path:
    """A copy of one checkpoint that torch-dcpx wrote."""
    ckpt = root / "ckpt"
    if not TEMPLATES:
        save(STATE, root / "template")
        for path in (root / "template").iterdir():
            TEMPLATES[path.name] = path.read_bytes()
        shutil.rmtree(root / "template")
    ckpt.mkdir(parents=True)
    for name, data in TEMPLATES.items():
        (ckpt / name).write_bytes(data)
    return ckpt


def sealed(
    data: bytes,
    *,
    stock_pickle: bytes | None = None,
    header: Callable[[dict[str, Any]], object] = len,
    body: Callable[[bytearray, int], object] = lambda *_: None,
) -> bytes:
    """`.metadata` of ours with another pickle, header or body (and where its columns begin), and
    checksums that are right."""
    _, _, _, pickle_bytes, body_bytes, header_bytes, *_ = TAIL.unpack(data[-64:])
    old = data[pickle_bytes : pickle_bytes + body_bytes]
    fields = json.loads(old[:header_bytes])
    header(fields)
    head = json.dumps(fields).encode()
    head = head.ljust((len(head) + 7) & ~7)
    whole = bytearray(head + old[header_bytes:])
    body(whole, len(head))
    return seal(data, bytes(whole), len(head), stock_pickle)


def rewritten_ours(
    change: Callable[[Metadata], None], change_file: Callable[[FileEntry], FileEntry], root: Path
) -> None:
    """Ours, with right checksums, whose metadata and file table were changed."""
    path = ours(root) / ".metadata"
    found = decode_metadata(path.read_bytes(), str(path))
    metadata = dataclasses.replace(found.metadata)
    metadata.storage_data = dict(metadata.storage_data)
    metadata.state_dict_metadata = dict(metadata.state_dict_metadata)
    change(metadata)
    files = [change_file(entry) for entry in (found.files or {}).values()]
    path.write_bytes(encode_metadata(metadata, files, found.save_id))


def plant_planner_pickle(root: Path, data: bytes) -> None:
    """Ours, with right checksums, whose header says that planner_data is in this pickle."""
    path = ours(root) / ".metadata"
    path.write_bytes(
        sealed(
            path.read_bytes(), stock_pickle=data, header=lambda h: h.update(planner_data="pickle")
        )
    )


def plant_root(root: Path, data: bytes) -> None:
    """Stock's layout, whose `.metadata` is this pickle."""
    (stock(root) / ".metadata").write_bytes(data)


def plant_planner_data(root: Path, data: bytes) -> None:
    """Stock's layout, with this pickle in place of planner_data."""
    marker = "planner data of the corpus"

    def encode(metadata: Any) -> bytes:
        metadata.planner_data = marker
        whole = pickle.dumps(metadata, protocol=2)
        before, after = whole.split(hp.text(marker), 1)
        return before + data[2:-1] + after  # without PROTO and STOP

    stock(root, encode=encode)


def plant_byte_item(root: Path, data: bytes) -> None:
    stock(root, value=hp.torch_zip(data, {"data/0": bytes(8)}))


def plant_tensor_item(root: Path, data: bytes) -> None:
    stock(root, weight=hp.torch_zip(data, {"data/0": bytes(8)}))


# Where a pickle lies -> what plants it there.
PICKLE_PLACES: dict[str, Callable[[Path, bytes], None]] = {
    ".metadata": plant_root,
    "planner_data": plant_planner_data,
    "planner_data of ours": plant_planner_pickle,
    "byte item": plant_byte_item,
    "tensor item": plant_tensor_item,
}


def cases() -> Iterator[Case]:
    """All cases, in a fixed order."""
    from hostile import bombs, gadgets, lies, places

    for room in (gadgets, bombs, lies, places):
        yield from room.cases()
