"""What holds for each training that saves through an adapter of ours, or by its framework alone.

A test class of an adapter inherits these tests, and says what its example is called with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from support.frameworks import Framework, Run, check_all_ours, check_nothing_of_ours
from support.resume_cases import Trained, losses_after


class AdapterCases:
    """Tests of one example: `SCRIPT FOLDER [OURS] [--resume FOLDER/CHECKPOINT]`, without the hook.

    The example saves at 2, 4 and 6, and what it prints has the losses of its steps.
    """

    NAME: str
    CHECKPOINT: str  # the folder of a step, such as "step_{}"
    REFUSES_TORN: str  # in the error of a resume from a save that was killed
    ARGUMENTS: ClassVar[tuple[object, ...]] = ()  # of both sides
    OURS: ClassVar[tuple[object, ...]]  # what makes the example use our adapter
    RANKS = (1, 4)  # that resume what 2 have saved

    @pytest.fixture(scope="class")
    @classmethod
    def trained(cls, tmp_path_factory: pytest.TempPathFactory) -> Trained:
        framework = Framework(cls.NAME, tmp_path_factory.mktemp(cls.NAME))
        stock = framework.train("stock", *cls.ARGUMENTS, hook=False)
        ours = framework.train("ours", *cls.ARGUMENTS, *cls.OURS, hook=False)
        return Trained(framework, stock, ours)

    def resume(
        self, trained: Trained, saver: str, loader: str, step: int, into: Path, **options: Any
    ) -> Run:
        """Resumes by stock or ours from a step that stock or ours has saved."""
        start = trained.framework.folder / saver / self.CHECKPOINT.format(step)
        ours = self.OURS if loader == "ours" else ()
        arguments = (*self.ARGUMENTS, *ours, "--resume", start)
        return trained.framework.train(into, *arguments, hook=False, **options)

    def test_saves_are_ours_and_the_losses_stay(self, trained: Trained) -> None:
        assert set(trained.ours.result["losses"]) == set("123456")
        assert trained.ours.result["losses"] == trained.stock.result["losses"]
        check_nothing_of_ours(trained.stock)
        for step in (2, 4, 6):
            check_all_ours(trained.framework.folder / "ours" / self.CHECKPOINT.format(step))

    def test_killed_in_a_save_resumes_from_the_one_before(
        self, trained: Trained, tmp_path: Path
    ) -> None:
        arguments = (*self.ARGUMENTS, *self.OURS)
        trained.framework.kill_before_commit(2, tmp_path, *arguments, hook=False)
        whole, torn = (tmp_path / self.CHECKPOINT.format(step) for step in (2, 4))
        assert (whole / ".metadata").exists()
        assert not (torn / ".metadata").exists()
        with pytest.raises(AssertionError, match=self.REFUSES_TORN):
            trained.framework.train(tmp_path, *arguments, "--resume", torn, hook=False)
        resumed = trained.framework.train(tmp_path, *arguments, "--resume", whole, hook=False)
        assert losses_after(0, resumed) == losses_after(2, trained.stock)
        for step in (4, 6):
            check_all_ours(tmp_path / self.CHECKPOINT.format(step))

    @pytest.mark.parametrize(("saver", "loader"), [("ours", "stock"), ("stock", "ours")])
    def test_each_side_resumes_what_the_other_has_saved(
        self, trained: Trained, tmp_path: Path, saver: str, loader: str
    ) -> None:
        resumed = self.resume(trained, saver, loader, 4, tmp_path)
        assert losses_after(0, resumed) == losses_after(4, trained.stock)

    def test_resume_on_other_ranks_equals_that_of_stock(
        self, trained: Trained, tmp_path: Path
    ) -> None:
        for ranks in self.RANKS:
            stock, ours = (
                self.resume(trained, side, side, 4, tmp_path / f"{side}-{ranks}", ranks=ranks)
                for side in ("stock", "ours")
            )
            assert set(ours.result["losses"]) == {"5", "6"}
            assert ours.result["losses"] == stock.result["losses"]
