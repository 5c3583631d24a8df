"""Names, values, neighbours, interrupts and leftovers that an export must not stumble over."""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from export_cases import assert_artifact, read_artifact
from torch import nn

import torch_dcpx as dcpx
from torch_dcpx.artifacts import files as export_files
from torch_dcpx.artifacts.export import _Export
from torch_dcpx.artifacts.torch_archive import check_objects
from torch_dcpx.reader import pretrained_reader
from torch_dcpx.storage.directory import Directory
from torch_dcpx.storage.save_lock import machine

TWO = {"a": torch.ones(9), "b": torch.ones(5)}
OTHER = {"a": torch.zeros(9), "b": torch.zeros(5)}


def test_views_that_read_the_same_memory_otherwise_are_not_tied(tmp_path: Path) -> None:
    z = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    state = {"a": z, "conj": z.conj(), "imag": z.imag, "neg": z.conj().imag, "same": z.view(2)}
    report = dcpx.export(state, tmp_path)
    assert report.aliases == (("same", "a"),)
    found = read_artifact(tmp_path)
    assert found.keys() == {"a", "conj", "imag", "neg"}
    for name, tensor in found.items():
        assert torch.equal(tensor, state[name].resolve_conj().resolve_neg()), name


def test_orders_to_ranks_hold_no_boxes_of_tied_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, orders_of = [], _Export._orders

    def noting(run: _Export, parts: Any) -> Any:
        orders = orders_of(run, parts)
        own.extend(number for order in orders for number, _ in order.own)
        return orders

    monkeypatch.setattr(_Export, "_orders", noting)
    weight = torch.rand(4)
    report = dcpx.export({"a": weight, "b": weight, "c": torch.rand(2)}, tmp_path, no_dist=True)
    assert report.aliases == (("b", "a"),)
    assert own == [0, 2]


def test_names_and_headers_that_the_format_cannot_hold_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("__metadata__", "a\ud800"):
        with pytest.raises(dcpx.UnsupportedError, match=r"cannot hold 1 name:"):
            dcpx.export({name: torch.ones(2)}, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    monkeypatch.setattr("torch_dcpx.artifacts.layout.MAX_HEADER_BYTES", 120)
    with pytest.raises(dcpx.UnsupportedError, match="max_shard_bytes"):
        dcpx.export(TWO, tmp_path / "out")
    dcpx.export(TWO, tmp_path / "out", max_shard_bytes=1)


def test_tied_name_format_leaves_the_header_what_loaders_ask_for(tmp_path: Path) -> None:
    tensor = torch.ones(2)
    dcpx.export({"a": tensor, "format": tensor}, tmp_path)
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as held:
        assert held.metadata() == {"format": "pt"}


def test_tensors_without_memory_and_a_path_with_nul_are_typed_errors(tmp_path: Path) -> None:
    with pytest.raises(dcpx.UnsupportedError, match="'a' is on meta"):
        dcpx.export({"a": torch.empty(3, device="meta")}, tmp_path)
    with pytest.raises(dcpx.OptionError, match="NUL"):
        dcpx.export(TWO, f"{tmp_path}/a\0b")
    freed = torch.ones(6, 5)
    freed.untyped_storage().resize_(60)
    told = r"'a\.b' needs 120 B of a storage that holds 60 B"
    for name in ("m.safetensors", "m.pt"):
        with pytest.raises(dcpx.UnsupportedError, match=told):
            dcpx.export({"a": {"b": freed}}, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_directory_of_any_bytes_takes_an_artifact_and_a_file_name_must_be_utf8(
    tmp_path: Path,
) -> None:
    directory = tmp_path / os.fsdecode(b"a\x80")
    dcpx.export(TWO, directory, max_shard_bytes=1)
    model = nn.ParameterDict({name: torch.zeros_like(tensor) for name, tensor in TWO.items()})
    dcpx.load_pretrained(model, directory)
    assert torch.equal(model["a"], TWO["a"])
    assert_artifact(directory.rename(tmp_path / "b"), TWO)  # the package reads UTF-8 paths alone
    with pytest.raises(dcpx.OptionError, match=r"'a\\udc80' is no UTF-8"):
        dcpx.export(TWO, tmp_path / os.fsdecode(b"a\x80.safetensors"))


@pytest.mark.parametrize("stem", ["my model", "modèle", ".net"])
def test_own_shards_of_any_stem_are_loaded_again(tmp_path: Path, stem: str) -> None:
    dcpx.export(TWO, tmp_path / f"{stem}.safetensors", max_shard_bytes=1)
    model = nn.Module()
    for name, tensor in TWO.items():
        model.register_parameter(name, nn.Parameter(torch.zeros_like(tensor)))
    dcpx.load_pretrained(model, tmp_path / f"{stem}.safetensors.index.json")
    assert all(torch.equal(model.get_parameter(name), TWO[name]) for name in TWO)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), dcpx.StorageError("lost answer")])
def test_interrupt_right_after_the_last_rename_leaves_the_new_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    dcpx.export(TWO, tmp_path, max_shard_bytes=1)
    real = Directory.rename

    def renamed(self: Directory, old: str, new: str, **how: bool) -> None:
        real(self, old, new, **how)
        if new.endswith(".json"):
            raise error

    monkeypatch.setattr(Directory, "rename", renamed)
    with pytest.raises((KeyboardInterrupt, dcpx.DcpxError)):
        dcpx.export(OTHER, tmp_path, max_shard_bytes=1, overwrite=True)
    assert_artifact(tmp_path, OTHER)


@pytest.mark.parametrize("shard", [1, 2])
@pytest.mark.parametrize("is_made", [True, False])
def test_interrupt_at_the_rename_of_a_shard_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard: int, is_made: bool
) -> None:
    before: set[str] = set()
    for has_artifact in (False, True):  # the second time there are shards under these names
        real = Directory.rename

        def renamed(self: Directory, old: str, new: str, real: Any = real, **how: bool) -> None:
            is_last = f"-0000{shard}-of-" in new
            if is_made or not is_last:
                real(self, old, new, **how)
            if is_last:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Directory, "rename", renamed)
            with pytest.raises(KeyboardInterrupt):
                dcpx.export(OTHER, tmp_path, max_shard_bytes=1, overwrite=True)
        assert {path.name for path in tmp_path.iterdir()} == before
        if not has_artifact:
            dcpx.export(TWO, tmp_path, max_shard_bytes=1)
            before = {path.name for path in tmp_path.iterdir()}
    assert_artifact(tmp_path, TWO)


@pytest.mark.parametrize("kind", ["file", "link"])
def test_single_file_that_an_index_replaces_is_gone_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    out, single = tmp_path / "out", tmp_path / "out" / "model.safetensors"
    dcpx.export(TWO, out)
    if kind == "link":
        single.rename(tmp_path / "blob")
        single.symlink_to(tmp_path / "blob")
    at_sync: list[bool] = []
    real = Directory.sync

    def synced(self: Directory) -> None:
        real(self)
        at_sync.append(os.path.lexists(single))

    monkeypatch.setattr(Directory, "sync", synced)
    dcpx.export(OTHER, out, max_shard_bytes=1, overwrite=True)
    assert_artifact(out, OTHER)
    assert at_sync[-1] is False  # a power cut would bring it back, and loaders prefer it


def test_single_file_that_cannot_go_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dcpx.export(TWO, tmp_path)

    def refused(self: Directory, name: str) -> None:
        raise dcpx.StorageError(f"unlink '{name}'")

    monkeypatch.setattr(Directory, "unlink", refused)
    with pytest.raises(dcpx.StorageError, match=r"unlink 'model\.safetensors'"):
        dcpx.export(OTHER, tmp_path, max_shard_bytes=1, overwrite=True)


def test_two_exports_to_one_path_are_kept_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_leaks: object
) -> None:
    real = export_files.ArtifactFiles.publish

    def meanwhile(self: Any, *args: Any) -> None:
        monkeypatch.setattr(export_files.ArtifactFiles, "publish", real)
        with pytest.raises(dcpx.ConcurrentSaveError, match="another export"):
            dcpx.export(OTHER, tmp_path, max_shard_bytes=1, overwrite=True)
        real(self, *args)

    monkeypatch.setattr(export_files.ArtifactFiles, "publish", meanwhile)
    dcpx.export(TWO, tmp_path, max_shard_bytes=1)
    assert_artifact(tmp_path, TWO)
    dcpx.export(OTHER, tmp_path, max_shard_bytes=1, overwrite=True)
    assert_artifact(tmp_path, OTHER)


def test_checkpoint_that_is_exported_or_loaded_is_locked_against_deletion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dcpx.save(dict(TWO), tmp_path / "ckpt")
    lock = tmp_path / "ckpt" / ".dcpx.readers"
    lock.touch()
    from torch_dcpx.reader.reader import DcpxReader

    held = []
    real = DcpxReader.read_data

    def reading(self: Any, *args: Any) -> Any:
        with lock.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held.append(True)
        return real(self, *args)

    monkeypatch.setattr(DcpxReader, "read_data", reading)
    dcpx.export(tmp_path / "ckpt", tmp_path / "out")
    model = nn.ParameterDict({name: torch.zeros_like(tensor) for name, tensor in TWO.items()})
    dcpx.load_pretrained(model, tmp_path / "ckpt")
    assert held == [True, True]


def test_checkpoint_that_is_replaced_while_ranks_plan_is_refused(tmp_path: Path) -> None:
    from torch_dcpx.artifacts.agreement import Names, agreed_names
    from torch_dcpx.artifacts.stored_source import StoredSource
    from torch_dcpx.checkpoint.same_call import Call
    from torch_dcpx.options import WriteOptions

    offers, call = [], Call("export", {"path": "/out", "source": str(tmp_path)})
    for state in (TWO, OTHER):
        dcpx.save(dict(state), tmp_path)
        source = StoredSource(tmp_path, WriteOptions())
        offers.append(Names(*source.entries(), source.generation, call))
    with pytest.raises(dcpx.StorageError, match="was replaced"):
        agreed_names(offers)
    agreed_names(offers[:1] * 2)


def test_object_that_torch_cannot_load_is_refused_at_once(tmp_path: Path) -> None:
    longest = (1 << 2039) - 1
    dcpx.export({"o": longest, "n": -longest}, tmp_path, format="torch")
    held = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert held == {"o": longest, "n": -longest}
    with pytest.raises(dcpx.UnsupportedError, match="'o'"):
        dcpx.export({"o": longest + 1, "t": torch.ones(1)}, tmp_path, format="torch")
    doubled: list[Any] = []
    for _ in range(45):  # 2**45 paths to one list
        doubled = [doubled, doubled]
    check_objects({"o": doubled})
    with pytest.raises(dcpx.UnsupportedError, match="'o'"):
        check_objects({"o": [doubled, object()]})


def test_file_that_is_replaced_behind_its_header_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = pretrained_reader.read_safetensors

    def replaced(*args: Any) -> Any:
        held = real(*args)
        dcpx.export({"0": torch.ones(8), **OTHER}, tmp_path, overwrite=True)
        return held

    dcpx.export(TWO, tmp_path)
    model = nn.ParameterDict({name: torch.full_like(one, 7) for name, one in TWO.items()})
    with monkeypatch.context() as patch:
        patch.setattr(pretrained_reader, "read_safetensors", replaced)
        with pytest.raises(dcpx.StorageError, match="was replaced"):
            dcpx.load_pretrained(model, tmp_path)
    assert all(torch.equal(one, torch.full_like(one, 7)) for one in model.values())
    dcpx.load_pretrained(model, tmp_path)
    assert torch.equal(model["a"], OTHER["a"])


TWO = {"a": torch.ones(9), "b": torch.ones(5)}


def kill_export(path: Path, when: str, **kwargs: Any) -> None:
    """Exports in a child that is killed where it calls a method of ArtifactFiles."""
    pid = os.fork()
    if pid == 0:
        try:
            setattr(export_files.ArtifactFiles, when, lambda *_: os.kill(os.getpid(), 9))
            dcpx.export(
                {name: torch.zeros_like(one) for name, one in TWO.items()},
                path,
                no_dist=True,
                overwrite=True,
                **kwargs,
            )
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("when", "kind", "shard"),
    [("publish", "safetensors", 1), ("_sync", "safetensors", 1), ("_sync", "torch", 1 << 30)],
)
def test_next_export_removes_what_a_killed_one_left(
    tmp_path: Path, when: str, kind: str, shard: int
) -> None:
    out = tmp_path / "out"
    if kind == "safetensors":
        dcpx.export(TWO, out, max_shard_bytes=shard)
    kill_export(out, when, format=kind, max_shard_bytes=shard)
    left = [name for name in os.listdir(out) if name.endswith(".tmp")]
    assert left
    (out / ".mine.tmp").write_text("mine")
    if kind == "safetensors":
        dcpx.export(TWO, out, max_shard_bytes=shard, overwrite=True)
        (out / ".mine.tmp").unlink()
        assert_artifact(out, TWO)
    else:
        dcpx.export(TWO, out, format="torch")
        assert sorted(os.listdir(out)) == [".mine.tmp", "pytorch_model.bin"]


def test_only_own_names_of_this_machine_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = f"{machine()}-0123456789ab"
    gone = [
        f".model.safetensors.{own}.tmp",
        f".model.safetensors.index.json.{own}.tmp",
        f".model-00001-of-00002.safetensors.{own}.tmp",
        f".model-0123456789ab-00001-of-00002.safetensors.{own}.tmp",
    ]
    kept = [
        ".model.safetensors.deadbeef-0123456789ab.tmp",  # another machine's, or before a reboot
        f".other.safetensors.{own}.tmp",
        f".model.safetensors.{own[:-1]}.tmp",
        f".model.safetensors.{own}.tmp.txt",
        f"model.safetensors.{own}.tmp",
        f".pytorch_model.bin.{own}.tmp",
    ]
    for name in gone + kept:
        (tmp_path / name).write_text("x")
    link, kept_dir = tmp_path / gone[0], tmp_path / gone[1]
    link.unlink()
    link.symlink_to(tmp_path / "elsewhere")  # nobody's file: left alone, as a directory is
    kept_dir.unlink()
    kept_dir.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(export_files, "boot_id", lambda: export_files.UNKNOWN_BOOT)
        dcpx.export(TWO, tmp_path)
        assert set(gone + kept) < set(os.listdir(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(export_files, "_lock", lambda _: False)  # a file system without locks
        dcpx.export(TWO, tmp_path, overwrite=True)
        assert set(gone + kept) < set(os.listdir(tmp_path))
    dcpx.export(TWO, tmp_path, overwrite=True)
    assert set(os.listdir(tmp_path)) == {"model.safetensors", *kept, gone[0], gone[1]}
