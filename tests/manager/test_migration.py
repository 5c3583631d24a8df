"""Every call in docs/howto/migrate.md has its counterpart: each row of its tables is tried."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.machine import seconds
from support.states import assert_same
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from trainings import FAST, Training, manager_of, on_disk

import torch_dcpx as dcpx

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "migrate.md"
Row = Callable[[Path], None]
ROWS: dict[str, Row] = {}
# Said in words: what there is to see is in the tests of other rows, or is stock's own.
IN_WORDS = {
    "`FsspecWriter`, other storage": "test_object_urls.py",
    "`_load_state_dict_from_keys`, `_EmptyStateDictLoadPlanner`": "test_load_tensors.py",
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


def trained(*steps: int) -> Training:
    training = Training()
    for step in steps:
        training.train(step)
    return training


def weights_of(training: Training) -> dict[str, Any]:
    return training.model.state_dict()


# ---- Stock DCP, and back ------------------------------------------------------------------------


@row(
    "`dcp.save(state, checkpoint_id=path)`",
    "`dcp.load(state, checkpoint_id=path)`",
    "`FileSystemWriter(path, ...)`",
    "`FileSystemReader(path)`",
    "a checkpoint of `DcpxWriter`, `dcpx.save`, `async_save`",
)
def calls_of_stock(root: Path) -> None:
    state = state_of(1)
    dcp.save(state, storage_writer=dcpx.DcpxWriter(root / "writer"))
    assert dcpx.save(state, root / "save").result() is not None
    dcpx.async_save(state, root / "async").result()
    dcp.save(state, checkpoint_id=root / "stock")
    for name in ("writer", "save", "async", "stock"):
        ours, through, stock = state_of(2), state_of(2), state_of(2)
        dcpx.load(ours, root / name)
        dcp.load(through, storage_reader=dcpx.DcpxReader(root / name))
        dcp.load(stock, checkpoint_id=root / name)
        assert_same(state, ours)
        assert_same(state, through)
        assert_same(state, stock)


@row("`dcp.async_save(...).result()`", "`BlockingAsyncStager`, `DefaultStager`")
def async_saves_of_stock(root: Path) -> None:
    state = state_of(1)
    assert dcpx.async_save(state, root / "ours").result() is not None
    writer, stager = dcpx.DcpxWriter(root / "stager"), dcpx.DcpxStager()
    saved = dcp.async_save(state, storage_writer=writer, async_stager=stager, no_dist=True)
    saved.result(timeout=seconds(60))
    dcp.async_save(state, storage_writer=dcpx.DcpxWriter(root / "own"), no_dist=True).result(
        seconds(60)
    )
    for name in ("ours", "stager", "own"):
        found = state_of(2)
        dcpx.load(found, root / name)
        assert_same(state, found)


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
    planner = dcpx.DcpxSavePlanner(dedup_save_to_lowest_rank=True)
    dcp.save(state_of(3), storage_writer=dcpx.DcpxWriter(root / "low"), planner=planner)
    dcp.load(found, storage_reader=dcpx.DcpxReader(root / "low"), planner=dcpx.DcpxLoadPlanner())
    assert_same(state_of(3), found)


@row("`get_state_dict`, `set_state_dict`, `Stateful`", "a checkpoint of a manager")
def states_of_stock(root: Path) -> None:
    training = trained(1)
    manager_of(root).save(1, **training.parts, user_content={"epoch": 1})
    other = Training(5)
    model, optimizer = dcp.state_dict.get_state_dict(other.model, other.optimizer)
    found = {"model": model, "optimizer": optimizer}
    dcp.load(found, checkpoint_id=root / "step-1", planner=dcp.DefaultLoadPlanner(allow_partial_load=True))  # fmt: skip  # noqa: E501
    assert_same(weights_of(training), found["model"])
    names = dcp.FileSystemReader(root / "step-1").read_metadata().state_dict_metadata
    assert {name.split(".")[0] for name in names} == {"model", "optimizer", "dcpx"}


@row("`dcp_to_torch_save(path, file)`")
def conversions_of_stock(root: Path) -> None:
    state = state_of(1)
    dcpx.save(state, root / "ckpt")
    dcp_to_torch_save(root / "ckpt", root / "stock.pt")
    assert_same(state, torch.load(root / "stock.pt", weights_only=True))
    dcpx.export(root / "ckpt", root / "ours.pt", format="torch")
    assert_same(state["model"], dict(torch.load(root / "ours.pt", weights_only=True)))


@row(
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


@row("`allow_partial_load=True`")
def partial_loads_of_stock(root: Path) -> None:
    dcpx.save(state_of(1), root / "a")
    more = {**state_of(2), "head": torch.ones(2)}
    with pytest.raises(dcpx.MismatchError):
        dcpx.load(more, root / "a")
    for how in (
        {"planner": dcpx.DcpxLoadPlanner(allow_partial_load=True)},
        {"strict": False},
        {"allow_missing": ["head*"]},
    ):
        assert dcpx.load(more, root / "a", **how).missing == ("head",)


@row("`ROOT/newest`, `.dcpx.*` beside a checkpoint")
def what_lies_beside_a_checkpoint(root: Path) -> None:
    training = trained(1)
    with manager_of(root) as manager:
        manager.save(1, model=training.model)
        manager.resume(model=training.model)
    beside = [root / "newest", *(root / "step-1").glob(".dcpx*")]
    assert len(beside) > 1
    for path in beside:
        path.unlink()
    found = {"model": Training(5).model.state_dict()}
    dcp.load(found, checkpoint_id=root / "step-1")
    assert_same(weights_of(training), found["model"])
    other = Training(6)
    assert manager_of(root).resume(model=other.model).tag == "step-1"


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


@row("`DcpxSavePlanner(split_replicas=True)`")
def pieces_of_rows(root: Path) -> None:
    dcpx.save(state_of(1), root / "a", planner=dcpx.DcpxSavePlanner(split_replicas=True))
    found = state_of(2)
    dcp.load(found, checkpoint_id=root / "a")
    assert_same(state_of(1), found)


# ---- SageMaker's library ------------------------------------------------------------------------


@row(
    "`smp.save_checkpoint(path, tag, partial=True, ...)`",
    '`tag="total_steps100"`',
    "`user_content=`",
    "`smp.resume_from_checkpoint(path)`",
)
def save_checkpoint_and_resume(root: Path) -> None:
    training = trained(1)
    content = {"cli": {"width": 8}, "total_steps": 100, "sizes": (1, 2)}
    manager_of(root).save("total_steps100", **training.parts, user_content=content, step=100)
    assert on_disk(root) == {"total_steps100"}
    other = Training(5)
    info = manager_of(root).resume(**other.parts)
    assert (info.tag, info.step, info.user_content) == ("total_steps100", 100, content)
    assert_same(weights_of(training), weights_of(other))
    assert training.train(2) == other.train(2)
    named = manager_of(root).resume(tag="total_steps100", **Training(6).parts)
    assert named.tag == "total_steps100"


@row(
    "`partial=False`",
    "`partial=False` in a resume",
    "`translate_if_full=True`",
    "`translate_function=`",
)
def full_checkpoints_and_their_names(root: Path) -> None:
    training = trained(1)
    manager_of(root).save(1, **training.parts)
    dcpx.export(root / "step-1", root / "same")
    to_hf = dcpx.KeyMap((r"^(\d+)\.", r"transformer.h.\1."))
    dcpx.export(root / "step-1", root / "hf", key_map=to_hf)
    dcpx.export(root / "step-1", root / "net.pt", format="torch")
    assert_same(weights_of(training), dict(torch.load(root / "net.pt", weights_only=True)))

    same, translated = Training(5), Training(6)
    dcpx.load_pretrained(same.model, root / "same")
    assert_same(weights_of(training), weights_of(same))
    back = dcpx.KeyMap((r"^transformer\.h\.", ""))
    assert "transformer.h.0.weight" in str(back.dry_run(root / "hf"))
    dcpx.load_pretrained(translated.model, root / "hf", key_map=back)
    assert_same(weights_of(training), weights_of(translated))
    with pytest.raises(dcpx.MismatchError):
        dcpx.load_pretrained(Training(7).model, root / "hf")

    manager = manager_of(root)
    manager.export(1, root / "net2.pt", format="torch")
    assert_same(weights_of(training), dict(torch.load(root / "net2.pt", weights_only=True)))
    other = Training(8)
    manager.export(other.model, root / "live")
    dcpx.load_pretrained(same.model, root / "live")
    assert_same(weights_of(other), weights_of(same))


@row("`num_kept_partial_checkpoints=5`")
def kept_checkpoints(root: Path) -> None:
    training = trained(1)
    with manager_of(root, keep_last=2) as manager:
        for step in range(1, 6):
            manager.save(step, model=training.model)
    assert on_disk(root) == {"step-4", "step-5"}


@row("`strict=False`, `load_optimizer=False`")
def arguments_of_resume(root: Path) -> None:
    training = trained(1)
    manager = manager_of(root)
    manager.save("total_steps100", model=training.model, step=100)
    manager.save(200, **trained(1, 2).parts)
    other = Training(5)
    with pytest.raises(dcpx.MismatchError):
        manager.resume(**other.parts, tag="total_steps100")
    assert manager.resume(**other.parts, tag="total_steps100", strict=False).step == 100
    assert_same(weights_of(training), weights_of(other))
    fresh = Training(6)
    assert manager.resume(**fresh.parts, tag=200, load_optimizer=False).tag == "step-200"
    assert_same(weights_of(trained(1, 2)), weights_of(fresh))
    assert not fresh.optimizer.state
    assert fresh.scheduler.last_epoch == 0


@row("the `newest` file")
def newest_file(root: Path) -> None:
    training = trained(1)
    manager = manager_of(root)
    for step in (1, 2):
        manager.save(step, model=training.model)
    assert "step-2" in (root / "newest").read_text()
    (root / "newest").unlink()
    assert manager_of(root).resume(model=training.model).tag == "step-2"


@row("`smp.save(obj, f, partial=True)`")
def save_and_load(root: Path) -> None:
    dcpx.save({"name": state_of(1)}, root / "a", options=FAST)
    found = {"name": state_of(2)}
    dcpx.load(found, root / "a")
    assert_same({"name": state_of(1)}, found)
    manager = manager_of(root / "run")
    manager.save(1, state={"mine": dcpx.PerRank([3])}, user_content={"mine": dcpx.PerRank(4)})
    target: dict[str, Any] = {"mine": dcpx.PerRank(None)}
    assert manager.resume(state=target).user_content == {"mine": 4}
    assert target["mine"].value == [3]
    dcpx.export(state_of(1)["model"], root / "f.pt", format="torch")
    assert_same(state_of(1)["model"], dict(torch.load(root / "f.pt", weights_only=True)))


@row("`model.state_dict()`, which gathers")
def states_whole_and_local(root: Path) -> None:
    training = trained(1)
    dcpx.export(training.model, root / "net.pt", format="torch")
    whole = torch.load(root / "net.pt", weights_only=True)
    options = StateDictOptions(full_state_dict=True)
    assert_same(dict(whole), get_model_state_dict(training.model, options=options))
    assert set(get_optimizer_state_dict(training.model, training.optimizer)) == {
        "state",
        "param_groups",
    }


# ---- The page -----------------------------------------------------------------------------------


def rows_of_the_page() -> list[str]:
    """Returns the first cells of all tables."""
    cells = re.findall(r"^\| (.+?) \|", PAGE.read_text(), re.MULTILINE)
    return [cell for cell in cells if cell not in {"stock", "ours", "smp", "---"}]


@pytest.mark.parametrize("function", dict.fromkeys(ROWS.values()), ids=lambda f: f.__name__)
def test_counterpart_does_what_the_page_says(function: Row, tmp_path: Path) -> None:
    function(tmp_path)


def test_the_pages_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    training, weights = Training(), Training(5).model.state_dict()
    full = {f"transformer.{name}": value for name, value in weights.items()}
    torch.save({**full, "_smp_is_partial": False}, "smp-full.pt")
    dcp.save(state_of(1), checkpoint_id="ckpt/of-stock")
    names = {"torch": torch, "state": state_of(1), "train": training.train, **training.parts}
    names["scheduler"] = training.scheduler
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 6
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), names)
    assert on_disk(tmp_path / "ckpt") >= {"step-1", "step-2", "step-3", "step-4", "checked"}
    assert (tmp_path / "final" / "model.safetensors").exists()
    assert_same(weights, weights_of(training))


def test_every_row_of_the_page_is_tried() -> None:
    rows = rows_of_the_page()
    assert len(rows) == len(set(rows))
    assert set(rows) == set(ROWS) | set(IN_WORDS)
    tests = {path.name for path in PAGE.parents[2].glob("tests/*/test_*.py")}
    assert {where.split(",")[0] for where in IN_WORDS.values()} <= tests
