"""Every call in docs/howto/migrate.md has its counterpart: each row of its tables is tried, here or
in the test that is named. The page's code runs in tests/pages_code."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.states import assert_same
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from trainings import Training, manager_of

import torch_dcpx as dcpx

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "migrate.md"
Row = Callable[[Path], None]
ROWS: dict[str, Row] = {}
ELSEWHERE = {
    "`dcp.save(state, checkpoint_id=path)`": "test_interop.py",
    "`dcp.load(state, checkpoint_id=path)`": "test_interop.py",
    "`FileSystemReader(path)`": "test_interop.py",
    "a checkpoint of `DcpxWriter`, `dcpx.save`, `async_save`": "test_calls.py",
    "`dcp.async_save(...).result()`": "test_async_save.py",
    "`BlockingAsyncStager`, `DefaultStager`": "test_stager.py",
    "`FsspecWriter`, other storage": "test_object_urls.py",
    "`_load_state_dict_from_keys`, `_EmptyStateDictLoadPlanner`": "test_load_tensors.py",
    "`allow_partial_load=True`": "test_load_planner.py",
    "`DcpxSavePlanner(split_replicas=True)`": "test_row_pieces.py",
    "`smp.save_checkpoint(path, tag, partial=True, ...)`": "test_roundtrip.py",
    "`smp.resume_from_checkpoint(path)`": "test_roundtrip.py",
    '`tag="total_steps100"`': "test_roundtrip.py",
    "`strict=False`, `load_optimizer=False`": "test_roundtrip.py",
    "`user_content=`": "test_user_content.py",
    "`partial=False`": "test_manager_export.py",
    "`partial=False` in a resume": "test_load_pretrained.py",
    "`translate_if_full=True`": "test_manager_export.py",
    "`translate_function=`": "test_translate.py",
    "`num_kept_partial_checkpoints=5`": "test_retention.py",
    "the `newest` file": "test_newest.py",
    "`smp.save(obj, f, partial=True)`": "test_calls.py",
}


def row(*cells: str) -> Callable[[Row], Row]:
    """Says which rows of the page, by their first cell, a function tries."""

    def keep(function: Row) -> Row:
        ROWS.update(dict.fromkeys(cells, function))
        return function

    return keep


def state_of(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {"model": torch.nn.Linear(4, 3).state_dict(), "step": seed}


def trained() -> Training:
    training = Training()
    training.train(1)
    return training


@row("`DefaultSavePlanner`, `DefaultLoadPlanner`")
def planners_of_stock(root: Path) -> None:
    class Own(dcp.DefaultSavePlanner):
        def transform_object(self, write_item: Any, value: Any) -> Any:
            is_weight = isinstance(value, torch.Tensor)
            return value * 0 + 7 if is_weight else super().transform_object(write_item, value)

    dcpx.save(state_of(1), root / "own", planner=Own())
    found = state_of(2)
    dcpx.load(found, root / "own", planner=dcp.DefaultLoadPlanner())
    assert found["step"] == 1
    assert torch.equal(found["model"]["bias"], torch.full((3,), 7.0))


@row("`get_state_dict`, `set_state_dict`, `Stateful`", "a checkpoint of a manager")
def states_of_stock(root: Path) -> None:
    training = trained()
    manager_of(root).save(1, **training.parts, user_content={"epoch": 1})
    other = Training(5)
    model, optimizer = dcp.state_dict.get_state_dict(other.model, other.optimizer)
    found = {"model": model, "optimizer": optimizer}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(found, checkpoint_id=root / "step-1", planner=planner)
    assert_same(training.model.state_dict(), found["model"])
    names = dcp.FileSystemReader(root / "step-1").read_metadata().state_dict_metadata
    assert {name.split(".")[0] for name in names} == {"model", "optimizer", "dcpx"}


@row("`dcp_to_torch_save(path, file)`", "`model.state_dict()`, which gathers")
def conversions_of_stock(root: Path) -> None:
    state, training = state_of(1), trained()
    dcpx.save(state, root / "ckpt")
    dcp_to_torch_save(root / "ckpt", root / "stock.pt")
    assert_same(state, torch.load(root / "stock.pt", weights_only=True))
    dcpx.export(root / "ckpt", root / "ours.pt", format="torch")
    assert_same(state["model"], dict(torch.load(root / "ours.pt", weights_only=True)))
    dcpx.export(training.model, root / "net.pt", format="torch")
    options = StateDictOptions(full_state_dict=True)
    whole = get_model_state_dict(training.model, options=options)
    assert_same(whole, dict(torch.load(root / "net.pt", weights_only=True)))


@row(
    "`FileSystemWriter(path, ...)`",
    "`thread_count=N` (N files)",
    "`sync_files=False`",
    "`overwrite=False`",
)
def options_of_stocks_writer(root: Path) -> None:
    writer = dcpx.DcpxWriter(
        root / "a", thread_count=3, sync_files=False, per_thread_copy_ahead=1 << 20,
        cache_staged_state_dict=True, overwrite=False,
    )  # fmt: skip
    assert (writer.options.workers, writer.options.durability) == (3, "none")
    dcp.save(state_of(1), storage_writer=writer)
    assert len(list((root / "a").glob("*.distcp"))) == 1
    with pytest.raises(dcp.CheckpointException, match="already exists"):
        dcp.save(state_of(2), storage_writer=writer)
    found = state_of(2)
    dcpx.load(found, root / "a")
    assert_same(state_of(1), found)


@row("`ROOT/newest`, `.dcpx.*` beside a checkpoint")
def what_lies_beside_a_checkpoint(root: Path) -> None:
    training = trained()
    with manager_of(root) as manager:
        manager.save(1, model=training.model)
        manager.resume(model=training.model)
    beside = [root / "newest", *(root / "step-1").glob(".dcpx*")]
    assert len(beside) > 1
    for path in beside:
        path.unlink()
    found = {"model": Training(5).model.state_dict()}
    dcp.load(found, checkpoint_id=root / "step-1")
    assert_same(training.model.state_dict(), found["model"])
    assert manager_of(root).resume(model=Training(6).model).tag == "step-1"


@row("saves of stock into a directory of ours")
def stock_over_ours(root: Path) -> None:
    for seed in (1, 2):  # the second has an id in its names
        dcpx.save(state_of(seed), root / "a")
    with pytest.warns(UserWarning, match="existing checkpoint"):
        dcp.save(state_of(3), checkpoint_id=root / "a")
    ours, stock = state_of(0), state_of(0)
    dcpx.load(ours, root / "a")
    dcp.load(stock, checkpoint_id=root / "a")
    assert_same(state_of(3), ours)
    assert_same(state_of(3), stock)
    assert len(list((root / "a").glob("*.distcp"))) == 2  # the former one's is left


@pytest.mark.parametrize("function", dict.fromkeys(ROWS.values()), ids=lambda f: f.__name__)
def test_counterpart_does_what_the_page_says(function: Row, tmp_path: Path) -> None:
    function(tmp_path)


def test_every_row_of_the_page_is_tried() -> None:
    cells = re.findall(r"^\| (.+?) \|", PAGE.read_text(), re.MULTILINE)
    rows = [cell for cell in cells if cell not in {"stock", "ours", "smp", "---"}]
    assert len(rows) == len(set(rows))
    assert sorted(rows) == sorted([*ROWS, *ELSEWHERE])
    tests = {path.name for path in PAGE.parents[2].glob("tests/*/test_*.py")}
    assert set(ELSEWHERE.values()) <= tests
