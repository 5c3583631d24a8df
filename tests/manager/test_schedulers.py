"""A scheduler takes the state of one of its own kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.optim import lr_scheduler as kinds
from trainings import Training, manager_of

from torch_dcpx import MismatchError, OptionError


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


def chained(*makes: Any) -> Any:
    return lambda o: kinds.ChainedScheduler([make(o) for make in makes])


ONE_SIDED = [
    (step, exponential),
    (exponential, step),
    (both(step), both(exponential)),
    (chained(both(step)), chained(both(exponential))),
]


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


DEEP = [
    (both(chained(step, step)), both(chained(step)), "a ChainedScheduler of 1 .* of 2 was saved"),
    (both(chained(step)), both(chained(step, step)), "a ChainedScheduler of 2 .* of 1 was saved"),
    (chained(both(step)), chained(both(cosine)), "a CosineAnnealingLR, and another kind"),
]


@pytest.mark.parametrize(("saved", "now", "text"), DEEP)
@pytest.mark.parametrize("are_noted", [True, False])
def test_schedulers_within_those_within_are_compared(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    saved: Any,
    now: Any,
    text: str,
    *,
    are_noted: bool,
) -> None:
    if not are_noted:
        monkeypatch.setattr("torch_dcpx.manager.save.scheduler_classes", lambda _: {})
    manager_of(tmp_path).save(1, **parts(saved))
    given = parts(now, 1)
    before = given["model"][0].weight.clone()
    with pytest.raises(MismatchError, match=text):
        manager_of(tmp_path).resume(**given)
    assert given["model"][0].weight.equal(before) or not are_noted
    manager_of(tmp_path).resume(**given, load_optimizer=False)
    manager_of(tmp_path).resume(**parts(saved, 2))


def rate(epoch: int) -> float:
    return 0.9**epoch


def test_another_class_with_the_same_names_is_refused_before_anything_is_filled(
    tmp_path: Path,
) -> None:
    manager_of(tmp_path).save(1, **parts(lambda o: kinds.LambdaLR(o, rate)))
    given = parts(lambda o: kinds.MultiplicativeLR(o, rate), 1)
    before = given["model"][0].weight.clone()
    for allowed in ({}, {"allow_missing": ["lr_scheduler.lr_lambdas"]}):
        with pytest.raises(
            MismatchError, match=r"a MultiplicativeLR, and another .* LambdaLR"
        ) as no:
            manager_of(tmp_path).resume(**given, **allowed)
        assert no.value.fqn == "lr_scheduler"
    assert given["model"][0].weight.equal(before)
    for way in ("strict=False", r"allow_missing=['lr_scheduler*']", "load_optimizer=False"):
        assert way in str(no.value)
    for globs in (["lr_scheduler*"], ["lr_scheduler"], ["lr_scheduler.*"]):
        manager_of(tmp_path).resume(**given, allow_missing=globs)
    manager_of(tmp_path).resume(**given, strict=False)
    manager_of(tmp_path).resume(**given, load_optimizer=False)


class Own(kinds.LambdaLR):
    """A subclass has what its base has."""


def test_a_subclass_and_what_noted_no_class_are_taken_under_the_same_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager_of(tmp_path).save(1, **parts(lambda o: kinds.LambdaLR(o, rate)))
    manager_of(tmp_path).resume(**parts(lambda o: Own(o, rate), 1))
    monkeypatch.setattr("torch_dcpx.manager.save.scheduler_classes", lambda _: {})
    manager_of(tmp_path).save(2, **parts(lambda o: kinds.LambdaLR(o, rate)))
    manager_of(tmp_path).resume(**parts(lambda o: kinds.MultiplicativeLR(o, rate), 1))


SORTS: list[Any] = [step, lambda o: [step(o)], lambda o: {"x": step(o)}]


@pytest.mark.parametrize("saved", range(3))
@pytest.mark.parametrize("now", range(3))
def test_one_a_list_and_a_dict_do_not_take_each_others_states(
    tmp_path: Path, saved: int, now: int
) -> None:
    manager_of(tmp_path).save(1, **parts(SORTS[saved]))
    given = parts(SORTS[now], 1)
    if saved == now:
        manager_of(tmp_path).resume(**given)
        return
    for allowed in ({}, {"strict": False}, {"allow_missing": ["lr_scheduler*"]}):
        with pytest.raises(OptionError, match=r"another sort was saved: .* load_optimizer=False"):
            manager_of(tmp_path).resume(**given, **allowed)
    manager_of(tmp_path).resume(**given, load_optimizer=False)


def test_a_list_that_noted_no_classes_is_not_given_to_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_dcpx.manager.save.scheduler_classes", lambda _: {})
    manager_of(tmp_path).save(1, **parts(SORTS[1]))
    with pytest.raises(OptionError, match="another sort was saved"):
        manager_of(tmp_path).resume(**parts(step, 1))


NO_ROOM = [(step, both(step)), (chained(step, step), chained(step))]


@pytest.mark.parametrize(("saved", "now"), NO_ROOM)
def test_state_that_no_scheduler_of_several_can_take_is_refused_whatever_is_allowed(
    tmp_path: Path, saved: Any, now: Any
) -> None:
    manager_of(tmp_path).save(1, **parts(saved))
    for allowed in ({"strict": False}, {"allow_missing": ["lr_scheduler*"]}):
        with pytest.raises(MismatchError, match=r"was saved; .* load_optimizer=False leaves"):
            manager_of(tmp_path).resume(**parts(now, 1), **allowed)
