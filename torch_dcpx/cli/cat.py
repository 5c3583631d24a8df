"""`dcpx cat`: prints values of tensors, or of rows of them, and of objects."""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import Any, TypeAlias

import torch

from torch_dcpx.artifacts.opened import OpenCheckpoint, open_checkpoint
from torch_dcpx.cli.output import FINE, put_json, put_lines
from torch_dcpx.errors import OptionError, UnsupportedError
from torch_dcpx.storage.object_url import Location

_Part: TypeAlias = int | slice | EllipsisType


def run_cat(
    path: Location, names: Sequence[str], *, is_full: bool, rank: int | None, as_json: bool
) -> int:
    """Prints the values that `names` mean. Returns the exit code."""
    with open_checkpoint(path, rank=rank) as checkpoint:
        found = [(name, _read(checkpoint, name)) for name in names]
    if is_full:
        torch.set_printoptions(profile="full")  # type: ignore[no-untyped-call]
    try:
        if as_json:
            put_json([_json(*each) for each in found])
        else:
            put_lines([line for each in found for line in _lines(*each)])
    except RecursionError as error:
        raise UnsupportedError(f"print values of '{path}': {error}; name fewer of them") from error
    return FINE


def _lines(name: str, value: Any) -> list[str]:
    if isinstance(value, torch.Tensor):
        return [f"{name}: {_dtype(value)} {list(value.shape)}", *str(value).split("\n")]
    return [f"{name}: {value!r}"]


def _json(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, torch.Tensor):
        return {"name": name, "value": value}
    form = {"dtype": _dtype(value), "shape": list(value.shape)}
    return {"name": name, **form, "value": value.tolist()}


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _read(checkpoint: OpenCheckpoint, text: str) -> Any:
    """Returns what `NAME` or `NAME[ROWS]` means. Raises: OptionError, UnknownNameError, as a read.

    A name may itself end in brackets: what is stored under the whole text comes first.
    """
    if text in checkpoint.objects:
        return checkpoint.objects[text]
    name, bracket, rows = text.rpartition("[")
    if text in checkpoint or not (bracket and rows.endswith("]")):
        return checkpoint[text][...]
    index = tuple(_part(each.strip(), text) for each in rows[:-1].split(","))
    try:
        return checkpoint[name][index]
    except IndexError as error:
        raise OptionError(str(error), option="names", value=text) from error


def _part(text: str, whole: str) -> _Part:
    """Returns `7`, `3:7`, `::2` or `...` as an index."""
    try:
        if text == "...":
            return ...
        if ":" in text:
            ends = [int(end) if end.strip() else None for end in text.split(":")]
            return slice(*ends)
        return int(text)
    except (ValueError, TypeError):
        wanted = "a number, begin:end, begin:end:step or ..."
        message = f"rows of {whole!r}: {text!r} is not {wanted}"
        raise OptionError(message, option="names", value=whole) from None
