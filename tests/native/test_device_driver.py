"""The door to the CUDA driver: found, missing, forked, and at the end of the process."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import RunPython
from fake_cuda import seam
from fake_cuda.fake import FakeCuda

from torch_dcpx import _C
from torch_dcpx.errors import StagingError

TESTS = str(Path(__file__).resolve().parents[1])
COUNTERS = [
    "copies_1d", "copies_2d", "batches", "batch_pieces", "kernels", "kernel_pieces",
    "bytes_to_host", "bytes_to_device", "events_recorded",
]  # fmt: skip

FAKE = f"""
import sys; sys.path.insert(0, {TESTS!r})
import os
from fake_cuda.fake import FakeCuda, build
fake = FakeCuda(build())
os.environ["DCPX_CUDA_DRIVER"] = str(fake.path)
from torch_dcpx import _C
from torch_dcpx.errors import StagingError
"""


@pytest.fixture
def loaded(fake_cuda: FakeCuda) -> FakeCuda:
    """The fake driver, as C++ has loaded it."""
    seam.load_driver()
    return fake_cuda


def test_driver_that_is_there_has_a_version_and_devices(loaded: FakeCuda) -> None:
    found = _C.device_driver()
    assert (found["version"], found["devices"], found["failure"]) == (13000, 2, "")
    assert list(_C.device_counters()) == COUNTERS


@pytest.mark.parametrize(
    ("name", "reason"),
    [("/no/such/libcuda.so", "no CUDA driver: /no/such/libcuda.so"), ("libc.so.6", "than 12.0")],
)
def test_missing_driver_is_a_typed_error_with_the_reason(
    run_python: RunPython, name: str, reason: str
) -> None:
    code = (
        "from torch_dcpx import _C\nfrom torch_dcpx.errors import StagingError\n"
        "found = _C.device_driver()\n"
        "assert (found['version'], found['devices']) == (0, 0)\n"
        "try:\n    _C.SourceEvents([(0, 0)])\n"
        "except StagingError as error:\n    assert str(error) == found['failure']; print(error)\n"
    )
    printed = run_python(code, env={"DCPX_CUDA_DRIVER": name}).stdout
    assert reason in printed


def test_events_know_the_devices_of_their_streams(loaded: FakeCuda) -> None:
    stream = loaded.make_stream(1)
    _C.clear_device_counters()
    assert _C.SourceEvents([(1, stream), (0, 0), (1, 0)]).devices() == [0, 1]
    assert _C.device_counters()["events_recorded"] == 3
    assert _C.SourceEvents([]).devices() == []


def test_capturing_stream_is_refused_by_name(loaded: FakeCuda) -> None:
    stream = loaded.make_stream(0)
    loaded.set_capturing(stream, True)
    with pytest.raises(StagingError, match=f"stream {stream} of device 0 captures a CUDA graph"):
        _C.SourceEvents([(0, stream)])


def test_device_that_is_not_there_is_refused_by_number(loaded: FakeCuda) -> None:
    with pytest.raises(StagingError, match="device 7 is none of the CUDA driver's 2"):
        _C.SourceEvents([(7, 0)])


def test_forked_child_is_refused_and_the_parent_goes_on(run_python: RunPython) -> None:
    code = FAKE + (
        "events = _C.SourceEvents([(0, 0)])\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try:\n        _C.SourceEvents([(0, 0)])\n"
        "    except StagingError as error:\n        os._exit(0 if 'forked' in str(error) else 2)\n"
        "    os._exit(3)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert _C.SourceEvents([(0, 0)]).devices() == [0]\n"
        "print('done')\n"
    )
    assert run_python(code).stdout == "done\n"


def test_process_ends_with_events_alive_and_the_driver_gone(run_python: RunPython) -> None:
    code = FAKE + (
        "import builtins\n"
        "builtins.events = _C.SourceEvents([(0, 0), (1, 0)])\n"
        "fake.fail('cuEventDestroy', 1, 4)\n"  # CUDA_ERROR_DEINITIALIZED
        "fake.fail('cuCtxPushCurrent', 2, 4)\n"
        "print('done', flush=True)\n"
    )
    result = run_python(code)
    assert (result.stdout, result.stderr) == ("done\n", "")


def test_importing_the_extension_asks_for_no_driver(run_python: RunPython) -> None:
    code = FAKE + "print(fake.count('cuInit'))\n"
    assert run_python(code).stdout == "0\n"
