"""The matrix of tensors: no mismatch, and exactly the listed cases are refused."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from pathlib import Path

import pytest
from support.rank_fixture import StartRanks
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.tensor import _api as dtensor_api

pytestmark = pytest.mark.multirank

Key = tuple[str, str]  # case, placement
Verdict = tuple[str, str]  # "ok", "refused" or "MISMATCH"; and why
BOTH = ("plain", "Shard(0)")
COO = ("COO", "COO, hybrid", "COO, uncoalesced")
COMPRESSED = ("CSR", "CSC", "BSR", "BSC")

# (case, how its message begins) -> placements
REFUSED_ON_SAVE = {
    ("quantized quint4x2", "UnsupportedError: 'quantized quint4x2|plain' cannot"): ("plain",),
    **{
        (f"sparse {kind}", f"UnsupportedError: 'sparse {kind}|plain' is a sparse COO"): ("plain",)
        for kind in COO
    },
    ("meta", "UnsupportedError: 'meta|"): BOTH,
    ("fake", "UnsupportedError: 'fake|"): BOTH,
    ("functionalized", "UnsupportedError: 'functionalized|plain' is of 80 B but lies"): ("plain",),
    ("zero tensor", "UnsupportedError: 'zero tensor|plain' is of 80 B but lies"): ("plain",),
    ("freed storage", "UnsupportedError: 'freed storage|plain' needs 80 B of a"): ("plain",),
    **{
        (f"dtype {name}", f"UnsupportedError: 'dtype {name}|plain' is of torch.{name}"): ("plain",)
        for name in ("int1", "int4", "int7", "uint1", "uint4", "uint7", "bits8", "bits1x8")
    },
}
REFUSED_ON_LOAD_UNLESS_TRUSTED = {
    ("subclass", "unless trusted: UnsafePickleError: "): BOTH,
    ("wrapper", "unless trusted: UnsafePickleError: "): BOTH,
    **{
        (f"{kind} in a byte item", "unless trusted: UnsafePickleError: "): ("plain",)
        for kind in ("sparse", "quantized", "nested", "subclass")
    },
}
# DCP's planner raises, before it asks a writer.
REFUSED_BY_STOCK = {
    ("nested tensor", "as stock: RuntimeError: Internal error: NestedTensorImpl"): ("plain",),
    ("nested tensor, jagged", "as stock: AttributeError: '"): ("plain",),
    ("oneDNN layout", "as stock: NotImplementedError: Cannot access storage"): ("plain",),
    ("lazy parameter", "as stock: ValueError: Attempted to use an uninitialized"): ("plain",),
    ("masked", "as stock: TypeError: Multiple dispatch failed"): ("plain",),
}
if "partial placements" in inspect.getsource(dtensor_api):  # torch 2.9 saves what each rank has
    begin = "as stock: ValueError: Any checkpointing related operations are"
    REFUSED_BY_STOCK["dense", begin] = ("Partial",)
KEPT_BETTER_THAN_STOCK = {("under way", placement) for placement in BOTH}
if any(field.name == "strides" for field in dataclasses.fields(TensorProperties)):
    REFUSED_BY_STOCK |= {  # the newer planner asks for strides
        (f"sparse {kind}", f"as stock: RuntimeError: Sparse {kind} tensors"): ("plain",)
        for kind in COMPRESSED
    }
else:
    KEPT_BETTER_THAN_STOCK |= {(f"sparse {kind}", "plain") for kind in COMPRESSED}


def verdicts(ranks: StartRanks, seed: int, scratch: Path) -> dict[Key, Verdict]:
    """Returns one a case and placement; where launches of other numbers of ranks disagree, that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has one for a dtype of its cases
        from matrix_ranks import matrix
    found: dict[Key, Verdict] = {}
    saved = None
    for count in (2, 3, 1, 4):  # each loads what the one before has saved
        here = scratch / f"ranks{count}"
        for key, verdict in ranks(count, anew=True)(matrix, here, seed, saved)[0].items():
            before = found.setdefault(key, verdict)
            if before[0] not in (verdict[0], "MISMATCH"):
                found[key] = "MISMATCH", f"{before}, on {count} ranks {verdict}"
        saved = here
    return found


@pytest.mark.slow
def test_every_tensor_comes_back_bit_for_bit_or_is_refused_by_name(
    ranks: StartRanks, tmp_path: Path, seed: int
) -> None:
    rows = verdicts(ranks, seed % 10_000, tmp_path)
    assert {key: row for key, row in rows.items() if row[0] == "MISMATCH"} == {}

    expected = {
        (case, placement): begin
        for refused in (REFUSED_ON_SAVE, REFUSED_ON_LOAD_UNLESS_TRUSTED, REFUSED_BY_STOCK)
        for (case, begin), placements in refused.items()
        for placement in placements
    }
    found = {key: why for key, (verdict, why) in rows.items() if verdict == "refused"}
    assert sorted(found) == sorted(expected)
    for key, message in found.items():
        assert message.startswith(expected[key]), (key, message)
    kept = {key for key, (verdict, why) in rows.items() if verdict == "ok" and why}
    assert kept == KEPT_BETTER_THAN_STOCK
    assert len(rows) > 450
