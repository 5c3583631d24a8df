"""docs/reference/options.md names every option of every call, with the defaults of the code."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.filesystem import SerializationFormat

import torch_dcpx as dcpx

DOC = Path(__file__).resolve().parents[2] / "docs" / "reference" / "options.md"
EVERYWHERE = "Arguments of each call"  # the heading of what all calls share
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
NAMED = {
    "TORCH_SAVE": SerializationFormat.TORCH_SAVE,
    "SIGTERM, SIGUSR1": inspect.signature(dcpx.CheckpointManager.save_on_signal)
    .parameters["signals"]
    .default,
}
REQUIRED = object()
MANAGER_CALLS = ("save", "resume", "dry_run", "export", "save_on_signal", "wait")
# What is made by us for the caller, or has one argument that says all.
NO_OPTIONS = {
    "CopyGuard", "Finding", "LazyTensor", "OpenCheckpoint", "PerRank", "Preemption", "SaveHandle",
}  # fmt: skip


def value_of(text: str) -> Any:
    """Returns the default that a cell of the table says."""
    text = text.strip()
    if not text:
        return REQUIRED
    if text.strip("`") in NAMED:
        return NAMED[text.strip("`")]
    if found := re.fullmatch(r"(\d+) (KiB|MiB|GiB)", text):
        return int(found[1]) * UNITS[found[2]]
    if text[0].isdigit():
        text = text.replace(",", "")
    return ast.literal_eval(text.strip("`"))


def defaults_of(cell: str, count: int) -> list[Any]:
    """Returns the defaults of `count` names, which may share one."""
    parts = re.findall(r"`[^`]+`", cell)
    if count > 1 and len(parts) == count:
        return [value_of(part) for part in parts]
    return [value_of(cell)] * count


def tables(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the heading and the defaults by name of each table of arguments or options."""
    heading, column, found = "", None, {}
    for line in [*text.splitlines(), "#"]:
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if column is not None and cells and not cells[0].startswith("---"):
            names = re.findall(r"`([^`]+)`", cells[0])
            found.update(zip(names, defaults_of(cells[column], len(names)), strict=True))
        elif cells and cells[0] in ("name", "argument"):
            column = cells.index("default")
        elif not cells and column is not None:
            yield heading, found
            column, found = None, {}
        if line.startswith("#"):
            heading = line.strip("# ")


def options_of(function: Any) -> dict[str, Any]:
    """Returns what may be left out of a call, and its defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def documented() -> dict[str, dict[str, Any]]:
    """Returns the tables by the name of each call in their headings."""
    found: dict[str, dict[str, Any]] = {}
    for heading, table in tables(DOC.read_text()):
        for name in re.findall(r"`([^`]+)`", heading) or [heading]:
            assert name not in found
            found[name] = table
    return found


def calls() -> dict[str, Any]:
    """Returns every public call by name: functions, classes, the manager's methods."""
    found = {}
    for name in set(dcpx.__all__) - NO_OPTIONS - {"__version__"}:
        value = getattr(dcpx, name)
        is_made_by_us = inspect.isclass(value) and (
            issubclass(value, BaseException) or name.endswith(("Report", "ResumeInfo"))
        )
        if not is_made_by_us and options_of(value):
            found[name] = value
    for name in MANAGER_CALLS:
        found[f"CheckpointManager.{name}"] = getattr(dcpx.CheckpointManager, name)
    return found


@pytest.mark.parametrize("name", sorted(calls()))
def test_every_option_is_in_the_table_with_its_default(name: str) -> None:
    if name in ("Merge", "Split", "Transpose"):  # that page has the rules of a KeyMap
        page = (DOC.parents[1] / "howto" / "export.md").read_text()
        fields = ", ".join(
            p.name if p.default is p.empty else f"{p.name}={p.default!r}"
            for p in inspect.signature(calls()[name]).parameters.values()
        )
        assert f"`{name}({fields})`" in page
        return
    found = documented()
    shared = found[EVERYWHERE]
    wanted = options_of(calls()[name])
    own = {key: value for key, value in found[name].items() if value is not REQUIRED}
    if inspect.isclass(call := calls()[name]) and "__init__" not in vars(call):
        wanted = {key: wanted[key] for key in own}  # torch's, which another torch may add to
    assert own == {key: value for key, value in wanted.items() if key not in shared}
    assert {key: wanted[key] for key in wanted if key in shared} == {
        key: shared[key] for key in wanted if key in shared
    }


def test_the_table_has_no_call_that_is_not_there() -> None:
    for name in documented():
        assert name in {EVERYWHERE, *calls()}


def test_methods_of_the_manager_with_options_are_all_known() -> None:
    methods = inspect.getmembers(dcpx.CheckpointManager, inspect.isfunction)
    with_options = {name for name, method in methods if name[0] != "_" and options_of(method)}
    assert with_options == set(MANAGER_CALLS)


def test_a_wrong_default_a_missing_and_a_foreign_name_are_seen() -> None:
    text = "## `load`\n| name | values | default | meaning |\n| --- | --- | --- | --- |\n{}\n"
    rows = {'| `strict`, `cast` | x | `True`, `"error"` | y |': {"strict": True, "cast": "error"}}
    rows["| `slot_bytes` | x | 2 MiB | y |"] = {"slot_bytes": 2 << 20}
    rows["| `timeout_s` | x | 1800 | y \\| z |"] = {"timeout_s": 1800}
    for row, expected in rows.items():
        assert list(tables(text.format(row))) == [("`load`", expected)]
    assert options_of(lambda a, b=1, *, c=None: (a, b, c)) == {"b": 1, "c": None}
