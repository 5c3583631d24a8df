"""What users print: paths in their words, and only what is not the default."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

import torch_dcpx as dcpx


@pytest.mark.parametrize("cls", [dcpx.WriteOptions, dcpx.ReadOptions])
def test_options_show_what_is_not_their_default(cls: type) -> None:
    assert repr(cls()) == f"{cls.__name__}()"
    options = cls(workers=3, direct_io=False)
    assert repr(options) == f"{cls.__name__}(workers=3, direct_io=False)"
    assert eval(repr(options), vars(dcpx)) == options == pickle.loads(pickle.dumps(options))
    assert repr(replace(options, workers=None)) == f"{cls.__name__}(direct_io=False)"


def test_writer_and_reader_show_path_and_options() -> None:
    class Own(dcpx.DcpxWriter):
        pass

    assert repr(dcpx.DcpxWriter("run/a")) == "DcpxWriter('run/a')"
    assert repr(Own("a", sync_files=False)) == "Own('a', options=WriteOptions(durability='none'))"
    reader = dcpx.DcpxReader("run/a", options=dcpx.ReadOptions(verify="none"))
    assert repr(reader) == "DcpxReader('run/a', options=ReadOptions(verify='none'))"


def test_manager_shows_root_and_rules() -> None:
    assert repr(dcpx.CheckpointManager("run")) == "CheckpointManager('run')"
    manager = dcpx.CheckpointManager(
        "run", keep_last=3, keep_best=("loss", "min", 1), save_every=5, async_save=False
    )
    assert repr(manager) == (
        "CheckpointManager('run', keep_last=3, keep_best=('loss', 'min', 1), save_every=5, "
        "async_save=False)"
    )
