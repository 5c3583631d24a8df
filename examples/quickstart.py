"""The one changed line: a save through DcpxWriter, read by us, by stock DCP, and checked.

    python examples/quickstart.py

Stock warns that there is no process group: it saves and loads in this process alone.
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed.checkpoint as dcp

import torch_dcpx as dcpx
from torch_dcpx import DcpxReader, DcpxWriter


def make_state(seed: int) -> dict[str, object]:
    torch.manual_seed(seed)
    return {"model": torch.nn.Linear(256, 256).state_dict(), "step": seed}


def same(left: dict[str, object], right: dict[str, object]) -> bool:
    """Returns whether two states are equal, bit for bit."""
    weights = zip(left["model"].values(), right["model"].values(), strict=True)
    return left["step"] == right["step"] and all(torch.equal(a, b) for a, b in weights)


def main(path: str) -> None:
    state = make_state(100)
    writer = DcpxWriter(path)
    dcp.save(state, storage_writer=writer)  # the one changed line
    report = writer.last_report
    print(f"saved {report.items} items, {report.payload_bytes} B, in {report.files} file")

    ours = make_state(0)
    dcp.load(ours, storage_reader=DcpxReader(path))
    print(f"DcpxReader: step {ours['step']}, equal bit for bit: {same(state, ours)}")

    stock = make_state(0)
    dcp.load(stock, storage_reader=dcp.FileSystemReader(path))
    print(f"stock FileSystemReader: step {stock['step']}, equal bit for bit: {same(state, stock)}")

    found = dcpx.verify(path)
    print(f"verify: {found.checked_bytes} B checked, ok: {found.ok}")

    wrong = {"model": torch.nn.Linear(256, 128).state_dict(), "steps": 0}
    try:
        dcpx.load(wrong, path)  # all that does not fit is said before a byte is read
    except dcpx.MismatchError as error:
        print(f"refused: missing {error.missing}, shapes {[name for name, *_ in error.shapes]}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(f"{folder}/step-100")
