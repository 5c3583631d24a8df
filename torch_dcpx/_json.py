"""JSON that a file has chosen, parsed within a bound: a list takes two bytes, and 80 of memory; one
letter of four bytes makes all of a text as wide.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from torch_dcpx._text import human_bytes

_FREE_BYTES = 6 << 20  # whatever it is, it takes less than 256 MiB
_ROOM_BYTES = 200 << 20
# Bytes of memory for each: lists and dicts; their places; pairs while their dict is made; texts.
_COSTS = {b"[": 80, b"{": 80, b",": 40, b":": 200, b'"': 30}
_TEXT_COSTS = {mark.decode(): nbytes for mark, nbytes in _COSTS.items()}
_WIDEST = re.compile(rb"[\xf0-\xff]"), re.compile("[\U00010000-\U0010ffff]")


def _widths_of(text: str | bytes) -> tuple[int, int]:
    """Returns the bytes that each letter of a text takes in memory at most, and each of its own
    texts, which may have escapes.
    """
    is_text = isinstance(text, str)
    widest: Any = _WIDEST[is_text]
    width = 1 if text.isascii() else 4 if widest.search(text) else 2
    escape: Any = "\\u" if is_text else b"\\u"
    return width, 4 if escape in text else width


def cost_of_letters(text: str | bytes) -> int:
    """Returns what wide letters of a text make it and its parts take beyond its bytes."""
    wide = sum(_widths_of(text))
    return len(text) * (wide - 1) if wide > 2 else 0


def check_cost(text: str | bytes, nbytes: int) -> None:
    """Raises ValueError: a text's values would take far more memory than it has bytes."""
    if nbytes > _ROOM_BYTES + len(text):
        raise ValueError(f"its {len(text)} B would take {human_bytes(nbytes)} of memory")


def parsed_json(
    text: str | bytes,
    pairs_hook: Callable[[Iterable[tuple[str, Any]]], Any] | None = None,
    constant_hook: Callable[[str], Any] | None = None,
) -> Any:
    """Returns the value of a JSON text. Raises ValueError: it is none, is nested too deeply, or its
    values would take far more memory than it has bytes.
    """
    if len(text) > _FREE_BYTES:
        marks: Any = _COSTS if isinstance(text, bytes) else _TEXT_COSTS
        cost = sum(text.count(mark) * nbytes for mark, nbytes in marks.items())
        check_cost(text, cost + cost_of_letters(text))
    try:
        return json.loads(text, object_pairs_hook=pairs_hook, parse_constant=constant_hook)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
