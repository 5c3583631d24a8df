"""Reads a checkpoint of torch-dcpx with the standard library alone (docs/reference/format.md).

`read_checkpoint(directory)` returns (dtype, shape, bytes) by fqn.
"""

import itertools
import json
import math
import pathlib
import struct
import zlib


def check(is_right, what):
    if not is_right:
        raise ValueError(f"corrupt: {what}")


def read_columns(path):
    data = path.read_bytes()
    tail = struct.unpack("<8sIIQQQI16sI", data[-64:])
    check(tail[:2] == (b"DCPXMETA", 1) and tail[-1] == zlib.crc32(data[-64:-4]), path)
    body, columns, at = data[tail[3] : -64], {}, tail[5]
    check(len(body) == tail[4] and zlib.crc32(body) == tail[6], path)
    for name, kind, count in json.loads(body[:at])["columns"]:
        columns[name] = struct.unpack_from(f"<{count}{'q' if kind == 'i64' else 'B'}", body, at)
        at += (count * (8 if kind == "i64" else 1) + 7) // 8 * 8
    return columns


def read_rows(path, file_id, crc):
    data = path.read_bytes()
    tail = struct.unpack("<8sII16s7Q3I24sI", data[-128:])
    check(tail[:2] + tail[3:5] + tail[-1:] == (b"DCPXDATA", 1, file_id, len(data), crc), path)
    at, end = tail[6], tail[6] + tail[7]
    check(crc == zlib.crc32(data[-128:-4]) and tail[12] == zlib.crc32(data[at:end]), path)
    while at < end:
        row_bytes, kind, _, _, ndim, *row = struct.unpack_from("<I4B4QI4H3I", data, at)
        form = f"<{4 * ndim}q{row[5]}s{row[6]}s{row[7]}s{row[9]}s"
        *dims, dtype, _, _, fqn = struct.unpack_from(form, data, at + 64)
        payload = data[row[2] : row[2] + row[3]]
        check(zlib.crc32(payload) == row[4], fqn)
        ndim *= kind == 0  # others are one element: bytes, or what only torch.load reads
        yield fqn.decode(), dtype.decode(), payload, [dims[d * ndim :][:ndim] for d in range(4)]
        at += row_bytes


def read_checkpoint(directory):
    columns, found = read_columns(pathlib.Path(directory, ".metadata")), {}
    text, ends = bytes(columns["strings"]), (*columns["string_ends"], 0)  # [-1]: the first begin
    for n, (name, crc) in enumerate(zip(columns["file_path"], columns["file_crc"], strict=True)):
        path = pathlib.Path(directory, text[ends[name - 1] : ends[name]].decode())
        file_id = bytes(columns["file_id"][16 * n : 16 * n + 16])
        for fqn, dtype, payload, (shape, offsets, sizes, strides) in read_rows(path, file_id, crc):
            whole = found.setdefault(fqn, (dtype, tuple(shape), bytearray()))[2]
            nbytes = len(payload) // (math.prod(sizes) or 1)  # of one element
            whole.extend(bytes(max(0, math.prod(shape) * nbytes - len(whole))))
            for index in itertools.product(*map(range, sizes)):
                to = 0
                for size, offset, place in zip(shape, offsets, index, strict=True):
                    to = to * size + offset + place
                begin = (
                    sum(place * stride for place, stride in zip(index, strides, strict=True))
                    * nbytes
                )
                whole[to * nbytes : to * nbytes + nbytes] = payload[begin : begin + nbytes]
    return {fqn: (dtype, shape, bytes(whole)) for fqn, (dtype, shape, whole) in found.items()}
