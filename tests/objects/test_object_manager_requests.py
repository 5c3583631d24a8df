"""The requests of a manager's save and resume in a store, one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from object_managers import manager_of, resumed, save_steps

if TYPE_CHECKING:
    from support.object_proxy import FaultProxy
    from support.object_server import ObjectServer


def test_requests_of_a_save_and_a_resume(
    object_proxy: FaultProxy, object_prefix: str, object_server: ObjectServer
) -> None:
    """As docs/howto/object_stores.md counts them."""
    data = [*["head data"] * (object_server.scheme == "az"), "get data", "get data"]
    manager = manager_of(object_prefix)
    save_steps(manager, 1, 2)
    object_proxy.clear()
    save_steps(manager, 3)
    assert asked(object_proxy) == [
        "head .dcpx.pin",  # is there something that a save must not replace?
        "get newest",  # has another job been here?
        "head .metadata",
        "head .metadata",  # does it replace one?
        "put .dcpx.lock",
        "put data",
        "get newest",  # the tag is noted ...
        "put newest",
        "head .dcpx.pin",
        "put .metadata",  # ... committed ...
        "delete_many",
        "head .metadata",
        "get .metadata",
        "get newest",  # ... and pointed to
        "put newest",
        *["list"] * 4,  # behind it: what may go of the root and of each checkpoint
    ]
    object_proxy.clear()
    resumed(manager_of(object_prefix))
    assert asked(object_proxy) == [
        "get newest",
        "list",  # is it whole?
        "get .metadata",
        *["get .metadata", *data],  # the manager's record
        "list",  # may something be newer than what the pointer names?
        "head .metadata",
        *["get .metadata", *data],  # the load
    ]


def asked(proxy: FaultProxy) -> list[str]:
    """Returns the requests that have come, in order."""
    found = []
    for one in proxy.requests():
        name = one.key.rpartition("/")[2]
        name = "data" if name.endswith(".distcp") else name
        found.append(f"{one.kind.removesuffix('_object')} {name}".strip())
    return found
