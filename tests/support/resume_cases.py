"""What holds for each training that saves by DCP into folders of its steps, stock or ours.

A test class of a framework inherits these tests, and says what its example is called with. Ours is
a run with the hook, or (AdapterCases) one that uses an adapter.
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
    """Tests of one example: `SCRIPT FOLDER ARGUMENTS [OURS] [--resume FOLDER/CHECKPOINT]`."""

    NAME: str
    CHECKPOINT: str  # the folder of a step, such as "step_{}"
    REFUSES_TORN: str  # in the error of a resume from a save that was killed
    ARGUMENTS: ClassVar[tuple[object, ...]] = ()  # of both sides
    OURS: ClassVar[tuple[object, ...]] = ()  # what makes the example use our adapter
    HOOK = True  # of our side
    PARTS: ClassVar[tuple[str, ...]] = ("pytorch_model_fsdp_0", "optimizer_0")  # in their order
    RANKS: ClassVar[tuple[int, ...]] = (1, 4)  # that resume what 2 have saved
    ON_OTHER_RANKS: ClassVar[tuple[str, ...]] = ()  # arguments of a resume on these

    @pytest.fixture(scope="class")
    @classmethod
    def trained(cls, tmp_path_factory: pytest.TempPathFactory) -> Trained:
        framework = Framework(cls.NAME, tmp_path_factory.mktemp(cls.NAME))
        stock = framework.train("stock", *cls.ARGUMENTS, hook=False)
        ours = framework.train("ours", *cls.ARGUMENTS, *cls.OURS, hook=cls.HOOK)
        return Trained(framework, stock, ours)

    def resume(
        self, trained: Trained, saver: str, loader: str, step: int, into: Path, **options: Any
    ) -> Run:
        """Resumes by stock or ours from a step that stock or ours has saved."""
        start = trained.framework.folder / saver / self.CHECKPOINT.format(step)
        is_ours = loader == "ours"
        ours = self.OURS if is_ours else ()
        more = self.ON_OTHER_RANKS if "ranks" in options else ()
        arguments = (*self.ARGUMENTS, *ours, *more, "--resume", start)
        hook = self.HOOK and is_ours
        return trained.framework.train(into, *arguments, hook=hook, **options)

    def check_seen(self, run: Run, *roles: str) -> None:
        if self.HOOK:
            check_seen(run, *roles)

    def test_saves_are_ours_and_the_losses_stay(self, trained: Trained) -> None:
        self.check_seen(trained.ours, "writer", "planners")
        assert trained.ours.result["losses"] == trained.stock.result["losses"]
        assert set(trained.ours.result["losses"]) == set("123456")
        check_nothing_of_ours(trained.stock)
        for step in (2, 4, 6):
            for part in self.PARTS:
                folder = trained.framework.folder / "ours" / self.CHECKPOINT.format(step) / part
                check_all_ours(folder)

    def test_killed_in_a_save_resumes_from_the_one_before(
        self, trained: Trained, tmp_path: Path
    ) -> None:
        arguments = (*self.ARGUMENTS, *self.OURS)
        last = 2 * len(self.PARTS)  # of the save at step 4 all parts but one are committed
        trained.framework.kill_before_commit(last, tmp_path, *arguments, hook=self.HOOK)
        whole, torn = (tmp_path / self.CHECKPOINT.format(step) for step in (2, 4))
        is_committed = [
            (folder / part / ".metadata").exists()
            for folder in (whole, torn)
            for part in self.PARTS
        ]
        assert is_committed == [True] * (last - 1) + [False]
        with pytest.raises(AssertionError, match=self.REFUSES_TORN):
            trained.framework.train(tmp_path, *arguments, "--resume", torn, hook=self.HOOK)
        resumed = trained.framework.train(tmp_path, *arguments, "--resume", whole, hook=self.HOOK)
        self.check_seen(resumed, "reader", "writer", "planners")
        assert losses_after(0, resumed) == losses_after(2, trained.stock)
        for step in (4, 6):
            for part in self.PARTS:
                check_all_ours(tmp_path / self.CHECKPOINT.format(step) / part)  # saved again

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
            self.check_seen(ours, "reader")
            assert set(ours.result["losses"]) == {"5", "6"}
            assert ours.result["losses"] == stock.result["losses"]


class AdapterCases(ResumeCases):
    """Tests of an example that saves through an adapter of ours, without the hook."""

    HOOK = False
    PARTS = ("",)
