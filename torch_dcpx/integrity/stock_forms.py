"""Shapes and dtypes of the tensors in a data file of stock's, compared with the metadata.

C++ reads the pickle of a plain tensor. What torch alone decodes (a quantized or conjugated tensor,
or no tensor at all) is decoded here, as a load does, and executes nothing; large ones are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torch_dcpx._native import _C
from torch_dcpx._text import counted
from torch_dcpx.errors import CorruptionError, DcpxError, UnsafePickleError
from torch_dcpx.integrity.findings import Finding, file_finding, of_error
from torch_dcpx.options import ReadOptions
from torch_dcpx.reader.locate import Form
from torch_dcpx.storage.place import Place
from torch_dcpx.unpickle.byte_items import decode_byte_item

if TYPE_CHECKING:
    from torch_dcpx.integrity.compare import Item

_Found: TypeAlias = tuple[tuple[int, ...], torch.dtype | None] | str | None
_MAX_DECODED_BYTES = 16 << 20  # of an item


def compare_forms(
    directory: Place, items: Sequence[Item], metadata: Metadata, name: str
) -> Iterator[Finding]:
    """Yields the tensors in a file of stock's whose shape or dtype is not that of the metadata."""
    job = directory.read_job(ReadOptions())
    try:
        try:
            forms = _forms_of(job, name, items)
        except DcpxError:  # of one of them: each by itself
            forms = []
            for item in items:
                try:
                    forms += _forms_of(job, name, [item])
                except DcpxError as error:
                    yield of_error("item", error, name, (item.fqn,))
                    forms.append(None)
    finally:
        job.close()
    chunk_sizes: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}
    unknown: list[str] = []
    for item, form in zip(items, forms, strict=True):
        entry = metadata.state_dict_metadata.get(item.fqn)
        if form is None or not isinstance(entry, TensorStorageMetadata):
            continue
        if item.fqn not in chunk_sizes:
            chunk_sizes[item.fqn] = {tuple(c.offsets): tuple(c.sizes) for c in entry.chunks}
        wanted = chunk_sizes[item.fqn].get(item.offsets or ())
        if form.kind == "plain":
            found: _Found = (form.sizes, form.dtype)
        else:
            try:
                found = _decoded(directory, item, name)
            except CorruptionError as error:
                yield of_error("item", error, name, (item.fqn,))
                continue
        if found is None:
            unknown.append(item.fqn)
            continue
        if isinstance(found, str):
            why = found
        else:
            why = _unlike(found[0], found[1], wanted, entry.properties.dtype)
        if why:
            message = f"'{item.fqn}' in '{name}' is of another form: {why}"
            where = (item.offset, item.nbytes)
            yield file_finding("item", name, message, where=where, fqns=(item.fqn,))
    if unknown:
        message = f"'{name}' holds {counted(len(unknown), 'item')} that torch alone decodes, "
        yield file_finding("unchecked", name, f"{message}whose form is not compared", fqns=unknown)


def _unlike(
    sizes: tuple[int, ...],
    dtype: torch.dtype | None,
    wanted: tuple[int, ...] | None,
    wanted_dtype: torch.dtype,
) -> str:
    """Returns how a tensor in a file differs from the metadata; "" if it does not."""
    if wanted is not None and sizes != wanted:
        return f"the file says {list(sizes)}, the metadata {list(wanted)}"
    if dtype is not None and dtype != wanted_dtype:
        return f"the file says {dtype}, the metadata {wanted_dtype}"
    return ""


def _decoded(directory: Place, item: Item, name: str) -> _Found:
    """Returns sizes and dtype of what torch alone decodes; a text of what is no tensor; None: it is
    too large, or of classes that are not made here.

    Raises: CorruptionError: it is malformed.
    """
    if item.nbytes > _MAX_DECODED_BYTES:
        return None
    path = str(directory.path / name)
    with directory.open_regular(name) as file:
        data = file.part(item.offset, item.nbytes)
    try:
        value = decode_byte_item(data, fqn=item.fqn, path=path)
    except UnsafePickleError:
        return None
    if not isinstance(value, torch.Tensor):
        return f"the file says {type(value).__name__}, the metadata a tensor"
    return tuple(value.shape), value.dtype


def _forms_of(job: _C.ReadJob, name: str, items: Sequence[Item]) -> list[Form | None]:
    """Returns the forms of tensors in a file of stock's. Raises: as a load, of the first fault."""
    wanted = [(0, item.offset, item.nbytes, True) for item in items]
    rows, places = job.locate([(name, False, 0, b"", 0, b"")], wanted)
    forms = [Form(*row) for row in rows]
    return [forms[number] for number, *_ in places]
