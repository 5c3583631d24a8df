"""A save that is under way for as long as a test wants."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.async_saves import gated

import torch_dcpx


@contextmanager
def under_way(path: Path, state: Any) -> Iterator[None]:
    """Saves in a thread that stays in the middle while the block runs."""
    gate, options = gated()
    arguments: dict[str, Any] = {"no_dist": True, "options": options}
    saving = threading.Thread(target=torch_dcpx.save, args=(state, path), kwargs=arguments)
    saving.start()
    try:
        assert gate.reached.wait(60)
        yield
    finally:
        gate.open()
        saving.join()
