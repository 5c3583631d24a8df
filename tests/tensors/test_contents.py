"""Digests of tensors' contents: the same for equal numbers, whatever their layout and device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_dcpx.errors import StagingError
from torch_dcpx.tensors import device as device_memory
from torch_dcpx.tensors.contents import content_sums

NONE = bytes(8)
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.complex64, torch.complex128, torch.int64, torch.int16, torch.int8,
    torch.uint8, torch.bool,
]  # fmt: skip


def sums_of(*tensors: torch.Tensor, names: list[str] | None = None) -> list[bytes]:
    sums = content_sums(names or ["x"] * len(tensors), tensors)
    assert len(sums) == 8 * len(tensors)
    return [bytes(sums[at : at + 8]) for at in range(0, len(sums), 8)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layout_and_place_do_not_matter(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for shape in ((3, 5), (300, 257), (70, 8, 3, 3)):
        with monkeypatch.context() as patch:
            check_layouts(shape, dtype, patch)


def check_layouts(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = (torch.randn(shape) * 9).to(dtype)
    turned = whole.transpose(0, 1).contiguous().transpose(0, 1)
    part = torch.cat([whole, whole])[len(whole) :]
    assert not turned.is_contiguous() and part.storage_offset() > 0
    each = sums_of(whole, turned, part, torch.nn.Parameter(whole, requires_grad=False))
    if len(shape) == 4:
        each += sums_of(whole.contiguous(memory_format=torch.channels_last))
    monkeypatch.setattr(device_memory, "is_host", lambda one: one.dim() == 1)
    each += sums_of(whole)  # samples by torch
    assert len(set(each)) == 1 and each[0] != NONE
    assert (
        sums_of(~whole if dtype is torch.bool else (whole.to(torch.complex128).real + 9).to(dtype))
        != each[:1]
    )


def bits(values: list[int], dtype: torch.dtype) -> torch.Tensor:
    sizes: dict[int, Any] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return torch.tensor(values, dtype=sizes[dtype.itemsize]).view(dtype)


@pytest.mark.parametrize(
    ("dtype", "one", "other"),
    [
        (torch.float64, [0x7FF8 << 48, 0, 5], [-1, -(1 << 63), 5]),
        (torch.float32, [0x7FC00000, 0, 5], [-1, -(1 << 31), 5]),
        (torch.float16, [0x7E00, 0, 5], [-1, -(1 << 15), 5]),
        (torch.bfloat16, [0x7FC0, 0, 5], [-1, -(1 << 15), 5]),
        (torch.float8_e5m2, [0x7F, 0, 5], [0xFD, 0x80, 5]),
        (torch.float8_e4m3fn, [0x7F, 0, 5], [0xFF, 0x80, 5]),
    ],
    ids=str,
)
def test_nans_are_one_and_so_are_zeros(
    dtype: torch.dtype, one: list[int], other: list[int]
) -> None:
    a, b = bits(one, dtype), bits(other, dtype)
    assert torch.equal(a.double().nan_to_num(7), b.double().nan_to_num(7))
    assert len(set(sums_of(a, b))) == 1
    assert len(set(sums_of(a, bits([*one[:2], 6], dtype)))) == 2
    infinite = a.clone()
    infinite[0] = float("inf")  # the greatest number, or NaN where there is none
    assert sums_of(infinite) != sums_of(bits([0, *one[1:]], dtype))
    if infinite.double().isinf().any():
        negative = (-infinite.double()).to(dtype)
        assert len(set(sums_of(a, infinite, negative))) == 3


@pytest.mark.parametrize("number", [4096, 4160, 10_000, 1 << 20])
def test_other_bytes_nearly_everywhere_are_found(number: int) -> None:
    whole = torch.zeros(number, dtype=torch.uint8)
    assert len(set(sums_of(whole, whole + 1))) == 2
    rows = whole.clone()
    rows.view(-1, 16)[::2] = 1  # a matrix of which every other row differs
    assert len(set(sums_of(whole, rows))) == 2
    if number == 4096:
        whole[1234] = 1
        assert len(set(sums_of(whole, whole * 0))) == 2  # a small one is looked at whole


def test_contents_that_change_names_differ() -> None:
    assert len(set(sums_of(torch.ones(3), torch.ones(3), names=["a", "b"]))) == 2
    assert len(set(sums_of(torch.empty(0), torch.empty(0, 4)))) == 1


def test_conjugate_and_negative_views_are_what_they_show() -> None:
    whole = torch.randn(60, 50, dtype=torch.complex64)
    for view in (whole.conj(), whole.conj().imag):
        assert len(set(sums_of(view, view.clone().resolve_conj().resolve_neg()))) == 1


def test_what_has_no_strides_or_memory_has_no_digest() -> None:
    freed = torch.ones(2000)
    freed.untyped_storage().resize_(0)
    cut = torch.ones(40, 50).t()
    cut.untyped_storage().resize_(100)
    assert (
        sums_of(torch.empty(9, device="meta"), torch.eye(3).to_sparse(), freed, cut, torch.ones(3))[
            :4
        ]
        == [NONE] * 4
    )


def test_samples_of_many_tensors_stay_those_of_their_names() -> None:
    tensors = [torch.randn(7, 3).t().to((torch.float32, torch.int8)[n % 2]) for n in range(300)]
    wanted = [one.contiguous() for one in tensors]
    names = [f"name{n}" for n in range(300)]
    assert sums_of(*tensors, names=names) == sums_of(*wanted, names=names)


def test_stream_that_captures_a_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def capturing(_: Any) -> None:
        raise StagingError("a current stream is capturing a graph")

    monkeypatch.setattr(device_memory, "source_events", capturing)
    assert len(sums_of(torch.ones(3))) == 1
    with pytest.raises(StagingError, match="capturing"):
        sums_of(torch.ones(3, 4).t())
