"""Copies, renamed checkpoints and those of others beneath a manager's root in a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from object_managers import manager_of, names, resumed, save_steps

import torch_dcpx as dcpx

if TYPE_CHECKING:
    from support.object_server import ObjectServer

HOUR = 3600.0


def copy(server: ObjectServer, source: str, target: str) -> None:
    """Copies all objects beneath a URL, as `aws s3 cp --recursive`."""
    prefix, new = (url.removeprefix(f"{server.root}/") + "/" for url in (source, target))
    for key in server.keys(prefix):
        server.put(new + key.removeprefix(prefix), server.get(key))


@pytest.mark.parametrize("name", ["mine", "step-9"])
def test_copies_stay_and_take_no_slot(
    object_prefix: str, object_server: ObjectServer, later: list[float], name: str
) -> None:
    root = f"{object_prefix}/run"
    save_steps(manager_of(root), 1, 2, 3)
    save_steps(manager_of(f"{object_prefix}/other"), *range(40, 50))
    copy(object_server, f"{root}/step-3", f"{root}/{name}")
    copy(object_server, f"{object_prefix}/other/step-49", f"{root}/step-49")
    manager = manager_of(root, keep_last=2)
    assert resumed(manager) == 3
    for step in (4, 5, 6):
        later[0] += HOUR
        save_steps(manager, step)
    assert manager_of(root).tags() == [name, "step-49", "step-5", "step-6"]
    assert names(object_server, root, name) == {".metadata", "data"}
    assert (resumed(manager, tag=name), resumed(manager, tag=49)) == (3, 49)
    assert resumed(manager_of(root)) == 6


def test_later_checkpoint_of_no_manager_is_told(object_prefix: str) -> None:
    save_steps(manager_of(object_prefix), 100)
    for name in ("step-90", "step-200"):
        dcpx.save({"state": {"x": torch.ones(40)}}, f"{object_prefix}/{name}", no_dist=True)
    state = {"x": torch.zeros(40)}
    info = manager_of(object_prefix).resume(state=state)
    assert (info.tag, [tag for tag, _ in info.skipped]) == ("step-100", ["step-200"])
