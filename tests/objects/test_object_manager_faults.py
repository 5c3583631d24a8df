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
from object_manager_outcomes import HOUR, Root, clock_ahead
from object_managers import manager_of, resumed, save_steps
from object_outcomes import LOST, REFUSED, error_of, retries
from support.machine import points, spread
from support.object_fixture import s3_alone
from support.object_proxy import FaultProxy
from support.object_requests import Request
from support.object_server import ObjectServer

from torch_dcpx import CheckpointManager, DcpxError, OutcomeUnknownError, StorageError
from torch_dcpx.storage.object_store import Bucket

_TRIES = 3
_SECRET = "hush-SUmvNzYYk6dVb3"
_KEEP = 2

Errors = dict[int, DcpxError | None]  # of the saves of a call, by step


@pytest.fixture
def root(
    object_server: ObjectServer,
    object_prefix: str,
    object_proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
) -> Root:
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, _SECRET)
    return Root(object_server, object_proxy, object_prefix)


# ---- Saves --------------------------------------------------------------------------------------


def _job(root: Root, *steps: int) -> Errors:
    """Saves these steps as a job does that goes on after a failure; returns their errors.

    The grace of what lies there is over.
    """
    errors: Errors = {}
    with clock_ahead(2 * HOUR):
        manager = manager_of(root.url, keep_last=_KEEP)
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
    root.proxy.heal()
    where = f"{how} of {number}, {hit.kind} {hit.key}, {tries} tries: {errors}"
    print(where)
    if (tries and how in LOST) or how in ("delay", "partial_list"):
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


_REPEATED = (("reset", _TRIES), ("lost_answer", _TRIES))  # the others are other words for them


@pytest.mark.slow
@pytest.mark.parametrize(("how", "tries"), [*((how, 0) for how in (*LOST, *REFUSED)), *_REPEATED])
def test_no_fault_of_any_request_of_a_save_loses_anything(
    root: Root, seed: int, how: str, tries: int
) -> None:
    base = root.base()
    requests = _requests_of(root, base, lambda: _job(root, 4))
    for number in spread(len(range(_turn(how), len(requests), 3)), seed, 2):
        _saves_with_fault(root, base, (4,), _turn(how) + 3 * number, how, tries)


@s3_alone  # Azure signs the number of keys a page
def test_lists_that_come_in_pages_lose_nothing(root: Root) -> None:
    base = root.base()
    requests = _requests_of(root, base, lambda: _job(root, 4))
    for one in requests:
        if one.kind == "list":
            _saves_with_fault(root, base, (4,), one.number, "partial_list", 0)


def _turn(how: str) -> int:
    """Returns at which of three requests a fault begins: each meets two lost and one refused."""
    return (*LOST, *REFUSED).index(how) % 3


@pytest.mark.slow
@pytest.mark.parametrize("how", ["reset", "lost_answer", "403"])
def test_every_request_of_a_second_save_may_fail(root: Root, seed: int, how: str) -> None:
    base = root.base()
    requests = _requests_of(root, base, lambda: _job(root, 4, 5))
    begin = [one.number for one in requests if one.key.endswith("step-4/.metadata")][-1]
    begin += _turn(how)
    for number in spread(len(range(begin, len(requests), 3)), seed):
        _saves_with_fault(root, base, (4, 5), begin + 3 * number, how, 0)


# ---- Faults that stay ---------------------------------------------------------------------------

_KEYS = ("/newest", "/.metadata", ".distcp", "/.dcpx.lock", "/.dcpx.pin", "/.dcpx.deleted", "/")


@pytest.mark.parametrize("kind", ["put_object", "head_object", "get_object", "list", "delete_many"])
@pytest.mark.parametrize("how", ["reset", "403", "lost_answer"])
def test_kind_of_request_that_always_fails_loses_nothing(root: Root, kind: str, how: str) -> None:
    base = root.base()
    root.reset(base)
    root.proxy.fail(kind, how, times=None)
    with retries(0):
        errors = _job(root, 4, 5)
    assert root.proxy.count(kind)
    root.proxy.heal()
    _check_saves(root, errors, f"{how} of {kind}: {errors}")


@pytest.mark.parametrize("key", _KEYS[:-1])
@pytest.mark.parametrize("how", ["500", "lost_answer"])
@pytest.mark.parametrize("skip", [0, 1])
def test_objects_whose_requests_always_fail_lose_nothing(
    root: Root, key: str, how: str, skip: int
) -> None:
    """As of a store that answers again when the job has ended."""
    base = root.base()
    root.reset(base)
    root.proxy.fail("any", how, times=None, key=key, skip=skip)
    with retries(0):
        errors = _job(root, 4, 5)
    root.proxy.heal()
    _check_saves(root, errors, f"{how} of {key}: {errors}")


def test_save_that_is_committed_returns_though_its_pointer_cannot_be_replaced(
    root: Root, caplog: pytest.LogCaptureFixture
) -> None:
    root.reset(root.base())
    manager = manager_of(root.url)
    with retries(0):
        save_steps(manager, 4)
        root.proxy.fail("put_object", "500", times=None, key="/newest", skip=1)
        save_steps(manager, 5)  # the first is before the commit
    assert "'step-5' is committed; the pointer does not say so" in caplog.text
    root.proxy.heal()
    root.assert_resumes(5)


def test_save_that_failed_leaves_no_reason_against_a_fresh_start(root: Root) -> None:
    with retries(0):
        root.proxy.fail("put_object", "403", key=".distcp")
        assert error_of(partial(save_steps, manager_of(root.url), 1)) is not None
        assert root.names() == {"step-1/.dcpx.lock"}
        assert manager_of(root.url).resume(state={"x": torch.zeros(40)}).is_fresh


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


CALLS = (_delete, _delete_newest, _pin, _unpin, _latest, _tags, _resume)


def _check_call(root: Root, call: Callable[[CheckpointManager], None], error: object) -> None:
    """Asserts what must hold after a call over commits 2 and 3."""
    whole, names = root.whole(), root.names()
    gone = {2} if call is _delete else {3} if call is _delete_newest else set()
    if error is None:
        assert whole == {2, 3} - gone
        assert ("step-2/.dcpx.pin" in names) == (call is _pin)
    assert whole >= {2, 3} - gone
    root.assert_resumes(max(whole))
    with retries(0):
        manager = manager_of(root.url)
        for step in whole - {max(whole)}:
            manager.unpin(step)
    root.assert_cleans_up(_KEEP)


def _call_with_fault(
    root: Root,
    base: dict[str, bytes],
    call: Callable[[CheckpointManager], None],
    number: int,
    how: str,
    tries: int,
) -> None:
    root.reset(base)
    root.proxy.fail(number, how, seconds=0.01)
    with retries(tries):
        error = error_of(lambda: call(manager_of(root.url)))
    hit = root.proxy.requests()[number]
    root.proxy.heal()
    where = f"{call.__name__}, {how} of {number}, {hit.kind} {hit.key}, {tries} tries: {error!r}"
    print(where)
    assert hit.fault == how
    if (tries and how in LOST) or how == "delay":
        assert error is None, where
    assert _SECRET not in where
    _check_call(root, call, error)


def _base_of(root: Root, call: Callable[[CheckpointManager], None]) -> dict[str, bytes]:
    return {**root.base(), **({"step-2/.dcpx.pin": b""} if call is _unpin else {})}


@pytest.mark.parametrize("call", CALLS)
def test_fault_of_a_request_of_a_call_loses_nothing(
    root: Root, seed: int, call: Callable[[CheckpointManager], None]
) -> None:
    """A sample."""
    base, draw = _base_of(root, call), random.Random(seed)
    requests = _requests_of(root, base, lambda: call(manager_of(root.url)))
    for number in sorted(draw.sample(range(len(requests)), min(len(requests), points(4)))):
        how = draw.choice([*LOST, *REFUSED, "delay"])
        _call_with_fault(root, base, call, number, how, draw.choice([0, _TRIES]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "tries"), [("403", 0), ("reset", 0), ("lost_answer", 0), *_REPEATED]
)
@pytest.mark.parametrize("call", CALLS)
def test_every_fault_of_every_request_of_a_call_loses_nothing(
    root: Root, seed: int, call: Callable[[CheckpointManager], None], how: str, tries: int
) -> None:
    base = _base_of(root, call)
    requests = _requests_of(root, base, lambda: call(manager_of(root.url)))
    for number in spread(len(requests), seed, 2):
        _call_with_fault(root, base, call, number, how, tries)


@pytest.mark.parametrize("how", ["503", "403", "reset"])
@pytest.mark.parametrize("kind", ["get_object", "head_object", "list"])
def test_newest_that_does_not_answer_is_not_passed_over(root: Root, kind: str, how: str) -> None:
    """An older one in its place would take steps of the training back."""
    root.reset(root.base())
    root.proxy.fail(kind, how, times=None, key="/step-3")
    with retries(0):
        for call in (_resume, _latest, _tags):
            error = error_of(partial(call, manager_of(root.url)))
            assert error is not None or call is not _resume
    root.proxy.heal()
    root.assert_resumes(3)


def test_training_does_not_begin_anew_where_the_pointer_has_no_tag(root: Root) -> None:
    """As of a proxy that answers by a page of its own, with status 200, for this object alone."""
    root.reset({"newest": root.base()["newest"]})
    root.proxy.fail("get_object", "200", times=None, key="/newest")
    for more in ({}, {"allow_fresh": True}):
        with pytest.raises(StorageError, match=r"newest' is there and of no use.*no ETag"):
            manager_of(root.url, **more).resume(state={})


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
    error = error_of(partial(_delete_newest, manager_of(root.url)))
    assert (error is not None) == is_told and not left
    root.assert_resumes(3 if is_told else 2)
