"""A process without stdin, stdout and stderr: no file gets their numbers, whoever opens it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from conftest import RunPython

import torch_dcpx._descriptors as descriptors

# A thread that prints is what a library would do.
_SCRIPT = """
import json, os, sys, threading, time
import torch, torch_dcpx as dcpx
where = sys.argv[1]
for fd in map(int, sys.argv[2:]):
    os.close(fd)
seen, stop = set(), []
def noise():
    while not stop:
        for fd in (0, 1, 2):
            try:
                os.write(fd, b"[W] of interest to nobody\\n")
            except OSError:
                continue
            try:
                seen.add(os.readlink(f"/proc/self/fd/{fd}"))
            except OSError:
                pass
        time.sleep(0.0002)
thread = threading.Thread(target=noise, daemon=True)
thread.start()
state = {f"t{i}": torch.full((30_000,), float(i)) for i in range(10)}
dcpx.save(state, f"{where}/save", no_dist=True)
dcpx.async_save(state, f"{where}/async", no_dist=True).result()
dcpx.export(state, f"{where}/export", no_dist=True)
dcpx.export(state, f"{where}/torch", format="torch", no_dist=True)
with dcpx.CheckpointManager(f"{where}/root", no_dist=True, keep_last=1) as manager:
    for step in range(3):
        manager.save(step, state=state)
stop.append(1)
thread.join()
low = {}
for fd in (0, 1, 2):
    try:
        low[fd] = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        low[fd] = ""
got = {f"t{i}": torch.zeros(30_000) for i in range(10)}
for name in ("save", "async"):
    dcpx.load(got, f"{where}/{name}", no_dist=True)
    assert all((got[f"t{i}"] == i).all() for i in range(10)), name
    assert not dcpx.verify(f"{where}/{name}").faults, name
assert all((one == i).all() for i, one in enumerate(dcpx.load_tensors(f"{where}/export").values()))
with dcpx.CheckpointManager(f"{where}/root", no_dist=True) as manager:
    assert manager.resume(state=got).step == 2
os.write(int(os.open(f"{where}/out", os.O_WRONLY | os.O_CREAT)),
         json.dumps([sorted(seen), low]).encode())
"""


@pytest.mark.parametrize("closed", [[2], [0, 1, 2]], ids=["2>&-", "all"])
def test_no_file_of_ours_gets_0_to_2(
    run_warm: RunPython, tmp_path: Path, closed: list[int]
) -> None:
    run_warm(_SCRIPT, str(tmp_path), *map(str, closed))
    seen, low = json.loads((tmp_path / "out").read_text())
    ours = [name for name in [*seen, *low.values()] if str(tmp_path) in name or "memfd" in name]
    assert not ours


def test_a_file_that_gets_a_low_number_moves_and_loses_what_was_printed(
    run_warm: RunPython, tmp_path: Path
) -> None:
    code = """
import os, sys
from torch_dcpx._descriptors import open_file
real = os.open
def printed_into(*args, **kwargs):
    fd = real(*args, **kwargs)
    if fd == 2 and args[0] == sys.argv[1]:
        os.write(2, b"noise")
    return fd
os.close(2)
os.open = printed_into
fd = open_file(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
os.write(fd, b"own")
print(fd > 2, os.readlink("/proc/self/fd/2"), os.get_inheritable(fd))
"""
    path = tmp_path / "file"
    assert run_warm(code, str(path)).stdout == "True /dev/null False\n"
    assert path.read_bytes() == b"own"


def test_the_usual_open_is_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(descriptors, "_fill", refuse)
    monkeypatch.setattr(descriptors.fcntl, "fcntl", refuse)
    os.close(descriptors.open_file(tmp_path / "file", os.O_WRONLY | os.O_CREAT))
