"""What every test shares: markers, the strict mode, seeds, fresh processes, the leak check.

Environment (set by the Makefile):
    DCPX_STRICT=1            a skip is a failure (make test-all); DCPX_ALLOW_SKIP=1 lifts it
    DCPX_REQUIRE_CUDA=1      a `cuda` test that cannot run is a failure
    DCPX_REQUIRE_INSTALLED=1 the tests must import an installed torch_dcpx, not this clone's
    DCPX_FRAMEWORKS=DIR      environments of frameworks (make test-frameworks)
    DCPX_PAGES=1             the tests of pages in a browser (make test-pages)
    DCPX_DFS=all             tests on file systems with several clients, or NAMES (make test-dfs)
    DFS_MOMENTS=N            faults of these at N moments of a save each, not at one
    DCPX_NEW_PICTURES=1      draws what these are compared with anew (tests/pages/golden)
    DCPX_AZURE=1             all tests on Azurite, not a tenth of them (make test-azure)
    DCPX_SEED=N              the `seed` fixture's value, to repeat one test
    DCPX_SLOWNESS=X          how slow this machine is; measured without it (support/machine.py)
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib.metadata
import importlib.util
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Protocol

import hypothesis
import pytest
from _pytest.config import create_terminal_writer
from support.machine import points, seconds, slowness

ROOT = Path(__file__).resolve().parent.parent

# Before torch is imported, here and in children: OpenMP's threads, which by default spin while they
# wait for work, took half of all that the tests took.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# A make that a test runs is none of the make that runs the tests: what that one was given, which
# make exports to all below, is not its. DCPX_* are for the tests.
_given = re.findall(r"(?<!\\) (?!DCPX_)(\w+)=", os.environ.get("MAKEFLAGS", ""))
for _name in (*_given, "MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL"):
    os.environ.pop(_name, None)

pytest_plugins = [
    "fake_cuda.fixture",
    "support.drawn",
    "support.device_fixture",
    "support.hook_fixture",
    "support.object_fixture",
    "support.build_fixture",
    "support.page_fixture",
    "support.fuse_fixture",
    "support.place_fixture",
    "support.rank_fixture",
    "support.under_way",
    "support.warm_commands",
]

# What `make test-frameworks`, `make test-pages` and `make test-dfs` install.
_OWN_TARGETS = {"frameworks": "DCPX_FRAMEWORKS", "pages": "DCPX_PAGES", "dfs": "DCPX_DFS"}
collect_ignore = [folder for folder, name in _OWN_TARGETS.items() if name not in os.environ]

if "DCPX_DFS" in os.environ:
    pytest_plugins.append("dfs.fixture")

hypothesis.settings.register_profile(
    "dcpx",
    max_examples=points(100),  # measured here, once: processes of pytest-xdist inherit it
    deadline=None,  # two busy cores: time says nothing about correctness
    print_blob=True,
    suppress_health_check=[
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.function_scoped_fixture,
    ],
)
hypothesis.settings.load_profile("dcpx")


def _is_set(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0")


# ---- Options and header -------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--everything",
        action="store_true",
        help="run `slow` and `root` tests too (make test-all); without it they are set aside",
    )


def pytest_report_header(config: pytest.Config) -> list[str]:
    try:
        torch_version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch_version = "not installed"
    spec = importlib.util.find_spec("torch_dcpx")
    origin = spec.origin if spec else "not found"
    return [
        f"torch {torch_version}, Python {platform.python_version()}, "
        f"seed {_session_seed(config)}, strict {_is_strict()}, "
        f"slowness {slowness()}",
        f"torch_dcpx from {origin}",
    ]


@pytest.hookimpl(tryfirst=True)  # before pytest-timeout reads it
def pytest_configure(config: pytest.Config) -> None:
    if config.option.timeout is None:  # pyproject.toml and the marks have an idle machine's limits
        config.option.timeout = seconds(float(config.getini("timeout")))
    if hasattr(config, "workerinput"):  # of pytest-xdist, where stdout is /dev/null
        stderr = create_terminal_writer(config, sys.__stderr__)
        config.get_terminal_writer = lambda: stderr  # type: ignore[method-assign]  # for timeouts


def pytest_sessionstart() -> None:
    if not _is_set("DCPX_REQUIRE_INSTALLED"):
        return
    spec = importlib.util.find_spec("torch_dcpx")
    if spec is None or spec.origin is None or ROOT / "torch_dcpx" in Path(spec.origin).parents:
        pytest.exit("DCPX_REQUIRE_INSTALLED=1, but the tests import this clone's torch_dcpx", 3)


# ---- Markers ------------------------------------------------------------------------------------


@functools.cache
def _cuda_reason() -> str:
    """Returns why CUDA tests cannot run here, or ''. Asks the driver, as csrc/device does."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no CUDA driver (libcuda.so.1)"
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return "the CUDA driver does not start"
    return "" if count.value else "the CUDA driver finds no device"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    everything = bool(config.getoption("--everything"))
    for item in items:
        if item.get_closest_marker("slow") and not everything:
            item.add_marker(pytest.mark.skip(reason="slow: runs in `make test-all`"))
        if item.get_closest_marker("root"):
            if not everything:
                item.add_marker(pytest.mark.skip(reason="root: runs in `make test-all`"))
            elif os.geteuid() != 0:
                item.add_marker(pytest.mark.skip(reason="needs root"))
        if limit := item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(seconds(limit.args[0])), append=False)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") is None:
        return
    reason = _cuda_reason()
    if reason and _is_set("DCPX_REQUIRE_CUDA"):
        pytest.fail(f"DCPX_REQUIRE_CUDA=1, but: {reason}", pytrace=False)
    if reason:
        pytest.skip(f"cuda: {reason}")


# ---- Strict mode --------------------------------------------------------------------------------


def _is_strict() -> bool:
    return _is_set("DCPX_STRICT") and not _is_set("DCPX_ALLOW_SKIP")


def _fail_instead_of_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turns a skip into a failure; an xfail, which pytest also reports as skipped, stays."""
    if not _is_strict() or report.outcome != "skipped" or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    report.outcome = "failed"
    report.longrepr = f"{report.nodeid}: {reason} (DCPX_STRICT=1: nothing may be skipped)"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # Set aside on purpose is not skipped; for `cuda`, DCPX_REQUIRE_CUDA decides.
    exempt = ["cuda"] if item.config.getoption("--everything") else ["cuda", "slow", "root"]
    if not any(item.get_closest_marker(name) for name in exempt):
        _fail_instead_of_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _fail_instead_of_skip(report)
    return report


# ---- Seeds --------------------------------------------------------------------------------------


def _session_seed(config: pytest.Config) -> int:
    if os.environ.get("DCPX_SEED"):
        return int(os.environ["DCPX_SEED"])
    seed = config.getoption("randomly_seed", 0)
    return seed if isinstance(seed, int) else 0


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A number that differs by test and by session; printed, so that a failure shows it."""
    value = _session_seed(request.config)
    if not os.environ.get("DCPX_SEED"):
        value ^= zlib.crc32(request.node.nodeid.encode())
    print(f"DCPX_SEED={value}")
    return value


# ---- Fresh processes ----------------------------------------------------------------------------


class RunPython(Protocol):
    def __call__(
        self,
        code: str,
        *args: str,
        env: dict[str, str] | None = None,
        timeout_s: float = 600,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture
def run_python(tmp_path: Path) -> RunPython:
    """Runs a snippet in a fresh interpreter, in an empty directory, killed after `timeout_s`.

    `args` are its `sys.argv[1:]`, `env` is added to the environment. With `check` a non-zero exit
    fails the test and shows both outputs.
    """

    def run(
        code: str,
        *args: str,
        env: dict[str, str] | None = None,
        timeout_s: float = 600,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        result = subprocess.run(
            [sys.executable, "-c", code, *args],
            env={**os.environ, **(env or {})},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=seconds(timeout_s),
            check=False,
        )
        if check and result.returncode != 0:
            pytest.fail(f"exit {result.returncode}\n{result.stdout}\n{result.stderr}")
        return result

    return run


@pytest.fixture(scope="session", autouse=True)
def _interrupts() -> Iterator[None]:
    """SIGINT interrupts the tests and their children, also where a shell started them with it
    ignored (`nohup make test &`): children inherit that, and a test that sends one waits for ever.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session", autouse=True)
def _warm_processes(_interrupts: None) -> Iterator[None]:
    """The process that forks is started beside the first tests, and is no leak of one."""
    from support.warm import warm_parent

    parent = warm_parent()
    yield
    parent.close()


@pytest.fixture
def run_warm(tmp_path: Path) -> RunPython:
    """Like `run_python`, in a process that has imported torch and torch_dcpx before (warm.py)."""
    from support.warm import warm_parent

    def run(
        code: str,
        *args: str,
        env: dict[str, str] | None = None,
        timeout_s: float = 600,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        result = warm_parent().run(
            ["-c", code, *args],
            env={**os.environ, **(env or {})},
            cwd=tmp_path,
            timeout_s=seconds(timeout_s),
        )
        if check and result.returncode != 0:
            pytest.fail(f"exit {result.returncode}\n{result.stdout}\n{result.stderr}")
        return result

    return run


# ---- Collections --------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def _frozen_imports() -> None:
    """Takes what was imported so far out of the collector's sight: torch's 260,000 objects make
    each of the collections around a test 0.15 s long, a fifth of all that the tests take.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def thawed() -> Iterator[None]:
    """Nothing is frozen, as in most programs: where something is, `_gc` makes nothing old."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


# ---- Leaks --------------------------------------------------------------------------------------


def _open_files() -> dict[str, str]:
    """Returns descriptor -> target of this process, the listing's own descriptor left out."""
    files = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            files[name] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
    return files


def _threads() -> dict[str, str]:
    """Returns kernel thread id -> name, those that C++ started included."""
    names = {}
    for tid in os.listdir("/proc/self/task"):
        try:
            names[tid] = Path(f"/proc/self/task/{tid}/comm").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):
            continue
    return names


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fails a test after which this process has more open files or threads than before it.

    Staging memory is the process's, kept for the next save: `close` gives it back. A thread that is
    just ending gets 20 seconds, a slow machine's more. Torch's own pools start with its first
    parallel operation, so they are started before the count.
    """
    import torch

    torch.ones(1 << 20).add_(1)
    gc.collect()
    files_before, threads_before = _open_files(), _threads()
    yield
    deadline = time.monotonic() + seconds(20)
    while True:
        gc.collect()
        if "torch_dcpx.staging.arena" in sys.modules:
            sys.modules["torch_dcpx.staging.arena"].process_pool().close()
        files = {k: v for k, v in _open_files().items() if files_before.get(k) != v}
        threads = {k: v for k, v in _threads().items() if k not in threads_before}
        if not files and not threads:
            return
        if time.monotonic() > deadline:
            python = [t.name for t in threading.enumerate()]
            pytest.fail(f"left open: {files}; left running: {threads} (Python knows {python})")
        time.sleep(0.01)
