"""A save that is under way for as long as a test wants."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch_dcpx


@contextmanager
def under_way(path: Path, state: Any) -> Iterator[None]:
    """Saves in a thread that stays in the middle while the block runs."""
    begun, go_on = threading.Event(), threading.Event()

    def hold(_done: int, _total: int) -> None:
        begun.set()
        assert go_on.wait(60)

    options = torch_dcpx.WriteOptions(progress=hold)
    arguments: dict[str, Any] = {"no_dist": True, "options": options}
    saving = threading.Thread(target=torch_dcpx.save, args=(state, path), kwargs=arguments)
    saving.start()
    try:
        assert begun.wait(60)
        yield
    finally:
        go_on.set()
        saving.join()
