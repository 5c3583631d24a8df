"""A manager's root, and one before and after a manager's call that met a fault.

`base` makes one with all that a manager may meet; a test puts it back before each point of a sweep.
The answers come from the server itself, past every proxy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from object_outcomes import Store, retries
from support.small_managers import manager_of, resumed, save_steps

from torch_dcpx import CheckpointManager
from torch_dcpx.metadata.file import decode_file_names
from torch_dcpx.storage.names import ROOT_LOCK_NAME
from torch_dcpx.storage.object_store import Bucket

HOUR = 3600.0
LOST_DATA = "step-8/__0_0.0123456789ab.distcp"  # of a checkpoint whose metadata somebody has lost
FOREIGN = {"logs/run.txt": b"x", "notes.txt": b"x"}
_KILLED = {"step-9/.dcpx.lock": b"", "step-9/__0_0.0123456789ab.distcp": b"x"}


@contextmanager
def clock_ahead(seconds: float) -> Iterator[None]:
    """In the block the store's clock is so far ahead of the dates of its objects."""
    now_s = Bucket.now_s
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bucket, "now_s", lambda self, prefix: now_s(self, prefix) + seconds)
        yield


class Root(Store):
    """A root on a server; it may be behind a proxy."""

    def manager(self, **arguments: Any) -> CheckpointManager:
        return manager_of(self.url, **arguments)

    def names(self, beneath: str = "") -> set[str]:
        """Returns the names of all objects but the lock, which stays."""
        return super().names(beneath) - {ROOT_LOCK_NAME}

    def objects(self, beneath: str = "") -> dict[str, bytes]:
        found = super().objects(beneath)
        found.pop(ROOT_LOCK_NAME, None)
        return found

    def base(self) -> dict[str, bytes]:
        """Returns objects: commits 2 and 3 (the newest), leftovers of 1 (removed) and 9 (killed),
        what is left of 8, and files that are no manager's.
        """
        with retries(0):
            save_steps(self.manager(keep_last=2), 1, 2, 3)
        found = self.objects()
        assert "step-1/.dcpx.deleted" in found
        return {**found, **FOREIGN, LOST_DATA: b"x" * 9, **_KILLED}

    def whole(self) -> set[int]:
        """Returns the steps that are committed; fails unless the data of each are there."""
        names = self.names()
        tags = {name.partition("/")[0] for name in names if name.endswith("/.metadata")}
        for tag in tags:
            named = decode_file_names(self.get(f"{tag}/.metadata"), self.url)
            lost = {f"{tag}/{name}" for name in named} - names
            assert not lost, f"{tag} lacks {lost}"
        return {int(tag.removeprefix("step-")) for tag in tags}

    def assert_resumes(self, step: int) -> None:
        """Asserts that the next job begins with this step, by the pointer and without it."""
        with retries(0):
            assert resumed(self.manager()) == step
            pointer = self.get("newest") if "newest" in self.names() else None
            self.delete("newest")
            assert self.manager().latest() == f"step-{step}"
            if pointer is not None:
                self.put("newest", pointer)

    def assert_cleans_up(self, keep_last: int) -> None:
        """Asserts that, when the grace is over, the saves of a next job leave what they keep, and
        what is no manager's.
        """
        steps = range(20, 20 + keep_last)
        foreign = self.names() & {*FOREIGN, LOST_DATA}
        with clock_ahead(3 * HOUR), retries(0):
            manager = self.manager(keep_last=keep_last)
            save_steps(manager, *steps)
            manager._retention.run()  # as behind one more commit
        own = {f"step-{step}/{name}" for step in steps for name in (".metadata", "data")}
        expected = {"newest", *own, *map(_without_id, foreign)}
        assert {_without_id(name) for name in self.names()} == expected
        assert self.whole() == set(steps)


def _without_id(name: str) -> str:
    """Returns a name with "data" in place of a data file's."""
    tag, slash, end = name.rpartition("/")
    return f"{tag}{slash}data" if end.endswith(".distcp") else name
