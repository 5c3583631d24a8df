"""An open checkpoint: its objects, its end, and what others do meanwhile."""

from __future__ import annotations

import copy
import gc
import inspect
import os
import pickle
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch as st
import torch
from support.foreign import Piece, write_foreign
from support.saves import change, data_files, save
from support.zip_samples import saved

import torch_dcpx as dcpx
from torch_dcpx import (
    ConcurrentSaveError,
    CorruptionError,
    OptionError,
    ReadOptions,
    StorageError,
    UnknownNameError,
    UnsafePickleError,
    UnsupportedError,
)
from torch_dcpx.storage.reader_lock import being_deleted, make_readers_file


class Opaque:
    """A class that no allow-list has."""

    made = 0

    def __init__(self, value: int) -> None:
        self.value = value

    def __setstate__(self, state: dict[str, Any]) -> None:
        type(self).made += 1
        vars(self).update(state)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    state = {
        "w": torch.arange(1000).view(100, 10),
        "step": 7,
        "odd": Opaque(4),
        "opt": {"name": "a"},
    }
    save(state, tmp_path / "ckpt")
    return tmp_path / "ckpt"


# ---- Objects -------------------------------------------------------------------------------------


def test_objects_are_decoded_one_by_one_under_the_trust_rules(stored: Path) -> None:
    Opaque.made = 0
    with dcpx.open_checkpoint(stored) as checkpoint:
        assert set(checkpoint.objects) == {"step", "odd", "opt.name"}
        assert checkpoint.objects["step"] == 7
        assert checkpoint.objects["opt.name"] == "a"
        with pytest.raises(UnsafePickleError, match="Opaque"):
            checkpoint.objects["odd"]
        with pytest.raises(UnknownNameError, match="'w' among 3"):
            checkpoint.objects["w"]
    assert Opaque.made == 0
    for options in (ReadOptions(safe_globals=(Opaque,)), ReadOptions(trusted=True)):
        with dcpx.open_checkpoint(stored, options) as checkpoint:
            assert checkpoint.objects["odd"].value == 4
            assert checkpoint.objects["step"] == 7


# ---- The end, and copies -------------------------------------------------------------------------


def test_use_after_the_end_is_an_error_that_says_so(stored: Path, no_leaks: None) -> None:
    with dcpx.open_checkpoint(stored) as checkpoint:
        lazy, objects = checkpoint["w"], checkpoint.objects
    assert lazy.shape == (100, 10)
    assert "closed" in repr(checkpoint)
    checkpoint.close()
    uses = [
        lambda: lazy[0],
        lambda: checkpoint["w"],
        lambda: list(checkpoint),
        lambda: len(checkpoint),
        lambda: "w" in checkpoint,
        checkpoint.load_tensors,
        lambda: objects["step"],
        checkpoint.__enter__,
    ]
    for use in uses:
        with pytest.raises(OptionError, match="is closed: open it again"):
            use()


@pytest.mark.parametrize("act", [pickle.dumps, copy.copy, copy.deepcopy])
def test_pickles_and_copies_are_refused_by_name(stored: Path, act: Any) -> None:
    with dcpx.open_checkpoint(stored) as checkpoint:
        with pytest.raises(UnsupportedError, match=r"open checkpoint .* cannot be pickled"):
            act(checkpoint)
        with pytest.raises(UnsupportedError, match="lazy tensor 'w' cannot be pickled"):
            act(checkpoint["w"])


def test_threads_and_a_forked_child_read_at_once(stored: Path) -> None:
    expected, found = torch.arange(1000).view(100, 10), {}

    def read(thread: int) -> None:
        found[thread] = all(torch.equal(lazy[row], expected[row]) for row in range(thread, 100, 4))

    with dcpx.open_checkpoint(stored) as checkpoint:
        lazy = checkpoint["w"]
        threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == dict.fromkeys(range(4), True)
        child = os.fork()
        if not child:
            os._exit(0 if torch.equal(lazy[90:], expected[90:]) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(lazy[0], expected[0])


# ---- Lazy tensors as arguments -------------------------------------------------------------------


VALUES = {
    "matrix": torch.arange(6.0).reshape(2, 3),
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(3),
    "bits": torch.tensor([True, False]),
    "half": torch.ones(4, dtype=torch.bfloat16),
}


def test_functions_that_make_tensors_and_arrays_read_a_lazy_one_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(VALUES, tmp_path)
    reads: list[Any] = []
    getitem = dcpx.LazyTensor.__getitem__
    monkeypatch.setattr(
        dcpx.LazyTensor, "__getitem__", lambda t, index: reads.append(index) or getitem(t, index)
    )
    with dcpx.open_checkpoint(tmp_path) as checkpoint:
        for name, value in VALUES.items():
            lazy: Any = checkpoint[name]
            for make in (torch.as_tensor, torch.tensor, torch.asarray, torch.from_dlpack):
                made = make(lazy)
                assert made.dtype == value.dtype and torch.equal(made, value), (name, make)
            assert torch.equal(torch.as_tensor(lazy, dtype=torch.float64), value.double())
            if name != "half":
                array = np.asarray(lazy)
                assert array.dtype == value.numpy().dtype and (array == value.numpy()).all()
                assert np.array(lazy, dtype=np.float64).dtype == np.float64
        with pytest.raises(UnsupportedError, match=r"'half': numpy has no torch.bfloat16; .*float"):
            np.asarray(checkpoint["half"])
    assert set(reads) == {...}
    assert len(reads) == 5 * len(VALUES) + 2 * (len(VALUES) - 1) + 1  # each as a whole, once


def test_other_functions_of_torch_refuse_a_lazy_tensor_and_say_how_to_read_it(
    stored: Path,
) -> None:
    with dcpx.open_checkpoint(stored) as checkpoint:
        lazy: Any = checkpoint["w"]
        for call in (
            lambda: torch.add(lazy, 1),
            lambda: torch.ones(10) + lazy,
            lambda: torch.cat([lazy, torch.ones(1, 10)]),
            lambda: torch.zeros(100, 10).copy_(lazy),
        ):
            with pytest.raises(UnsupportedError, match=r"got a LazyTensor: read it first, as t\["):
                call()


# ---- What others do meanwhile --------------------------------------------------------------------


def test_deletion_waits_until_it_is_closed_or_forgotten(stored: Path) -> None:
    make_readers_file(stored)
    for is_closed in (True, False):
        checkpoint = dcpx.open_checkpoint(stored)
        with pytest.raises(ConcurrentSaveError, match="somebody reads it"), being_deleted(stored):
            raise AssertionError("deleted")
        if is_closed:
            checkpoint.close()
        del checkpoint
        gc.collect()
        with being_deleted(stored):
            pass


def test_error_of_the_opening_leaves_no_lock(stored: Path, no_leaks: None) -> None:
    make_readers_file(stored)
    path = stored / ".metadata"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CorruptionError) as caught:
        dcpx.open_checkpoint(stored)
    with being_deleted(stored):
        assert caught.value.path == str(path)


@pytest.mark.parametrize("kind", ["ours", "stock", "safetensors", "safetensors in place"])
def test_read_after_the_checkpoint_was_replaced_is_an_error_and_never_a_mix(
    tmp_path: Path, kind: str
) -> None:
    def write(value: int) -> None:
        state = {"w": torch.full((500, 10), value), "v": torch.full((9,), value)}
        if kind == "safetensors in place":
            (tmp_path / "model.safetensors").touch()
            (tmp_path / "model.safetensors").write_bytes(st.save(state))
        elif kind == "safetensors":
            st.save_file(state, tmp_path / "other.tmp")
            (tmp_path / "other.tmp").rename(tmp_path / "model.safetensors")
        else:
            save(state, tmp_path, kind)

    write(1)
    with dcpx.open_checkpoint(tmp_path) as checkpoint:
        assert (checkpoint["w"][:5] == 1).all()
        write(2)
        with pytest.raises(StorageError, match=r"was replaced .* again"):
            checkpoint["w"][:5]
        with pytest.raises(StorageError, match=r"was replaced .* again"):
            checkpoint.load_tensors("v")
    assert (dcpx.load_tensors(tmp_path)["v"] == 2).all()


def test_file_of_stock_that_is_written_to_while_it_is_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save({"w": torch.zeros(1000)}, tmp_path, "stock")
    read_data = dcpx.DcpxReader.read_data

    def overwritten(self: Any, *args: Any) -> Any:
        change(tmp_path / "__0_0.distcp", 2000, b"\x01" * 8)
        return read_data(self, *args)

    with dcpx.open_checkpoint(tmp_path) as checkpoint:
        monkeypatch.setattr(dcpx.DcpxReader, "read_data", overwritten)
        with pytest.raises(StorageError, match="was replaced"):
            checkpoint["w"][...]


def test_flipped_bit_in_the_rows_is_found_and_elsewhere_does_no_harm(tmp_path: Path) -> None:
    rows = torch.zeros(64, 64 << 10, dtype=torch.uint8)
    save({"w": rows}, tmp_path)
    (name,) = data_files(tmp_path)
    change(tmp_path / name, 20 * (64 << 10), b"\xff")
    with dcpx.open_checkpoint(tmp_path) as checkpoint:
        assert not checkpoint["w"][40:50].any()
        with pytest.raises(CorruptionError) as caught:
            checkpoint["w"][10:30]
        assert caught.value.fqn == "w"


def test_sparse_tensor_is_refused_by_name(tmp_path: Path) -> None:
    def mark(metadata: Any) -> None:
        metadata.state_dict_metadata["w"].properties.layout = torch.sparse_coo

    tensor = torch.eye(3)
    write_foreign(tmp_path, [Piece("w", saved(tensor.to_sparse()), tensor)], change=mark)
    with dcpx.open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint["w"].shape == (3, 3)
        with pytest.raises(UnsupportedError, match=r"'w' is stored as .* of layout"):
            checkpoint["w"][...]


def test_objects_of_a_torch_file_are_there_and_tensors_in_them_refused(tmp_path: Path) -> None:
    path, loop = tmp_path / "y.pt", [1]
    loop.append(loop)
    deep: Any = ()
    for _ in range(400):
        deep = (deep,)
    more = {"odd": (torch.ones(3), 2), "loop": (loop,), "deep": deep}
    torch.save({"w": torch.ones(2), "step": 7, "lr": {"a": {3}}, **more}, path)
    with dcpx.open_checkpoint(path) as checkpoint:
        assert list(checkpoint) == ["w"]
        assert set(checkpoint.objects) == {"step", "lr.a", "odd", "loop", "deep"}
        assert (checkpoint.objects["step"], checkpoint.objects["lr.a"]) == (7, {3})
        checkpoint.objects["lr.a"].add(4)
        assert checkpoint.objects["lr.a"] == {3}
        assert checkpoint.objects["loop"][0][1][0] == 1
        with pytest.raises(UnsupportedError, match=r"'odd' of .* is a tuple with a tensor in it"):
            checkpoint.objects["odd"]
        checkpoint.objects["step"]  # the file is read; Python versions differ in frames a level
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(len(inspect.stack(0)) + 400)
        try:
            with pytest.raises(UnsupportedError, match=r"'deep' of .* is nested too deeply"):
                checkpoint.objects["deep"]
        finally:
            sys.setrecursionlimit(limit)
