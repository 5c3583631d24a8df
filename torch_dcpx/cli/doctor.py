"""`dcpx doctor`: checks that a machine, and the file system of a path, serve saves and loads.

Its own process imports no torch, but for a pickle that is not as torch writes it. A check is fine,
a warning (it works, but slower or with less of a promise: the text says which) or a failure.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import mmap
import platform
import resource
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from torch_dcpx._answered_os import fcntl, os
from torch_dcpx._descriptors import open_file
from torch_dcpx._text import counted, human_bytes
from torch_dcpx._version import __version__
from torch_dcpx.cli.output import CANNOT, FINE, put_json, put_table
from torch_dcpx.errors import StorageError, UnsupportedError
from torch_dcpx.hook.settings import AUTOLOAD, INSTALL, is_asked, is_autoload_off
from torch_dcpx.integrity.states import walk
from torch_dcpx.reader.hints import command
from torch_dcpx.storage.directory import Directory, storage_error
from torch_dcpx.storage.object_store import bucket_of
from torch_dcpx.storage.object_url import Location, ObjectUrl
from torch_dcpx.views.ls import ListedCheckpoint, listed

_FEW_FILES = 1024
_BLOCK = 4096
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_State: TypeAlias = Literal["fine", "warning", "failure"]
_STATES: dict[str, _State] = {"saving": "fine", "removed": "fine", "unreadable": "failure"}


class Check(NamedTuple):
    """The state of one thing."""

    name: str
    state: _State
    text: str


def examine(path: Location | None, *, as_json: bool) -> int:
    """Prints all checks. Returns the exit code: 2 with a failure, else 0."""
    checks = list(_of_machine())
    if path is not None:
        checks += _of_directory(path) if isinstance(path, Path) else _of_store(path)
    if as_json:
        put_json(checks)
    else:
        put_table(["", "what", "found"], ((state, name, text) for name, state, text in checks))
    return CANNOT if any(check.state == "failure" for check in checks) else FINE


def _of_machine() -> Iterator[Check]:
    system = f"Python {platform.python_version()}, Linux {platform.release()} {platform.machine()}"
    untested = platform.machine() == "aarch64"
    text = f"torch-dcpx {__version__}, {system}" + (", which is untested" if untested else "")
    yield Check("versions", "warning" if untested else "fine", text)
    yield _torch()
    yield _numpy()
    yield from _extension()
    yield _hook()
    yield _huge_pages()
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    late = "; loads of many files open them late, one by one" if files < _FEW_FILES else ""
    yield Check("open files", "warning" if late else "fine", f"{files} (ulimit -n){late}")
    cores = len(os.sched_getaffinity(0))
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield Check("machine", "fine", f"{cores} usable cores, {human_bytes(pages)} of free memory")


def _torch() -> Check:
    try:
        version = importlib.metadata.version("torch")
        release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        version, release = "not installed", ()
    if release < (2, 9):
        return Check("torch", "failure", f"{version}; torch-dcpx needs 2.9 or newer")
    return Check("torch", "fine", version)


def _numpy() -> Check:
    try:
        return Check("numpy", "fine", importlib.metadata.version("numpy"))
    except importlib.metadata.PackageNotFoundError:
        text = (
            "not installed; dcp.save and dcp.load on several ranks need it (torch_dcpx.save does "
        )
        return Check("numpy", "warning", text + "not): pip install numpy")


def _extension() -> Iterator[Check]:
    try:
        from torch_dcpx._native import _C
    except ImportError as error:
        yield Check("C++ extension", "failure", str(error))
        return
    kinds = ", ".join(_C.crc32_implementations())
    driver = _C.device_driver()
    kernel = "with" if driver["has_kernel"] else "without"
    text = f"loads, built {kernel} the CUDA pack kernel; checksums by the fastest of {kinds}"
    yield Check("C++ extension", "fine", text)
    used = f"{driver['devices']} devices, driver {driver['version']}"
    failure = driver["failure"]
    yield Check("CUDA", "fine", f"not used: {failure}" if failure else used)


# Not from the current directory, which may be that of a checkpoint: `torch.py` there would run.
_TRY_HOOK_S = 300
_TRY_HOOK = """
import sys
sys.path[:] = filter(None, sys.path)
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
made = {
    "FileSystemWriter": dcp.FileSystemWriter("."), "FileSystemReader": dcp.FileSystemReader("."),
    "DefaultSavePlanner": dcp.DefaultSavePlanner(), "DefaultLoadPlanner": dcp.DefaultLoadPlanner(),
    "DefaultStager": DefaultStager(StagingOptions(False, False, False, False)),
}
ours = [name for name, one in made.items() if type(one).__module__.startswith("torch_dcpx.")]
from torch_dcpx.reports import REPLACED
print(", ".join(ours) or "nothing", "replaced;", dict(sorted(REPLACED.items())))
"""


def _hook() -> Check:
    """Checks, in a process of its own, that the hook is on where a variable asks for it."""
    if not is_asked():
        how = f"{INSTALL}=1, dcpx run or torch_dcpx.install() turns it on"
        return Check("hook", "fine", f"off; {how}")
    said = f"{INSTALL}={os.environ[INSTALL]}"
    if is_autoload_off():
        text = f"{said}, but {AUTOLOAD}={os.environ[AUTOLOAD]} switches it off"
        return Check("hook", "failure", text)
    entries = importlib.metadata.entry_points(group="torch.backends")
    if "torch_dcpx" not in entries.names:
        text = f"{said}, but no entry point of torch.backends is ours: install torch-dcpx anew"
        return Check("hook", "failure", text)
    child = [sys.executable, "-W", "ignore", "-c", _TRY_HOOK]
    try:
        ended = subprocess.run(
            child, capture_output=True, text=True, check=False, timeout=_TRY_HOOK_S
        )
    except subprocess.TimeoutExpired:
        text = f"{said}: a process that imports torch did not end in {_TRY_HOOK_S} s"
        return Check("hook", "failure", text)
    if ended.returncode:
        lines = [line for line in ended.stderr.splitlines() if "Error" in line] or ["?"]
        return Check("hook", "failure", f"{said}: {lines[0]}")
    state: _State = "warning" if ended.stdout.startswith("nothing") else "fine"
    return Check("hook", state, f"{said}: {ended.stdout.strip()}")


def _huge_pages() -> Check:
    try:
        text = _HUGE_PAGES.read_text().strip()
        slower = "; direct reads and writes take up to twice as long" if "[never]" in text else ""
    except OSError as error:
        text, slower = f"unknown ({error})", "; large reads and writes may be slower"
    return Check("huge pages", "warning" if slower else "fine", text + slower)


def _of_store(url: ObjectUrl) -> Iterator[Check]:
    """Checks what lies beneath a URL, and the store by an object of its own."""
    client = f"by obstore {importlib.metadata.version('obstore')}"
    began = time.perf_counter()
    try:
        bucket = bucket_of(url)
        bucket.listing(url.key)
    except StorageError as error:
        yield Check("store", "failure", f"{error} ({client})")
        return
    answered_ms = (time.perf_counter() - began) * 1e3
    yield Check("store", "fine", f"lists '{url}' in {answered_ms:.0f} ms, {client}")
    yield _checkpoints(url)
    try:
        bucket.check_conditional(url.key)
    except UnsupportedError as error:
        yield Check("writing", "failure", str(error))
    except StorageError as error:
        yield Check("writing", "warning", f"{error}: loads may work, saves do not")
    else:
        yield Check("writing", "fine", "works, with conditions: of two saves at a time one fails")


def _of_directory(path: Path) -> Iterator[Check]:
    """Checks a directory. Raises: StorageError: there is none, or it cannot be read."""
    with Directory(path) as directory:
        status = os.fstatvfs(directory.fd)
        free, whole = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
        text = f"{_mount_of(path)}, {human_bytes(free)} of {human_bytes(whole)} free"
        yield Check("file system", "fine", text)
        yield _checkpoints(path)
        if status.f_flag & os.ST_RDONLY:
            text = "the file system is read-only: loads work, saves do not"
            yield Check("writing", "warning", text)
        else:
            yield from _writing(directory)


def _mount_of(path: Path) -> str:
    """Returns kind and options of the file system that holds `path`."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
        for line in reversed(lines):
            head, _, tail = line.partition(" - ")
            fields = head.split()
            if len(fields) > 5 and fields[2] == wanted and tail:
                return f"{tail.split()[0]} ({fields[5]})"
    return "unknown ()"


def _checkpoints(path: Location) -> Check:
    """Says what lies at a path, or beneath it."""
    counts: Counter[str] = Counter()
    export = ""
    try:
        for seen in walk(path):
            kind: str = seen.state.kind
            row = listed(seen) if kind == "committed" else None
            if row is not None:
                kind = "damaged" if row.whole is False else row.state
            if seen.path == path and row is not None:
                return _one(row, path)
            if seen.path == path and kind != "none":
                state = _STATES.get(kind, "warning")
                look = f"; {command('ls', path)} says what can be done" * (state == "warning")
                return Check("checkpoint", state, seen.state.text + look)
            counts[kind] += kind != "none"
            export = export or seen.state.text * seen.state.is_export
    except StorageError as error:
        if error.errno != errno.ENOENT:  # a URL beneath which nothing lies
            return Check("checkpoint", "failure", str(error))
    if not sum(counts.values()):
        return Check("checkpoint", "fine", export or "none here")
    words = {"saving": "being saved", "unfinished": "of saves that did not end"}
    others = [
        f"{n} {words.get(kind, kind)}" for kind, n in counts.items() if n and kind != "committed"
    ]
    text = f"root of {counted(counts['committed'], 'checkpoint')}"
    worst: _State = "warning" if counts["unfinished"] or counts["damaged"] else "fine"
    worst = "failure" if counts["unreadable"] else worst
    more = "" if worst == "fine" else f" (see {command('ls', path)})"
    return Check("checkpoint", worst, ", ".join([text, *others]) + more)


def _one(row: ListedCheckpoint, path: Location) -> Check:
    """Says what the look of `ls` has found at the path itself."""
    if row.state != "committed":  # it was, by its names alone
        state = "warning" if row.whole is False else _STATES.get(row.state, "warning")
        return Check("checkpoint", state, f"{row.state}: {row.problem}")
    text = f"a committed one, {counted(row.files, 'data file')}"
    if not row.whole:
        return Check("checkpoint", "warning", f"{text}, {row.found}: {row.problem}")
    saving = f"; a save to it is under way ({row.saving})" if row.saving else ""
    return Check("checkpoint", "fine", f"{text}; {command('verify', path)} proves it{saving}")


def _writing(directory: Directory) -> Iterator[Check]:
    """Tries each thing that a save does, with a small file of its own."""
    name = f".dcpx-doctor-{uuid.uuid4().hex[:12]}.tmp"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = open_file(name, flags, 0o600, dir_fd=directory.fd)
    except OSError as error:
        text = str(storage_error("create", directory.path / name, error))
        yield Check("writing", "failure", text)
        return
    try:
        yield _tried("writing", "fsync is not honoured", _write, fd, state="failure")
        without = "saves go through the page cache"
        yield _tried("direct I/O", without, _write_direct, directory, name)
        without = "two saves at once are not noticed, leftovers stay"
        yield _tried("locks", without, fcntl.flock, fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        without = "that a commit survives a power cut is up to the file system"
        yield _tried("fsync of directories", without, os.fsync, directory.fd)
    finally:
        os.close(fd)
        directory.unlink(name)


def _tried(
    name: str, without: str, do: Callable[..., object], *args: Any, state: _State = "warning"
) -> Check:
    try:
        do(*args)
    except OSError as error:
        return Check(name, state, f"{os.strerror(error.errno or errno.EIO)}: {without}")
    return Check(name, "fine", "works")


def _write(fd: int) -> None:
    os.pwrite(fd, b"x" * _BLOCK, 0)
    os.fsync(fd)


def _write_direct(directory: Directory, name: str) -> None:
    fd = open_file(name, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC, dir_fd=directory.fd)
    try:
        with mmap.mmap(-1, _BLOCK) as page:  # aligned for direct I/O
            os.pwritev(fd, [page], 0)
    finally:
        os.close(fd)
