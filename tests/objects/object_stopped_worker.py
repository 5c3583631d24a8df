"""One rank of test_object_stopped.py: saves to a store, which is stopped, with the others."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.worker import rank_case

import torch_dcpx
from torch_dcpx import ReadOptions, StorageError, WriteOptions

WRITE, READ = WriteOptions(save_timeout_s=4), ReadOptions(load_timeout_s=4)


def state() -> dict[str, torch.Tensor]:
    return {f"w{dist.get_rank()}": torch.arange(3000)}


@rank_case("save")
def ranks_save_and_load(root: Path, url: str) -> None:
    torch_dcpx.save(state(), f"{url}/old", options=WRITE)
    torch_dcpx.load(state(), f"{url}/old", options=READ)


def assert_unanswered(error: Exception, url: str) -> None:
    assert isinstance(error, StorageError) and error.errno == errno.ETIMEDOUT, repr(error)
    assert f"'{url}/" in str(error) and "no answer for 3 s" in str(error), error


@rank_case("all_hang")
def a_load_of_ranks_that_all_hang_raises_on_all(root: Path, url: str) -> None:
    with pytest.raises(StorageError) as caught:
        torch_dcpx.load(state(), f"{url}/old", options=READ)
    assert_unanswered(caught.value, url)


@rank_case("all_hang")
def a_save_of_ranks_that_all_hang_raises_on_all(root: Path, url: str) -> None:
    with pytest.raises(StorageError) as caught:
        torch_dcpx.save(state(), f"{url}/new", options=WRITE)
    assert_unanswered(caught.value, url)


@rank_case("one_hangs")
def a_save_in_which_one_rank_hangs_raises_on_all(root: Path, url: str) -> None:
    with pytest.raises(StorageError) as caught:
        torch_dcpx.save(state(), f"{url}/new", options=WRITE)
    assert_unanswered(caught.value, url)
