"""One job at a time saves beneath a root in a store."""

from __future__ import annotations

import os
from typing import Any

import pytest
from object_roots import Root
from support.object_proxy import FaultProxy
from support.small_managers import resumed, save_steps

from torch_dcpx import ConcurrentSaveError, WriteOptions
from torch_dcpx.storage import root_lock
from torch_dcpx.storage.holder import Holder
from torch_dcpx.storage.names import ROOT_LOCK_NAME


def elsewhere(**more: Any) -> bytes:
    own = Holder.own("")._replace(host="node7", pid=4711, boot="another", token="other")
    return own._replace(**more).encoded()


def is_over(root: Root) -> bool:
    found = Holder.decoded(root.get(ROOT_LOCK_NAME))
    assert found is not None
    return found.is_over


@pytest.fixture(autouse=True)
def _short(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(root_lock, "_ENDING_S", 0.0)
    monkeypatch.setattr(root_lock, "_LIMIT_S", 0.1)


@pytest.mark.parametrize("is_conditional", [True, False])
def test_job_of_another_machine_is_refused_to_until_it_is_gone(
    root: Root, monkeypatch: pytest.MonkeyPatch, is_conditional: bool
) -> None:
    options = WriteOptions(conditional_commit=is_conditional)
    root.put(ROOT_LOCK_NAME, elsewhere())
    with pytest.raises(ConcurrentSaveError, match="host=node7 pid=4711 since="):
        save_steps(root.manager(options=options), 1)
    assert not [name for name in root.names() if "probe" not in name]
    monkeypatch.setattr(root_lock, "_LIMIT_S", 60.0)
    monkeypatch.setattr(root_lock, "_GONE_S", 0.1)
    with root.manager(options=options) as manager:
        save_steps(manager, 1)
        assert not is_over(root)
    assert is_over(root)
    assert resumed(root.manager()) == 1


def test_ended_dead_and_copied_jobs_are_not_waited_for(root: Root) -> None:
    path = str(root.manager().root)
    dead = Holder.own(path)._replace(pid=2**22 + 1, start="1", token="other").encoded()
    parent = Holder.own(f"{path}/copied")._replace(pid=os.getppid(), start="", token="other")
    for step, record in enumerate((elsewhere(is_over=True), dead, parent.encoded()), 1):
        root.put(ROOT_LOCK_NAME, record)
        with root.manager() as manager:
            save_steps(manager, step)


def test_stolen_root_is_noticed_before_the_commit(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = root.manager()
    save_steps(manager, 1)
    monkeypatch.setattr(root_lock, "_GONE_S", 0.0)  # so long ago was the last renewal

    def steal(*_: object) -> None:
        root.put(ROOT_LOCK_NAME, elsewhere())

    monkeypatch.setattr(manager._root.files, "check_save", steal)
    with pytest.raises(ConcurrentSaveError, match=r"host=node7.*nothing is committed"):
        save_steps(manager, 2)
    assert resumed(root.manager()) == 1


def test_answer_that_is_lost_takes_the_root_all_the_same(root: Root, proxy: FaultProxy) -> None:
    proxy.fail("put_object", "lost_answer", key=f"/{ROOT_LOCK_NAME}")
    save_steps(root.manager(), 1)
    assert resumed(root.manager()) == 1
