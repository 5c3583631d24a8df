"""Makes corpus/columns, the seeds of fuzz_columns.cpp: our newest golden checkpoint, a small one.

Run it as `PYTHONPATH=.:tests python tests/cpp/make_columns_corpus.py`.
"""

from __future__ import annotations

import re
import struct
import tarfile
from pathlib import Path

from support.metadata_samples import encode_small

from torch_dcpx.metadata.columns import ColumnReader
from torch_dcpx.metadata.parts import decode_parts

HERE = Path(__file__).resolve().parent


def column_names() -> list[str]:
    """The columns in the order in which the target takes them."""
    table = (HERE / "fuzz_columns.cpp").read_text().split("kNames[] = {")[1].split("};")[0]
    return re.findall(r'"(\w+)"', table)


def column_bytes(columns: ColumnReader, name: str) -> bytes:
    if not columns.has(name):
        return b""
    is_bytes = name in ("strings", "chunk_flags") or name.endswith(("kind", "tag", "_flags"))
    if is_bytes or name == "tensor_memory_format":
        return columns.u8(name, None)
    return bytes(columns.i64_view(name, None, low=-(1 << 63)))


def seed(data: bytes) -> bytes:
    """A `.metadata` file of ours as the target takes it."""
    columns = decode_parts(data, ".metadata").columns
    assert columns is not None
    flags = columns.has("tensor_stride_count") + 2 * columns.has("planner_fqn")
    made = [struct.pack("<B4x", flags + 4 * len(columns.header["descriptors"]))]
    for name in column_names():
        raw = column_bytes(columns, name)
        made += [struct.pack("<H", len(raw)), raw]
    return b"".join(made)


def main() -> None:
    out = HERE / "corpus" / "columns"
    out.mkdir(exist_ok=True)
    (out / "small.bin").write_bytes(seed(encode_small()))
    with tarfile.open(HERE.parent / "golden" / "ours-2.15.0.tar.xz") as tar:
        file = tar.extractfile(".metadata")
        assert file is not None
        (out / "golden.bin").write_bytes(seed(file.read()))


if __name__ == "__main__":
    main()
