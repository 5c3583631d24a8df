"""What holds for adapters that save folders of several checkpoints, each as one commit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from support.frameworks import check_all_ours, check_nothing_of_ours
from support.resume_cases import Trained, losses_after

PARTS = ("pytorch_model_fsdp_0", "optimizer_0")


def folders_in(root: Path, pattern: str = "checkpoint*") -> set[str]:
    """Returns the names of folders."""
    return {path.name for path in root.glob(pattern)}


def options_of_bash(*commands: str) -> list[str]:
    """Returns the beginning of a command that bash prepares."""
    return ["bash", "-c", f'{" && ".join(commands)} && exec "$@"', "bash"]


def check_parts(folder: Path) -> None:
    """Checks that both parts of a folder are ours."""
    for part in PARTS:
        check_all_ours(folder / part)


class FolderCases:
    """Tests in place of those of `AdapterCases` that look into checkpoints."""

    CHECKPOINT: str
    ARGUMENTS: ClassVar[tuple[object, ...]]
    OURS: ClassVar[tuple[object, ...]]

    def test_saves_are_ours_and_the_losses_stay(self, trained: Trained) -> None:
        assert set(trained.ours.result["losses"]) == set("123456")
        assert trained.ours.result["losses"] == trained.stock.result["losses"]
        check_nothing_of_ours(trained.stock)
        stock, ours = (trained.framework.folder / side for side in ("stock", "ours"))
        for step in (2, 4, 6):
            check_parts(ours / self.CHECKPOINT.format(step))
        assert files_of(ours) == files_of(stock)

    def test_killed_in_a_save_resumes_from_the_one_before(
        self, trained: Trained, tmp_path: Path
    ) -> None:
        arguments: tuple[Any, ...] = (*self.ARGUMENTS, *self.OURS)
        trained.framework.kill_before_commit(4, tmp_path, *arguments, hook=False)
        whole, torn = (tmp_path / self.CHECKPOINT.format(step) for step in (2, 4))
        check_parts(whole)
        assert not torn.exists()
        assert list(tmp_path.glob(".dcpx.saving.*"))
        resumed = trained.framework.train(tmp_path, *arguments, "--resume", whole, hook=False)
        assert losses_after(0, resumed) == losses_after(2, trained.stock)
        check_parts(torn)  # saved again
        assert not list(tmp_path.glob(".dcpx*"))


def files_of(run: Path) -> set[str]:
    """Returns the paths of all files of a run but ours."""
    files = (path.relative_to(run) for path in run.rglob("*") if path.is_file())
    return {str(path) for path in files if not path.name.startswith(".dcpx.")}
