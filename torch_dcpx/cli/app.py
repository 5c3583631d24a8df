"""The commands of `dcpx` and their arguments. Each imports its code when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from torch_dcpx._text import seconds_of
from torch_dcpx._version import __version__
from torch_dcpx.cli.help import WIDTH, Commands
from torch_dcpx.cli.output import command
from torch_dcpx.errors import DcpxError, OptionError
from torch_dcpx.storage.object_url import Location, location_of
from torch_dcpx.storage.paths import checked_location, checked_path

_WAY_OUT = "copy or mount it, and name the directory"


class _Path(click.Path):
    """A path that the library takes; whether one may read it, a command finds out itself."""

    def __init__(self, *, takes_urls: bool = False, way_out: str = _WAY_OUT) -> None:
        """Takes URLs of stores, too, if `takes_urls`; else the error of one ends in `way_out`."""
        super().__init__(readable=False, path_type=Path)
        self._check = checked_location if takes_urls else checked_path
        self._way_out = way_out

    def convert(self, value: Any, param: Any, ctx: Any) -> Location:
        try:
            text = self._check(value, self._way_out)
        except DcpxError as error:
            self.fail(str(error), param, ctx)
        path = location_of(text)  # which drops the "./" of a name that begins with "~"
        if isinstance(path, Path) and str(path).startswith("~"):
            return path.absolute()
        return path


class _Age(click.ParamType[float]):
    """A time such as 90s, 15min, 1h or 2d; in seconds."""

    name = "age"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        try:
            return seconds_of(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class _Name(click.types.StringParamType):
    """A name in a checkpoint, or a glob: UTF-8, though the locale may know no such letters."""

    name = "text"

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        try:
            return str(value).encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
        except UnicodeError:
            return str(value)


_NAME = _Name()
_PATH = _Path()
_PATH_OR_URL = _Path(takes_urls=True)
_RANK = click.option(
    "--rank", type=click.IntRange(min=0), help="whose checkpoint, where each rank saved its own"
)
_KEYS = click.option(
    "--key",
    "-k",
    "keys",
    type=_NAME,
    multiple=True,
    help="only this name, or names that this glob fits (any of several)",
)
_LIMIT = click.option(
    "--limit", type=click.IntRange(0), default=100, show_default=True, help="rows shown; 0: all"
)
_HTML = click.option(
    "--html",
    "html",
    type=_Path(way_out="name a file, and copy it there"),
    metavar="FILE",
    help="also draw it: one page that needs no network (FILE.html)",
)
_OVERWRITE = click.option("--overwrite", is_flag=True, help="replace a page that is at --html")


def _page(html: Path | None, *, is_replacing: bool) -> Any:
    """Returns the page that a command writes, None without `--html`."""
    if html is None:
        if is_replacing:
            raise click.UsageError("--overwrite is for --html, which is not there")
        return None
    from torch_dcpx.cli.page import Page

    return Page(html, is_replacing=is_replacing)


def _look(*paths: Location, takes_files: bool = False) -> None:
    """Raises StorageError where a path is not what a command takes: before torch is imported.

    `takes_files`: it takes the files of an export.
    """
    from torch_dcpx.cli.looks import look

    for path in paths:
        look(path, takes_files=takes_files)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDTH},
)
@click.version_option(__version__, prog_name="dcpx")
def app() -> None:
    """Look at checkpoints of torch-dcpx and of stock DCP, check them, mend them.

    Exits with 0 if what was asked about is sound or equal, 1 if damage or a difference was found,
    2 if the question could not be answered: no checkpoint is there, an argument is wrong, the
    storage failed.
    """


@app.command("ls", example="dcpx ls ckpt")
@click.argument("path", type=_PATH_OR_URL)
@click.option("--all", "with_all", is_flag=True, help="directories without a checkpoint, too")
@click.option("--newest", is_flag=True, help="only the whole one that was saved last")
@click.option(
    "--max-age", type=_Age(), help="with --newest: exit with 1 if it is older: 90s, 15min, 1h, 2d"
)
@command
def list_(
    path: Location, with_all: bool, newest: bool, max_age: float | None, as_json: bool
) -> int:
    """List the checkpoints at PATH, or beneath it: state, step, age, ranks, size.

    Looks two levels down where there is none at the first. "files" compares names and sizes, and
    reads no data: see `verify`. Exits with 1 if one is not whole, or of a save that did not end and
    that nobody holds.
    """
    if max_age is not None and not newest:
        text = "--max-age is for --newest, which is not there"
        raise OptionError(text, option="max_age", value=max_age)
    _look(path)
    from torch_dcpx.cli.ls import show

    return show(path, with_all=with_all, newest=newest, max_age_s=max_age, as_json=as_json)


@app.command(example="dcpx inspect ckpt/step-200 -k 'model.*'")
@click.argument("path", type=_PATH_OR_URL)
@_KEYS
@click.option("--parts", is_flag=True, help="each stored part, with its file and place")
@click.option("--chunks", is_flag=True, hidden=True, help="an earlier name of --parts")
@_LIMIT
@_HTML
@_OVERWRITE
@command
def inspect(
    path: Location,
    keys: tuple[str, ...],
    parts: bool,
    chunks: bool,
    limit: int,
    html: Path | None,
    overwrite: bool,
    as_json: bool,
) -> int:
    """Show the names, dtypes, shapes, parts and files of a checkpoint or an export.

    "stored" is the size with framing. --html alone reads values, of a few small objects. Exits with
    1 if a file is missing or has a wrong size, with 2 if nothing fits a --key.
    """
    _look(path, takes_files=True)
    page = _page(html, is_replacing=overwrite)
    from torch_dcpx.cli.inspect import show

    return show(path, keys, with_parts=parts or chunks, limit=limit, as_json=as_json, page=page)


@app.command(example="dcpx verify ckpt")
@click.argument("paths", type=_PATH_OR_URL, nargs=-1, required=True, metavar="PATH...")
@click.option("--workers", type=click.IntRange(min=1), help="threads that read and sum")
@command
def verify(paths: tuple[Location, ...], workers: int | None, as_json: bool) -> int:
    """Compare every byte of checkpoints with its checksums, and list all faults.

    Each PATH is a checkpoint, a directory with checkpoints in it, or what `export` wrote.
    """
    _look(*paths, takes_files=True)
    from torch_dcpx.cli.listing import run_verify

    return run_verify(paths, workers=workers, as_json=as_json)


@app.command(example="dcpx cat ckpt/step-200 'model.weight[0:2]' step")
@click.argument("path", type=_PATH_OR_URL)
@click.argument("names", type=_NAME, nargs=-1, required=True, metavar="NAME[ROWS]...")
@click.option("--full", is_flag=True, help="every value; default: torch's summary")
@_RANK
@command
def cat(path: Location, names: tuple[str, ...], full: bool, rank: int | None, as_json: bool) -> int:
    """Print values of tensors, of some of their rows, and of objects.

    PATH is a checkpoint, or what `export` wrote. A NAME is stored, else a glob: 'step', '*.bias',
    'model.weight[3:7]', 'model.weight[0, ::2]'. Reads the blocks of these rows, executes nothing.
    """
    _look(path, takes_files=True)
    from torch_dcpx.cli.cat import run_cat

    return run_cat(path, names, is_full=full, rank=rank, as_json=as_json)


@app.command(example="dcpx diff ckpt/step-100 ckpt/step-200")
@click.argument("a", type=_PATH_OR_URL)
@click.argument("b", type=_PATH_OR_URL)
@_KEYS
@click.option("--rtol", default=0.0, help="values are equal if |A - B| <= ATOL + RTOL * |B|")
@click.option("--atol", default=0.0, help="see --rtol")
@click.option("--quick", is_flag=True, help="by recorded checksums, which proves no bytes")
@_LIMIT
@_RANK
@_HTML
@_OVERWRITE
@command
def diff(
    a: Location,
    b: Location,
    keys: tuple[str, ...],
    html: Path | None,
    overwrite: bool,
    as_json: bool,
    **choices: Any,
) -> int:
    """Show how B differs from A: names, shapes, dtypes, then values.

    Each is a checkpoint, or what `export` wrote. Reads all values of both, and compares them with
    their checksums on the way; --quick compares recorded checksums where both have these of the
    same parts. Exits with 1 if they differ.
    """
    _look(a, b, takes_files=True)
    page = _page(html, is_replacing=overwrite)
    from torch_dcpx.cli.diff import run_diff

    return run_diff(a, b, keys=keys or None, as_json=as_json, page=page, **choices)


@app.command(example="dcpx stats ckpt/step-200 -k 'model.*'")
@click.argument("path", type=_PATH_OR_URL)
@_KEYS
@_LIMIT
@_RANK
@command
def stats(
    path: Location, keys: tuple[str, ...], limit: int, rank: int | None, as_json: bool
) -> int:
    """Show minimum, maximum, mean and norm of tensors, and count NaN and infinities.

    PATH is a checkpoint, or what `export` wrote. Reads all values, in bounded memory. Minimum,
    maximum, mean and norm are those of finite elements.
    """
    _look(path, takes_files=True)
    from torch_dcpx.cli.stats import run_stats

    return run_stats(path, keys, rank=rank, limit=limit, as_json=as_json)


@app.command(example="dcpx export ckpt/step-200 model.safetensors -k 'model.*'")
@click.argument("source", type=_PATH_OR_URL)
@click.argument("dest", type=_PATH_OR_URL)
@click.option(
    "--format", "-f", "kind", type=click.Choice(["safetensors", "torch", "dcp"]), help="of DEST"
)
@click.option(
    "--key", "-k", "keys", type=_NAME, multiple=True, help="only names that this glob fits"
)
@click.option("--dtype", help="of floating tensors, such as bf16, fp16, fp32")
@click.option("--max-shard-bytes", default="5GB", show_default=True, help="of a safetensors file")
@click.option("--unwrap", is_flag=True, help="leave the 'module.' of DDP out of names")
@click.option("--config", metavar="DIR", help="copy configs and tokenizer files of DIR beside it")
@click.option("--merge-lora", metavar="DIR", help="add an adapter of peft to its base's weights")
@click.option("--overwrite", is_flag=True, help="replace a DEST of the same kind")
@command
def export(source: Location, dest: Location, as_json: bool, **choices: Any) -> int:
    """Write a checkpoint as safetensors or one torch.save file, or such files as a checkpoint.

    DEST's suffix (.safetensors, .pt, .pth, .bin) says the format. A DEST without one is a directory
    of safetensors if SOURCE is a checkpoint, and a checkpoint if SOURCE is such files. Another
    suffix of letters is refused, unless --format is given.
    """
    _look(source, takes_files=True)
    from torch_dcpx.cli.export import run_export

    return run_export(source, dest, as_json=as_json, **choices)


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    example="dcpx run -- python train.py",
)
@click.argument("line", type=click.UNPROCESSED, nargs=-1, required=True, metavar="-- COMMAND...")
@command
def run(line: tuple[str, ...], as_json: bool) -> int:  # noqa: ARG001  (of errors)
    """Run a command with DCPX_INSTALL=1: in it and its children DCP's classes are ours."""
    from torch_dcpx.cli.run import run_with_hook

    run_with_hook(line)


@app.command(example="dcpx repair ckpt/step-200 --dry-run")
@click.argument("path", type=_PATH_OR_URL)
@click.option("--dry-run", is_flag=True, help="print the report, write nothing")
@click.option("--accept-assumptions", is_flag=True, help="write metadata that needs assumptions")
@click.option("--file", "files", multiple=True, help="a data file of the save (each of them)")
@click.option(
    "--rank-local/--all-ranks",
    default=None,
    help="make each rank's own metadata, or that of all ranks; default: as the files show",
)
@command
def repair(path: Location, files: tuple[str, ...], as_json: bool, **flags: bool | None) -> int:
    """Make a lost or damaged .metadata anew from the data files. Never over a good one.

    Exits with 1, and writes nothing, if they do not prove what the metadata held. If they do with
    assumptions, --dry-run lists and --accept-assumptions takes them.
    """
    _look(path)
    from torch_dcpx.cli.listing import run_repair

    return run_repair(path, as_json=as_json, files=files or None, **flags)


@app.command(example="dcpx gc ckpt")
@click.argument("paths", type=_PATH_OR_URL, nargs=-1, required=True, metavar="PATH...")
@click.option("--delete", is_flag=True, help="remove them")
@click.option(
    "--grace",
    "grace_s",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="age at which objects of a store may go; default: a day",
)
@command
def gc(paths: tuple[Location, ...], delete: bool, grace_s: float | None, as_json: bool) -> int:
    """List data files that no metadata names: of saves that did not end, or were replaced.

    Each PATH is a checkpoint, or a directory with checkpoints in it. --delete removes them, under
    the lock of a save. In a directory without metadata it removes files only if PATH names it. A
    save of stock DCP takes no lock: do not use --delete while one is under way. A store has no
    locks: there it removes what is older than --grace.
    """
    _look(*paths)
    from torch_dcpx.cli.gc import run_gc

    return run_gc(paths, delete=delete, grace_s=grace_s, as_json=as_json)


@app.command(example="dcpx trace traces --out merged.json")
@click.argument("folder", type=_PATH, metavar="DIR")
@click.option("--out", type=_PATH, default="trace.json", show_default=True, help="the merged trace")
@click.option("--overwrite", is_flag=True, help="replace a trace at --out, a page at --html")
@click.option("--save-id", help="of this save or load; default: the newest")
@click.option("--all", "takes_all", is_flag=True, help="all saves and loads")
@_HTML
@command
def trace(
    folder: Path, out: Path, html: Path | None, overwrite: bool, as_json: bool, **choices: Any
) -> int:
    """Merge the traces of all ranks that DCPX_TRACE_DIR=DIR left, and show which phase took long.

    --html draws them; the merged file opens in ui.perfetto.dev, too. Ranks are placed by the clocks
    of their machines. A row "worker: write" is the mean over the workers of a rank.
    """
    page = None if html is None else _page(html, is_replacing=overwrite)
    if html is not None and html.absolute() == out.absolute():
        raise click.UsageError("--html and --out name one file")
    from torch_dcpx.cli.trace import run_trace

    choices |= {"overwrite": overwrite, "page": page}
    return run_trace(folder, out, as_json=as_json, **choices)


@app.command(example="dcpx doctor ckpt")
@click.argument("path", type=_PATH_OR_URL, required=False)
@command
def doctor(path: Location | None, as_json: bool) -> int:
    """Check that this machine, and PATH's file system or store, serve fast and safe saves.

    Writes and removes a small file in PATH.
    """
    if path is not None:
        _look(path)
    from torch_dcpx.cli.doctor import examine

    return examine(path, as_json=as_json)
