"""One job at a time saves beneath a root in a store."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from object_managers import manager_of, resumed, save_steps

from torch_dcpx import ConcurrentSaveError, WriteOptions
from torch_dcpx.storage import root_lock
from torch_dcpx.storage.holder import Holder
from torch_dcpx.storage.names import ROOT_LOCK_NAME

if TYPE_CHECKING:
    from support.object_proxy import FaultProxy
    from support.object_server import ObjectServer


def elsewhere(**more: Any) -> bytes:
    own = Holder.own("")._replace(host="node7", pid=4711, boot="another", token="other")
    return own._replace(**more).encoded()


def holder(server: ObjectServer, prefix: str) -> Holder:
    found = Holder.decoded(server.get(f"{prefix}/{ROOT_LOCK_NAME}".removeprefix(f"{server.root}/")))
    assert found is not None
    return found


@pytest.fixture(autouse=True)
def _short(object_prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(root_lock, "_ENDING_S", 0.0)
    monkeypatch.setattr(root_lock, "_LIMIT_S", 0.1)


@pytest.mark.parametrize("is_conditional", [True, False])
def test_job_of_another_machine_is_refused_to_until_it_is_gone(
    object_server: ObjectServer,
    object_prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    is_conditional: bool,
) -> None:
    options = WriteOptions(conditional_commit=is_conditional)
    object_server.put(f"{object_prefix}/{ROOT_LOCK_NAME}", elsewhere())
    before = set(object_server.keys(f"{object_prefix}/".removeprefix(f"{object_server.root}/")))
    with pytest.raises(ConcurrentSaveError, match="host=node7 pid=4711 since="):
        save_steps(manager_of(object_prefix, options=options), 1)
    after = set(object_server.keys(f"{object_prefix}/".removeprefix(f"{object_server.root}/")))
    assert {key for key in after - before if "probe" not in key} == set()
    monkeypatch.setattr(root_lock, "_LIMIT_S", 60.0)
    monkeypatch.setattr(root_lock, "_GONE_S", 0.1)
    with manager_of(object_prefix, options=options) as manager:
        save_steps(manager, 1)
        assert not holder(object_server, object_prefix).is_over
    assert holder(object_server, object_prefix).is_over
    assert resumed(manager_of(object_prefix)) == 1


def test_ended_dead_and_copied_jobs_are_not_waited_for(
    object_server: ObjectServer, object_prefix: str
) -> None:
    root = str(manager_of(object_prefix).root)
    dead = Holder.own(root)._replace(pid=2**22 + 1, start="1", token="other").encoded()
    parent = Holder.own(f"{root}/copied")._replace(pid=os.getppid(), start="", token="other")
    for step, record in enumerate((elsewhere(is_over=True), dead, parent.encoded()), 1):
        object_server.put(f"{object_prefix}/{ROOT_LOCK_NAME}", record)
        with manager_of(object_prefix) as manager:
            save_steps(manager, step)


def test_stolen_root_is_noticed_before_the_commit(
    object_server: ObjectServer, object_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = manager_of(object_prefix)
    save_steps(manager, 1)
    monkeypatch.setattr(root_lock, "_GONE_S", 0.0)  # so long ago was the last renewal

    def steal(*_: object) -> None:
        object_server.put(f"{object_prefix}/{ROOT_LOCK_NAME}", elsewhere())

    monkeypatch.setattr(manager._root.files, "check_save", steal)
    with pytest.raises(ConcurrentSaveError, match=r"host=node7.*nothing is committed"):
        save_steps(manager, 2)
    assert resumed(manager_of(object_prefix)) == 1


def test_answer_that_is_lost_takes_the_root_all_the_same(
    object_prefix: str, object_proxy: FaultProxy
) -> None:
    object_proxy.fail("put_object", "lost_answer", key=f"/{ROOT_LOCK_NAME}")
    save_steps(manager_of(object_prefix), 1)
    assert resumed(manager_of(object_prefix)) == 1
