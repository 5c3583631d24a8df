"""A commit that a store does after its client has given it up finds its data, or is refused."""

from __future__ import annotations

import pytest
from object_outcomes import (
    NEW,
    OTHER,
    LatePut,
    error_of,
    found,
    interrupted,
    prepared,
    retries,
    save,
    unanswered,
)
from support.object_server import ObjectServer

from torch_dcpx import OutcomeUnknownError, StorageError

_METADATA = "/.metadata"


@pytest.mark.parametrize("before", ["none", "old"])
def test_commit_that_arrives_late_is_found_by_its_retry(
    object_server: ObjectServer, object_prefix: str, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    old = prepared(object_server, object_prefix, before)
    with retries(0):
        late = LatePut(monkeypatch)
        late.before_next = late.arrive
        save(NEW, object_prefix)
        assert found(object_server, object_prefix, old, NEW) == ("new", [])


@pytest.mark.parametrize("before", ["none", "old"])
@pytest.mark.parametrize("end", ["failures", "interrupt of a pause", "interrupt of a retry"])
def test_commit_that_arrives_after_its_save_has_ended_finds_its_data(
    object_server: ObjectServer,
    object_prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    before: str,
    end: str,
) -> None:
    old = prepared(object_server, object_prefix, before)
    with retries(0), monkeypatch.context() as patch:
        late = LatePut(patch)
        late.before_next = unanswered
        if end == "interrupt of a pause":
            patch.setattr("torch_dcpx.storage.object_place.time.sleep", interrupted)
        elif end == "interrupt of a retry":
            late.before_next = interrupted
        with pytest.raises(OutcomeUnknownError if end == "failures" else KeyboardInterrupt):
            save(NEW, object_prefix)
        assert found(object_server, object_prefix, old, NEW).what == before
        late.arrive()
        assert found(object_server, object_prefix, old, NEW).what == "new"


def test_commit_that_arrives_after_another_save_is_refused_by_the_store(
    object_server: ObjectServer, object_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(object_server, object_prefix, "old")
    with retries(0):
        late = LatePut(monkeypatch)
        late.before_next = unanswered
        assert type(error_of(lambda: save(NEW, object_prefix))) is OutcomeUnknownError
        late.before_next = lambda: None
        save(OTHER, object_prefix)
        with pytest.raises(StorageError):
            late.arrive()
        assert found(object_server, object_prefix, {}, OTHER).what == "new"
