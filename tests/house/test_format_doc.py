"""examples/format_reader.py, of docs/reference/format.md, reads our checkpoints without torch."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import ROOT, RunPython
from support.chunked import Box, chunked
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.utils._pytree import tree_map

from torch_dcpx import DcpxWriter
from torch_dcpx.metadata.file import decode_metadata

READER = (ROOT / "examples" / "format_reader.py").read_text()
MAX_LINES = 70

# Prints {fqn: [dtype, global sizes, hex]}; argv: directory.
RUN = """
import json, sys
print(json.dumps({fqn: (dtype, shape, data.hex()) for fqn, (dtype, shape, data)
                  in read_checkpoint(sys.argv[1]).items()}))
foreign = {"torch", "numpy", "torch_dcpx"} & set(sys.modules)
assert not foreign, foreign
"""


def in_chunks(value: Any) -> Any:
    """Returns a tensor of two or more rows as three chunks, as three ranks would hold it."""
    if not isinstance(value, torch.Tensor) or not value.dim() or value.size(0) < 2:
        return value
    rows, *rest = value.size()
    boxes = [
        Box((begin, *[0] * len(rest)), (end - begin, *rest))
        for begin, end in ((0, rows // 2), (rows // 2, rows), (rows, rows))  # the last is empty
    ]
    return chunked(boxes, [value[box.slices] for box in boxes], value.size())


def state() -> dict[str, Any]:
    torch.manual_seed(7)
    return {
        "float32": torch.randn(5, 3),
        "bfloat16": torch.randn(4, 2, 3).to(torch.bfloat16),
        "float8": torch.randn(9).to(torch.float8_e4m3fn),
        "complex64": torch.randn(2, 2, dtype=torch.complex64),
        "bool": torch.tensor([True, False, True]),
        "int64": torch.arange(-3, 4),
        "large": torch.randint(0, 256, (300, 400), dtype=torch.uint8),
        "two rows": torch.randn(2, 3),
        "transposed": torch.randn(6, 4).t(),
        "sliced": torch.arange(40).reshape(5, 8)[:, ::3],
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "none left": torch.empty(3, 0, dtype=torch.int16),
        "nested": {"list": [torch.ones(2), 3], "ümläut": "text"},
        "step": 12,
    }


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


@pytest.fixture(params=[lambda value: value, in_chunks], ids=["whole", "in chunks"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    stored = tree_map(request.param, state())
    dcp.save(stored, storage_writer=DcpxWriter(path), no_dist=True)
    return path


def test_reader_fits_a_page() -> None:
    assert len(READER.splitlines()) <= MAX_LINES


def test_reader_gives_the_bytes_of_every_tensor_and_item(
    checkpoint: Path, run_python: RunPython
) -> None:
    found = json.loads(run_python(READER + RUN, str(checkpoint)).stdout)
    flat, _ = dcp._nested_dict.flatten_state_dict(state())
    tensors = {fqn: value for fqn, value in flat.items() if isinstance(value, torch.Tensor)}
    expected = {
        fqn: [str(value.dtype).removeprefix("torch."), list(value.shape), bytes_of(value).hex()]
        for fqn, value in tensors.items()
    }
    assert {fqn: found.get(fqn) for fqn in tensors} == expected
    assert found.keys() == flat.keys()

    name = str(checkpoint / ".metadata")
    places = decode_metadata(Path(name).read_bytes(), name).metadata.storage_data
    for fqn in flat.keys() - tensors.keys():
        dtype, shape, data = found[fqn]
        place = places[MetadataIndex(fqn)]
        whole = (checkpoint / place.relative_path).read_bytes()
        assert bytes.fromhex(data) == whole[place.offset : place.offset + place.length]
        assert (dtype, shape) == ("", [])
        assert torch.load(io.BytesIO(bytes.fromhex(data)), weights_only=True) == flat[fqn]


@pytest.mark.parametrize("where", ["payload", "index", "data tail", "body", "metadata tail"])
def test_reader_refuses_a_flipped_bit(where: str, tmp_path: Path, run_python: RunPython) -> None:
    path = tmp_path / "checkpoint"
    dcp.save({"key": torch.arange(9)}, storage_writer=DcpxWriter(path), no_dist=True)
    (data,) = path.glob("*.distcp")
    file = path / ".metadata" if where in ("body", "metadata tail") else data
    content = bytearray(file.read_bytes())
    at = {
        "payload": content.find(bytes(torch.arange(9).view(torch.uint8).tolist())) + 17,
        "index": int.from_bytes(content[-80:-72], "little") + 64,  # index_offset of the tail
        "data tail": len(content) - 128 + 90,
        "body": content.find(b'"format"') + 1,
        "metadata tail": len(content) - 64 + 13,
    }[where]
    content[at] ^= 1
    file.write_bytes(content)
    result = run_python(READER + RUN, str(path), check=False)
    assert result.returncode == 1
    assert "ValueError: corrupt: " in result.stderr
