"""A scheduler takes the state of one of its own kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.optim import lr_scheduler as kinds
from trainings import Patch, Training, manager_of

from torch_dcpx import MismatchError, OptionError

Make = Callable[[Any], Any]
NOT_NOTED = "torch_dcpx.manager.save.scheduler_classes"


def parts(make: Make, seed: int = 0) -> dict[str, Any]:
    training = Training(seed)
    given = {"model": training.model, "optimizer": training.optimizer}
    return {**given, "lr_scheduler": make(training.optimizer)}


def step(optimizer: Any) -> Any:
    return kinds.StepLR(optimizer, 2)


def cosine(optimizer: Any) -> Any:
    return kinds.CosineAnnealingLR(optimizer, 5)


def exponential(optimizer: Any) -> Any:
    return kinds.ExponentialLR(optimizer, 0.5)


def both(last: Make) -> Make:
    """Makes a scheduler of two, by the second one."""
    return lambda o: kinds.SequentialLR(o, [kinds.ConstantLR(o), last(o)], [2])


def chained(*makes: Make) -> Make:
    return lambda o: kinds.ChainedScheduler([make(o) for make in makes])


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


SWAPPED: list[tuple[Make, Make]] = [
    (step, cosine),
    (lambda o: [step(o)], lambda o: [cosine(o)]),
    (lambda o: {"x": step(o)}, lambda o: {"x": cosine(o)}),
    (cosine, kinds.ReduceLROnPlateau),
    (both(step), step),
    (both(step), both(cosine)),
]
ONE_SIDED: list[tuple[Make, Make]] = [  # one has only names more than the other
    (step, exponential),
    (exponential, step),
    (both(step), both(exponential)),
    (chained(both(step)), chained(both(exponential))),
]


@pytest.mark.parametrize("at", range(11))
def test_state_of_another_kind_is_refused(tmp_path: Path, at: int) -> None:
    saved, now = [*SWAPPED, *ONE_SIDED, (Slower, step)][at]
    manager_of(tmp_path).save(1, **parts(saved))
    given = parts(now, 1)
    with pytest.raises(MismatchError, match=r"another kind, \w+, was saved: it had .*lr_sch") as no:
        manager_of(tmp_path).resume(**given)
    assert (bool(no.value.left), bool(no.value.missing)).count(True) == 1 + (at < len(SWAPPED))
    assert given["optimizer"].param_groups[0]["lr"] != 0 and not given["optimizer"].state
    if at < len(SWAPPED):
        manager_of(tmp_path).resume(**given, allow_missing=["lr_scheduler.*"])
    manager_of(tmp_path).resume(**given, strict=False)
    manager_of(tmp_path).resume(**parts(saved, 2))


def test_other_names_of_the_own_or_a_class_not_noted_are_taken(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    for number, (saved, now) in enumerate(
        [(step, Slower), (Renamed, kinds.ReduceLROnPlateau), *ONE_SIDED]
    ):
        if number == 2:
            monkeypatch.setattr(NOT_NOTED, lambda _: {})
        manager_of(tmp_path).save(number, **parts(saved))
        manager_of(tmp_path).resume(**parts(now, 1))


DEEP: list[tuple[Make, Make, str]] = [
    (chained(step, step), chained(step, step, step), "a ChainedScheduler of 3 .* of 2 was saved"),
    (chained(step, step, step), chained(step, step), "a ChainedScheduler of 2 .* of 3 was saved"),
    (both(chained(step, step)), both(chained(step)), "a ChainedScheduler of 1 .* of 2 was saved"),
    (both(chained(step)), both(chained(step, step)), "a ChainedScheduler of 2 .* of 1 was saved"),
    (chained(both(step)), chained(both(cosine)), "a CosineAnnealingLR, and another kind"),
]


@pytest.mark.parametrize("are_noted", [True, False])
def test_schedulers_within_others_are_compared(
    tmp_path: Path, monkeypatch: Patch, *, are_noted: bool
) -> None:
    if not are_noted:
        monkeypatch.setattr(NOT_NOTED, lambda _: {})
    for number, (saved, now, text) in enumerate(DEEP):
        manager_of(tmp_path).save(number, **parts(saved))
        given = parts(now, 1)
        before = given["model"][0].weight.clone()
        with pytest.raises(MismatchError, match=text):
            manager_of(tmp_path).resume(**given)
        assert given["model"][0].weight.equal(before) or not are_noted
        manager_of(tmp_path).resume(**given, load_optimizer=False)
        manager_of(tmp_path).resume(**parts(saved, 2))


def rate(epoch: int) -> float:
    return 0.9**epoch


def lambdas(kind: Any) -> Make:
    return lambda o: kind(o, rate)


class Own(kinds.LambdaLR):
    """A subclass has what its base has."""


def test_another_class_with_the_same_names_is_refused(tmp_path: Path, monkeypatch: Patch) -> None:
    manager_of(tmp_path).save(1, **parts(lambdas(kinds.LambdaLR)))
    manager_of(tmp_path).resume(**parts(lambdas(Own), 1))
    given = parts(lambdas(kinds.MultiplicativeLR), 1)
    before = given["model"][0].weight.clone()
    text = r"a MultiplicativeLR, and another .* LambdaLR"
    for allowed in ({}, {"allow_missing": ["lr_scheduler.lr_lambdas"]}):
        with pytest.raises(MismatchError, match=text) as no:
            manager_of(tmp_path).resume(**given, **allowed)
        assert no.value.fqn == "lr_scheduler"
    assert given["model"][0].weight.equal(before)
    for way in ("strict=False", r"allow_missing=['lr_scheduler*']", "load_optimizer=False"):
        assert way in str(no.value)
    for globs in (["lr_scheduler*"], ["lr_scheduler"], ["lr_scheduler.*"]):
        manager_of(tmp_path).resume(**given, allow_missing=globs)
    manager_of(tmp_path).resume(**given, strict=False)
    manager_of(tmp_path).resume(**given, load_optimizer=False)
    monkeypatch.setattr(NOT_NOTED, lambda _: {})
    manager_of(tmp_path).save(2, **parts(lambdas(kinds.LambdaLR)))
    manager_of(tmp_path).resume(**given)


SORTS: list[Make] = [step, lambda o: [step(o)], lambda o: {"x": step(o)}]


def test_one_a_list_and_a_dict_do_not_mix(tmp_path: Path, monkeypatch: Patch) -> None:
    for saved in range(3):
        manager_of(tmp_path).save(saved, **parts(SORTS[saved]))
        for now in range(3):
            given = parts(SORTS[now], 1)
            if saved == now:
                manager_of(tmp_path).resume(**given)
                continue
            for allowed in ({}, {"strict": False}, {"allow_missing": ["lr_scheduler*"]}):
                text = r"another sort was saved: .* load_optimizer=False"
                with pytest.raises(OptionError, match=text):
                    manager_of(tmp_path).resume(**given, **allowed)
            manager_of(tmp_path).resume(**given, load_optimizer=False)
    monkeypatch.setattr(NOT_NOTED, lambda _: {})
    manager_of(tmp_path).save(4, **parts(SORTS[1]))
    with pytest.raises(OptionError, match="another sort was saved"):
        manager_of(tmp_path).resume(**parts(step, 1))


def test_state_that_no_scheduler_of_several_can_take_is_refused(tmp_path: Path) -> None:
    for saved, now in ((step, both(step)), (chained(step, step), chained(step))):
        manager_of(tmp_path).save(1, **parts(saved))
        for allowed in ({"strict": False}, {"allow_missing": ["lr_scheduler*"]}):
            with pytest.raises(MismatchError, match=r"was saved; .* load_optimizer=False leaves"):
                manager_of(tmp_path).resume(**parts(now, 1), **allowed)
