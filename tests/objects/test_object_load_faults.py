"""One request of a load from a store fails: an error of ours, or nobody notices.

What a load gets is whole. With retries, a lost request or answer is not noticed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from object_outcomes import (
    LOST,
    REFUSED,
    Store,
    load,
    loaded_or_error,
    put_objects,
    retries,
    state_of,
)
from support.object_proxy import FaultProxy
from support.object_server import ObjectServer
from support.states import assert_same

from torch_dcpx import DcpxError

_TRIES = 3


@pytest.fixture
def store(object_server: ObjectServer, object_prefix: str, object_proxy: FaultProxy) -> Store:
    return Store(object_server, object_proxy, object_prefix)


def _ours(store: Store, folder: Path) -> dict[str, Any]:
    state = state_of(1, 800_000)  # more than one slot
    store.saved(state)
    return state


def _stocks(store: Store, folder: Path) -> dict[str, Any]:
    """Puts a checkpoint there that stock's writer has written to a directory."""
    state = state_of(1, 300_000)
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    put_objects(
        store.server, store.url, {path.name: path.read_bytes() for path in folder.iterdir()}
    )
    return state


_WRITTEN: dict[str, Callable[[Store, Path], dict[str, Any]]] = {"ours": _ours, "stock's": _stocks}
# Stock's files have no checksum that a load compares (docs/explain/guarantees.md).
_OF_LOADS = {"ours": (*LOST, *REFUSED, "flip"), "stock's": (*LOST, *REFUSED)}


def _load_with_fault(
    store: Store, state: dict[str, Any], number: int, how: str, tries: int
) -> DcpxError | None:
    """Loads while one request fails, asserts what must hold, and returns the error."""
    store.proxy.heal()
    store.proxy.clear()
    store.proxy.fail(number, how)
    with retries(tries):
        error, loaded = loaded_or_error(state, store.url)
    hit = store.proxy.requests()[number]
    where = f"{how} of {hit}, {tries} tries: {error!r}"
    print(where)
    assert hit.fault == how
    if error is None:
        assert_same(state, loaded, where)
    if tries and how in LOST:
        assert error is None, where
    elif how not in ("flip", "412"):  # bytes between the payloads; a load that begins anew
        assert error is not None, where
    return error


@pytest.mark.parametrize("written", _WRITTEN)
def test_fault_of_any_request_of_a_load_is_an_error_or_not_noticed(
    store: Store, tmp_path: Path, seed: int, written: str
) -> None:
    """A sample: each fault with or without retries."""
    state = _WRITTEN[written](store, tmp_path)
    draw = random.Random(seed)
    for number in range(_loads_requests(store, state)):
        for how in _OF_LOADS[written]:
            _load_with_fault(store, state, number, how, draw.choice([0, _TRIES]))


def _loads_requests(store: Store, state: dict[str, Any]) -> int:
    store.proxy.clear()
    assert_same(state, load(state, store.url))
    assert store.proxy.count() >= 3  # metadata, a file's end, payloads
    return store.proxy.count()


@pytest.mark.slow
@pytest.mark.parametrize("tries", [0, _TRIES])
@pytest.mark.parametrize("written", _WRITTEN)
def test_every_fault_of_every_request_of_a_load_is_an_error_or_not_noticed(
    store: Store, tmp_path: Path, written: str, tries: int
) -> None:
    state = _WRITTEN[written](store, tmp_path)
    seen = {"NoneType"}
    for number in range(_loads_requests(store, state)):
        for how in _OF_LOADS[written]:
            error = _load_with_fault(store, state, number, how, tries)
            seen.add(type(error).__name__)
    assert seen >= {"StorageError"} | ({"CorruptionError"} if written == "ours" else set())
