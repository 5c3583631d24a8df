"""Small pickles that ask for much time or memory: refused, and honest ones like them are not."""

from __future__ import annotations

import argparse
import collections
import pickle
import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hostile import bombs
from hostile import pickles as hp
from support.foreign import Piece, write_foreign
from support.rows import check_rows
from support.saves import load, raises_one
from support.zip_samples import saved

from torch_dcpx import _C, DcpxReader
from torch_dcpx.errors import CorruptionError, UnsafePickleError
from torch_dcpx.metadata.file import decode_metadata
from torch_dcpx.unpickle import settle
from torch_dcpx.unpickle.byte_items import decode_byte_item
from torch_dcpx.unpickle.hashed_keys import (
    MAX_COMPOUND_KEYS,
    MAX_SAME_HASH,
    KeyCheckedUnpickler,
    check_keys,
)
from torch_dcpx.unpickle.stand_ins import brief

# torch 2.15 says that checking takes time.
pytestmark = pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants:UserWarning")


def decode(body: bytes) -> Any:
    return decode_byte_item(hp.torch_zip(body), fqn="k", path="p")


SMALL = {
    name: body
    for name, body in bombs.PICKLES.items()
    if len(body) < 1 << 19 and name not in bombs.HARMLESS and not name.startswith("one list, sets")
}


def test_bomb_is_refused_as_byte_item_and_as_metadata() -> None:
    def check(pickled: bytes) -> None:
        body = b"\x80\x04" + pickled + (b"" if pickled == SMALL["no STOP"] else b".")
        for read in (decode, lambda data: decode_metadata(data, "p")):
            with pytest.raises((CorruptionError, UnsafePickleError)):
                read(body)

    check_rows(SMALL, check)


def test_one_list_that_many_calls_copy_is_refused() -> None:
    made = hp.name("collections", "deque")
    given = hp.value(list(range(50_000))) + b"q\xc8"
    body = b"(" + given + hp.call(made, b"h\xc8") * 100 + b"t."
    with pytest.raises(CorruptionError):
        decode(body)


@pytest.mark.parametrize("protocol", [2, 4])
def test_honest_dicts_of_many_compound_keys_are_read(protocol: int) -> None:
    count = 3 * MAX_COMPOUND_KEYS
    texts = {(f"a{i}", f"b{i}"): i for i in range(count)}
    state = {
        "merges": texts,
        "cells": {(i, j): i for i in range(60) for j in range(60)},
        "seeds": {2**63 + i: i for i in range(count)},
        "members": {(i, i + 1) for i in range(count)},
        "frozen": frozenset((i, str(i)) for i in range(count)),
        "ordered": collections.OrderedDict(texts),
        "nested": {((i,), (i, (i, frozenset([i])))): i for i in range(count)},
    }
    data = saved(state, pickle_protocol=protocol)
    assert decode_byte_item(data, fqn="k", path="p") == state


def test_compound_keys_are_counted_and_texts_and_objects_are_not() -> None:
    def keys(obj: Any, protocol: int) -> int:
        return _C.scan_keys(pickle.dumps(obj, protocol))[1]

    for protocol in range(6):
        assert keys({"a": 1, "b": 2, 3: 4, 2.5: 6, None: 1, True: 0}, protocol) == 0
        assert keys({(1, 2): 1, 2**61 - 1: 2, 2**70: 3}, protocol) == 3
        assert keys({"a": {(i, i): 0 for i in range(5)}}, protocol) == 5
    assert keys({(1,), (2,)}, 4) == 2
    assert keys(frozenset([frozenset([1]), 2**64]), 4) == 2


def test_keys_of_one_hash_are_refused_beyond_a_few() -> None:
    modulus = 2**61 - 1
    check_keys([modulus * i for i in range(MAX_SAME_HASH)])
    with pytest.raises(pickle.UnpicklingError, match=f"{MAX_SAME_HASH + 1} keys with one hash"):
        check_keys([modulus * i for i in range(MAX_SAME_HASH + 1)])


def _none(*_: Any) -> Any:
    raise AssertionError("nothing is looked for")


@pytest.mark.parametrize("kind", [dict.fromkeys, set, frozenset])
def test_containers_whose_keys_have_one_hash_are_refused(kind: Any) -> None:
    keys = [(2**61 - 1) * i for i in range(2 * MAX_COMPOUND_KEYS)]
    for protocol in (2, 4):
        with pytest.raises(CorruptionError, match="keys with one hash"):
            decode_byte_item(saved({"x": kind(keys)}, pickle_protocol=protocol), fqn="k", path="p")
    reader = KeyCheckedUnpickler(pickle.dumps(kind(keys), 4), _none, _none)
    with pytest.raises(pickle.UnpicklingError, match="keys with one hash"):
        reader.load()


def test_brief_shows_plain_values_and_only_the_type_of_others() -> None:
    assert [brief(v) for v in (1, -2.5, None, "x" * 99)] == ["1", "-2.5", "None", "'" + "x" * 39]
    laughs: Any = ("ab",)
    for _ in range(60):
        laughs = laughs, laughs
    assert (brief(laughs), brief([laughs])) == ("a tuple", "a list")


# ---- Tensors that torch's loader reads ----------------------------------------------------------


def torch_item(body: bytes) -> bytes:
    return hp.torch_zip(b"\x80\x02" + body + b".", {"data/0": bytes(8)})


def sparse(indices: list[int]) -> torch.Tensor:
    values = [1.0 + i for i in indices]
    return torch.sparse_coo_tensor([indices], values, (9,), check_invariants=True)


def coo(index: int) -> bytes:
    data = bytearray(saved(sparse([0, 7])))
    at = data.index((0).to_bytes(8, "little") + (7).to_bytes(8, "little")) + 8
    data[at : at + 8] = index.to_bytes(8, "little", signed=True)
    return bytes(data)


COLLIDING = b"(" + b"".join(hp.value(bombs.MODULUS * i) + b"N" for i in range(1, 3000))
TENSORS: dict[str, tuple[bytes, str]] = {
    "bytes": (torch_item(hp.call(hp.name("builtins", "bytearray"), hp.value(3 << 30))), "calls"),
    "Tensor": (torch_item(hp.call(hp.name("torch", "Tensor"), hp.value(9))), "calls"),
    "Tensor new": (torch_item(hp.new(hp.name("torch", "Tensor"), hp.value(9))), "calls"),
    "storage": (torch_item(hp.call(hp.name("torch", "FloatStorage"), hp.value(9))), "calls"),
    "dict": (torch_item(b"}" + COLLIDING + b"u"), "one hash"),
    "ordered": (torch_item(hp.call(hp.ORDERED) + COLLIDING + b"u"), "one hash"),
    "called": (
        torch_item(hp.call(hp.ORDERED, b"](" + COLLIDING[1:] + b"e")),
        "keys",
    ),
    "no tensor": (torch_item(b"}"), "a dict where a tensor belongs"),
    "index behind": (coo(9), "found index"),
    "index before": (coo(-1), "negative index"),
}  # fmt: skip


def test_tensor_that_takes_memory_or_reaches_outside_is_corruption(tmp_path: Path) -> None:
    def check(name: str) -> None:
        data, why = TENSORS[name]
        whole = sparse([0]) if "index" in name else torch.full((9,), 3.0)
        write_foreign(tmp_path / name, [Piece("t", data, whole)])
        with raises_one(CorruptionError) as raised:
            load({"t": whole}, tmp_path / name)
        assert re.search(why, str(raised.error)), str(raised.error)
        assert raised.error.fqn == "t"

    check_rows({name: name for name in TENSORS}, check)


def test_whole_sparse_tensor_is_read(tmp_path: Path) -> None:
    whole, target = sparse([0, 7]), {"t": sparse([1])}
    write_foreign(tmp_path, [Piece("t", saved(whole), whole)])
    dcp.load(target, storage_reader=DcpxReader(tmp_path), no_dist=True)
    assert target["t"].to_dense().tolist() == whole.to_dense().tolist()


def test_calls_that_make_bytes_of_one_text_again_and_again_are_refused(tmp_path: Path) -> None:
    body = b"(" + hp.text("a" * 100_000) + b"q\x00"
    body += hp.call(hp.name("_codecs", "encode"), b"h\x00", hp.text("latin1")) * 200 + b"t"
    write_foreign(tmp_path, [Piece("t", torch_item(body), torch.ones(2))])
    with raises_one(CorruptionError) as raised:
        load({"t": torch.ones(2)}, tmp_path)
    assert "far more by its calls" in str(raised.error)


def test_attribute_of_the_name_nbytes_is_no_size() -> None:
    for nbytes in ("12 GB", None, 10**15):
        raw = types.SimpleNamespace(nbytes=nbytes), argparse.Namespace(nbytes=nbytes)
        assert decode_byte_item(saved(raw), fqn="k", path="p") == raw


def test_long_tuple_is_read_however_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settle, "MAX_NODES", 1000)
    raw = tuple(range(5000)), {(n, n): None for n in range(2000)}
    assert decode_byte_item(saved(raw), fqn="k", path="p") == raw
