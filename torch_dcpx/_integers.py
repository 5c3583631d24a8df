"""Integers of any type: Python's, numpy's, tensors without dimensions. Imports nothing heavy."""

from __future__ import annotations

import operator
from typing import Any


def plain_int(value: Any) -> Any:
    """Returns an integer of any type as an int, and anything else, bools too, as it is."""
    if type(value) is int or value is None:
        return value
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
    if is_bool or getattr(value, "ndim", 0) != 0:
        return value
    try:
        return int(operator.index(value))
    except (TypeError, ValueError, RuntimeError):  # the last: a tensor without data
        return value


def set_plain_ints(options: object, *names: str) -> None:
    """Makes fields of frozen options plain ints where they are integers of another type."""
    for name in names:
        value = getattr(options, name)
        number = plain_int(value)
        if number is not value:
            object.__setattr__(options, name, number)
