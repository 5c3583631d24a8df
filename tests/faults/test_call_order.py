"""The order of a save's calls, as docs/explain/commit.md has it: it needs every fsync.

A power cut shows what one file system loses today. These rules say what any may lose: what was
written and not fsynced, names in a directory that was not. The calls are recorded by the shim.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from cut_saves import NEVER, NEW, SCENARIOS, Scenario, by_us, nothing
from forks import run_alone
from support.call_shim import Action, Shim, compiled

Calls = list[tuple[str, str]]  # name, and the path that it was on
FILLS = ("open", "write", "pwrite", "fallocate", "ftruncate")  # and their 64-bit names


def calls_of(library: Path, folder: Path) -> dict[str, Calls]:
    """Returns scenario (cut_saves.py) -> the changing calls of its save."""
    shim, found = Shim(library), {}
    more = {"not durable": Scenario(nothing, by_us(NEW, durability="none"), "none")}
    for name, scenario in {**SCENARIOS, **more}.items():
        tree = folder / str(len(found))
        ckpt = tree / "a" / "b" / "ckpt"
        tree.mkdir()
        scenario.prepare(ckpt)
        shim.watch(tree)
        shim.arm(NEVER, Action.COUNT)
        scenario.save(ckpt)
        shim.disarm()
        found[name] = shim.calls()
    return found


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Calls]:
    folder = tmp_path_factory.mktemp("order").resolve()
    library = compiled(folder)
    found: dict[str, Calls] = run_alone(calls_of, library, folder, library=library)
    return found


def is_fsync(call: tuple[str, str]) -> bool:
    return call[0] in ("fsync", "fdatasync")


def parent(path: str) -> str:
    return path.rpartition("/")[0]


def offences(calls: Calls, scenario: str) -> list[str]:
    """Returns what in these calls a power cut could make a loss of."""
    renames = [n for n, (call, _) in enumerate(calls) if call.startswith("rename")]
    if len(renames) != 1:
        return [f"{len(renames)} renames"]
    commit, ckpt = renames[0], parent(calls[renames[0]][1])
    found = []

    def needs(path: str, after: int, before: int, why: str) -> None:
        if not any(is_fsync(call) and call[1] == path for call in calls[after + 1 : before]):
            found.append(f"no fsync of {path or '/'} in ({after}, {before}): {why}")

    created = [
        (n, path)
        for n, (call, path) in enumerate(calls)
        if call.startswith("open") and not path.endswith(".lock")
    ]
    for begin, path in created:
        last = max(n for n, (call, on) in enumerate(calls) if on == path and call.startswith(FILLS))
        needs(path, last, commit, "what was written, before metadata says that it is there")
        if path.endswith(".distcp"):
            needs(ckpt, begin, commit, f"the name {path}, before metadata names it")
    if scenario.startswith(("first", "rank-local replaced")):  # no metadata of this name before
        needs(parent(ckpt), -1, commit, "the directory of the checkpoint")
    if scenario.startswith("first"):
        made = dict.fromkeys(path for call, path in calls if call.startswith("mkdir"))
        for path in made if "empty directory" not in scenario else ():  # there, made by the caller
            needs(parent(path), calls.index(("mkdir", path)), commit, f"the directory {path}")
    if scenario == "first, after one that was killed":  # before the fsync to be made up for
        needs("", -1, commit, "the directory that one made")
    needs(ckpt, commit, len(calls), "the rename, before the save returns")
    for n, (call, path) in enumerate(calls):
        if call.startswith("unlink"):
            # What goes before the commit is a leftover by the word of metadata that a killed save
            # may have renamed; what goes behind it, by that of this save's.
            needs(ckpt, -1 if n < commit else commit, n, f"the rename, before {path} goes")
    return found


@pytest.mark.slow
def test_save_fsyncs_what_a_power_cut_could_lose_before_it_matters(
    recorded: dict[str, Calls],
) -> None:
    assert recorded.keys() >= {"first", "over ours", "over stock's", "over ours, rank-local"}
    for scenario, calls in recorded.items():
        if scenario != "not durable":
            assert offences(calls, scenario) == [], (scenario, calls)


def test_every_fsync_of_a_save_is_missed_when_it_is_left_out(recorded: dict[str, Calls]) -> None:
    count = 0
    for scenario, calls in recorded.items():
        for n in [n for n, call in enumerate(calls) if is_fsync(call)]:
            left_out = [*calls[:n], *calls[n + 1 :]]
            assert offences(left_out, scenario), f"{scenario}: without {n}, {calls[n]}"
            count += 1
    print(f"{count} fsyncs of {len(recorded)} saves, each missed")


def test_save_that_is_not_durable_offends(recorded: dict[str, Calls]) -> None:
    assert len(offences(recorded["not durable"], "first")) >= 6


def test_removal_before_the_commit_is_durable_offends(recorded: dict[str, Calls]) -> None:
    calls = recorded["over ours"]
    unlink = next(n for n, (call, _) in enumerate(calls) if call.startswith("unlink"))
    earlier = [calls[unlink], *calls[:unlink], *calls[unlink + 1 :]]
    assert len(offences(earlier, "over ours")) == 1
