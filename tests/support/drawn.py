"""Which tests a run takes, in which order and until when: options of `make test-all` and `.ci/run`.

    --shard=K/N            the K-th of N parts that take equally long and together are everything
    --core                 the tests of tests/core.txt alone, the longest first
    --draw=TEXT            the others, in an order that TEXT draws
    --until=TIME           no test begins after it (seconds since 1970); what did not begin is no
                           failure, and is named in build/ci/not_run.txt
    --too-late             collects and begins none: names those that tests/durations.json has
    --durations-to=FILE    notes the seconds of slow tests there, as in tests/durations.json
    --began=TIME           when the run began; that file has the time from then to these tests, too

A test that has begun ends.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import re
import time
from pathlib import Path

import pytest
from support.machine import slowness

TESTS = Path(__file__).resolve().parents[1]
NOT_RUN = Path("build", "ci", "not_run.txt")  # of the tree's root
_MARKS = ("slow", "root")


def core() -> list[str]:
    """Returns the tests of tests/core.txt."""
    lines = (TESTS / "core.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def durations() -> dict[str, float]:
    """Returns the seconds that each slow test took (tests/durations.json, `make durations`)."""
    found: dict[str, float] = json.loads((TESTS / "durations.json").read_text())["seconds"]
    return found


def order(names: list[str], text: str) -> list[str]:
    """Returns the names that are not of the core, as `text` draws them."""
    others = set(names) - set(core())
    return sorted(others, key=lambda name: hashlib.sha256(f"{text} {name}".encode()).digest())


def shard(names: list[str], slow: set[str], number: int, count: int) -> set[str]:
    """Returns the tests of one of `count` parts. Fast tests of a file stay together."""
    known = durations()
    mean = sum(known.values()) / len(known)
    long = {name: known.get(name, mean) for name in names if name in slow}
    units: dict[str, list[str]] = collections.defaultdict(list)
    for name in names:
        units[name if name in long else name.partition("::")[0]].append(name)
    seconds = {unit: long.get(unit, 0.05 * len(units[unit])) for unit in units}
    filled = [0.0] * count
    taken: set[str] = set()
    for unit in sorted(units, key=lambda unit: (-seconds[unit], unit)):
        part = filled.index(min(filled))
        filled[part] += seconds[unit]
        if part == number - 1:
            taken.update(units[unit])
    return taken


def _shard_of(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is no part K/N, for example 3/8")
    return int(found[1]), int(found[2])


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("drawn", "which tests run, in which order, until when")
    group.addoption("--shard", type=_shard_of, metavar="K/N", help="one of N parts of the tests")
    group.addoption("--core", action="store_true", help="the tests of tests/core.txt alone")
    group.addoption("--draw", metavar="TEXT", help="the others, in an order that TEXT draws")
    group.addoption("--until", type=float, metavar="TIME", help="tests begin until then")
    group.addoption("--too-late", action="store_true", help="names tests, collects none")
    group.addoption("--durations-to", type=Path, metavar="FILE", help="notes tests' seconds")
    group.addoption("--began", type=float, metavar="TIME", help="when the run began")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.core:
        config.args = [f"{config.rootpath}/{name}" for name in core()]
    if config.option.too_late:
        config.args = []
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Record(config), "drawn")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    by_name = {item.nodeid: item for item in items}
    names = list(by_name)
    if config.option.shard is not None:
        slow = {name for name, item in by_name.items() if any(map(item.get_closest_marker, _MARKS))}
        taken = shard(names, slow, *config.option.shard)
        names = [name for name in names if name in taken]
    if config.option.core:
        seconds = durations()
        names.sort(key=lambda name: (-seconds.get(name, 0.0), name))
    if config.option.draw is not None:
        names = order(names, config.option.draw)
    config.hook.pytest_deselected(items=[by_name[name] for name in by_name.keys() - set(names)])
    items[:] = [by_name[name] for name in names]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Returns True, "done", for a test that is not to begin any more: pytest hears of no result.

    All later tests of this process are such, so no fixture of theirs is needed.
    """
    until = item.config.option.until
    return True if until is not None and time.time() > until else None


class _Record:
    """Notes which tests were there, which ran and how long. In the process that reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        too_late = config.option.too_late
        self._there: list[str] = order(list(durations()), "") if too_late else []
        self._seconds: collections.Counter[str] = collections.Counter()
        self._slow: set[str] = set()
        self._began_at = time.time()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._there = [item.nodeid for item in session.items] or self._there

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._there = list(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if any(mark in report.keywords for mark in _MARKS):
            self._slow.add(report.nodeid)

    def _not_begun(self) -> list[str]:
        return [name for name in self._there if name not in self._seconds]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if (
            self._config.option.too_late
            and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED
        ):
            session.exitstatus = pytest.ExitCode.OK
        if self._config.option.durations_to is not None:
            self._note_durations(self._config.option.durations_to)

    def _note_durations(self, path: Path) -> None:
        """Writes what was measured. Of a test that did not run, what the file had stays."""
        found = json.loads(path.read_text()) if path.is_file() else {"seconds": {}}
        if self._config.option.draw is not None:  # all are there, but those of the core
            there = {*self._there, *core()}
            found["seconds"] = {k: v for k, v in found["seconds"].items() if k in there}
            found["before_s"] = round(self._began_at - (self._config.option.began or 0))
        found["seconds"] |= {name: round(self._seconds[name], 2) for name in self._slow}
        found["slowness"] = slowness()
        path.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._config.option.until is None:
            return
        left, say = sorted(self._not_begun()), terminalreporter.write_line
        path = self._config.rootpath / NOT_RUN
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:  # what `make test` left is there
            file.writelines(f"{name}\n" for name in left)
        drawn = f", drawn by {self._config.option.draw}" if self._config.option.draw else ""
        say(
            f"{len(self._there) - len(left)} of {len(self._there)} tests ran{drawn}; "
            f"{len(left)} did not begin in the time ({NOT_RUN})"
        )
        files = collections.Counter(name.partition("::")[0] for name in left)
        for file, count in sorted(files.items()):
            say(f"  {count:4} of {file}")
        # Once more, what failed: of what a landing printed, its last lines may be all one can see.
        failed = [*terminalreporter.getreports("failed"), *terminalreporter.getreports("error")]
        for report in failed[:5]:
            say("\n".join([report.nodeid, *report.longreprtext.splitlines()[-12:]]))
