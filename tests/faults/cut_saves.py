"""The saves whose calls are cut and recorded, and the mutants that must turn a test red."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from call_sweep import a_file_each, background, new_arena, of_stock, rank_local, state_of
from support.saves import data_files, save

from torch_dcpx import _C, WriteOptions
from torch_dcpx.storage import directory
from torch_dcpx.storage import save_lock as lock
from torch_dcpx.writer import files as write_files

NEVER = 1_000_000  # calls that no save makes
OLD, NEW, NEXT = (state_of(seed) for seed in range(3))


class Scenario(NamedTuple):
    """A save, and what is there before it."""

    prepare: Callable[[Path], None]  # on a disk that is then unmounted
    save: Callable[[Path], None]
    before: str = "old"  # what a cut may leave besides "new"; "none" of a first save
    is_local: bool = False  # of one rank


def nothing(path: Path) -> None:
    pass


def by_us(state: dict[str, Any], **options: Any) -> Callable[[Path], None]:
    options = {"workers": 2, "slot_bytes": 256 << 10, **options}
    return lambda path: save(state, path, options=WriteOptions(**options))


def of(save: Callable[[dict[str, Any], Path], object], state: Any = NEW) -> Callable[[Path], None]:
    return lambda path: (new_arena(), save(state, path))[0]


def through_the_page_cache_alone(path: Path) -> None:
    """As where there is neither O_DIRECT nor sync_file_range: nothing is written back early."""
    _C.arm_fault(0, errno.EOPNOTSUPP, "sync_file_range")
    by_us(NEW, direct_io=False, workers=1, slot_bytes=1 << 20)(path)
    _C.disarm_fault()


def into_a_directory_just_made(path: Path) -> None:
    path.mkdir(parents=True)
    by_us(NEW)(path)


def killed_when_it_had_made_one(path: Path) -> None:
    """What a first save leaves that was killed between a `mkdir` and the fsync behind it."""
    path.parents[1].mkdir()


def many_files_and_leftovers(path: Path) -> None:
    """What the next save removes: each file of the old checkpoint, and those of one that failed."""
    a_file_each(OLD, path)
    for name in ("__0_7.0123456789ab.distcp", "__1_0.distcp", ".metadata.0123456789ab.tmp"):
        (path / name).write_bytes(bytes(10_000))


def killed_behind_its_rename(path: Path) -> None:
    """What a save leaves that was killed before it could remove what it replaced."""
    by_us(NEXT)(path)
    replaced = data_files(path)[0]
    (path / replaced).rename(path / "kept")
    by_us(OLD)(path)
    (path / "kept").rename(path / replaced)
    (path / ".dcpx.lock").write_text(f"host=here pid=1 boot={lock.boot_id()}\n")


SCENARIOS = {
    "first": Scenario(nothing, by_us(NEW), "none"),
    "first, buffered": Scenario(nothing, by_us(NEW, direct_io=False), "none"),
    "first, page cache alone": Scenario(nothing, through_the_page_cache_alone, "none"),
    "first, into an empty directory": Scenario(nothing, into_a_directory_just_made, "none"),
    "first, after one that was killed": Scenario(killed_when_it_had_made_one, by_us(NEW), "none"),
    "first, rank-local": Scenario(nothing, of(rank_local), "none", True),
    "first, in the background": Scenario(nothing, of(background), "none"),
    "over ours": Scenario(by_us(OLD), by_us(NEW)),
    "over ours, buffered": Scenario(by_us(OLD), by_us(NEW, direct_io=False)),
    "over ours, a file each": Scenario(many_files_and_leftovers, of(a_file_each)),
    "over stock's": Scenario(of(of_stock, OLD), by_us(NEW)),
    "over ours, after one that was killed": Scenario(killed_behind_its_rename, by_us(NEW)),
    "over ours, rank-local": Scenario(of(rank_local, OLD), of(rank_local), "old", True),
    "rank-local replaced": Scenario(of(rank_local, OLD), by_us(NEW)),
}


# ---- What must turn a test red ------------------------------------------------------------------


def unlink_first(where: Path) -> None:
    """`.metadata` goes before the new one is renamed to it, as stock does."""
    rename = directory.Directory.rename

    def unlink_and_rename(self: directory.Directory, old: str, new: str) -> None:
        self.unlink(new)
        rename(self, old, new)

    directory.Directory.rename = unlink_and_rename  # type: ignore[method-assign]


def reuse_a_name(where: Path) -> None:
    """The new file has the name of the old one, which is gone as if it were truncated."""
    taken = data_files(where)[0]

    def names(*args: Any, **kwargs: Any) -> tuple[str, ...]:
        (where / taken).unlink()
        return (taken,)

    write_files.data_file_names = names


# And those that leave out one fsync: "no fsync of", and of what (power_cuts.fsyncs_of).
MUTANTS = {"unlink first": unlink_first, "reuse a name": reuse_a_name}
