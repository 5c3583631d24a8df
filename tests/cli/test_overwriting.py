"""One rule in Python and in commands: what is there is replaced if asked, and by its own kind."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import torch_dcpx as dcpx
from torch_dcpx import _replacing
from torch_dcpx.artifacts.files import ArtifactFiles
from torch_dcpx.cli.app import app
from torch_dcpx.errors import OptionError

Door = Callable[..., Any]
MINE = b'{"mine": "the only copy"}'


def command(*args: object) -> None:
    """Calls a command; one that could not do it raises OptionError with what it says."""
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    if result.exit_code:
        raise OptionError(result.stderr)


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DCPX_TRACE_DIR", str(tmp_path / "traces"))
    dcpx.save({"w": torch.ones(3), "v": torch.ones(3)}, tmp_path / "ckpt")
    return tmp_path / "ckpt"


def export(saved: Path, path: Path, *, overwrite: bool = False) -> None:
    dcpx.export(saved, path, overwrite=overwrite)


def export_shards(saved: Path, path: Path, *, overwrite: bool = False) -> None:
    dcpx.export(saved, path.parent, max_shard_bytes=1, overwrite=overwrite)


def export_command(saved: Path, path: Path, *, overwrite: bool = False) -> None:
    command("export", saved, path, *(["--overwrite"] if overwrite else []))


def trace(saved: Path, path: Path, *, overwrite: bool = False) -> None:
    dcpx.save({"w": torch.ones(3)}, saved).result().trace(path, overwrite=overwrite)


def trace_command(saved: Path, path: Path, *, overwrite: bool = False) -> None:
    flags = ["--overwrite"] if overwrite else []
    command("trace", saved.parent / "traces", "--out", path, *flags)


def page(saved: Path, path: Path, *, overwrite: bool = False) -> None:
    command("inspect", saved, "--html", path, *(["--overwrite"] if overwrite else []))


DOORS: list[tuple[Door, str]] = [
    (export, "model.safetensors"),
    (export, "model.pt"),
    (export_shards, "model.safetensors"),
    (export_shards, "model.safetensors.index.json"),
    (export_command, "model.safetensors"),
    (export_command, "model.bin"),
    (trace, "trace.json"),
    (trace_command, "trace.json"),
    (page, "page.html"),
]


def each_door(test: Any) -> Any:
    ids = [f"{door[0].__name__}-{door[1]}" for door in DOORS]
    return pytest.mark.parametrize("door", DOORS, ids=ids)(test)


@each_door
def test_a_file_of_another_kind_stays_and_one_of_the_same_is_replaced_if_asked(
    saved: Path, tmp_path: Path, door: tuple[Door, str]
) -> None:
    call, name = door
    out = tmp_path / "out"
    out.mkdir()
    for overwrite in (False, True):
        for mine in (MINE, b"", b"PK\x03\x04", b"[" * 9999, bytes(64)):
            (out / name).write_bytes(mine)
            with pytest.raises(OptionError, match="is there"):
                call(saved, out / name, overwrite=overwrite)
            assert [(path.name, path.read_bytes()) for path in out.iterdir()] == [(name, mine)]
    path = tmp_path / "more" / name
    path.parent.mkdir()
    call(saved, path)
    with pytest.raises(OptionError, match="is there"):
        call(saved, path)
    call(saved, path, overwrite=True)
    assert not [path for path in path.parent.iterdir() if path.name.startswith(".")]


@each_door
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("has_rename", [False, True])
def test_a_file_that_comes_meanwhile_stays(
    saved: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    door: tuple[Door, str],
    overwrite: bool,
    has_rename: bool,
) -> None:
    call, name = door
    out = tmp_path / "out"
    out.mkdir()

    def put(*_: Any) -> None:
        (out / name).write_bytes(MINE)

    checked = _replacing.Replacing.check
    checks = []

    def check(self: Any, path: Path) -> None:
        checks.append(path)
        checked(self, path)
        if not overwrite:  # behind the last look: the rename itself must refuse
            monkeypatch.setattr(_replacing.Replacing, "check", checked)
            put()

    def publish(*args: Any) -> None:
        put()
        published(*args)

    published = ArtifactFiles.publish
    if "export" in call.__name__:
        monkeypatch.setattr(ArtifactFiles, "publish", publish)
    else:
        monkeypatch.setattr(_replacing.Replacing, "check", check)
        if overwrite:  # before the last look
            monkeypatch.setattr(_replacing.Replacing, "move", moving(put))
    if not has_rename:

        def none(*_: object) -> None:
            raise OSError(errno.EINVAL, "no such rename")

        monkeypatch.setattr(_replacing, "rename_new", none)
    with pytest.raises(OptionError, match="is there"):
        call(saved, out / name, overwrite=overwrite)
    assert [(path.name, path.read_bytes()) for path in out.iterdir()] == [(name, MINE)]


def moving(put: Callable[[], None]) -> Any:
    real = _replacing.Replacing.move

    def move(self: Any, old: Path, new: Path) -> None:
        put()
        real(self, old, new)

    return move


def test_the_last_rename_of_an_export_replaces_nothing_unasked(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    refuse = ArtifactFiles._refuse_taken
    calls: list[None] = []

    def refuse_then_put(self: Any) -> None:
        refuse(self)
        calls.append(None)
        if len(calls) == 2:  # behind the last look
            (out / "model.safetensors").write_bytes(MINE)

    monkeypatch.setattr(ArtifactFiles, "_refuse_taken", refuse_then_put)
    with pytest.raises(OptionError, match="is there"):
        dcpx.export(saved, out)
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    assert (out / "model.safetensors").read_bytes() == MINE


def test_a_checkpoint_that_comes_meanwhile_stays(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch_dcpx.cli import export as cli_export

    dcpx.export(saved, tmp_path / "model.pt")
    real = cli_export._check_dest

    def then_saved(*args: Any) -> None:
        real(*args)
        dcpx.save({"mine": torch.ones(1)}, tmp_path / "b")

    monkeypatch.setattr(cli_export, "_check_dest", then_saved)
    with pytest.raises(OptionError, match="is there by now; name another"):
        command("export", tmp_path / "model.pt", tmp_path / "b")
    assert list(dcpx.load_tensors(tmp_path / "b")) == ["mine"]


def test_a_trace_of_a_container_with_the_same_name_and_pid_stays(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch_dcpx import _trace_files

    state = {"w": torch.zeros(3), "v": torch.zeros(3)}
    for _ in range(2):
        monkeypatch.setattr(_trace_files, "_counter", iter(range(99)))
        dcpx.load(state, saved)
    assert len(list((tmp_path / "traces").glob("load-*"))) == 2
