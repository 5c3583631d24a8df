"""A scheduler takes the state of one of its own kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.optim import lr_scheduler as kinds
from trainings import Training, manager_of

from torch_dcpx import MismatchError


def parts(make: Any, seed: int = 0) -> dict[str, Any]:
    training = Training(seed)
    given = {"model": training.model, "optimizer": training.optimizer}
    return {**given, "lr_scheduler": make(training.optimizer)}


def both(last: Any) -> Any:
    """Makes a scheduler of two, by the second one."""
    return lambda o: kinds.SequentialLR(o, [kinds.ConstantLR(o), last(o)], [2])


def step(optimizer: Any) -> Any:
    return kinds.StepLR(optimizer, 2)


def cosine(optimizer: Any) -> Any:
    return kinds.CosineAnnealingLR(optimizer, 5)


SWAPPED: dict[str, tuple[Any, Any]] = {
    "alone": (step, cosine),
    "in a list": (lambda o: [step(o)], lambda o: [cosine(o)]),
    "by name": (lambda o: {"x": step(o)}, lambda o: {"x": cosine(o)}),
    "on a plateau": (cosine, kinds.ReduceLROnPlateau),
    "of several": (both(step), step),
    "within another": (both(step), both(cosine)),
}


@pytest.mark.parametrize("name", SWAPPED)
def test_state_of_another_kind_is_refused(tmp_path: Path, name: str) -> None:
    saved, now = SWAPPED[name]
    manager_of(tmp_path).save(1, **parts(saved))
    given = parts(now, 1)
    with pytest.raises(MismatchError, match=r"another kind, \w+, was saved: it had lr_sch") as no:
        manager_of(tmp_path).resume(**given)
    assert no.value.left and no.value.missing
    assert given["optimizer"].param_groups[0]["lr"] != 0 and not given["optimizer"].state
    for allowed in ({"allow_missing": ["lr_scheduler.*"]}, {"strict": False}):
        manager_of(tmp_path).resume(**given, **allowed)
    manager_of(tmp_path).resume(**parts(saved, 2))


class Renamed(kinds.ReduceLROnPlateau):
    """As torch had it before."""

    def state_dict(self) -> dict[str, Any]:
        own: dict[str, Any] = super().state_dict()
        del own["default_min_lr"]
        return {**own, "verbose": False}


Renamed.__name__ = "ReduceLROnPlateau"


class Slower(kinds.StepLR):
    """Keeps one name more."""

    def __init__(self, optimizer: Any) -> None:
        self.by = 2
        super().__init__(optimizer, 2)


def exponential(optimizer: Any) -> Any:
    return kinds.ExponentialLR(optimizer, 0.5)


ONE_SIDED = [(step, exponential), (exponential, step), (both(step), both(exponential))]


@pytest.mark.parametrize(("saved", "now"), [*ONE_SIDED, (Slower, step)])
def test_another_class_with_only_more_or_only_fewer_names_is_refused(
    tmp_path: Path, saved: Any, now: Any
) -> None:
    manager_of(tmp_path).save(1, **parts(saved))
    given = parts(now, 1)
    with pytest.raises(MismatchError, match=r"another kind, \w+, was saved: it had .*lr_sch") as no:
        manager_of(tmp_path).resume(**given)
    assert bool(no.value.left) != bool(no.value.missing)
    assert not given["optimizer"].state
    manager_of(tmp_path).resume(**given, strict=False)
    manager_of(tmp_path).resume(**parts(saved, 2))


@pytest.mark.parametrize(("saved", "now"), [(step, Slower), (Renamed, kinds.ReduceLROnPlateau)])
def test_a_class_with_more_names_than_its_own_were_saved_of_is_taken(
    tmp_path: Path, saved: Any, now: Any
) -> None:
    manager_of(tmp_path).save(1, **parts(saved))
    manager_of(tmp_path).resume(**parts(now, 1))


@pytest.mark.parametrize(("saved", "now"), ONE_SIDED)
def test_more_or_fewer_names_are_taken_of_saves_that_noted_no_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: Any, now: Any
) -> None:
    monkeypatch.setattr("torch_dcpx.manager.save.scheduler_classes", lambda _: {})
    manager_of(tmp_path).save(1, **parts(saved))
    manager_of(tmp_path).resume(**parts(now, 1))


@pytest.mark.parametrize("counts", [(2, 3), (3, 2)])
def test_state_of_fewer_or_more_schedulers_is_refused(
    tmp_path: Path, counts: tuple[int, int]
) -> None:
    def of(count: int) -> Any:
        return lambda o: kinds.ChainedScheduler([step(o) for _ in range(count)])

    saved, now = counts
    manager_of(tmp_path).save(1, **parts(of(saved)))
    with pytest.raises(MismatchError, match=f"a ChainedScheduler of {now} .* of {saved} was saved"):
        manager_of(tmp_path).resume(**parts(of(now), 1))
