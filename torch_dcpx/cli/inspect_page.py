"""The data of the page of `dcpx inspect`: columns, so that 100,000 tensors stay a small file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch_dcpx._text import printable
from torch_dcpx.cli.page_values import read_values
from torch_dcpx.storage.names import data_file_parts

if TYPE_CHECKING:
    from torch_dcpx.storage.object_url import Location
    from torch_dcpx.views.inspect import Described


def inspect_data(path: Location, keys: Sequence[str], found: Iterable[Described]) -> dict[str, Any]:
    """Returns what the page of `dcpx inspect` shows. Names are escaped as those of the table.

    Reads values of a few small objects, which the command itself does not.
    """
    checkpoints = [_checkpoint(path, one, [printable(key) for key in keys]) for one in found]
    return {"path": printable(path), "checkpoints": checkpoints}


def _checkpoint(path: Location, found: Described, keys: list[str]) -> dict[str, Any]:
    values = read_values(path, found.metadata_file, found.items)
    numbers = {fqn: number for number, fqn in enumerate(found.fqns) if fqn in values}
    return {
        "metadata_file": printable(found.metadata_file),
        "written_by": printable(found.writer),
        "save_id": printable(found.save_id),
        "saved": found.saved_at or "",
        "step": found.step,
        "parameters": found.parameters,
        "keys": keys,
        "faults": list(map(printable, found.faults)),
        "files": {
            "name": list(map(printable, found.files)),
            "rank": list(map(_rank, found.files)),
            "found": [size.found or 0 for size in found.files.values()],
        },
        "values": {"item": [numbers[fqn] for fqn in values], "text": list(values.values())},
        **_items(found),
    }


def _items(found: Described) -> dict[str, Any]:
    """Returns columns of all names, and of their parts what many tensors have in common, once.

    A layout is a list of parts: offsets, sizes, number of the file (-1: none), bytes in it. `at`
    has where each part begins in its file.
    """
    numbers = {name: number for number, name in enumerate(found.files)}
    layouts: dict[tuple[Any, ...], int] = {}
    columns: dict[str, list[Any]] = {
        name: [] for name in ("name", "dtype", "shape", "nbytes", "layout", "at")
    }
    for item in found.items:
        layout = tuple(
            (part.offsets, part.sizes, numbers.get(part.file, -1), part.nbytes)
            for part in item.parts
        )
        number = layouts.setdefault(layout, len(layouts))
        at = [part.offset for part in item.parts]
        row = printable(item.fqn), item.dtype, item.shape, item.nbytes, number, at
        for column, value in zip(columns.values(), row, strict=True):
            column.append(value)
    return {"items": columns, "layouts": list(layouts)}


def _rank(file: str) -> int | None:
    parts = data_file_parts(file)
    return None if parts is None else parts[0]
