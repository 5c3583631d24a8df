"""Clocks around functions, for tables of what each step of a save or load costs in Python."""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple


class Step(NamedTuple):
    """A function that is timed."""

    title: str
    owner: Any
    name: str


@contextmanager
def timed(steps: Sequence[Step], seconds: dict[str, float]) -> Iterator[None]:
    """Adds up the time inside of each step while the block runs."""
    originals = [getattr(step.owner, step.name) for step in steps]

    def clocked(title: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # DCP looks at signatures
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[title] += time.perf_counter() - began

        return call

    for step, function in zip(steps, originals, strict=True):
        setattr(step.owner, step.name, clocked(step.title, function))
    try:
        yield
    finally:
        for step, function in zip(steps, originals, strict=True):
            setattr(step.owner, step.name, function)


def medians(
    steps: Sequence[Step],
    items: int,
    rounds: int,
    run: Callable[[], object],
    clear: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Returns microseconds per 1,000 items of each step of `run`; its first run is not counted."""
    found: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds + 1):
        seconds: dict[str, float] = dict.fromkeys((step.title for step in steps), 0.0)
        with timed(steps, seconds):
            run()
        clear()
        for title, value in seconds.items():
            if number > 0:
                found[title].append(value / items * 1e9)
    return {title: statistics.median(values) for title, values in found.items()}


def arguments(doc: str, item_bytes: int) -> argparse.ArgumentParser:
    """Returns the parser of what the tables take."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--items", type=int, default=20_000)
    parser.add_argument("--item-bytes", type=int, default=item_bytes)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the file system to use")
    return parser


def print_table(
    args: argparse.Namespace, measure: Callable[[int, int, int, Path], dict[str, float]]
) -> None:
    """Prints microseconds per 1,000 items of each step."""
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        found = measure(args.items, args.item_bytes, args.rounds, Path(folder))
    print(f"| step, {args.items:,} x {args.item_bytes:,} B | us per 1,000 items |\n| --- | --- |")
    for title, value in found.items():
        print(f"| {title} | {value:,.0f} |")
