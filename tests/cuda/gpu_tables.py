"""The summary that a run ends with, and the page of its figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gpu_runner import OK, Result, is_table

REHEARSAL = "REHEARSAL on a fake driver: no figure here is one of a GPU"


def summary_lines(results: Sequence[Result], is_rehearsal: bool) -> list[str]:
    """Returns a line a stage, and one of them all."""
    lines = [f"{'stage':10} {'outcome':10} {'seconds':>7}  what"]
    for result in results:
        what = result.reason or result.figures.get("short", "")
        lines.append(f"{result.stage:10} {result.outcome:10} {result.seconds:7.1f}  {what[:200]}")
    counts = [result.outcome for result in results]
    total = ", ".join(f"{counts.count(name)} {name}" for name in dict.fromkeys(counts))
    seconds = sum(result.seconds for result in results)
    lines.append(f"{total or 'no stage'} in {seconds:.0f} s")
    if is_rehearsal:
        lines.append(REHEARSAL)
    return lines


def figures_page(results: Sequence[Result], is_rehearsal: bool) -> str:
    """Returns the figures of all stages as Markdown, under the card's name."""
    by_stage = {result.stage: result for result in results}
    lines: list[str] = []
    if is_rehearsal:
        lines += [f"**{REHEARSAL}.**", ""]
    lines += [f"### {_machine(by_stage)}", ""]
    for result in results:
        tables: dict[str, Any] = {
            key: value for key, value in result.figures.items() if is_table(value)
        }
        if not tables:
            continue
        if result.outcome != OK:
            lines += [f"`{result.stage}`: {result.outcome}, {result.reason}", ""]
        for title, table in tables.items():
            lines += [f"#### {title}", "", *_table(table["columns"], table["rows"]), ""]
    return "\n".join(lines).rstrip() + "\n"


def _machine(by_stage: dict[str, Result]) -> str:
    found = by_stage["doctor"].figures if "doctor" in by_stage else {}
    text = "{gpu}, driver {driver}, torch {torch}, Python {python}, {cores} cores, {memory_gib} GiB"
    try:
        return text.format(**found)
    except KeyError:
        return "an unknown GPU: the doctor did not end"


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield "|" + " --- |" * len(columns)
    for row in rows:
        yield f"| {' | '.join(str(cell) for cell in row)} |"
