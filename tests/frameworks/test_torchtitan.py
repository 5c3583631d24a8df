"""torchtitan under the hook: its own trainer and checkpoint manager, all three modes of saving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.frameworks import Run, check_all_ours, check_page, check_seen
from support.resume_cases import ResumeCases, Trained, losses_after


class TestTorchtitan(ResumeCases):
    NAME = "torchtitan"
    CHECKPOINT = "checkpoint/step-{}"
    PARTS = ("",)

    def resume(self, trained: Trained, side: str, step: int, into: Path, **options: Any) -> Run:
        """As the base; torchtitan loads the place in its data on the same number of ranks only."""
        start = trained.framework.folder / side / self.CHECKPOINT.format(step)
        more = ["--new-ranks"] if "ranks" in options else []
        return trained.framework.train(into, "--resume", start, *more, **options)

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


def test_commands_of_the_page_run(tmp_path: Path) -> None:
    check_page("torchtitan", tmp_path)
