"""Every command prints a table or JSON, and exits with one of these codes.

0    sound, or equal
1    damage or a difference was found, and nothing else
2    the question could not be answered: no checkpoint is there, a wrong argument, an error of the
     storage, a bug, an output that cannot be written
130  interrupted (128 + SIGINT)
141  who read the output has gone (128 + SIGPIPE), about which nothing is said

Where stdout or stderr was closed from the start, the code is the answer.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import io
import json
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import PurePath
from typing import Any, NoReturn, ParamSpec, TextIO

import click
from rich import progress
from rich.console import Console

from torch_dcpx._answers import current_timeout, wait_at_most
from torch_dcpx._text import aligned, cells, counted, printable
from torch_dcpx.errors import (
    CorruptionError,
    DcpxError,
    NotCommittedError,
    RepairError,
    ShortReadError,
    StorageError,
)
from torch_dcpx.storage.names import is_data_file_name
from torch_dcpx.views.tables import Shown

FINE, UNSOUND, CANNOT, INTERRUPTED, PIPE = 0, 1, 2, 130, 141

_Args = ParamSpec("_Args")
_PROGRESS_WIDTH = 50  # columns: bar, bytes, rate, time
_SHARD = re.compile(r"-\d{5,9}-of-\d{5,9}(\.[\w-]+)?\.safetensors$")
_OF_CHECKPOINT = (CorruptionError, ShortReadError)


class _Output(io.FileIO):
    """Descriptor 1 or 2. What stderr cannot take is lost; an error of stdout ends the command, by a
    SystemExit, which no code takes for an error of a checkpoint or of its storage.
    """

    is_lost = False  # stdout has failed: the flush of an exit finds no error any more

    def write(self, data: Any) -> int:
        if self.is_lost:
            return len(data)
        try:
            return super().write(data)
        except OSError as error:
            self.is_lost = True
            if self.fileno() == 2:
                return len(data)
            if isinstance(error, BrokenPipeError):
                raise SystemExit(PIPE) from None
            put_problem(f"write to stdout: {error.strerror}")
            raise SystemExit(CANNOT) from None


def open_output() -> None:
    """Makes `sys.stdout` and `sys.stderr` ours: they escape what their encoding lacks.

    A descriptor that was closed gets /dev/null, before a file of a checkpoint gets its number.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # which takes the lowest number
    sys.stderr = _opened(2, sys.stderr)
    sys.stdout = _opened(1, sys.stdout)


def _opened(fd: int, old: TextIO | None) -> TextIO:
    file = io.BufferedWriter(_Output(fd, "w", closefd=False))
    is_tty, encoding = file.isatty() or fd == 2, "utf-8" if old is None else old.encoding
    return io.TextIOWrapper(file, encoding, "backslashreplace", line_buffering=is_tty)


def command(function: Callable[_Args, int]) -> Callable[_Args, NoReturn]:
    """Makes a function that returns its exit code a click command with `--json`.

    It prints an error of ours or of the system as one line, or as JSON on stdout: `{"error":
    {"type": ..., "message": ..., and its fields}}`. Any other error is a bug: it prints the
    traceback and exits with 2. All of it waits for storage as one load does.
    """

    @functools.wraps(function)
    def run(*args: _Args.args, **kwargs: _Args.kwargs) -> NoReturn:
        code = CANNOT
        try:
            with wait_at_most(current_timeout()):
                code = function(*args, **kwargs)
        except (DcpxError, OSError) as error:
            put_error(error, as_json=bool(kwargs.get("as_json")))
            code = CANNOT if _is_asked(error, kwargs) else exit_code(error)
        except KeyboardInterrupt:
            put_problem("interrupted")
            code = INTERRUPTED
        except click.ClickException:  # of arguments that contradict each other
            raise
        except Exception:  # noqa: BLE001 - a bug is printed, and is no damage
            put_lines(traceback.format_exc().splitlines(), sys.stderr)
        sys.exit(code)

    return click.option("--json", "as_json", is_flag=True, help="print JSON")(run)


def _is_asked(error: Exception, arguments: Mapping[str, Any]) -> bool:
    """Returns whether an error says that what an argument names is not there."""
    asked = (
        one for each in arguments.values() for one in (each if type(each) is tuple else [each])
    )
    is_lost = getattr(error, "errno", None) in (errno.ENOENT, errno.ENOTDIR)
    return is_lost and str(getattr(error, "path", "")) in set(map(str, asked))


def put_error(error: Exception, *, as_json: bool) -> None:
    """Prints an error as one line, or as JSON on stdout."""
    if as_json:
        put_json({"error": {"type": type(error).__name__, **_fields(error)}})
    else:
        put_problem(str(error))


def is_of_checkpoint(error: Exception) -> bool:
    """Returns whether an error is a fault of a checkpoint, or of what a save has left."""
    if isinstance(error, NotCommittedError):
        return bool(error.files) and _is_unfinished(error)
    if isinstance(error, RepairError):  # else there is nothing that it could repair
        return bool(error.candidates or error.is_good)
    return isinstance(error, _OF_CHECKPOINT) or _is_of_lost_file(error)


def _is_of_lost_file(error: Exception) -> bool:
    """Returns whether a data file is not there that metadata, or an index, names."""
    if not isinstance(error, StorageError) or error.errno != errno.ENOENT:
        return False
    path = str(error.path)
    return is_data_file_name(PurePath(path).name) or _SHARD.search(path) is not None


def _is_unfinished(error: NotCommittedError) -> bool:
    """Returns whether nobody holds what lies there: no save is under way, no manager removed it."""
    from torch_dcpx.integrity.contents import location
    from torch_dcpx.integrity.way_out import kind_at

    try:
        return kind_at(location(str(error.path)).parent) == "unfinished"
    except DcpxError:
        return False


def exit_code(error: Exception) -> int:
    """Returns the exit code that an error stands for."""
    return UNSOUND if is_of_checkpoint(error) else CANNOT


def _fields(error: Exception) -> dict[str, Any]:
    names = ("path", "fqn", "offset", "nbytes", "expected", "found", "errno")
    values = {name: getattr(error, name, None) for name in names}
    known = {name: value for name, value in values.items() if isinstance(value, str | int)}
    return {"message": str(error), **known}


def put_json(value: Any) -> None:
    """Prints one JSON value; dataclasses and named tuples are objects."""
    sys.stdout.write(json.dumps(_plain(value), indent=2) + "\n")


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(vars(value))
    if hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, dict):
        text = str if len({str(key) for key in value}) == len(value) else repr  # 1 and "1"
        return {text(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, int | str) or (type(value) is float and isfinite(value)):
        return value
    if type(value) is not float and hasattr(value, "tolist"):  # of numpy and torch
        items = value.tolist()
        if type(items) in (list, int, float):
            return _plain(items)
    return str(value)  # JSON has no nan, no inf


def put_lines(lines: Iterable[str], file: TextIO | None = None) -> None:
    """Prints lines, by default to stdout: uncut, each on one line."""
    (file or sys.stdout).writelines(f"{printable(line)}\n" for line in lines)


def put_problem(text: str) -> None:
    """Prints one line on stderr."""
    put_lines([f"dcpx: {text}"], sys.stderr)


def put_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Prints a table; columns that begin with '#' are numbers. Each row is one line, uncut.

    The last column runs on. Where it has names, and a row is wider than the terminal, what all of
    them begin with is printed once, above.
    """
    shown = [[printable(each) for each in row] for row in rows]
    head, *lines = aligned(columns, shown)
    if sys.stdout.isatty():
        if max(map(cells, lines), default=0) > shutil.get_terminal_size().columns:
            begin = _common_begin([row[-1] for row in shown]) if columns[-1] == "name" else ""
            if begin:
                put_lines([f"all names begin with {begin}"])
                rest = [[*row[:-1], row[-1][len(begin) :]] for row in shown]
                head, *lines = aligned([*columns[:-1], "rest of the name"], rest)
        head = click.style(head, bold=True) if _is_styled() else head
    sys.stdout.writelines(f"{line}\n" for line in (head, *lines))


def _common_begin(names: Sequence[str]) -> str:
    """Returns the folders, else the modules, that all of several names begin with; "" if none."""
    if len(names) < 2:
        return ""
    begin = os.path.commonprefix(names)  # noqa: RUF071 - of texts
    return begin[: 1 + begin.rfind("/" if "/" in begin else ".")]


def _is_styled() -> bool:
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") not in (None, "", "dumb")


def put_result(result: Shown[Any], limit: int) -> None:
    """Prints the table of a result, its first `limit` rows (0: all), and its head below."""
    columns, rows = result.table()
    more = len(rows) - limit if 0 < limit < len(rows) else 0
    if rows:
        put_table(columns, rows[:limit] if more else rows)
    put_lines([result.head(), *not_shown(more)])


def not_shown(names: int) -> list[str]:
    """Returns the line that says how many names a limit has left out; none if it has not."""
    return [f"{counted(names, 'name')} not shown: --limit 0 shows all"] if names else []


@contextmanager
def showing_progress(what: str, *, is_shown: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Gives a function that shows (done bytes, total bytes); None without a terminal."""
    if not (is_shown and sys.stderr.isatty()):  # FORCE_COLOR makes no terminal of a log
        yield None
        return
    console = Console(file=sys.stderr, highlight=False, emoji=False, markup=False)
    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console, transient=True) as shown:
        text = printable(what)
        if cells(text) > console.width - _PROGRESS_WIDTH:
            text = text.partition(" ")[0]  # a name would be folded, and bytes cut
        task = shown.add_task(text, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)
