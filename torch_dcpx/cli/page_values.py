"""Values of small objects and tensors, as the page of `dcpx inspect` shows them.

They are decoded as every load decodes them: no class is made that is not known to be harmless. The
page has a few of them, of a few kilobytes each: whatever a checkpoint holds, it stays small.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torch_dcpx.artifacts.named_reads import NamedReads
from torch_dcpx.errors import DcpxError
from torch_dcpx.options import ReadOptions
from torch_dcpx.views.objects import short

if TYPE_CHECKING:
    from torch_dcpx.storage.object_url import Location
    from torch_dcpx.views.items import Item

_MOST = 64  # objects, and as many tensors
_MOST_READS = 64
_MOST_BYTES = 4096  # of each, as it is stored
_MOST_ELEMS = 16  # of a tensor
_MOST_CHARS = 200  # of a text
_RANK = re.compile(r"__(\d+)\.metadata")


def read_values(path: Location, metadata_file: str, items: Iterable[Item]) -> dict[str, str]:
    """Returns texts of values by name. What cannot be read says so: a page of a damaged checkpoint
    is a page.
    """
    small = [item for item in items if item.nbytes <= _MOST_BYTES]
    objects = [item.fqn for item in small if item.kind == "object"][:_MOST]
    scalars = (item for item in small if item.shape is not None)
    tensors = [item.fqn for item in scalars if math.prod(item.shape or ()) <= _MOST_ELEMS][:_MOST]
    values: dict[str, Any] = {}
    if objects or tensors:
        rank = _RANK.fullmatch(metadata_file)
        with contextlib.suppress(DcpxError, RuntimeError):
            reads = NamedReads(path, ReadOptions(), None if rank is None else int(rank[1]))
            with contextlib.closing(reads):
                values = _Values(reads).read(objects, tensors)
    return {fqn: short_text(value) for fqn, value in values.items()}


class _NotRead(str):
    """Says why a value is none."""


class _Values:
    """Reads values at once; where that fails, halves of them, until it knows which do."""

    def __init__(self, reads: NamedReads) -> None:
        self._reads = reads
        self._left = _MOST_READS

    def read(self, objects: Sequence[str], tensors: Sequence[str]) -> dict[str, Any]:
        """Returns the value of each name, or why there is none."""
        cpu = torch.device("cpu")
        found = self._by_halves(
            objects, lambda names: dict(zip(names, self._reads.read_objects(names), strict=True))
        )
        return found | self._by_halves(tensors, lambda names: self._reads.read_tensors(names, cpu))

    def _by_halves(
        self, names: Sequence[str], read: Callable[[Sequence[str]], dict[str, Any]]
    ) -> dict[str, Any]:
        if not names:
            return {}
        self._left -= 1
        if self._left < 0:
            return dict.fromkeys(names, _NotRead("not read"))
        try:
            return read(names)
        except (DcpxError, RuntimeError) as error:  # RuntimeError: of torch; nested too deeply
            if len(names) == 1:
                return {names[0]: _NotRead(f"not read: {type(error).__name__}")}
        middle = len(names) // 2
        return self._by_halves(names[:middle], read) | self._by_halves(names[middle:], read)


def short_text(value: Any) -> str:
    """Returns a value in at most 200 characters, whatever it refers to, and however often."""
    if isinstance(value, _NotRead):
        return str(value)
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        is_plain = value.numel() <= _MOST_ELEMS and not value.is_quantized
        value = value.tolist() if is_plain and value.device.type == "cpu" else value
    return short(value, _MOST_CHARS)
