"""What holds for each training that saves by DCP into folders of its steps, stock or ours.

A test class of a framework inherits these tests, and says what its example is called with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
from support.frameworks import (
    Framework,
    Run,
    check_all_ours,
    check_nothing_of_ours,
    check_seen,
)


class Trained(NamedTuple):
    """A framework, and two runs of its example that nothing stopped; each saved at 2, 4 and 6."""

    framework: Framework
    stock: Run  # saved into stock/
    ours: Run  # saved into ours/


def losses_after(step: int, run: Run) -> dict[str, Any]:
    """Returns the losses of a run behind a step."""
    return {name: loss for name, loss in run.result["losses"].items() if int(name) > step}


class ResumeCases:
    """Tests of one example: `SCRIPT FOLDER ARGUMENTS [--resume FOLDER/CHECKPOINT]`."""

    NAME: str
    CHECKPOINT: str  # the folder of a step, such as "step_{}"
    REFUSES_TORN: str  # in the error of a resume from a save that was killed
    ARGUMENTS: ClassVar[tuple[object, ...]] = ()
    PARTS = ("pytorch_model_fsdp_0", "optimizer_0")  # checkpoints of DCP in each, in their order

    @pytest.fixture(scope="class")
    @classmethod
    def trained(cls, tmp_path_factory: pytest.TempPathFactory) -> Trained:
        framework = Framework(cls.NAME, tmp_path_factory.mktemp(cls.NAME))
        stock = framework.train("stock", *cls.ARGUMENTS, hook=False)
        return Trained(framework, stock, framework.train("ours", *cls.ARGUMENTS))

    def resume(self, trained: Trained, side: str, step: int, into: Path, **options: Any) -> Run:
        """Resumes from a step of stock's or our run; its own saves go elsewhere."""
        start = trained.framework.folder / side / self.CHECKPOINT.format(step)
        return trained.framework.train(into, *self.ARGUMENTS, "--resume", start, **options)

    def test_training_saves_by_us_and_its_losses_stay(self, trained: Trained) -> None:
        check_seen(trained.ours, "writer", "planners")
        assert trained.ours.result["losses"] == trained.stock.result["losses"]
        assert set(trained.ours.result["losses"]) == set("123456")
        for step in (2, 4, 6):
            for part in self.PARTS:
                folder = trained.framework.folder / "ours" / self.CHECKPOINT.format(step) / part
                check_all_ours(folder)

    def test_without_the_variable_nothing_of_ours_is_loaded(self, trained: Trained) -> None:
        check_nothing_of_ours(trained.stock)

    def test_killed_in_a_save_resumes_from_the_one_before(
        self, trained: Trained, tmp_path: Path
    ) -> None:
        last = 2 * len(self.PARTS)  # of the save at step 4 all parts but one are committed
        trained.framework.kill_before_commit(last, tmp_path, *self.ARGUMENTS)
        torn, whole = (tmp_path / self.CHECKPOINT.format(step) for step in (4, 2))
        is_committed = [(torn / part / ".metadata").exists() for part in self.PARTS]
        assert is_committed == [True] * (len(self.PARTS) - 1) + [False]
        with pytest.raises(AssertionError, match=self.REFUSES_TORN):
            trained.framework.train(tmp_path, *self.ARGUMENTS, "--resume", torn)
        resumed = trained.framework.train(tmp_path, *self.ARGUMENTS, "--resume", whole)
        check_seen(resumed, "reader", "writer", "planners")
        assert losses_after(0, resumed) == losses_after(2, trained.stock)
        for part in self.PARTS:
            check_all_ours(torn / part)  # saved again

    @pytest.mark.parametrize("ranks", [1, 4])
    def test_resume_on_other_ranks_equals_that_of_stock(
        self, trained: Trained, tmp_path: Path, ranks: int
    ) -> None:
        stock = self.resume(trained, "stock", 4, tmp_path / "stock", ranks=ranks, hook=False)
        ours = self.resume(trained, "ours", 4, tmp_path / "ours", ranks=ranks)
        check_seen(ours, "reader")
        assert set(ours.result["losses"]) == {"5", "6"}
        assert ours.result["losses"] == stock.result["losses"]

    @pytest.mark.parametrize(("side", "hook"), [("ours", False), ("stock", True)])
    def test_each_side_resumes_what_the_other_has_saved(
        self, trained: Trained, tmp_path: Path, side: str, hook: bool
    ) -> None:
        resumed = self.resume(trained, side, 4, tmp_path, hook=hook)
        assert losses_after(0, resumed) == losses_after(4, trained.stock)
