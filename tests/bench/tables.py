"""The result of a bench as Markdown: printed, or put between its marks of a page, which it makes.

python tests/bench/tables.py save.json --page docs/develop/measurements.md
python tests/bench/plan.py >plan.txt
python tests/bench/tables.py plan.txt --command tests/bench/plan.py --page ...
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cases import ALL_CASES
from machine import ROOT, describe_machine

SIDES = (
    "raw", "engine", "ours", "dcpx", "ours_unverified", "stock_files", "stock", "stock2",
    "safetensors", "dcp_alone", "ours_nosync", "stock_nosync",
    "save", "live", "stored", "load", "load_and_save",
)  # fmt: skip
MIB = 1 << 20
# The page's parts: what these benches print, in this order.
PARTS = (
    "save", "load", "save_steps", "load_steps", "async_save", "async_first", "plan", "balance",
    "export", "frameworks", "objects", "object_gaps",
)  # fmt: skip
HEAD = "<!-- generated: programs of tests/bench print these figures -->\n# Measurements\n"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float) -> str:
    """Returns three digits that count."""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def spread_text(value: dict[str, float]) -> str:
    if value["min"] == value["max"]:
        return number(value["median"])
    return f"{number(value['median'])} ({number(value['min'])}-{number(value['max'])})"


def time_text(seconds: dict[str, float]) -> str:
    """Returns median, least and most, in one unit."""
    if seconds["median"] >= 0.1:
        return f"{spread_text(seconds)} s"
    return f"{spread_text({name: 1000 * value for name, value in seconds.items()})} ms"


def title(result: dict[str, Any]) -> str:
    name = ALL_CASES[result["case"]].title
    if result.get("cache"):
        return f"{name}, {result['cache']}"
    return name if result["ranks"] == 1 else f"{name}, {result['ranks']} ranks"


def seconds_table(results: Sequence[dict[str, Any]]) -> str:
    """One row a case and side: time, GB/s, and how many times as fast ours is."""
    rows = []
    for result in results:
        for side in SIDES:
            seconds = result["seconds"].get(side)
            if seconds is None:
                continue
            speed = result["bytes"] / seconds["median"] / 1e9
            ratio = result["ours_speed_of"].get(side)
            rows.append([
                title(result), side, str(len(result["times"][side])), time_text(seconds),
                number(speed) if speed > 0.02 else "", spread_text(ratio) if ratio else "",
            ])  # fmt: skip
    header = ["state", "side", "rounds", "time (min-max)", "GB/s", "speed of ours to it"]
    return table(header, rows)


def target_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        name = row["title"] if row["side"] == "engine" else f"{row['side']}: {row['title']}"
        bound = f"{'<=' if row['is_most'] else '>='} {row['bound']:g}"
        reached = "yes" if row["is_reached"] else "**no**"
        state = title({"ranks": 1, **row})
        lines.append([state, name, bound, spread_text(row["value"]), reached])
    return table(["state", "figure", "to reach", "measured (min-max)", "reached"], lines)


def meter_table(results: Sequence[dict[str, Any]]) -> str:
    rows = []
    for result in results:
        for side, meters in result.get("meters", {}).items():
            peak, after = meters.get("extra_peak_bytes"), meters.get("rss_bytes_after")
            counting = meters.get("counting", {})
            rows.append([
                title(result), side, "" if peak is None else number(peak / MIB),
                f"{after['3'] / MIB:.1f}, {after['30'] / MIB:.1f}" if after else "",
                f"{counting['default']:.2f}" if "default" in counting else "",
                f"{counting['one worker']:.2f}" if "one worker" in counting else "",
            ])  # fmt: skip
    header = [
        "state", "side", "peak extra MiB", "MiB after saves 3, 30",
        "counting thread", "... one worker",
    ]  # fmt: skip
    return table(header, rows)


def bytes_table(results: Sequence[dict[str, Any]]) -> str:
    """What each side read, in MiB: asked for, by the engine's count and by the kernel's."""
    rows = []
    for result in results:
        read_by_side = result.get("bytes_read", {})
        for side in SIDES:
            read = read_by_side.get(side)
            if read is None or not result["bytes"]:
                continue
            counted = [read.get("engine_read"), read["rchar"], read["read_bytes"]]
            rows.append([
                title(result), side, number(result["bytes"] / MIB),
                *("" if count is None else number(count / MIB) for count in counted),
                f"{(counted[0] or counted[1]) / result['bytes']:.3f}",
            ])  # fmt: skip
    header = [
        "state", "side", "needed MiB", "engine read", "rchar", "read from disk", "read / needed",
    ]  # fmt: skip
    return table(header, rows)


def machine_line(commands: Iterable[str], machine: dict[str, Any]) -> str:
    m = machine
    shown = ", ".join(f"`{command}`" for command in commands)
    return (
        f"{shown} on {m['cores']} cores ({m['cpu']}), {m['memory_gib']} GiB, Linux "
        f"{m['kernel']}, {m['file_system']}; Python {m['python']}, torch {m['torch']}, torch-dcpx "
        f"{m['torch-dcpx']} at {m['commit']}, safetensors {m['safetensors']}."
    )


def as_markdown(report: dict[str, Any]) -> str:
    """Returns the tables of a report."""
    timed = [result for result in report["results"] if result["seconds"]]
    parts = [machine_line(report["commands"], report["machine"])]
    if report["bench"] == "load" and not any(r.get("cache") == "cold" for r in timed):
        parts.append("All was loaded from the page cache: to empty it takes root, and full size.")
    if report["size"] != "full":
        parts.append(f"Sizes are `{report['size']}`: far smaller than the titles say.")
    if not report["has_safetensors"]:
        parts.append("safetensors is not installed: its side is left out.")
    raw = {title(r): r["raw"] for r in timed if "raw" in r}
    if report["targets"]:
        parts += ["### Figures to reach", target_table(report["targets"])]
    if timed:
        parts += ["### Times", seconds_table(timed)]
    if raw:
        found = "; ".join(
            f"{name}: {r['config']}" + ("" if r["is_direct"] else ", buffered")
            for name, r in raw.items()
        )
        parts.append(f"The limit's best configuration, by probe: {found}.")
    if any("bytes_read" in result for result in timed):
        parts += ["### Bytes", bytes_table(timed)]
    if any("meters" in result for result in report["results"]):
        parts += ["### Memory, and a counting thread", meter_table(report["results"])]
    return "\n\n".join(parts) + "\n"


def printed_text(printed: str, command: str) -> str:
    """Returns what a bench without a JSON report printed, under its command and this machine."""
    shown = printed if "| --- |" in printed else f"```text\n{printed}```\n"
    return f"{machine_line([f'python {command}'], describe_machine(ROOT))}\n\n{shown}"


def marks(bench: str) -> tuple[str, str]:
    return f"<!-- {bench}.py: begin -->\n", f"<!-- {bench}.py: end -->"


def new_page() -> str:
    """Returns the page without any result."""
    return HEAD + "".join(f"\n## {name}.py\n{''.join(marks(name))}\n" for name in PARTS)


def part_of(page: str, bench: str) -> str:
    """Returns what stands between the marks of a bench."""
    begin, end = marks(bench)
    _, has_begin, rest = page.partition(begin)
    part, has_end, _ = rest.partition(end)
    if not has_begin or not has_end:
        raise ValueError(f"the page lacks {begin.strip()} or {end}")
    return part


def put_on_page(page: str, tables: str, bench: str) -> str:
    """Returns the page with `tables` between the bench's marks."""
    begin, end = marks(bench)
    return page.replace(f"{begin}{part_of(page, bench)}{end}", f"{begin}{tables}{end}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("report", type=Path, help="JSON, or what a bench printed, named like it")
    parser.add_argument("--command", help="which printed it, for a report that is no JSON")
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    text = args.report.read_text()
    if args.report.suffix == ".json":
        report = json.loads(text)
        bench, tables = report["bench"], as_markdown(report)
    elif args.command:
        bench, tables = args.report.stem, printed_text(text, args.command)
    else:
        parser.error(f"{args.report} is no JSON: give the --command that printed it")
    if args.page:
        page = args.page.read_text() if args.page.exists() else new_page()
        args.page.write_text(put_on_page(page, tables, bench))
    else:
        print(tables)


if __name__ == "__main__":
    main()
