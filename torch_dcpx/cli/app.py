"""The commands of `dcpx` and their arguments. Each imports its code when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from torch_dcpx._version import __version__
from torch_dcpx.cli.output import command
from torch_dcpx.errors import DcpxError
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
        if not value:
            self.fail("an empty text is no path; '.' is the current directory", param, ctx)
        try:
            text = self._check(value, self._way_out)
        except DcpxError as error:
            self.fail(str(error), param, ctx)
        path = location_of(text)  # which drops the "./" of a name that begins with "~"
        if isinstance(path, Path) and str(path).startswith("~"):
            return path.absolute()
        return path


_PATH = _Path()
_PATH_OR_URL = _Path(takes_urls=True)
_RANK = click.option(
    "--rank", type=click.IntRange(min=0), help="whose checkpoint, where each rank saved its own"
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

    Args:
        takes_files: whether it takes the files of an export.
    """
    from torch_dcpx.cli.looks import look

    for path in paths:
        look(path, takes_files=takes_files)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="dcpx")
def app() -> None:
    """Look at checkpoints of torch-dcpx and of stock DCP, check them, mend them.

    Exits with 0 if all is well, 1 if a checkpoint is not, 2 if the command could not do it.
    """


@app.command("ls")
@click.argument("path", type=_PATH_OR_URL)
@click.option("--all", "with_all", is_flag=True, help="directories without a checkpoint, too")
@command
def list_(path: Location, with_all: bool, as_json: bool) -> int:
    """List the checkpoints at PATH, or beneath it one level down: state, size, files.

    Compares sizes, reads no data: see `verify`. Exits with 1 if one is not whole.
    """
    _look(path)
    from torch_dcpx.cli.listing import show

    return show(path, with_all=with_all, as_json=as_json)


@app.command()
@click.argument("path", type=_PATH_OR_URL)
@click.option(
    "--key", "-k", "keys", multiple=True, help="only names that this glob fits (any of several)"
)
@click.option("--chunks", is_flag=True, help="each chunk, with its file and place")
@click.option("--limit", default=100, show_default=True, help="rows of the table; 0: all")
@_HTML
@_OVERWRITE
@command
def inspect(
    path: Location,
    keys: tuple[str, ...],
    chunks: bool,
    limit: int,
    html: Path | None,
    overwrite: bool,
    as_json: bool,
) -> int:
    """Show the names, dtypes, shapes, chunks and files of a checkpoint or an export. Reads no data.

    --html reads values of a few small objects. Exits with 1 if a file is missing or has a wrong
    size, or if no name fits a --key.
    """
    _look(path, takes_files=True)
    page = _page(html, is_replacing=overwrite)
    from torch_dcpx.cli.inspect import show

    return show(path, keys, with_chunks=chunks, limit=limit, as_json=as_json, page=page)


@app.command()
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


@app.command()
@click.argument("path", type=_PATH_OR_URL)
@click.argument("names", nargs=-1, required=True, metavar="NAME[ROWS]...")
@click.option("--full", is_flag=True, help="every value; default: torch's summary")
@_RANK
@command
def cat(path: Location, names: tuple[str, ...], full: bool, rank: int | None, as_json: bool) -> int:
    """Print values: 'model.weight', 'model.weight[3:7]', 'model.weight[0, ::2]', 'step'.

    PATH is a checkpoint, or what `export` wrote. Reads the blocks that hold these rows, and
    executes nothing.
    """
    _look(path, takes_files=True)
    from torch_dcpx.cli.cat import run_cat

    return run_cat(path, names, is_full=full, rank=rank, as_json=as_json)


@app.command()
@click.argument("a", type=_PATH_OR_URL)
@click.argument("b", type=_PATH_OR_URL)
@click.option("--limit", default=100, show_default=True, help="rows of the table; 0: all")
@_RANK
@_HTML
@_OVERWRITE
@command
def diff(
    a: Location,
    b: Location,
    limit: int,
    rank: int | None,
    html: Path | None,
    overwrite: bool,
    as_json: bool,
) -> int:
    """Show how B differs from A: names, shapes, dtypes, then values.

    Each is a checkpoint, or what `export` wrote. Compares values by their checksums, where both
    have these of the same parts; else it reads. What needs a class that no reader makes counts as
    different. Exits with 1 if they differ.
    """
    _look(a, b, takes_files=True)
    page = _page(html, is_replacing=overwrite)
    from torch_dcpx.cli.diff import run_diff

    return run_diff(a, b, rank=rank, limit=limit, as_json=as_json, page=page)


@app.command()
@click.argument("source", type=_PATH_OR_URL)
@click.argument("dest", type=_PATH_OR_URL)
@click.option(
    "--format", "-f", "kind", type=click.Choice(["safetensors", "torch", "dcp"]), help="of DEST"
)
@click.option("--key", "-k", "keys", multiple=True, help="only names that this glob fits")
@click.option("--dtype", help="of floating tensors, such as bfloat16")
@click.option("--max-shard-bytes", default="5GB", show_default=True, help="of a safetensors file")
@click.option("--unwrap", is_flag=True, help="leave the 'module.' of DDP out of names")
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


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("line", type=click.UNPROCESSED, nargs=-1, required=True, metavar="-- COMMAND...")
@command
def run(line: tuple[str, ...], as_json: bool) -> int:  # noqa: ARG001  (of errors)
    """Run a command with DCPX_INSTALL=1: in it and its children DCP's classes are ours.

    Example: dcpx run -- torchrun --nproc-per-node 8 train.py
    """
    from torch_dcpx.cli.run import run_with_hook

    run_with_hook(line)


@app.command()
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
    assumptions, --dry-run lists them, and --accept-assumptions takes them.
    """
    _look(path)
    from torch_dcpx.cli.listing import run_repair

    return run_repair(path, as_json=as_json, files=files or None, **flags)


@app.command()
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


@app.command()
@click.argument("folder", type=_PATH, metavar="DIR")
@click.option("--out", type=_PATH, default="trace.json", show_default=True, help="the merged trace")
@click.option("--save-id", help="of this save or load; default: the newest")
@click.option("--all", "takes_all", is_flag=True, help="all saves and loads")
@_HTML
@_OVERWRITE
@command
def trace(
    folder: Path, out: Path, html: Path | None, overwrite: bool, as_json: bool, **choices: Any
) -> int:
    """Merge the traces of all ranks that DCPX_TRACE_DIR=DIR left, and show which phase took long.

    --html draws them; the merged file opens in ui.perfetto.dev, too. Ranks are placed by the clocks
    of their machines. A row "worker: write" is the mean over the workers of a rank.
    """
    page = _page(html, is_replacing=overwrite)
    if html is not None and html.absolute() == out.absolute():
        raise click.UsageError("--html and --out name one file")
    from torch_dcpx.cli.trace import run_trace

    return run_trace(folder, out, as_json=as_json, page=page, **choices)


@app.command()
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
