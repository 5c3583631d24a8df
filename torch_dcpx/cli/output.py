"""Every command prints a table or JSON, and exits with one of three codes.

0  all is well
1  the checkpoint is not: damaged, incomplete, never committed, hostile
2  the command could not do it: a wrong argument, no such path, no permission, interrupted, a bug
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import Any, NoReturn, ParamSpec

import click
from rich import progress
from rich.console import Console
from rich.table import Table
from rich.text import Text

from torch_dcpx._text import counted, printable
from torch_dcpx.errors import (
    CorruptionError,
    DcpxError,
    NotCommittedError,
    RepairError,
    ShortReadError,
)
from torch_dcpx.views.tables import Shown

FINE, UNSOUND, CANNOT = 0, 1, 2

_Args = ParamSpec("_Args")
_ENDLESS = 1 << 20  # columns: too many to wrap a line
_OF_CHECKPOINT = (CorruptionError, NotCommittedError, RepairError, ShortReadError)

_on_stdout = functools.partial(Console, highlight=False, emoji=False, markup=False)
_on_stderr = functools.partial(_on_stdout, stderr=True)


def command(function: Callable[_Args, int]) -> Callable[_Args, NoReturn]:
    """Makes a function that returns its exit code a click command with `--json`.

    It prints an error of ours or of the system as one line, or as JSON on stdout: `{"error":
    {"type": ..., "message": ..., and its fields}}`. Any other error is a bug: it prints the
    traceback and exits with 2, as after an interrupt.
    """

    @functools.wraps(function)
    def run(*args: _Args.args, **kwargs: _Args.kwargs) -> NoReturn:
        code = CANNOT
        try:
            code = function(*args, **kwargs)
        except (DcpxError, OSError) as error:
            put_error(error, as_json=bool(kwargs.get("as_json")))
            code = exit_code(error)
        except KeyboardInterrupt:
            put_problem("interrupted")
        except Exception:  # noqa: BLE001 - a bug is printed, and is no damage
            put_lines(traceback.format_exc().splitlines(), _on_stderr())
        sys.exit(code)

    return click.option("--json", "as_json", is_flag=True, help="print JSON")(run)


def put_error(error: Exception, *, as_json: bool) -> None:
    """Prints an error as one line, or as JSON on stdout."""
    if as_json:
        put_json({"error": {"type": type(error).__name__, **_fields(error)}})
    else:
        put_problem(str(error))


def is_of_checkpoint(error: Exception) -> bool:
    """Returns whether an error is a fault of a checkpoint."""
    return isinstance(error, _OF_CHECKPOINT)


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
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, int | str) or (type(value) is float and isfinite(value)):
        return value
    return str(value)  # JSON has no nan, no inf


def put_lines(lines: Iterable[str], console: Console | None = None) -> None:
    """Prints lines, by default to stdout: without markup, uncut, each on one line."""
    shown = console or _on_stdout()
    for line in lines:
        shown.print(Text(printable(line)), soft_wrap=True)


def put_problem(text: str) -> None:
    """Prints one line on stderr."""
    put_lines([f"dcpx: {text}"], _on_stderr())


def put_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Prints a table; columns that begin with '#' are numbers.

    A terminal that is too narrow folds texts, then numbers; it cuts nothing. In a pipe each row is
    one line.
    """
    console = _on_stdout()
    if not console.is_terminal:
        console.width = _ENDLESS
    shown = [[printable(each) for each in row] for row in rows]
    numbers = [at for at, name in enumerate(columns) if name.startswith("#")]
    widest = sum(max(len(row[at]) + 1 for row in [columns, *shown]) for at in numbers)
    table = Table(box=None, pad_edge=False, show_edge=False)
    for at, name in enumerate(columns):
        is_number = at in numbers
        table.add_column(
            name.lstrip("#"),
            justify="right" if is_number else "left",
            no_wrap=is_number and widest < console.width // 2,  # else rich would cut them
            overflow="fold",
        )
    for row in shown:
        table.add_row(*map(Text, row))
    console.print(table, soft_wrap=not console.is_terminal)


def put_result(result: Shown, limit: int) -> None:
    """Prints the table of a result, its first `limit` rows (0: all), and its head below."""
    columns, rows = result.table()
    more = len(rows) - limit if 0 < limit < len(rows) else 0
    if rows:
        put_table(columns, rows[:limit] if more else rows)
    left = f" ({counted(more, 'row')} not shown)" if more else ""
    put_lines([result.head() + left])


@contextmanager
def showing_progress(what: str, *, is_shown: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Gives a function that shows (done bytes, total bytes); None without a terminal."""
    console = _on_stderr()
    if not (is_shown and console.is_terminal):
        yield None
        return
    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.DownloadColumn(True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task(printable(what), total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)
