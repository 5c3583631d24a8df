"""torchtitan under the hook, in all three modes of saving, and through our adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.frameworks import Framework, Run, check_all_ours, check_page, check_seen, check_typos
from support.resume_cases import AdapterCases, ResumeCases, Trained, losses_after
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

NEW_RANKS = ("--new-ranks",)  # it loads the place in its data on the same number of ranks only


class TestTorchtitan(ResumeCases):
    NAME = "torchtitan"
    CHECKPOINT = "checkpoint/step-{}"
    PARTS = ("",)
    ON_OTHER_RANKS = NEW_RANKS

    def test_killed_in_a_save_resumes_from_the_one_before(
        self, trained: Trained, tmp_path: Path
    ) -> None:
        self.check_killed(trained, tmp_path, "disabled")

    @pytest.mark.parametrize("mode", ["async", "async_with_pinned_mem"])
    def test_saves_in_the_background_are_ours(
        self, trained: Trained, tmp_path: Path, mode: str
    ) -> None:
        run = trained.framework.train(tmp_path, "--async-mode", mode)
        check_seen(run, "writer", "planners")
        assert run.result["losses"] == trained.stock.result["losses"]
        for step in (2, 4, 6):
            check_all_ours(tmp_path / self.CHECKPOINT.format(step))
        # In the mode with pinned memory spawned processes write; they end without a last word.
        writers = [line for line in run.log if line.startswith("FileSystemWriter is ")]
        assert len(writers) == 2 * 3, run.log

    @pytest.mark.parametrize("mode", ["async", "async_with_pinned_mem"])
    def test_killed_in_a_save_in_the_background_resumes_from_the_one_before(
        self, trained: Trained, tmp_path: Path, mode: str
    ) -> None:
        self.check_killed(trained, tmp_path, mode)

    def check_killed(self, trained: Trained, folder: Path, mode: str) -> None:
        """Kills a training before it commits step 4, and starts it again by the same command."""
        trained.framework.kill_before_commit(2, folder, "--async-mode", mode)
        whole, torn = (folder / self.CHECKPOINT.format(step) for step in (2, 4))
        assert (whole / ".metadata").exists()
        assert torn.is_dir()
        assert not (torn / ".metadata").exists()
        resumed = trained.framework.train(folder, "--async-mode", mode)  # finds step 2
        check_seen(resumed, "reader", "writer", "planners")
        assert losses_after(0, resumed) == losses_after(2, trained.stock)
        for step in (2, 4, 6):
            check_all_ours(folder / self.CHECKPOINT.format(step))


MANAGER = ("--manager", "torch_dcpx.integrations.torchtitan:DcpxCheckpointManager")
STEP = "checkpoint/step-{}"


def options(**values: Any) -> list[str]:
    """Returns arguments of the example: options of the manager's Config."""
    return [f"--set={name}={json.dumps(value)}" for name, value in values.items()]


def steps_in(folder: Path) -> set[str]:
    """Returns the names of the checkpoints of a run."""
    return {path.name for path in (folder / "checkpoint").glob("step-*")}


def content_of(checkpoint: Path, into: Path) -> dict[str, Any]:
    """Returns all that stock DCP reads from a checkpoint, but our manager's own item."""
    dcp_to_torch_save(checkpoint, into)
    content: dict[str, Any] = torch.load(into, weights_only=False)
    content.pop("dcpx", None)
    return content


class TestTorchtitanAdapter(AdapterCases):
    NAME = "torchtitan"
    CHECKPOINT = STEP
    OURS = MANAGER
    ON_OTHER_RANKS = NEW_RANKS

    @pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
    def test_killed_in_a_save_resumes_from_the_one_before(  # type: ignore[override]
        self, trained: Trained, tmp_path: Path, mode: str
    ) -> None:
        arguments = (*MANAGER, "--async-mode", mode)
        trained.framework.kill_before_commit(2, tmp_path, *arguments, hook=False)
        assert (tmp_path / STEP.format(4)).is_dir()
        assert not (tmp_path / STEP.format(4) / ".metadata").exists()
        resumed = trained.framework.train(tmp_path, *arguments, hook=False)  # finds step 2
        assert losses_after(0, resumed) == losses_after(2, trained.stock)
        for step in (2, 4, 6):
            check_all_ours(tmp_path / STEP.format(step))

    def test_stock_goes_on_in_our_folder_and_ours_behind_it(
        self, trained: Trained, tmp_path: Path
    ) -> None:
        for steps, manager in ((2, MANAGER), (4, ()), (6, MANAGER)):
            run = trained.framework.train(tmp_path, "--steps", steps, *manager, hook=False)
            assert set(run.result["losses"]) == {str(steps - 1), str(steps)}


@pytest.fixture(scope="module")
def framework(tmp_path_factory: pytest.TempPathFactory) -> Framework:
    return Framework("torchtitan", tmp_path_factory.mktemp("titan"))


def train(framework: Framework, *arguments: object) -> Run:
    return framework.train(*arguments, hook=False)


def test_retention_keeps_the_last_commits_and_what_is_pinned(
    framework: Framework, tmp_path: Path
) -> None:
    arguments = (tmp_path, "--save-every", 1, *MANAGER, *options(keep_latest_k=2))
    train(framework, *arguments, "--steps", 1)
    (tmp_path / STEP.format(1) / ".dcpx.pin").touch()
    train(framework, *arguments, "--steps", 5, "--async-mode", "async")
    assert steps_in(tmp_path) == {"step-1", "step-4", "step-5"}


def test_after_a_step_back_the_last_commit_goes_on(framework: Framework, tmp_path: Path) -> None:
    train(framework, tmp_path, "--save-every", 1, "--steps", 5, *MANAGER)
    train(framework, tmp_path, "--steps", 2, *MANAGER, *options(load_step=1))
    run = train(framework, tmp_path, "--steps", 3, *MANAGER)
    assert set(run.result["losses"]) == {"3"}  # from step 2, not from 5


def test_damaged_newest_is_passed_over(framework: Framework) -> None:
    folder = "damaged"  # relative
    whole = train(framework, folder, "--save-every", 1, "--steps", 3, *MANAGER)
    for path in (framework.folder / folder / STEP.format(3)).glob("*.distcp"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    resumed = train(framework, folder, "--steps", 3, *MANAGER)
    assert resumed.result["losses"] == losses_after(2, whole)
    told = ("passed over", "skipped")  # the latter if our manager's own record is hit
    assert any("step-3" in line and any(map(line.__contains__, told)) for line in resumed.log)


def test_seed_is_loaded_by_more_ranks_as_stocks(framework: Framework, tmp_path: Path) -> None:
    only_load = options(load_only=True, keep_latest_k=2)
    losses = []
    for manager in (MANAGER, ()):
        folder = tmp_path / ("ours" if manager else "stock")
        seed = options(create_seed_checkpoint=True, last_save_model_only=True)
        framework.train(folder, *manager, *seed, hook=False, ranks=1)
        assert steps_in(folder) == {"step-0"}
        run = train(framework, folder, "--steps", 2, *manager, *only_load)
        assert steps_in(folder) == {"step-0"}  # `load_only`
        losses.append(run.result["losses"])
    assert losses[0] == losses[1]
    check_all_ours(tmp_path / "ours" / STEP.format(0))


@pytest.mark.parametrize("in_hf", [False, True])
def test_final_model_equals_stocks_and_starts_another_training(
    framework: Framework, tmp_path: Path, in_hf: bool
) -> None:
    final = options(last_save_model_only=True, export_dtype="bfloat16", last_save_in_hf=in_hf)
    for manager in (MANAGER, ()):
        train(framework, tmp_path / str(bool(manager)), "--steps", 2, *manager, *final)
    ours, stock = (tmp_path / name / STEP.format(2) for name in ("True", "False"))
    if in_hf:
        names, wanted = (
            {str(path.relative_to(top)) for path in top.rglob("*")} for top in (ours, stock)
        )
        assert names == wanted
        files = [path.name for path in stock.iterdir() if path.is_file()]
        # DCP's parts in `sharded` have their header in another order each time.
        assert all((ours / name).read_bytes() == (stock / name).read_bytes() for name in files)
    else:
        check_all_ours(ours)
        found, wanted = content_of(ours, tmp_path / "a"), content_of(stock, tmp_path / "b")
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    start = options(initial_load_model_only=True, initial_load_in_hf=in_hf)
    losses = [
        train(
            framework, tmp_path / name, "--steps", 1, *manager, *start, "--resume", ours
        ).result["losses"]
        for name, manager in (("from-ours", MANAGER), ("from-stock", ()))
    ]  # fmt: skip
    assert losses[0] == losses[1]


@pytest.mark.parametrize("end", [["--steps", 4], ["--samples", 6]])  # another save; no more data
def test_failed_save_in_the_background_ends_the_training(
    framework: Framework, tmp_path: Path, end: list[object]
) -> None:
    train(framework, tmp_path, "--steps", 1, *MANAGER)
    arguments = (tmp_path, *MANAGER, "--async-mode", "async", *end)
    command = framework.torchrun(*arguments)
    small_files = ["bash", "-c", 'ulimit -f 4096 && exec "$@"', "bash"]  # of 4 MiB
    with pytest.raises(AssertionError, match="File too large"):
        framework.run([*small_files, *command], hook=False)
    assert (tmp_path / STEP.format(1) / ".metadata").exists()
    assert not (tmp_path / STEP.format(2) / ".metadata").exists()


def test_folder_at_another_url_is_refused(framework: Framework, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"UnsupportedError: .*'gs://bucket/run'"):
        train(framework, tmp_path, *MANAGER, *options(folder="gs://bucket/run"))


def test_commands_of_the_page_run(tmp_path: Path) -> None:
    check_page("torchtitan", tmp_path)


def test_typo_is_told_what_was_meant(tmp_path: Path) -> None:
    calls = {
        "DcpxCheckpointManager.Config(keep_last=3)": "keep_latest_k",
        "DcpxCheckpointManager(None, model=None)": "model_parts",
    }
    check_typos("torchtitan", tmp_path, calls)
