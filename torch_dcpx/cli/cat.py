"""`dcpx cat`: prints values of tensors, or of rows of them, and of objects."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from types import EllipsisType
from typing import Any, NamedTuple, TypeAlias

import torch

from torch_dcpx._globs import chosen_names
from torch_dcpx.artifacts.opened import OpenCheckpoint, open_checkpoint
from torch_dcpx.cli.output import FINE, exit_code, put_json, put_lines, put_problem
from torch_dcpx.errors import DcpxError, OptionError, UnsupportedError
from torch_dcpx.storage.object_url import Location
from torch_dcpx.unpickle.byte_items import decode_byte_item

_Part: TypeAlias = int | slice | EllipsisType
_Index: TypeAlias = tuple[_Part, ...] | None  # None: an object
_BYTES = bytes, bytearray, io.BytesIO
_ZIP = b"PK\x03\x04"  # how bytes of torch.save begin


class _Value(NamedTuple):
    """Holds what one name means."""

    name: str  # with its rows, if there are some
    value: Any
    note: str = ""  # about bytes that hold what is shown, or that nothing can be shown of
    error: DcpxError | None = None  # of one among others, which are shown


def run_cat(
    path: Location, names: Sequence[str], *, is_full: bool, rank: int | None, as_json: bool
) -> int:
    """Prints the values that `names` mean. Returns the exit code."""
    code, shown = FINE, []
    if is_full:
        torch.set_printoptions(profile="full")  # type: ignore[no-untyped-call]
    try:
        with open_checkpoint(path, rank=rank) as checkpoint:
            wanted = [each for name in names for each in _meant(checkpoint, name)]
            for one in _values(checkpoint, dict(wanted)):
                code = max(code, FINE if one.error is None else exit_code(one.error))
                if as_json:
                    shown.append(_json(one))
                elif one.error is not None:
                    put_problem(str(one.error))
                else:
                    put_lines(_lines(one))
        if as_json:
            put_json(shown)
    except RecursionError as error:
        raise UnsupportedError(f"print values of '{path}': {error}; name fewer of them") from error
    return code


def _lines(one: _Value) -> list[str]:
    value = one.value
    if isinstance(value, torch.Tensor):
        return [f"{one.name}: {_dtype(value)} {list(value.shape)}", *str(value).split("\n")]
    if isinstance(value, _BYTES) and one.note:
        return [f"{one.name}: {one.note}"]
    note = f"{one.note}: " if one.note else ""
    return [f"{one.name}: {note}{value!r}"]


def _json(one: _Value) -> dict[str, Any]:
    if one.error is not None:
        kind = type(one.error).__name__
        return {"name": one.name, "error": {"type": kind, "message": str(one.error)}}
    if not isinstance(one.value, torch.Tensor):
        note = {"note": one.note} if one.note else {}
        return {"name": one.name, **note, "value": one.value}
    form = {"dtype": _dtype(one.value), "shape": list(one.value.shape)}
    return {"name": one.name, **form, "value": one.value.tolist()}


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _values(checkpoint: OpenCheckpoint, wanted: dict[tuple[str, str], _Index]) -> Iterator[_Value]:
    """Yields the values, one in memory at a time; what cannot be read hides no other one."""
    for (name, rows), index in wanted.items():
        try:
            if index is None:
                yield _opened(name, checkpoint.objects[name], checkpoint.path)
            else:
                yield _Value(name + rows, checkpoint[name][index])
        except IndexError as error:
            raise OptionError(str(error), option="names", value=name + rows) from error
        except DcpxError as error:
            if len(wanted) == 1:
                raise
            yield _Value(name, None, error=error)


def _opened(name: str, value: Any, path: str) -> _Value:
    """Returns an object; of the bytes of torch.save what they hold, by the rules of every load."""
    data = value.getvalue() if isinstance(value, io.BytesIO) else value
    if not isinstance(data, (bytes, bytearray)) or data[:4] != _ZIP:
        return _Value(name, value)
    try:
        held = decode_byte_item(bytes(data), fqn=name, path=path)
    except DcpxError as error:
        return _Value(name, value, f"{len(data)} B of torch.save, not shown: {error}")
    return _Value(name, held, f"{len(data)} B of torch.save")


def _meant(checkpoint: OpenCheckpoint, text: str) -> Iterator[tuple[tuple[str, str], _Index]]:
    """Yields what `NAME`, `NAME[ROWS]`, `GLOB` or `GLOB[ROWS]` means: names, with indices.

    A name may itself end in brackets: what is stored under the whole text comes first, then rows
    of what is stored under the text in front of them, then globs.

    Raises: OptionError, UnknownNameError.
    """
    objects, names = checkpoint.objects, [*checkpoint, *checkpoint.objects]
    front, bracket, end = text.rpartition("[")
    has_rows = bool(bracket) and end.endswith("]")
    chosen = chosen_names(names, [text])
    if has_rows and text not in names and (front in names or not chosen):
        index = tuple(_part(each.strip(), text) for each in end[:-1].split(","))
        for name in checkpoint.select(front):
            yield (name, f"[{end}"), index
        return
    for name in chosen or checkpoint.select(text):  # which raises UnknownNameError
        yield (name, ""), None if name in objects else (...,)


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
