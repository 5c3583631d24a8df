"""What goes wrong in `dcpx.load` is raised as it is, by its own type, and leaves nothing open."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.saves import change, save
from support.states import assert_same, blank_like
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata

import torch_dcpx as dcpx

pytestmark = pytest.mark.usefixtures("no_leaks")

STATE = {"a": torch.arange(50_000), "b": torch.ones(7), "step": 3}


@pytest.fixture(autouse=True)
def keyboard() -> Iterator[None]:
    # A shell starts what runs in the background with Ctrl-C ignored, and Python keeps to that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def open_files() -> set[str]:
    return {
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    }


def raised(kind: type[BaseException], **arguments: Any) -> BaseException:
    """Returns the error of a load, which holds no file open though it is kept."""
    before = open_files()
    with pytest.raises(kind) as caught:
        dcpx.load(blank_like(STATE), **arguments)
    assert type(caught.value) is kind
    assert open_files() <= before
    return caught.value


def test_damaged_metadata_is_corruption_even_beside_that_of_a_rank(tmp_path: Path) -> None:
    save(STATE, tmp_path)
    (tmp_path / "__0.metadata").write_bytes((tmp_path / ".metadata").read_bytes())
    change(tmp_path / ".metadata", 200, b"\xff\xfe")
    raised(dcpx.CorruptionError, checkpoint_id=tmp_path)


def test_damaged_metadata_is_said_before_a_planner_looks_for_its_entries(tmp_path: Path) -> None:
    class Looks(DefaultLoadPlanner):
        def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
            super().set_up_planner(*args, **kwargs)
            assert self.metadata is not None
            self.size = self.metadata.state_dict_metadata["a"]

    save(STATE, tmp_path)
    assert dcpx.load(blank_like(STATE), tmp_path, planner=Looks()).is_whole
    change(tmp_path / ".metadata", 200, b"\xff\xfe")
    raised(dcpx.CorruptionError, checkpoint_id=tmp_path, planner=Looks())


class Fails(DefaultLoadPlanner):
    """Fails in one hook with an error that is not ours."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        real = getattr(self, hook)

        def failing(*args: Any, **kwargs: Any) -> Any:
            real(*args, **kwargs)
            raise KeyError(hook)

        setattr(self, hook, failing)


def test_an_error_of_a_planners_hook_comes_out_as_it_is(tmp_path: Path) -> None:
    save(STATE, tmp_path)
    for hook in ("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan"):
        error = raised(KeyError, checkpoint_id=tmp_path, planner=Fails(hook))
        assert error.args == (hook,)


def test_a_planners_error_after_a_read_says_what_was_touched(tmp_path: Path) -> None:
    save(STATE, tmp_path)
    error = raised(KeyError, checkpoint_id=tmp_path, planner=Fails("commit_tensor"))
    assert set(vars(error)["touched"]) == set(STATE)
    assert "3 tensors may hold new bytes: " in "".join(getattr(error, "__notes__", ()))
    assert pickle.loads(pickle.dumps(error)).args == error.args


def test_ctrl_c_ends_the_load_and_the_next_one_works(tmp_path: Path) -> None:
    class Interrupted(DefaultLoadPlanner):
        def commit_tensor(self, read_item: Any, tensor: Any) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    save(STATE, tmp_path)
    reader = dcpx.DcpxReader(tmp_path)
    error = raised(KeyboardInterrupt, storage_reader=reader, planner=Interrupted())
    assert set(vars(error)["touched"]) == set(STATE)
    target = blank_like(STATE)
    assert dcpx.load(target, storage_reader=reader).is_whole
    assert_same(STATE, target)


def test_a_stateful_object_that_refuses_its_state_is_the_error(tmp_path: Path) -> None:
    class Refuses:
        def state_dict(self) -> dict[str, Any]:
            return {"b": torch.zeros(7)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise LookupError("not mine")

    save({"x": {"b": torch.ones(7)}}, tmp_path)
    with pytest.raises(LookupError, match="not mine"):
        dcpx.load({"x": Refuses()}, tmp_path)


def test_metadata_without_an_entry_for_a_tensor_is_corrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = dcpx.DcpxReader.read_metadata

    def read_less(self: dcpx.DcpxReader, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read(self, *args, **kwargs)
        metadata.storage_data = {k: v for k, v in metadata.storage_data.items() if k.fqn != "a"}
        return metadata

    save(STATE, tmp_path)
    monkeypatch.setattr(dcpx.DcpxReader, "read_metadata", read_less)
    error = raised(dcpx.CorruptionError, storage_reader=dcpx.DcpxReader(tmp_path))
    assert isinstance(error, dcpx.CorruptionError)
    assert (error.fqn, error.touched) == ("a", ())
