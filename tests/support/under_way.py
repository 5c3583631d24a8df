"""Notes which tests are under way in the file that DCPX_UNDER_WAY names (requirements/speak.py).

One line a change, `KIND TIME TEXT`: `stage` says what comes before and after the tests, `total` how
many there are, `start` and `end` name one, after `over` nothing is to be said. With pytest-xdist
its controller notes them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterable

import pytest

# Taken out: of this run, not of those that its tests start.
_FILE = os.environ.pop("DCPX_UNDER_WAY", "")


def pytest_configure(config: pytest.Config) -> None:
    if _FILE and not hasattr(config, "workerinput"):
        has_workers = config.getoption("dist", "no") != "no"
        config.pluginmanager.register(_Controller() if has_workers else _Notes())


class _Notes:
    """The notes of a run in one process."""

    def __init__(self) -> None:
        self._descriptor = os.open(_FILE, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self.note("stage", "pytest starts")

    def note(self, kind: str, text: object) -> None:
        os.write(self._descriptor, f"{kind} {time.monotonic()} {text}\n".encode())

    def pytest_unconfigure(self) -> None:
        os.close(self._descriptor)

    def pytest_collection(self) -> None:
        self.note("stage", "collecting tests")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.nodeid.endswith(".py"):
            self.note("stage", f"collecting tests, {report.nodeid} is read")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.note("total", len(session.items))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.note("start", nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.note("end", nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self) -> Generator[None, None, None]:
        self.note("stage", "all tests are done, what they shared is closed")
        yield
        self.note("stage", "the report")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self) -> Generator[None, None, None]:
        yield
        self.note("over", "the closing line is the last one")


class _Controller(_Notes):
    """The notes of a run whose tests are in workers of pytest-xdist."""

    def __init__(self) -> None:
        super().__init__()
        self._workers = self._ready = self._read = 0

    def pytest_xdist_setupnodes(self, specs: Iterable[object]) -> None:
        self._workers = len(list(specs))
        self.note("stage", f"{self._workers} workers start")

    def pytest_testnodeready(self) -> None:
        self._ready += 1
        self.note("stage", f"{self._ready} of {self._workers} workers have started")

    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._read += 1
        if self._read < self._workers:
            self.note("stage", f"{self._read} of {self._workers} workers have collected tests")
        elif self._read == self._workers:
            self.note("total", len(ids))

    def pytest_handlecrashitem(self, crashitem: str) -> None:
        self.note("end", crashitem)
