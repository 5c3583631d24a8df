"""Fixtures of all tests in this folder: a place in a store, the proxy before it, a root."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from object_outcomes import Store
    from object_roots import Root
    from support.object_proxy import FaultProxy
    from support.object_server import ObjectServer


@pytest.fixture
def store(object_server: ObjectServer, object_prefix: str) -> Store:
    """A URL under which nothing is."""
    from object_outcomes import Store

    return Store(object_server, object_prefix)


@pytest.fixture
def root(object_server: ObjectServer, object_prefix: str) -> Root:
    """A place for a manager's root."""
    from object_roots import Root

    return Root(object_server, object_prefix)


@pytest.fixture
def proxy(request: pytest.FixtureRequest, object_proxy: FaultProxy) -> FaultProxy:
    """A proxy before the store, through which all requests go; `store.proxy` as well."""
    for name in {"store", "root"} & set(request.fixturenames):
        request.getfixturevalue(name).proxy = object_proxy
    return object_proxy


@pytest.fixture
def chosen(request: pytest.FixtureRequest, seed: int) -> Callable[[Sequence[Any]], list[Any]]:
    """Gives one of several points that should not differ, by the seed; all with --everything."""
    is_all, draw = request.config.getoption("--everything"), random.Random(seed)
    return lambda given: list(given) if is_all else [draw.choice(given)]
