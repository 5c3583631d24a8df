"""The arguments of a load that say who reads, and how."""

from __future__ import annotations

from torch.distributed.checkpoint.storage import StorageReader

from torch_dcpx._arguments import check_options, check_part
from torch_dcpx.errors import OptionError, UnsupportedError, must_be
from torch_dcpx.options import ReadOptions
from torch_dcpx.reader.reader import DcpxReader
from torch_dcpx.storage.paths import AnyPath


def options_of(options: ReadOptions | None, reader: StorageReader | None) -> ReadOptions:
    check_options("options", options, ReadOptions)
    if options is None:
        return reader.options if isinstance(reader, DcpxReader) else ReadOptions()
    return options


def reader_for(
    reader: StorageReader | None, checkpoint_id: AnyPath | None, options: ReadOptions | None
) -> DcpxReader:
    if reader is None:
        if checkpoint_id:
            return DcpxReader(checkpoint_id, options=options)
        wrong = "a path, or there must be a storage_reader, which has one"
        raise must_be("checkpoint_id", checkpoint_id, wrong)
    if not isinstance(reader, DcpxReader):
        check_part("storage_reader", reader, StorageReader, ("read_metadata", "read_data"))
        raise UnsupportedError(
            f"storage_reader={type(reader).__name__}: dcpx.load reads through a DcpxReader; use "
            "torch.distributed.checkpoint.load (dcp.load) for other readers"
        )
    if options is not None and options != reader.options:
        wrong = "options contradict those of storage_reader; give them to the reader"
        raise OptionError(wrong, option="options", value=options)
    if checkpoint_id is not None:
        reader.reset(checkpoint_id)
    return reader
