"""JSON that a file has chosen, parsed within a bound: a list takes two bytes, and 80 of memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from torch_dcpx._text import human_bytes

_FREE_BYTES = 6 << 20  # whatever it is, it takes less than 256 MiB
_ROOM_BYTES = 200 << 20
# Bytes of memory for each: lists and dicts; their places; pairs while their dict is made; texts.
_COSTS = {b"[": 80, b"{": 80, b",": 40, b":": 200, b'"': 30}


def parsed_json(
    text: str | bytes, pairs_hook: Callable[[Iterable[tuple[str, Any]]], Any] | None = None
) -> Any:
    """Returns the value of a JSON text. Raises ValueError: it is none, is nested too deeply, or its
    values would take far more memory than it has bytes.
    """
    if len(text) > _FREE_BYTES:
        data = text.encode(errors="surrogatepass") if isinstance(text, str) else text
        cost = sum(data.count(mark) * nbytes for mark, nbytes in _COSTS.items())
        if cost > _ROOM_BYTES + len(text):
            raise ValueError(f"its {len(text)} B would take {human_bytes(cost)} of memory")
    try:
        return json.loads(text, object_pairs_hook=pairs_hook)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
