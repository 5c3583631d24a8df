"""The cases of the matrix: every kind of tensor and value, each made from a seed.

REGULAR cases must come back bit for bit, in every placement. ODD ones are tried alone, because
stock, or we, may refuse them; `tensor_matrix` says what becomes of each.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import decimal
import fractions
import pathlib
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from support import odd_tensors
from support.odd_tensors import Tagged, TaggedParameter, Wrapper, low_bits
from support.states import random_bytes

Generator = torch.Generator
Maker = Callable[[Generator], Any]


class Case(NamedTuple):
    """One row of the matrix. `make` gives a tensor, or a state of several."""

    make: Maker
    is_like_target: bool = True  # load into what `make` gives from another seed; else into zeros
    is_cut: bool = True  # a tensor that placements may cut
    is_rare: bool = False  # its placements are tried on two ranks only
    allow: tuple[Any, ...] = ()  # classes that torch.load is told to trust
    kills_stock: bool = False  # stock dies of it: only ours is tried


def generator(seed: int) -> Generator:
    return torch.Generator().manual_seed(seed)


def floats(*shape: int) -> Maker:
    return lambda g: random_bytes(shape, torch.float32, g)


def complexes(*shape: int) -> Maker:
    return lambda g: random_bytes(shape, torch.complex64, g)


def inference_tensor(g: Generator) -> torch.Tensor:
    with torch.inference_mode():
        return floats(13, 7)(g).clone()


def with_attribute(g: Generator) -> torch.Tensor:
    tensor = floats(13, 7)(g)
    tensor.note = "not a part of the value"  # type: ignore[attr-defined]
    return tensor


def shared_storage(g: Generator) -> dict[str, torch.Tensor]:
    base = floats(40, 6)(g)
    return {"left": base[:25], "right": base[10:], "whole": base, "columns": base.t()}


def tied(g: Generator) -> dict[str, torch.Tensor]:
    weight = torch.nn.Parameter(floats(13, 7)(g))
    return {"embedding": weight, "head": weight}


def nested(g: Generator) -> dict[str, Any]:
    t = floats(3, 2)
    return {
        "layers": [{"w": t(g), "b": t(g)}, {"w": t(g), "b": None}],
        "list": [t(g), [t(g), {"deep": {"er": t(g)}}], 5],
        "numbers": {"7": t(g), 8: t(g)},
        "empty": {},
        "values": [1, "two", 3.0],
    }


def odd_keys(g: Generator) -> dict[str, Any]:
    t = floats(2, 3)
    keys = [
        "a.b.c", "a/b", "/etc/passwd", "../up", "..", "", " ", "new\nline", "tab\t", "quote'\"\\",
        "nul\0", "déjà", "模型", "🦊", "e\u0301", "long" * 20_000, "%s{0}", "-1", ".metadata",
    ]  # fmt: skip
    return {key: {"tensor": t(g), "value": key} for key in keys}


def objects(_: Generator) -> dict[str, Any]:
    zone = datetime.timezone(datetime.timedelta(hours=2), "somewhere")
    counts = collections.defaultdict(int, {"a": 1})
    values: list[Any] = [
        None, True, -(2**70), 1.5, float("inf"), 1 + 2j, "text", b"bytes", bytearray(b"array"),
        (1, (2, "x")), {1, 2}, frozenset({3}), slice(1, 2, None), range(1, 9, 2),
        collections.OrderedDict(a=1), counts, collections.deque([1, 2], 3),
        collections.Counter("abca"), pathlib.PurePosixPath("a/b"), datetime.date(2026, 1, 2),
        datetime.datetime(2026, 1, 2, 3, 4, 5, 6, zone), datetime.timedelta(1, 2, 3),
        decimal.Decimal("1.50"), fractions.Fraction(1, 3), uuid.UUID(int=7),
        argparse.Namespace(lr=0.1), torch.float8_e4m3fn, torch.Size([1, 2]),
        torch.device("cpu"), np.float32(1.5), np.arange(6).reshape(2, 3), np.dtype("int16"),
    ]  # fmt: skip
    # A tuple keeps flatten from taking a value apart.
    return {f"{i} {type(value).__name__}": (value,) for i, value in enumerate(values)}


def tensors_in_bytes(g: Generator) -> dict[str, Any]:
    """Tensors that flatten does not see: they travel inside byte items."""
    base = floats(13, 7)(g)
    return {
        "pair": (base, 3),
        "views": (base, base.t(), base[2:5]),
        "parameter": (torch.nn.Parameter(base.clone()),),
        "bf16": (random_bytes((5,), torch.bfloat16, g),),
        "fp8": (random_bytes((5,), torch.float8_e5m2, g),),
    }


def of_dtype(dtype: torch.dtype) -> Maker:
    return lambda g: random_bytes((24, 7), dtype, g)


COMMON = {torch.float32, torch.bfloat16, torch.bool, torch.float8_e4m3fn, torch.complex128}


def _is_copied(dtype: torch.dtype) -> bool:
    """Returns whether this torch copies tensors of the dtype at all: 2.9 not all that it saves."""
    try:
        torch.zeros(16, dtype=torch.uint8).view(dtype).clone()
    except NotImplementedError:
        return False
    return True


def _saved_dtypes() -> list[torch.dtype]:
    known = set(torch.storage._dtype_to_storage_type_map()) | torch.storage._new_dtypes()
    return sorted(
        (dtype for dtype in known if "bits" not in str(dtype) and "qint" not in str(dtype)
         and "quint" not in str(dtype) and _is_copied(dtype)),
        key=str,
    )  # fmt: skip


REGULAR: dict[str, Case] = {
    **{
        str(dtype).removeprefix("torch."): Case(
            of_dtype(dtype), is_like_target=False, is_rare=dtype not in COMMON
        )
        for dtype in _saved_dtypes()
    },
    "0-d": Case(floats()),
    "one element": Case(floats(1)),
    "one row": Case(floats(1, 9)),
    "empty": Case(floats(0, 7)),
    "empty inside": Case(floats(5, 0, 3)),
    "length-1 dims": Case(floats(1, 5, 1, 4, 1)),
    "vector": Case(floats(100_003)),
    "large": Case(floats(1031, 521)),
    "transposed": Case(lambda g: floats(13, 7)(g).t()),
    "large transposed": Case(lambda g: floats(521, 1031)(g).t()),
    "strided": Case(lambda g: floats(40, 30)(g)[::2, 1::3]),
    "view": Case(lambda g: floats(40, 7)(g)[5:18]),
    "channels_last": Case(
        lambda g: floats(5, 3, 4, 6)(g).contiguous(memory_format=torch.channels_last)
    ),
    "channels_last_3d": Case(
        lambda g: floats(5, 3, 4, 2, 6)(g).contiguous(memory_format=torch.channels_last_3d)
    ),
    "expanded": Case(lambda g: floats(1, 7)(g).expand(13, 7), is_like_target=False),
    "overlapping": Case(lambda g: floats(40)(g).as_strided((13, 7), (2, 1)), is_like_target=False),
    "requires_grad": Case(lambda g: floats(13, 7)(g).requires_grad_()),
    "not a leaf": Case(lambda g: floats(13, 7)(g).requires_grad_() * 1),
    "Parameter": Case(lambda g: torch.nn.Parameter(floats(13, 7)(g))),
    "Parameter subclass": Case(lambda g: TaggedParameter(floats(13, 7)(g)), is_cut=False),
    "Buffer": Case(lambda g: torch.nn.Buffer(floats(13, 7)(g)), is_cut=False),
    "inference mode": Case(inference_tensor),
    "conj view": Case(lambda g: complexes(13, 7)(g).conj()),
    "conj view, transposed": Case(lambda g: complexes(13, 7)(g).conj().t()),
    "neg view": Case(lambda g: complexes(13, 7)(g).conj().imag),
    "copy on write": Case(lambda g: torch._lazy_clone(floats(13, 7)(g)), is_cut=False),
    "with attribute": Case(with_attribute, is_cut=False),
    "shared storage": Case(shared_storage, is_cut=False),
    "tied": Case(tied, is_cut=False),
    "nested": Case(nested, is_like_target=False, is_cut=False),
    "odd keys": Case(odd_keys, is_like_target=False, is_cut=False),
    "Python objects": Case(objects, is_like_target=False, is_cut=False),
    "tensors in byte items": Case(tensors_in_bytes, is_like_target=False, is_cut=False),
}

SCALES = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)


def quantized(dtype: torch.dtype) -> Maker:
    return lambda g: torch.quantize_per_tensor(torch.randn(8, 6, generator=g), 0.1, 3, dtype)


def per_channel(dtype: torch.dtype, zeros: torch.Tensor) -> Maker:
    return lambda g: torch.quantize_per_channel(
        torch.randn(4, 6, generator=g), SCALES, zeros, 0, dtype
    )


def sparse(make: Callable[[torch.Tensor], torch.Tensor]) -> Maker:
    """The same pattern from every seed: torch copies between equal patterns only."""
    pattern = (torch.arange(24) % 3 == 0).view(4, 6)
    return lambda g: make(torch.randn(4, 6, generator=g).exp() * pattern)


def small(g: Generator) -> torch.Tensor:
    return torch.randn(8, 6, generator=g)


def lazy(_: Generator) -> torch.Tensor:
    return torch.nn.UninitializedParameter()


ODD: dict[str, Case] = {
    "dense": Case(small, is_cut=False),
    **{f"quantized {name}": Case(quantized(getattr(torch, name)))
       for name in ("qint8", "quint8", "qint32")},
    "quantized per channel": Case(per_channel(torch.qint8, torch.arange(4))),
    "quantized, a view": Case(lambda g: quantized(torch.qint8)(g)[2:4]),
    "quantized quint4x2": Case(per_channel(torch.quint4x2, torch.zeros(4)), is_cut=False),
    "sparse COO": Case(sparse(lambda t: t.to_sparse()), is_cut=False),
    "sparse COO, hybrid": Case(sparse(lambda t: t.to_sparse(1)), is_cut=False),
    "sparse COO, uncoalesced": Case(
        lambda g: torch.sparse_coo_tensor([[0, 0, 1], [2, 2, 0]], small(g)[0, :3], (4, 5)),
        is_cut=False,
    ),
    "sparse CSR": Case(sparse(lambda t: t.to_sparse_csr()), is_cut=False),
    "sparse CSC": Case(sparse(lambda t: t.to_sparse_csc()), is_cut=False),
    "sparse BSR": Case(sparse(lambda t: t.to_sparse_bsr((2, 3))), is_cut=False),
    "sparse BSC": Case(sparse(lambda t: t.to_sparse_bsc((2, 3))), is_cut=False),
    "nested tensor": Case(
        lambda g: torch.nested.nested_tensor([small(g), small(g)[:3]]), is_cut=False
    ),
    "nested tensor, jagged": Case(
        lambda g: torch.nested.nested_tensor([small(g), small(g)[:3]], layout=torch.jagged),
        is_cut=False,
    ),
    "oneDNN layout": Case(lambda g: small(g).to_mkldnn(), is_cut=False),
    "meta": Case(lambda _: torch.empty(8, 6, device="meta")),
    "fake": Case(odd_tensors.fake_tensor),
    "functionalized": Case(odd_tensors.functional_tensor, is_cut=False),
    "zero tensor": Case(odd_tensors.zero_tensor, is_cut=False),
    "freed storage": Case(odd_tensors.freed_tensor, is_cut=False, kills_stock=True),
    "lazy parameter": Case(lazy, is_cut=False),
    "masked": Case(lambda g: torch.masked.masked_tensor(small(g), small(g) > 0), is_cut=False),
    "under way": Case(odd_tensors.async_tensor),
    "subclass": Case(lambda g: small(g).as_subclass(Tagged)),
    "subclass, allowed": Case(lambda g: small(g).as_subclass(Tagged), allow=(Tagged,)),
    "subclass of a view, allowed": Case(
        lambda g: small(g)[::2].as_subclass(Tagged), allow=(Tagged,)
    ),
    "wrapper": Case(lambda g: Wrapper(small(g))),
    "wrapper, allowed": Case(lambda g: Wrapper(small(g)), allow=(Wrapper,)),
    "wrapper of a view, allowed": Case(lambda g: Wrapper(small(g).t()[1:3]), allow=(Wrapper,)),
    "wrapper of bf16, allowed": Case(lambda g: Wrapper(small(g).bfloat16()), allow=(Wrapper,)),
    **{f"dtype {name}": Case(low_bits(getattr(torch, name)), is_cut=False)
       for name in ("int1", "int4", "int7", "uint1", "uint4", "uint7", "bits8", "bits1x8")},
    "sparse in a byte item": Case(lambda g: {"pair": (sparse(lambda t: t.to_sparse())(g), 1)},
                                  is_like_target=False, is_cut=False),
    "quantized in a byte item": Case(lambda g: {"pair": (quantized(torch.qint8)(g), 1)},
                                     is_like_target=False, is_cut=False),
    "nested in a byte item": Case(
        lambda g: {"pair": (torch.nested.nested_tensor([small(g), small(g)[:3]]), 1)},
        is_like_target=False, is_cut=False,
    ),
    "subclass in a byte item": Case(lambda g: {"pair": (small(g).as_subclass(Tagged), 1)},
                                    is_like_target=False, is_cut=False),
}  # fmt: skip


@contextlib.contextmanager
def allowed(case: Case) -> Any:
    """torch.load's own allow-list, the way libraries of tensor subclasses set it."""
    with torch.serialization.safe_globals(list(case.allow)):
        yield
