"""The fake CUDA driver from Python: its control functions, and tensors in its device memory.

    def test_x(fake_cuda: FakeCuda) -> None:
        source = fake_cuda.device_tensor(torch.arange(10))     # nobody but the driver may read it
        stream = fake_cuda.make_stream()
        fake_cuda.stream_write(source, torch.ones(10), stream)  # a step in flight
        ...
        assert torch.equal(fake_cuda.read_back(source), ...)

`fake_cuda.h` says what each function does. The fixture is in `fixture.py`.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

ROOT: Final = Path(__file__).resolve().parents[2]
LIBRARY: Final = ROOT / "build" / "fake_cuda" / "libfakecuda.so"

#: What cuModuleLoadData takes for an image: a fatbin as far as the fake looks.
IMAGE: Final = (0xBA55ED50).to_bytes(4, "little") + bytes(60)

# Pace: when work runs that nobody waits for.
# Held work starts when somebody asks; hung work not before `release_hung`.
BY_SEED, EAGER, UNEVEN, LATE, HELD, HUNG = -1, 0, 1, 2, 3, 4

INVALID_VALUE: Final = 1
INVALID_CONTEXT: Final = 201
INVALID_HANDLE: Final = 400
NOT_READY: Final = 600
ILLEGAL_ADDRESS: Final = 700
LAUNCH_FAILED: Final = 719
CAPTURE_UNSUPPORTED: Final = 900
UNKNOWN: Final = 999

_I, _I64, _U64, _P, _S = (
    ctypes.c_int,
    ctypes.c_int64,
    ctypes.c_uint64,
    ctypes.c_void_p,
    ctypes.c_char_p,
)
_SIGNATURES: Final = {
    "fake_reset": (None, _U64),
    "fake_set_driver_version": (None, _I),
    "fake_set_pace": (None, _I),
    "fake_limit_pinned": (None, _U64),
    "fake_alloc": (_U64, _I, _U64, _I),
    "fake_free": (_I, _U64),
    "fake_device_of": (_I, _U64),
    "fake_write": (_I, _U64, _P, _U64),
    "fake_read": (_I, _U64, _P, _U64),
    "fake_make_stream": (_U64, _I, _I),
    "fake_destroy_stream": (_I, _U64),
    "fake_stream_write": (_I, _I, _U64, _U64, _P, _U64),
    "fake_stream_sync": (_I, _I, _U64),
    "fake_sync_all": (None,),
    "fake_set_stream_pace": (None, _I, _U64, _I),
    "fake_release_hung": (None,),
    "fake_set_capturing": (_I, _U64, _I),
    "fake_is_capture_broken": (_I, _U64),
    "fake_fail": (_I, _S, _I64, _I, _I),
    "fake_clear_failures": (None,),
    "fake_refuse_fatbin": (None, _I),
    "fake_lose_device": (None, _I, _I, _I64),
    "fake_counts": (ctypes.c_size_t, _S, ctypes.c_size_t),
    "fake_reports": (ctypes.c_size_t, _S, ctypes.c_size_t),
    "fake_notes": (ctypes.c_size_t, _S, ctypes.c_size_t),
    "fake_count": (_I64, _S),
    "fake_clear_reports": (None,),
    "fake_clear_counts": (None,),
    "fake_context_depth": (_I,),
    "fake_capture_mode": (_I,),
}


def build() -> Path:
    """Builds the library if a source is newer, and returns its path."""
    folder = str(Path(__file__).parent)
    done = subprocess.run(
        ["flock", folder, "make", "-s", f"-j{os.cpu_count() or 1}", "-C", folder],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the fake CUDA driver does not build:\n{done.stdout}{done.stderr}")
    return LIBRARY


class FakeCuda:
    """The fake driver of this process. One a process: it is loaded once, as a driver is."""

    def __init__(self, library: Path = LIBRARY) -> None:
        self.path = library
        self.library = ctypes.CDLL(str(library))
        for name, (result, *arguments) in _SIGNATURES.items():
            function = getattr(self.library, name)
            function.restype, function.argtypes = result, arguments
        # The stream that is current on a device, for code under test that asks; 0: the default.
        self.current_streams: dict[int, int] = {}
        self._resets = 0
        self._kept: list[object] = []  # what queued work writes to

    def environment(self) -> dict[str, str]:
        """What a fresh process needs to use the fake (conftest's `run_python(env=...)`)."""
        paths = [str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        return {
            "DCPX_CUDA_DRIVER": str(self.path),
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        }

    # ---- Settings -------------------------------------------------------------------------------

    def reset(self, seed: int = 0) -> None:
        """Ends what is queued and forgets all but what the program holds."""
        self._resets += 1
        self.current_streams.clear()
        self.library.fake_reset(seed & (1 << 64) - 1)
        self._kept.clear()

    def set_driver_version(self, version: int) -> None:
        """Takes effect when the driver is loaded next: `_C.forget_device_driver()`."""
        self.library.fake_set_driver_version(version)

    def set_pace(self, pace: int, stream: int | None = None, device: int = 0) -> None:
        """Sets when work runs that nobody waits for: in all streams, or in one."""
        if stream is None:
            self.library.fake_set_pace(pace)
        else:
            self.library.fake_set_stream_pace(device, stream, pace)

    def limit_pinned(self, nbytes: int) -> None:
        self.library.fake_limit_pinned(nbytes)

    def refuse_fatbin(self, is_refused: bool = True) -> None:
        self.library.fake_refuse_fatbin(is_refused)

    def fail(self, entry: str, nth: int = 1, code: int = UNKNOWN, sticky: bool = False) -> None:
        """Lets the n-th call from now of an entry point fail."""
        self._check(self.library.fake_fail(entry.encode(), nth, code, sticky))

    def clear_failures(self) -> None:
        self.library.fake_clear_failures()

    def lose_device(self, device: int = 0, code: int = LAUNCH_FAILED, after_works: int = 0) -> None:
        """Loses a device, now or after it has run so many more copies and kernels."""
        self.library.fake_lose_device(device, code, after_works)

    # ---- Memory ---------------------------------------------------------------------------------

    def alloc(self, nbytes: int, device: int = 0, is_adjacent: bool = False) -> int:
        """Returns the address of new device memory; `free` gives it back."""
        address = int(self.library.fake_alloc(device, nbytes, is_adjacent))
        if address == 0:
            raise MemoryError(f"no room for {nbytes} B on the fake's device {device}")
        return address

    def free(self, address: int) -> None:
        self._check(self.library.fake_free(address))

    def write(self, address: int, data: bytes) -> None:
        """Writes device memory at once, ordered behind nothing."""
        self._check(self.library.fake_write(address, data, len(data)))

    def read(self, address: int, nbytes: int) -> bytes:
        """Reads device memory at once, ordered behind nothing."""
        data = ctypes.create_string_buffer(nbytes)
        self._check(self.library.fake_read(address, data, nbytes))
        return data.raw

    def device_tensor(self, data: torch.Tensor, device: int = 0) -> torch.Tensor:
        """Returns a tensor like `data`, strides included, whose memory is the fake's.

        It says that it is on the CPU, but who reads it crashes. The memory is freed with its last
        view, at once and whatever is queued, as torch's allocator does.
        """
        return self.segment([data], device)[0]

    def segment(self, tensors: Sequence[torch.Tensor], device: int = 0) -> list[torch.Tensor]:
        """Returns `device_tensor`s of one allocation, each on 512 B, as torch packs them."""
        import torch

        spans = [_span_bytes(data) for data in tensors]
        starts, end = [], 0
        for span in spans:
            starts.append(end)
            end += -(-span // 512) * 512
        if end == 0:
            return [torch.empty_strided(d.size(), d.stride(), dtype=d.dtype) for d in tensors]
        memory = self._memory(end, device)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        made = []
        for data, start, span in zip(tensors, starts, spans, strict=True):
            raw = whole[start : start + span].view(data.dtype)
            made.append(raw.as_strided(data.size(), data.stride(), raw.storage_offset()))
            if data.numel():
                self.write(made[-1].data_ptr(), _span_of(data))
        return made

    def empty(self, sizes: Sequence[int], dtype: torch.dtype, device: int = 0) -> torch.Tensor:
        """Returns a contiguous `device_tensor` full of 0xA5."""
        import torch

        data = torch.empty(tuple(sizes), dtype=dtype)
        data.view(-1).view(torch.uint8).fill_(0xA5)
        return self.device_tensor(data, device)

    def read_back(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns what a `device_tensor` holds now, on the CPU; waits for nothing."""
        import torch

        copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
        if tensor.numel():
            span = _span_bytes(tensor)
            self._check(self.library.fake_read(tensor.data_ptr(), copy.data_ptr(), span))
        return copy

    def ordinal_of(self, tensor: torch.Tensor) -> int:
        """Returns the fake device whose memory holds the tensor; -1: host memory, or none."""
        import torch

        if tensor.layout != torch.strided or not tensor.is_cpu:
            return -1
        return int(self.library.fake_device_of(tensor.data_ptr()))

    def _memory(self, nbytes: int, device: int) -> ctypes.Array[ctypes.c_uint8]:
        address = self.alloc(nbytes, device)
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        weakref.finalize(memory, self._release, address, self._resets)
        return memory

    def _release(self, address: int, resets: int) -> None:
        if resets == self._resets:  # else the reset has freed it
            self.free(address)

    # ---- Streams --------------------------------------------------------------------------------

    def make_stream(self, device: int = 0, is_non_blocking: bool = True) -> int:
        """Returns the handle of a caller's stream, as torch's are non-blocking."""
        return int(self.library.fake_make_stream(device, is_non_blocking))

    def destroy_stream(self, stream: int) -> None:
        self._check(self.library.fake_destroy_stream(stream))

    def stream_write(self, tensor: torch.Tensor, data: torch.Tensor, stream: int = 0) -> None:
        """Queues on the caller's stream that `tensor` becomes `data`, which has its strides."""
        assert data.stride() == tensor.stride() and data.dtype == tensor.dtype
        raw = _span_of(data)
        address, device = tensor.data_ptr(), self.ordinal_of(tensor)
        self._check(self.library.fake_stream_write(device, stream, address, raw, len(raw)))

    def stream_sync(self, stream: int = 0, device: int = 0) -> None:
        self._check(self.library.fake_stream_sync(device, stream))

    def sync(self) -> None:
        """Waits for all that is queued anywhere."""
        self.library.fake_sync_all()

    def release_hung(self) -> None:
        """Lets work of pace HUNG run; `sync` and `reset` do so too."""
        self.library.fake_release_hung()

    def set_capturing(self, stream: int, is_capturing: bool = True) -> None:
        self._check(self.library.fake_set_capturing(stream, is_capturing))

    def is_capture_broken(self, stream: int) -> bool:
        return bool(self.library.fake_is_capture_broken(stream))

    # ---- What was done --------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """Returns calls by entry point, bytes by direction, and what lives; absent means 0."""
        pairs = (line.split() for line in self._text("fake_counts"))
        return {name: int(value) for name, value in pairs}

    def count(self, name: str) -> int:
        return int(self.library.fake_count(name.encode()))

    def clear_counts(self) -> None:
        self.library.fake_clear_counts()

    def reports(self) -> list[str]:
        """Returns what the program did and must not."""
        return self._text("fake_reports")

    def notes(self) -> list[str]:
        """Returns what the program did that costs it time, as copies of unpinned memory."""
        return self._text("fake_notes")

    def take_reports(self) -> list[str]:
        """Returns the reports, which the fixture then does not fail the test for."""
        reports = self.reports()
        self.library.fake_clear_reports()
        return reports

    def live(self) -> dict[str, int]:
        """Returns how many objects of each kind the program holds."""
        kinds = ("streams", "events", "registrations", "modules", "driver_allocations")
        counts = self.counts()
        return {kind: counts[f"live_{kind}"] for kind in kinds}

    def _text(self, function: str) -> list[str]:
        get = getattr(self.library, function)
        text = ctypes.create_string_buffer(1 << 16)
        while (size := get(text, len(text))) > len(text):
            text = ctypes.create_string_buffer(size)
        return text.value.decode().splitlines()

    @staticmethod
    def _check(result: int) -> None:
        if result != 0:
            raise RuntimeError(f"the fake CUDA driver answered {result}")


def _span_bytes(tensor: torch.Tensor) -> int:
    """Returns how many bytes lie between a tensor's first element and behind its last."""
    if tensor.numel() == 0:
        return 0
    pairs = zip(tensor.size(), tensor.stride(), strict=True)
    return (sum((n - 1) * stride for n, stride in pairs) + 1) * tensor.element_size()


def _span_of(data: torch.Tensor) -> bytes:
    return ctypes.string_at(data.data_ptr(), _span_bytes(data))
