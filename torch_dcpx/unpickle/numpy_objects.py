"""NumPy arrays, scalars and dtypes of byte items; an empty table where NumPy is missing.

NumPy's own `__setstate__` of a dtype believes sizes and offsets. Here the public constructor makes
a dtype from its description, and an array from a dtype, a shape and bytes of just that size.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from typing import Any

from torch_dcpx.errors import UnsafePickleError
from torch_dcpx.unpickle.settle import Settler, checked_args, never_called, no_more_than, refuse
from torch_dcpx.unpickle.stand_ins import EMPTY, GlobalTable, StandIn, stand_in
from torch_dcpx.unpickle.torch_objects import dims

try:
    import numpy as np
except ImportError:  # optional: torch runs without it
    np = None  # type: ignore[assignment]

_KIND = re.compile(r"([biufcSUV?])([0-9]{0,9})\Z|([mM])8?\Z")  # no O: that one holds pickles
_UNIT = re.compile(rb"(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as|generic)\Z")
_SWAPPED = ">" if sys.byteorder == "little" else "<"
_ALIGNED = 0x80  # NPY_ALIGNED_STRUCT


def _plain_dtype(value: Any) -> Any:
    if not isinstance(value, np.dtype) or value.hasobject:
        refuse("has a NumPy array of what is no plain dtype")
    return value


def _time_dtype(kind: str, state: tuple[Any, ...]) -> Any:
    details = state[8] if len(state) == 9 else None
    if type(details) is not tuple or len(details) != 2 or type(details[1]) is not tuple:
        refuse("has a NumPy time without a unit")
    unit, count, *_ = details[1]
    if type(unit) is not bytes or not _UNIT.match(unit) or type(count) is not int or count < 1:
        refuse("has a NumPy time of an unknown unit")
    return np.dtype(f"{kind}8" if unit == b"generic" else f"{kind}8[{count}{unit.decode()}]")


def _struct_dtype(names: Any, fields: Any, state: tuple[Any, ...]) -> Any:
    if type(names) is not tuple or type(fields) is not dict or len(fields) != len(names):
        refuse("has a NumPy structure of unknown fields")
    formats, offsets = [], []
    for name in names:
        field = fields.get(name)
        if type(name) is not str or type(field) is not tuple or len(field) != 2:
            refuse("has a NumPy structure with a titled or unknown field")
        formats.append(_plain_dtype(field[0]))
        offsets.append(dims((field[1],), "NumPy field offset")[0])
    spec = {"names": names, "formats": formats, "offsets": offsets, "itemsize": state[5]}
    return np.dtype(spec, align=bool(state[7] & _ALIGNED))  # type: ignore[call-overload]


def _dtype(raw: StandIn, settle: Settler) -> Any:
    no_more_than(raw, state=True)
    text, _, _ = checked_args(raw, raw.args, str, (bool, int), (bool, int))
    match = _KIND.match(text)
    if text[:1] == "O":  # as it was written: no damage, for which an older checkpoint would do
        raise UnsafePickleError(
            "refuse to rebuild a NumPy array of objects: save a list, or arrays of numbers",
            global_name=raw.global_name,
        )
    if match is None:
        refuse(f"has the NumPy dtype {text!r:.40}")
    state = settle(raw.state) if raw.state is not EMPTY else (3, "|", None, None, None, -1, -1, 0)
    if type(state) is not tuple or len(state) not in (8, 9) or type(state[7]) is not int:
        refuse("has a NumPy dtype with an unknown state")
    _, order, base, names, fields, itemsize, *_ = state
    if order not in ("<", ">", "|", "=") or type(itemsize) is not int:
        refuse("has a NumPy dtype with an unknown byte order")
    if match[3]:
        made = _time_dtype(match[3], state)
    elif base is not None:
        if type(base) is not tuple or len(base) != 2:
            refuse("has a NumPy sub-array of unknown parts")
        made = np.dtype((_plain_dtype(base[0]), dims(base[1], "NumPy sub-array")))
    elif names is not None:
        made = _struct_dtype(names, fields, state)
    else:
        made = np.dtype(text)
    if base is None and names is None and order == _SWAPPED:
        made = made.newbyteorder(order)
    return _plain_dtype(made)


def _from_bytes(data: Any, dtype: Any, shape: Any, order: Any) -> Any:
    """Returns an array of its own memory; `data` must hold exactly its elements."""
    dtype, shape = _plain_dtype(dtype), dims(shape, "NumPy shape")
    if type(data) not in (bytes, bytearray) or order not in ("C", "F", "A"):
        refuse("has a NumPy array of what are no bytes")
    if math.prod(shape) * dtype.itemsize != len(data):
        refuse(f"has a NumPy array {shape} of {dtype} in {len(data)} B")
    # Not ndarray.copy(), which leaves the padding of structures to chance.
    return np.ndarray(shape, dtype, buffer=bytearray(data), order="F" if order == "F" else "C")


def _reconstruct(raw: StandIn, settle: Settler) -> Any:
    no_more_than(raw, state=True)
    cls = raw.args[0] if raw.args else None
    if cls is not NUMPY["numpy", "ndarray"] or type(raw.state) is not tuple:
        refuse("rebuilds another class than numpy.ndarray")
    if len(raw.state) != 5:
        refuse("has a NumPy array with an unknown state")
    _, shape, dtype, is_fortran, data = settle(raw.state)
    made = _from_bytes(data, dtype, shape, "F" if is_fortran else "C")
    if dtype.byteorder == _SWAPPED:  # as NumPy does for this form of array
        return made.byteswap(inplace=True).view(dtype.newbyteorder("="))
    return made


def _frombuffer(raw: StandIn, settle: Settler) -> Any:
    no_more_than(raw)
    return _from_bytes(*settle(raw.args))


def _scalar(raw: StandIn, settle: Settler) -> Any:
    no_more_than(raw)
    dtype, data = settle(raw.args)
    return _from_bytes(data, dtype, (), "C")[()]


def _table() -> GlobalTable:
    builds: dict[tuple[str, str], Callable[[StandIn, Settler], Any]] = {
        ("numpy", "dtype"): _dtype,
        ("numpy", "ndarray"): never_called,
    }
    for core in ("numpy.core", "numpy._core"):  # NumPy 1 and 2
        builds[f"{core}.multiarray", "_reconstruct"] = _reconstruct
        builds[f"{core}.multiarray", "scalar"] = _scalar
        builds[f"{core}.numeric", "_frombuffer"] = _frombuffer
    return {key: stand_in(".".join(key), build) for key, build in builds.items()}


NUMPY: GlobalTable = {} if np is None else _table()
