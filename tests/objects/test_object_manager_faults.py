"""One request of a manager beneath an `s3://` root fails: what holds afterwards, for every request.

A save that returned is there and is what the next job resumes; one that raised left what was there.
Nothing that a rule keeps is lost. When the grace is over, the next saves clean up all that is left.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from object_outcomes import LOST, REFUSED, error_of, retries
from object_roots import HOUR, Root, clock_ahead
from support.machine import points, spread
from support.object_fixture import s3_alone
from support.object_proxy import FaultProxy
from support.object_requests import Request
from support.small_managers import resumed, save_steps

from torch_dcpx import CheckpointManager, DcpxError, OutcomeUnknownError, StorageError
from torch_dcpx.storage.object_store import Bucket

_TRIES = 3
_SECRET = "hush-SUmvNzYYk6dVb3"
_KEEP = 2

Errors = dict[int, DcpxError | None]  # of the saves of a call, by step
Choose = Callable[[Sequence[Any]], list[Any]]


@pytest.fixture(autouse=True)
def _secrets(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, _SECRET)


# ---- Saves --------------------------------------------------------------------------------------


def _job(root: Root, *steps: int) -> Errors:
    """Saves these steps as a job does that goes on after a failure; returns their errors.

    The grace of what lies there is over.
    """
    errors: Errors = {}
    with clock_ahead(2 * HOUR):
        manager = root.manager(keep_last=_KEEP)
        for step in steps:
            errors[step] = error_of(partial(save_steps, manager, step))
        manager.close()
    return errors


def _requests_of(root: Root, base: dict[str, bytes], call: Callable[[], object]) -> list[Request]:
    """Returns the requests of a call without a fault."""
    root.reset(base)
    with retries(0):
        call()
        return root.proxy.requests()


def _check_saves(root: Root, errors: Errors, where: str) -> None:
    """Asserts what must hold after saves over commits 2 and 3."""
    root.proxy.heal()
    whole = root.whole()
    for step, error in errors.items():
        if isinstance(error, DcpxError) and not isinstance(error, OutcomeUnknownError):
            assert step not in whole, f"a save failed and is there: {where}"
        assert _SECRET not in repr(error)
    commits = [2, 3, *(s for s, error in errors.items() if error is None or s in whole)]
    assert whole >= set(commits[-_KEEP:]), f"{commits} were committed, {whole} are there: {where}"
    root.assert_resumes(commits[-1])
    root.assert_cleans_up(_KEEP)


def _saves_with_fault(
    root: Root, base: dict[str, bytes], steps: Sequence[int], number: int, how: str, tries: int
) -> None:
    root.reset(base)
    root.proxy.fail(number, how, seconds=0.01)
    with retries(tries):
        errors = _job(root, *steps)
    hit = root.proxy.requests()[number]
    assert hit.fault == how
    where = f"{how} of {number}, {hit.kind} {hit.key}, {tries} tries: {errors}"
    print(where)
    if (tries and how in LOST) or how == "delay":
        assert not any(errors.values()), where
    _check_saves(root, errors, where)


@pytest.mark.parametrize("steps", [(4,), (4, 5)])
def test_fault_of_a_request_of_saves_loses_nothing_and_is_cleaned_up(
    root: Root, seed: int, steps: Sequence[int], caplog: pytest.LogCaptureFixture
) -> None:
    """A sample."""
    base, draw = root.base(), random.Random(seed)
    requests = _requests_of(root, base, lambda: _job(root, *steps))
    for number in sorted(draw.sample(range(len(requests)), min(len(requests), points(14)))):
        how = draw.choice([*LOST, *REFUSED, "delay"])
        _saves_with_fault(root, base, steps, number, how, draw.choice([0, _TRIES]))
    assert _SECRET not in caplog.text


# Others are other words for these: 500 and 503 for a reset, a cut answer for a lost one.
_HOWS = ("reset", "lost_answer", "done_500", *REFUSED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "tries"),
    [*((how, 0) for how in _HOWS), ("reset", _TRIES), ("lost_answer", _TRIES)],
)
def test_no_fault_of_any_request_of_a_save_loses_anything(
    root: Root, seed: int, how: str, tries: int
) -> None:
    """Each request meets two faults that lose it, or its answer, and one that refuses it."""
    base, turn = root.base(), _HOWS.index(how) % 3
    requests = _requests_of(root, base, lambda: _job(root, 4))
    for number in spread(len(range(turn, len(requests), 3)), seed, 2):
        _saves_with_fault(root, base, (4,), turn + 3 * number, how, tries)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["reset", "lost_answer", "403"])
def test_every_request_of_a_second_save_may_fail(root: Root, seed: int, how: str) -> None:
    base = root.base()
    requests = _requests_of(root, base, lambda: _job(root, 4, 5))
    begin = [one.number for one in requests if one.key.endswith("step-4/.metadata")][-1]
    begin += ("reset", "lost_answer", "403").index(how)
    for number in spread(len(range(begin, len(requests), 3)), seed):
        _saves_with_fault(root, base, (4, 5), begin + 3 * number, how, 0)


# ---- Faults that stay ---------------------------------------------------------------------------


@s3_alone  # Azure signs the number of keys a page
def test_lists_that_come_in_pages_lose_nothing(root: Root) -> None:
    root.reset(root.base())
    root.proxy.fail("list", "partial_list", times=None)
    with retries(0):
        errors = _job(root, 4)
    assert root.proxy.count("list") > 10 and not any(errors.values())
    _check_saves(root, errors, "pages of one key")


@pytest.mark.parametrize("kind", ["put_object", "head_object", "get_object", "list", "delete_many"])
def test_kind_of_request_that_always_fails_loses_nothing(
    root: Root, kind: str, chosen: Choose
) -> None:
    base = root.base()
    for how in ("403", *chosen(["reset", "lost_answer"])):
        root.reset(base)
        root.proxy.fail(kind, how, times=None)
        with retries(0):
            errors = _job(root, 4, 5)
        assert root.proxy.count(kind)
        _check_saves(root, errors, f"{how} of {kind}: {errors}")


@pytest.mark.parametrize(
    "key", ["/newest", "/.metadata", ".distcp", "/.dcpx.lock", "/.dcpx.pin", "/.dcpx.deleted"]
)
def test_objects_whose_requests_always_fail_lose_nothing(
    root: Root, key: str, chosen: Choose
) -> None:
    """As of a store that answers again when the job has ended."""
    base = root.base()
    for how, skip in [(how, skip) for how in ("500", "lost_answer") for skip in chosen([0, 1])]:
        root.reset(base)
        root.proxy.fail("any", how, times=None, key=key, skip=skip)
        with retries(0):
            errors = _job(root, 4, 5)
        _check_saves(root, errors, f"{how} of {key} but {skip}: {errors}")


def test_save_that_is_committed_returns_though_its_pointer_cannot_be_replaced(
    root: Root, caplog: pytest.LogCaptureFixture
) -> None:
    root.reset(root.base())
    manager = root.manager()
    with retries(0):
        save_steps(manager, 4)
        root.proxy.fail("put_object", "500", times=None, key="/newest", skip=1)
        save_steps(manager, 5)  # the first is before the commit
    assert "'step-5' is committed; the pointer does not say so" in caplog.text
    root.proxy.heal()
    root.assert_resumes(5)


# ---- Other calls --------------------------------------------------------------------------------


def _delete(manager: CheckpointManager) -> None:
    manager.delete(2)


def _delete_newest(manager: CheckpointManager) -> None:
    manager.delete(3)


def _pin(manager: CheckpointManager) -> None:
    manager.pin(2)


def _unpin(manager: CheckpointManager) -> None:
    manager.unpin(2)


def _latest(manager: CheckpointManager) -> None:
    assert manager.latest() == "step-3"


def _tags(manager: CheckpointManager) -> None:
    assert manager.tags() == ["step-2", "step-3"]


def _resume(manager: CheckpointManager) -> None:
    assert resumed(manager) == 3


Call = Callable[[CheckpointManager], None]
CALLS: tuple[Call, ...] = (_delete, _delete_newest, _pin, _unpin, _latest, _tags, _resume)


def _check_call(root: Root, call: Call, error: object) -> None:
    """Asserts what must hold after a call over commits 2 and 3."""
    whole, names = root.whole(), root.names()
    gone = {2} if call is _delete else {3} if call is _delete_newest else set()
    if error is None:
        assert whole == {2, 3} - gone
        assert ("step-2/.dcpx.pin" in names) == (call is _pin)
    assert whole >= {2, 3} - gone
    root.assert_resumes(max(whole))
    with retries(0):
        manager = root.manager()
        for step in whole - {max(whole)}:
            manager.unpin(step)
    root.assert_cleans_up(_KEEP)


def _calls_with_faults(
    root: Root,
    call: Call,
    numbers: Callable[[int], list[int]],
    fault: Callable[[], tuple[str, int]],
) -> None:
    """Has requests of a call fail one by one.

    Args:
        numbers: gives those of so many requests that fail.
        fault: gives how one fails, and the number of retries.
    """
    base = {**root.base(), **({"step-2/.dcpx.pin": b""} if call is _unpin else {})}
    for number in numbers(len(_requests_of(root, base, lambda: call(root.manager())))):
        how, tries = fault()
        root.reset(base)
        root.proxy.fail(number, how, seconds=0.01)
        with retries(tries):
            error = error_of(lambda: call(root.manager()))
        hit = root.proxy.requests()[number]
        root.proxy.heal()
        where = f"{how} of {number}, {hit.kind} {hit.key}, {tries} tries: {error!r}"
        print(where)
        assert hit.fault == how and _SECRET not in where
        if (tries and how in LOST) or how == "delay":
            assert error is None, where
        _check_call(root, call, error)


@pytest.mark.parametrize("call", CALLS)
def test_fault_of_a_request_of_a_call_loses_nothing(root: Root, seed: int, call: Call) -> None:
    """A sample."""
    draw = random.Random(seed)
    _calls_with_faults(
        root,
        call,
        lambda count: sorted(draw.sample(range(count), min(count, points(4)))),
        lambda: (draw.choice([*LOST, *REFUSED, "delay"]), draw.choice([0, _TRIES])),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "tries"),
    [("403", 0), ("reset", 0), ("lost_answer", 0), ("reset", _TRIES), ("lost_answer", _TRIES)],
)
@pytest.mark.parametrize("call", CALLS)
def test_every_fault_of_every_request_of_a_call_loses_nothing(
    root: Root, seed: int, call: Call, how: str, tries: int
) -> None:
    _calls_with_faults(root, call, lambda count: spread(count, seed, 2), lambda: (how, tries))


@pytest.mark.parametrize("kind", ["get_object", "head_object", "list"])
def test_newest_that_does_not_answer_is_not_passed_over(
    root: Root, kind: str, chosen: Choose
) -> None:
    """An older one in its place would take steps of the training back."""
    for how in chosen(["503", "403", "reset"]):
        root.reset(root.base())
        root.proxy.fail(kind, how, times=None, key="/step-3")
        with retries(0):
            for call in (_resume, _latest, _tags):
                error = error_of(partial(call, root.manager()))
                assert error is not None or call is not _resume
        root.proxy.heal()
        root.assert_resumes(3)
        root.put_all({})


def test_training_does_not_begin_anew_where_the_pointer_has_no_tag(root: Root) -> None:
    """As of a proxy that answers by a page of its own, with status 200, for this object alone."""
    root.reset({"newest": root.base()["newest"]})
    root.proxy.fail("get_object", "200", times=None, key="/newest")
    for more in ({}, {"allow_fresh": True}):
        with pytest.raises(StorageError, match=r"newest' is there and of no use.*no ETag"):
            root.manager(**more).resume(state={"x": torch.zeros(40)})


@pytest.mark.parametrize(("lost", "is_told"), [(1, False), (2, False), (3, True)])
def test_record_of_a_root_is_put_again_where_the_connection_was_lost(
    root: Root, monkeypatch: pytest.MonkeyPatch, lost: int, *, is_told: bool
) -> None:
    root.reset(root.base())
    stock, left = Bucket.put_if, [None] * lost

    def put_if(self: Bucket, key: str, *arguments: Any) -> None:
        if key.endswith("/.dcpx.root") and left:
            left.pop()
            raise StorageError("put: the connection is lost", errno=errno.EIO)
        stock(self, key, *arguments)

    monkeypatch.setattr(Bucket, "put_if", put_if)
    error = error_of(partial(_delete_newest, root.manager()))
    assert (error is not None) == is_told and not left
    root.assert_resumes(3 if is_told else 2)
