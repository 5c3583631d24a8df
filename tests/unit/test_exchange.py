"""What ranks agree on through a store, and how the failure of one reaches all."""

from __future__ import annotations

import pytest

from torch_dcpx.errors import PlanError
from torch_dcpx.exchange import Exchange, LocalExchange, exchange_for

# ---- One process --------------------------------------------------------------------------------


@pytest.fixture
def local() -> Exchange:
    return exchange_for(None, no_dist=False, timeout_s=5)


def test_without_torch_distributed_the_exchange_is_local(local: Exchange) -> None:
    assert type(local) is LocalExchange
    assert (local.rank, local.world_size, local.is_coordinator) == (0, 1, True)
    assert local.what == "save"
    assert 0 < local.deadline.remaining_s <= 5


def test_local_exchange_passes_objects_through_unpickled(local: Exchange) -> None:
    value = object()
    assert local.all_reduce("plan", lambda: value, lambda values: values[0]) is value
    assert local.reduce_scatter("plan", lambda: value, lambda values: values) is value


def test_local_exchange_raises_the_very_error_of_the_callable(local: Exchange) -> None:
    error = KeyError("x")

    def fail() -> None:
        raise error

    with pytest.raises(KeyError) as caught, local:
        local.all_reduce("plan", fail, lambda _: None)
    assert caught.value is error


def test_local_exchange_with_pieces_for_others_raises(local: Exchange) -> None:
    with pytest.raises(PlanError, match="2 pieces for 1 ranks"):
        local.reduce_scatter("plan", lambda: 1, lambda values: [*values, 2])
