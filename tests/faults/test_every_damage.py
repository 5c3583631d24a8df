"""A checkpoint of two ranks, damaged in every way there is: right bytes or an error, and `verify`
names file and range. Samples by default; with DCPX_EVERY_POINT=1 every point.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support import machine
from support.machine import EVERY_POINT
from support.rank_saves import save_ranks, sharded
from support.saves import data_files, load, read_footer
from support.states import assert_same
from support.verified import covers
from torch.distributed.checkpoint.api import CheckpointException

import torch_dcpx as dcpx
from torch_dcpx import DcpxError

PAGE = 4096
ZEROED = 512  # bytes


def state_of(seed: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    matrix = torch.randn(10, 3, generator=g)
    rest = {"text": f"text {seed}", "empty": torch.zeros(0)}
    return {"m": matrix, "b": torch.randn(5, generator=g), **rest}


class Point(NamedTuple):
    """One thing to do to a file, and where the first byte is that differs afterwards."""

    kind: str
    name: str
    change: Callable[[bytes], bytes] | None  # None: the file goes
    at: int


def replaced(at: int, new: bytes) -> Callable[[bytes], bytes]:
    return lambda whole: whole[:at] + new + whole[at + len(new) :]


def flips(name: str, whole: bytes, rng: random.Random) -> Iterator[Point]:
    for at, byte in enumerate(whole):
        yield Point("flip", name, replaced(at, bytes([byte ^ 1 << rng.randrange(8)])), at)


def cuts(directory: Path, name: str, whole: bytes) -> Iterator[Point]:
    ends = {0, 1, len(whole) - 1, *range(0, len(whole), PAGE)}
    if name != ".metadata":
        footer = read_footer(directory / name)
        ends |= {footer.data_bytes, footer.index_offset, footer.table_offset, footer.tail_offset}
        ends |= {footer.page_checks_offset, footer.index_offset + footer.index_bytes}
        for row in footer.rows:
            places = row.item_offset, row.item_offset + row.item_bytes
            ends |= {*places, row.payload_offset, row.payload_offset + row.payload_bytes}
    for end in sorted(ends):
        yield Point("cut", name, lambda data, end=end: data[:end], end)
    for more in (1, 64, PAGE):
        yield Point("grow", name, lambda data, more=more: data + bytes(more), len(whole))


def zeros(name: str, whole: bytes) -> Iterator[Point]:
    for begin in range(0, len(whole), ZEROED):
        block = whole[begin : begin + ZEROED]
        if any(block):
            first = next(at for at, byte in enumerate(block) if byte)
            yield Point("zero", name, replaced(begin, bytes(len(block))), begin + first)


def instead(path: Path) -> Callable[[bytes], bytes]:
    content = path.read_bytes()
    return lambda _: content


def points(directory: Path, other: Path, seed: int) -> list[Point]:
    """Returns everything that is to be done to the files of `directory`."""
    rng = random.Random(seed)
    found: list[Point] = []
    names = [".metadata", *data_files(directory)]
    for name in names:
        whole = (directory / name).read_bytes()
        found += flips(name, whole, rng)
        found += cuts(directory, name, whole)
        found += zeros(name, whole)
        found.append(Point("delete", name, None, 0))
        found.append(Point("of another save", name, instead(other / name), 0))
        beside = names[1 + names.index(name) % (len(names) - 1)]
        if name != ".metadata" and beside != name:
            found.append(Point("of another rank", name, instead(directory / beside), 0))
    return found


def sample(found: list[Point], count: int, seed: int) -> list[Point]:
    """Returns some of each kind, of flips more."""
    by_kind: dict[str, list[Point]] = {}
    for point in found:
        by_kind.setdefault(point.kind, []).append(point)
    rng = random.Random(seed)
    counts = {kind: 8 * count if kind == "flip" else count for kind in by_kind}
    return [
        point
        for kind, points in by_kind.items()
        for point in rng.sample(points, min(counts[kind], len(points)))
    ]


def outcome(directory: Path, state: dict[str, Any], point: Point) -> str:
    """Returns what a load gives: "right", "refused", or what must not be."""
    try:
        found = load(state, directory)
    except CheckpointException as failure:
        error = failure.failures[0][0]
        is_named = point.kind != "flip" or error.path == str(directory / point.name)
        return "refused" if isinstance(error, DcpxError) and is_named else repr(error)
    try:
        assert_same(state, found)
    except AssertionError:
        return "silent"
    return "right"


def try_point(directory: Path, point: Point, state: dict[str, Any]) -> tuple[str, str]:
    """Returns what a load gives, and whether `verify` has "found" or "missed" the damage."""
    path = directory / point.name
    whole = path.read_bytes()
    path.unlink()
    try:
        if point.change is not None:
            path.write_bytes(point.change(whole))
        report = dcpx.verify(directory)
        got = outcome(directory, state, point)
    finally:
        path.write_bytes(whole)
    name, faults = point.name, {finding.file for finding in report.faults}
    if point.kind == "of another save" and name == ".metadata":
        # A whole `.metadata`: what is wrong is every file that it does not mean.
        return got, "found" if faults == set(data_files(directory)) else "missed"
    # What a file was cut behind is its last byte: without a size to compare, more is not known.
    places = range(point.at - (point.kind == "cut"), point.at + 1)
    if point.kind == "zero":  # of several things in a block, the first that is wrong is named
        places = range(point.at, point.at - point.at % ZEROED + ZEROED)
    is_found = any(covers(finding, name, at) for finding in report.findings for at in places)
    if got == "refused":
        is_found = is_found and name in faults
    if name != ".metadata":
        is_found = is_found and faults <= {name}
    return got, "found" if is_found else "missed"


def sweep(tmp_path: Path, seed: int, count: int | None) -> None:
    """Tries `count` points of each kind, None: all; prints the table."""
    whole, other = state_of(1), state_of(2)
    ckpt = tmp_path / "ckpt"
    save_ranks(sharded(whole, 2), ckpt)
    save_ranks(sharded(other, 2), tmp_path / "other")
    tried = points(ckpt, tmp_path / "other", seed)
    if count is not None:
        tried = sample(tried, count, seed)
    table: Counter[tuple[str, str, str]] = Counter()
    bad = []
    for point in tried:
        got, found = try_point(ckpt, point, whole)
        table[point.kind, got, found] += 1
        if found == "missed" or got not in ("right", "refused"):
            bad.append((point.kind, point.name, point.at, got, found))
    print(table)
    assert not bad, f"{len(bad)} bad points, such as {bad[:10]}"
    assert dcpx.verify(ckpt).ok
    shutil.rmtree(ckpt)


@pytest.mark.usefixtures("no_leaks")
def test_some_damage_of_every_kind_is_found(tmp_path: Path, seed: int) -> None:
    sweep(tmp_path, seed, machine.points(5))


@pytest.mark.slow
@pytest.mark.timeout(3600 if EVERY_POINT else 1200)
def test_much_damage_of_every_kind_is_found(tmp_path: Path, seed: int) -> None:
    sweep(tmp_path, seed, None if EVERY_POINT else machine.points(60))
