"""Mutations of what checkpoints hold, by the seed: read, or refused by an error of ours.

DCPX_FUZZ_ROUNDS=N tries so many of each kind (2,000).
"""

from __future__ import annotations

import argparse
import collections
import datetime
import io
import os
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hostile import pickles as hp
from support.machine import points
from support.metadata_samples import TAIL, encode_small, seal, small
from support.mutations import mutate

from torch_dcpx.errors import DcpxError
from torch_dcpx.metadata.file import decode_file_names, decode_metadata
from torch_dcpx.unpickle.byte_items import decode_byte_item

ROUNDS = int(os.environ.get("DCPX_FUZZ_ROUNDS") or points(2000))
PLAIN = {
    "state": {0: {"step": torch.tensor(3.0)}, (1, 2): frozenset([4])},
    "groups": [{"lr": 1e-3, "betas": (0.9, 0.95)}, argparse.Namespace(x=datetime.timedelta(1))],
    "ordered": collections.OrderedDict(a=b"bytes", b=torch.nn.Parameter(torch.ones(2))),
}


def read_all(data: bytes) -> None:
    metadata = decode_metadata(data, "p").metadata
    for table in (metadata.state_dict_metadata, metadata.storage_data, metadata.planner_data or {}):
        for _ in table.items() if hasattr(table, "items") else ():
            pass
    decode_file_names(data, "p")


def stock_pickle(data: bytes) -> None:
    read_all(data)


def columns(data: bytes) -> None:
    whole = encode_small()
    read_all(seal(whole, data, TAIL.unpack(whole[-64:])[5]))


def byte_item(data: bytes) -> None:
    decode_byte_item(
        hp.torch_zip(data, {"data/0": bytes(4), "data/1": bytes(8)}), fqn="k", path="p"
    )


def byte_zip(data: bytes) -> None:
    decode_byte_item(data, fqn="k", path="p")


def seeds() -> dict[str, tuple[list[bytes], Callable[[bytes], None]]]:
    whole = encode_small()
    body = whole[TAIL.unpack(whole[-64:])[3] : -64]
    zips = []
    for protocol in (2, 4):
        data = io.BytesIO()
        torch.save(PLAIN, data, pickle_protocol=protocol)
        zips.append(data.getvalue())
    pickles = [data[data.index(b"\x80") :][:1500] for data in zips]
    stocks = [pickle.dumps(small(), protocol) for protocol in (2, 3, 4, 5)]
    return {
        "stock pickle": (stocks, stock_pickle),
        "columns": ([body], columns),
        "byte item": (pickles, byte_item),
        "byte zip": (zips, byte_zip),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stock pickle", "columns", "byte item", "byte zip"])
def test_mutation_is_read_or_refused_by_an_error_of_ours(kind: str, seed: int) -> None:
    random_ = random.Random(seed)
    bodies, read = seeds()[kind]
    outcomes: collections.Counter[str] = collections.Counter()
    for _ in range(ROUNDS):
        mutant: Any = mutate(random_.choice(bodies), random_)
        try:
            with hp.watched():
                read(mutant)
            outcomes["read"] += 1
        except DcpxError as error:
            outcomes[type(error).__name__] += 1
    print(kind, dict(outcomes))
    assert len(outcomes) > 1, outcomes
