"""What the tests spend: CPU and wall seconds by folder, file or test, and on what.

    python tests/support/costs.py [--by folder|file|test] [--most N] [PYTEST ARGUMENT ...]

Runs pytest with itself as a plugin; arguments are pytest's (none: all of `make test`). CPU seconds
are of the process that runs the test, of the children that it waited for, and of what is forked
from the warm parent (warm.py): all of them. Beside them, of all processes, those killed included:

    imports    of torch, each with the CPU seconds that one took on this machine, measured first
    starts     of programs, forks not counted
    compiling  CPU seconds of compilers, linkers and mypy
    fsync      calls, and the wall seconds in them; all threads of all processes together
    sleeping   wall seconds in sleeps, that is in waits for no event

What a session shares, such as a server of a store, is counted where it ends: with the last test.
A test that preloads a library of its own is not looked into.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHIM = Path(__file__).with_name("cost_shim.c")
PAGE = ("starts", "imports", "compiling", "syncs", "sync_s", "sleeps", "sleeping")
NANOSECONDS = {"compiling", "sync_s", "sleeping"}
_TICKS = os.sysconf("SC_CLK_TCK")


# ---- The plugin ---------------------------------------------------------------------------------


class Costs:
    """Notes what each test of this process spends, a line each."""

    def __init__(self, folder: Path, shim: ctypes.CDLL) -> None:
        path = folder / f"{os.getpid()}.page"
        shim.costs_open(os.fsencode(path))
        os.environ["DCPX_COSTS_PAGE"] = str(path)
        self._page, self._lines = path, folder / f"{os.getpid()}.jsonl"

    def _now(self) -> dict[str, float]:
        own, children = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        cpu = own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
        counts = memoryview(self._page.read_bytes()).cast("Q")
        found = {
            name: count / 1e9 if name in NANOSECONDS else float(count)
            for name, count in zip(PAGE, counts, strict=True)
        }
        return {"wall": time.monotonic(), "cpu": cpu + _warm_cpu_s(), **found}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        before = self._now()
        result = yield
        spent = {name: value - before[name] for name, value in self._now().items()}
        with self._lines.open("a") as file:
            file.write(json.dumps({"test": item.nodeid, **spent}) + "\n")
        return result


def _warm_cpu_s() -> float:
    """Returns the CPU seconds of the process that forks and of its children that have ended."""
    warm = sys.modules.get("support.warm")
    if warm is None or not warm.warm_parent.cache_info().currsize:
        return 0.0
    try:
        text = Path(f"/proc/{warm.warm_parent().pid}/stat").read_text()
    except FileNotFoundError:
        return 0.0  # it has ended, and is among the children
    return sum(map(int, text.rpartition(")")[2].split()[11:15])) / _TICKS


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or config.getoption("numprocesses", None) in (None, 0):
        folder = Path(os.environ["DCPX_COSTS"])
        config.pluginmanager.register(Costs(folder, ctypes.CDLL(os.environ["LD_PRELOAD"])))


# ---- The command --------------------------------------------------------------------------------


def _import_s() -> float:
    """Returns the CPU seconds of an `import torch` on this machine, with its process."""
    code = "import torch, time; print(time.process_time())"
    command = [sys.executable, "-c", code]
    ended = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(3)]
    return sorted(float(each.stdout) for each in ended)[1]


def table(rows: list[dict[str, Any]], key: Callable[[str], str], most: int, import_s: float) -> str:
    """Returns what was spent by `key` of a test's name, most CPU seconds first."""
    sums: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for row in rows:
        for name in (key(row["test"]), "in all"):
            sums[name].update({k: v for k, v in row.items() if k != "test"}, cases=1)
    form = "{:>6} {:>8} {:>8} {:>8} {:>8} {:>7} {:>9} {:>7} {:>7} {:>8}  {}"
    heads = ("cases", "CPU s", "wall s", "imports", "CPU s", "starts", "compiling", "fsyncs")
    lines = [form.format(*heads, "s", "sleeping", "")]
    for name, of in sorted(sums.items(), key=lambda each: -each[1]["cpu"])[: most + 1]:
        imports = int(of["imports"])
        figures: tuple[Any, ...] = (of["cases"], f"{of['cpu']:.1f}", f"{of['wall']:.1f}", imports)
        figures += f"{imports * import_s:.1f}", int(of["starts"]), f"{of['compiling']:.1f}"
        figures += int(of["syncs"]), f"{of['sync_s']:.1f}", f"{of['sleeping']:.1f}"
        lines.append(form.format(*figures, name))
    return "\n".join(lines)


def _folder(test: str) -> str:
    return test.split("::")[0].rpartition("/")[0]


def _file(test: str) -> str:
    return test.split("::")[0]


KEYS: dict[str, Callable[[str], str]] = {"folder": _folder, "file": _file, "test": str}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--by", choices=KEYS, default="folder")
    parser.add_argument("--most", type=int, default=40, help="rows (40)")
    given, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        shim = Path(folder, "shim.so")
        options = ["-O2", "-Wall", "-Werror", "-shared", "-fPIC"]
        subprocess.run(["cc", *options, "-o", shim, str(SHIM), "-ldl"], check=True)
        environment = {
            **os.environ, "LD_PRELOAD": str(shim), "DCPX_COSTS": folder,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
        }  # fmt: skip
        command = [sys.executable, "-m", "pytest", "-p", "support.costs", *arguments]
        code = subprocess.run(command, env=environment, check=False).returncode
        files = Path(folder).glob("*.jsonl")
        rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    print(table(rows, KEYS[given.by], given.most, _import_s()))
    return code


if __name__ == "__main__":
    sys.exit(main())
