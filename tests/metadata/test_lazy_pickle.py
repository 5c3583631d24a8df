"""Pickles of the dicts that a reader hands out: plain dicts to stock, and to our allow-list."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hostile import pickles as hp
from support.metadata_samples import PATH, canonical, encode_small, small
from torch.distributed.checkpoint.metadata import Metadata

from torch_dcpx.errors import CorruptionError
from torch_dcpx.metadata.file import decode_metadata
from torch_dcpx.metadata.stock import load_stock_metadata

FIELDS = ("state_dict_metadata", "storage_data", "planner_data")


def read() -> Metadata:
    return decode_metadata(encode_small(), PATH).metadata


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickle_of_metadata_that_was_handed_out_is_read_by_the_allow_list(protocol: int) -> None:
    data = pickle.dumps(read(), protocol=protocol)
    with hp.watched():
        found = load_stock_metadata(data, PATH)
    for one in (found, pickle.loads(data)):
        assert [type(getattr(one, field)) for field in FIELDS] == [dict] * 3
        assert canonical(one) == canonical(small())


class Reduced:
    """Pickled as whatever it is told."""

    def __init__(self, parts: Callable[[], tuple[Any, ...]]) -> None:
        self.parts = parts

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self.parts()


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize(
    "dict_that",
    [
        lambda: (dict, ([("w", 1)],)),
        lambda: (dict, (), None, iter([1])),
        lambda: (dict, (), {"planted": 1}),
        lambda: (dict, (), None, None, iter([([], 1)])),
    ],
    ids=["has arguments", "is appended to", "has a state", "has a key without a hash"],
)
def test_pickled_call_of_dict_that_does_more_than_fill_it_is_corruption(
    dict_that: Callable[[], tuple[Any, ...]], field: str
) -> None:
    metadata = small()
    setattr(metadata, field, Reduced(dict_that))
    with hp.watched(), pytest.raises(CorruptionError) as caught:
        load_stock_metadata(pickle.dumps(metadata), PATH)
    assert caught.value.path == PATH
