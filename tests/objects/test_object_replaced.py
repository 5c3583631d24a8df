"""A checkpoint in a store is replaced while it is loaded: an error, or one of the two, whole."""

from __future__ import annotations

from pathlib import Path

import torch.distributed.checkpoint as dcp
from object_outcomes import load, objects_at, put_objects, retries, save, state_of
from support.object_proxy import FaultProxy
from support.object_requests import Request
from support.object_server import ObjectServer
from support.states import assert_same


def test_load_during_which_another_save_commits_gets_one_checkpoint_whole(
    object_server: ObjectServer, object_prefix: str, object_proxy: FaultProxy
) -> None:
    """The other one commits before each of the load's requests, the first included: the load then
    begins anew.
    """
    old_state = state_of(1, 1_500_000)  # three ranges
    save(old_state, object_prefix)
    old = objects_at(object_server, object_prefix)
    object_proxy.clear()
    load(old_state, object_prefix)
    outcomes = []
    for number in range(object_proxy.count()):
        put_objects(object_server, object_prefix, old)
        object_proxy.heal()
        new_state = state_of(2, 1_500_000)
        object_proxy.hook("get_object", lambda _, new=new_state: save(new, object_prefix),
                          skip=number)  # fmt: skip
        loaded = load(old_state, object_prefix)
        step = loaded["step"]
        assert_same(old_state if step == 1 else new_state, loaded)
        outcomes.append(f"step {step}")
        assert_same(new_state, load(new_state, object_prefix))
    print(outcomes)
    assert outcomes[:2] == ["step 2", "step 2"]
    object_proxy.heal()


def test_stocks_file_that_is_replaced_under_its_name_during_a_load_is_read_anew(
    object_server: ObjectServer, object_prefix: str, object_proxy: FaultProxy, tmp_path: Path
) -> None:
    """No checksum would tell: the store does, by the ETag."""
    state, other = state_of(1, 300_000), state_of(2, 300_000)
    for folder, each in (("old", state), ("new", other)):
        dcp.save(each, checkpoint_id=tmp_path / folder, no_dist=True)
    for path in (tmp_path / "old").iterdir():
        object_server.put(f"{object_prefix}/{path.name}", path.read_bytes())
    name = "__0_0.distcp"

    def replace(_: Request) -> None:
        object_server.put(f"{object_prefix}/{name}", (tmp_path / "new" / name).read_bytes())

    object_proxy.hook("get_object", replace, key=name, skip=1)
    with retries(0):
        assert_same(other, load(state, object_prefix))
    assert object_proxy.count("get_object", name) >= 2
