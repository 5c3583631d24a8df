"""Two ranks of test_call_arguments.py: a wrong argument of one is the error of both, at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.worker import rank_case
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

import torch_dcpx as dcpx
from torch_dcpx import CheckpointManager, KeyMap, OptionError, ReadOptions, WriteOptions

# Both ranks wait as long for each other, should the error not arrive.
WRITE, READ = WriteOptions(save_timeout_s=900), ReadOptions(load_timeout_s=900)


def fails_on_both(call: Callable[..., Any], given: dict[str, Any], wrong: dict[str, Any]) -> None:
    """Rank 1 gives what is wrong. Both raise an OptionError that names it."""
    is_wrong = dist.get_rank() == 1
    with pytest.raises(OptionError) as raised:
        call(**{**given, **(wrong if is_wrong else {})})
    (name,) = wrong
    assert name in str(raised.value), raised.value


@rank_case()
def wrong_arguments_of_one_rank_are_the_error_of_both(root: Path) -> None:
    state = {"w": torch.arange(4.0)}
    dcpx.save(state, root / "good", options=WRITE)
    group = {"process_group": "gloo"}, {"no_dist": "yes"}
    save = {"state_dict": state, "checkpoint_id": root / "out", "options": WRITE}
    for call in (dcpx.save, dcpx.async_save):
        wrongs = [{"state_dict": [1]}, {"checkpoint_id": 3}, {"planner": DefaultLoadPlanner()}]
        for wrong in (*wrongs, {"options": READ}, {"storage_writer": 3}, *group):
            fails_on_both(call, save, wrong)
    # Rank 0 had begun: its directory and its lock may be there.
    assert {path.name for path in root.glob("out/*")} <= {".dcpx.lock"}
    load = {"state_dict": state, "checkpoint_id": root / "good", "options": READ}
    wrongs = [{"state_dict": "x"}, {"checkpoint_id": 3}, {"planner": DefaultSavePlanner()}]
    wrongs += [{"options": WRITE}, {"storage_reader": 3}, {"strict": "no"}, {"cast": "maybe"}]
    for wrong in (*wrongs, {"allow_missing": "w"}, {"key_map": {"a": "b"}}, *group):
        fails_on_both(dcpx.load, load, wrong)
    model = nn.Linear(2, 2)
    pretrained = {"model": model, "path": root / "good", "options": READ}
    for wrong in ({"model": 3}, {"path": 3}, {"options": WRITE}, {"strict": 3}, *group):
        fails_on_both(dcpx.load_pretrained, pretrained, wrong)
    export = {"source": model, "path": root / "artifact", "options": WRITE}
    for wrong in ({"source": 3}, {"path": model}, {"keys": 3}, {"options": READ}, *group):
        fails_on_both(dcpx.export, export, wrong)
    assert not (root / "artifact").exists()


@rank_case()
def wrong_arguments_of_a_managers_call_are_the_error_of_both_ranks(root: Path) -> None:
    model = nn.Linear(2, 2)
    with CheckpointManager(root / "run", options=WRITE, read_options=READ) as manager:
        manager.save(1, model=model)
        manager.wait()
        save = {"tag_or_step": 2, "model": model}
        for wrong in ({"model": 3}, {"state": [1]}, {"metrics": 3}, {"step": "x"}):
            fails_on_both(manager.save, save, wrong)
        wrongs = [{"tag": 1.5}, {"strict": 3}, {"allow_missing": "x"}, {"cast": 3}]
        wrongs += [{"load_optimizer": "no"}, {"fallback": 3}, {"merge": 3}, {"translate": 3}]
        for wrong in wrongs:
            fails_on_both(manager.resume, {"model": model}, wrong)
        for call in (manager.pin, manager.unpin, manager.delete):
            fails_on_both(call, {"tag": 1}, {"tag": None})
        fails_on_both(manager.export, {"tag_or_model": 1, "path": root / "x"}, {"path": 3})
        fails_on_both(manager.dry_run, {"translate": KeyMap()}, {"translate": 3})
        fails_on_both(manager.save_on_signal, {"time_left_s": 1}, {"time_left_s": "soon"})
        assert manager.resume(model=model).tag == "step-1"
        assert manager.tags() == ["step-1"]
