"""The extension module: addresses, byte counts and names in, tables out."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

from typing_extensions import Buffer

def crc32(data: Any, crc: int = 0) -> int: ...
def crc32_implementations() -> list[str]: ...
def zip_records(data: Any) -> list[tuple[str, int, int, int, int]]: ...
def scan_pickle(
    data: Any, allow_persid: bool = False, max_depth: int = ..., max_ops: int = ...
) -> int: ...
def scan_keys(
    data: Any,
    allow_persid: bool = False,
    base_cost: int = 134217728,
    states_earn_per_byte: int = 0,
    storages: int = 0,
    said_earn_per_byte: int = 28,
) -> tuple[int, int]: ...
def plain_values(archives: list[Any]) -> list[Any]: ...
def pickle_metadata(
    columns: dict[str, Any],
    has_planner: bool,
    descriptors: list[list[str]],
    storage_meta: tuple[Any, ...] | None,
    version: str | None,
) -> memoryview: ...
def unpickle_metadata(data: bytes, hash_key: bytes) -> dict[str, Any] | None: ...
def text_column(texts: list[Any], numbers: dict[str, int]) -> bytes: ...
def size_column(values: list[Any], has_none: bool) -> bytes: ...
def row_columns(rows: list[Any], has_none: bool) -> tuple[bytes, bytes]: ...
def path_columns(
    paths: list[Any], numbers: dict[str, int]
) -> tuple[bytes, bytes, bytes] | None: ...
def have_ends(begins: Any, lengths: Any) -> bool: ...
def are_within(values: Any, low: int, high: int) -> bool: ...
def highest(values: Any) -> int: ...  # byte; 0 of none
def total(values: Any, widths: Any = None) -> int: ...  # 2**63: that or more
def are_keys(tags: Any, values: Any, strings: int) -> bool: ...
def longest_list(tags: Any, values: Any) -> int: ...
def check_coverage(
    ndims: Any, sizes: Any, box_counts: Any, offsets: Any, lengths: Any
) -> list[tuple[int, str, int, int, tuple[int, ...]]]: ...
def has_numbers(dtype: str) -> bool: ...
def compare_values(
    dtype_a: str, a: int, dtype_b: str, b: int, count: int, rtol: float = 0.0, atol: float = 0.0
) -> tuple[int, int, bool, float, float, float]: ...
def unlike_elements(a: int, b: int, count: int, elem_bytes: int) -> int: ...
def value_statistics(
    dtype: str, data: int, count: int
) -> tuple[int, int, int, int | float | None, int | float | None, float | None, float]: ...

class ItemMaker:
    def __init__(self, classes: dict[str, Any]) -> None: ...
    def read_items(
        self,
        rows: list[Any],
        fallback: Callable[[Any], list[Any]],
        is_swept: bool,
        columns: StoredColumns | None = None,
    ) -> tuple[
        list[Any], list[tuple[int, int, str, int, int, tuple[int, ...]]]
    ]: ...  # up to the first row with offences
    def write_items(self, rows: list[Any]) -> list[Any]: ...
    def dedup_items(
        self,
        plans: list[list[Any]],
        can_split: list[bool],
        to_lowest_rank: bool,
        lowest_names: set[str],
        whole_names: set[str],
        unlike: list[tuple[str, int, int]] | None = None,
    ) -> list[list[Any]]: ...
    def unlike_items(self, plans: list[list[Any]]) -> list[tuple[str, int, int]]: ...
    def global_plan(
        self, plans: list[list[Any]], kept: list[bool] = ...
    ) -> tuple[
        list[list[Any]], dict[str, Any], list[tuple[str, str, int, int, tuple[int, ...]]]
    ]: ...
    def pack_plan(
        self, items: list[Any], paths: Any, names: list[str]
    ) -> tuple[bytes, list[Any], list[Any], bool]: ...
    def unpack_plan(
        self, message: bytes, properties: list[Any], others: list[Any], is_shared: bool
    ) -> tuple[list[Any], dict[str, tuple[str | int, ...]] | None, list[str]]: ...
    def pack_results(self, results: list[Any]) -> tuple[bytes, list[Any]]: ...
    def unpack_results(self, message: bytes, others: list[Any]) -> list[Any]: ...
    def copied_entries(self, entries: dict[str, Any]) -> dict[str, Any]: ...

class SaveRows:
    def __init__(self, classes: dict[str, Any]) -> None: ...
    def plain_rows(
        self,
        items: Sequence[Any],
        files: Sequence[int],
        state: dict[str, Any],
        paths: dict[str, Any],
        types: dict[tuple[Any, ...], int],
        add_type: Callable[[Any, Any], int],
        is_host: Callable[[Any], bool],
    ) -> tuple[list[Any], list[Any], list[int]]: ...
    def strangers(self, items: Sequence[Any], state: dict[str, Any]) -> list[int]: ...
    def results(
        self,
        items: Sequence[Any],
        paths: Sequence[str],
        offsets: list[int],
        lengths: list[int],
        descriptors: list[str] | None,
    ) -> list[Any]: ...

class ContentReader:
    def __init__(self, parts: dict[str, Any]) -> None: ...
    def digests(
        self,
        names: list[str],
        tensors: list[Any],
        is_host: Callable[[Any], bool],
        are_samples: bool = False,
    ) -> tuple[bytes, list[int]]: ...

SAMPLE_BYTES: int  # bytes of what is looked at in one place

def sample_begins(nbytes: int) -> list[int] | None: ...

class StoredColumns:
    def __init__(
        self,
        maker: ItemMaker,
        strings: list[str],
        columns: dict[str, Any],
        values: dict[str, Any],
    ) -> None: ...
    @property
    def has_twins(self) -> bool: ...
    @property
    def item_count(self) -> int: ...
    @property
    def made_count(self) -> int: ...  # chunks and places made so far
    @property
    def probe_count(self) -> int: ...  # taken slots that items met when they were indexed
    def entry(self, number: int, has_chunks: bool = True) -> Any: ...
    def entries(self, numbers: list[int]) -> list[Any]: ...
    def chunk(self, number: int, at: int) -> Any: ...
    def place(self, index: Any) -> Any: ...  # None: not stored; NotImplemented: not to be told
    def places(self, indices: list[Any]) -> list[Any] | None: ...  # None: one not to be told
    def all_places(self) -> dict[Any, Any]: ...

class ReadRows:
    def __init__(self, classes: dict[str, Any]) -> None: ...
    def plain_reads(
        self,
        items: list[Any],
        files: list[int],
        places: list[tuple[int, int, int, int]],
        entries: list[Any],
        forms: list[Any],
        state: dict[str, Any],
        stored: dict[str, Any],
        columns: StoredColumns | None,
        is_host: Callable[[Any], bool],
        ordinal_of: Callable[[Any], int],
    ) -> tuple[list[Any], set[int]]: ...

class StateReader:
    def __init__(self, parts: dict[str, Any]) -> None: ...
    def flatten(self, state: Any) -> tuple[dict[str, Any], dict[str, Any], bool, bool]: ...
    def fingerprint(self, state: dict[str, Any], paths: dict[str, Any] | None) -> bytes | None: ...
    def unlike(
        self,
        state: dict[str, Any],
        entries: dict[str, Any],
        columns: StoredColumns,
        has_dtypes: bool,
    ) -> list[Any]: ...
    def whole_rows(
        self, state: dict[str, Any], entries: dict[str, Any], columns: StoredColumns
    ) -> tuple[list[Any], list[tuple[int, Any]]]: ...

def call_counts() -> dict[str, int]: ...
def arm_fault(nth: int, errno: int, kind: str = "") -> None: ...
def disarm_fault() -> None: ...
def stop_jobs(timeout_s: float) -> int: ...
def let_jobs_begin() -> None: ...
def stopped_threads() -> list[int]: ...

SPAN_KINDS: tuple[str, ...]  # by the number of a kind in the rows of spans
OBJECT_ZIP_OVERHEAD: int  # bytes that a row's pickle grows by when it is framed

class UploadPiece(Buffer): ...

class UploadPieces:
    def __iter__(self) -> UploadPieces: ...
    def __next__(self) -> UploadPiece: ...
    def nbytes(self) -> int | None: ...

class WriteJob:
    def __init__(
        self,
        *,
        dir_fd: int,
        dir_path: str | bytes,
        workers: int,
        segment_bytes: int,
        use_direct: bool,
        is_durable: bool,
        files_at_once: int = 1,
        in_place: str = "auto",
        memory_bytes: int = 0,
    ) -> None: ...
    def add_file(
        self, names: list[str], file_id: bytes, rank: int, save_id: bytes = b""
    ) -> int: ...
    def write(
        self,
        rows: Sequence[tuple[Any, ...]],
        types: Sequence[tuple[Any, ...]],
        is_final: bool,
        progress: Callable[[int], object] | None = None,
        after: SourceEvents | None = None,
        temporary: list[int] = ...,
        owners: object = None,
    ) -> tuple[list[int], list[int]]: ...
    def pieces(self, file: int) -> UploadPieces: ...
    def stop_uploads(self) -> None: ...
    def results(self) -> list[tuple[str, bytes, int, int]]: ...
    def abandon(self) -> None: ...
    def created(self) -> list[str]: ...
    @overload
    def report(self, spans: Literal[False] = False) -> dict[str, int]: ...
    @overload
    def report(self, spans: Literal[True]) -> dict[str, Any]: ...

class ReadJob:
    @overload
    def __init__(
        self,
        *,
        objects: object,
        dir_path: str | bytes,
        workers: int,
        slot_bytes: int,
        verify: bool,
        max_slots: int = 0,
    ) -> None: ...
    @overload
    def __init__(
        self,
        *,
        dir_fd: int,
        dir_path: str | bytes,
        workers: int,
        slot_bytes: int,
        use_direct: bool,
        verify: bool,
        max_open_files: int,
        max_slots: int = 0,
        may_be_left: bool = False,
    ) -> None: ...
    def locate(
        self,
        files: list[tuple[str, bool, int, bytes, int, bytes]],
        wanted: list[tuple[int, int, int, bool]],
    ) -> tuple[list[tuple[Any, ...]], list[tuple[int, int, int, int]]]: ...
    def read(self, rows: Sequence[tuple[Any, ...]], after: SourceEvents | None = None) -> None: ...
    def leave(self) -> None: ...
    moved: int  # read only
    def close(self) -> None: ...
    def touched(self) -> list[bool]: ...
    @overload
    def report(self, spans: Literal[False] = False) -> dict[str, int]: ...
    @overload
    def report(self, spans: Literal[True]) -> dict[str, Any]: ...

class VerifyJob:
    @overload
    def __init__(
        self,
        *,
        dir_fd: int,
        dir_path: str | bytes,
        workers: int,
        slot_bytes: int,
        use_direct: bool,
    ) -> None: ...
    @overload
    def __init__(
        self, *, objects: Any, dir_path: str | bytes, workers: int, slot_bytes: int
    ) -> None: ...
    def has_footer(self, path: str) -> bool: ...
    def add_file(
        self, path: str
    ) -> tuple[
        int,
        tuple[int, bytes, int, int, bytes] | None,
        list[tuple[Any, ...]] | None,
        list[tuple[str, str, int, int, str, str, str]],
    ]: ...  # bytes, tail, index rows, findings; see footers.py
    def add_foreign(
        self, path: str, items: list[tuple[int, int, bool]]
    ) -> tuple[int, list[tuple[str, str, int, int, str, str, str]]]: ...
    def sum(
        self, progress: Callable[[int, int], None] | None = None
    ) -> list[tuple[str, str, int, int, str, str, str]]: ...
    @property
    def done_bytes(self) -> int: ...
    @property
    def total_bytes(self) -> int: ...
    @property
    def direct_bytes(self) -> int: ...

class RangeJob:
    def __init__(
        self,
        *,
        dir_fd: int,
        dir_path: str | bytes,
        workers: int,
        slot_bytes: int,
        is_durable: bool,
        use_direct: bool,
    ) -> None: ...
    def add_file(self, name: str, file_bytes: int, is_new: bool) -> int: ...
    def write(self, rows: Sequence[tuple[Any, ...]]) -> None: ...
    def crc_shares(self) -> list[int]: ...
    def finish(self, is_whole: bool) -> None: ...
    def abandon(self) -> None: ...
    def report(self) -> dict[str, int]: ...

class Arena:
    def __init__(self, nbytes: int, *, is_shared: bool = False) -> None: ...
    @staticmethod
    def attach(fd: int, nbytes: int) -> Arena: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def fd(self) -> int: ...  # -1 where it is not shared
    @property
    def lent(self) -> int: ...  # storages and unused capsules over it
    @property
    def written(self) -> int: ...
    def add_written(self) -> None: ...
    @property
    def taken_bytes(self) -> int: ...  # by calls, before they were written to
    def lend(self, offset: int, nbytes: int) -> object: ...  # a DLPack capsule of bytes
    def prefault(self, workers: int) -> None: ...
    def place_near(self, device: int) -> None: ...  # of memory that nobody has touched
    def pin(self, device: int) -> None: ...  # goes on in the background
    @property
    def is_pin_begun(self) -> bool: ...
    @property
    def pinned_bytes(self) -> int: ...
    def release(self) -> None: ...  # what is lent stays valid

class StageTable:
    def __init__(self, entries: list[Any]) -> None: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def nowhere(self) -> int: ...  # a row of some bytes without memory; -1: none
    @property
    def devices(self) -> list[int]: ...  # CUDA ordinals, ascending
    def __len__(self) -> int: ...
    def places(self) -> list[tuple[int, int]]: ...  # (offset, bytes)
    def form(self, index: int) -> tuple[tuple[int, ...], tuple[int, ...]]: ...
    def capsules(self, arena: Arena) -> list[object]: ...

class StagedCopies:
    @property
    def is_done(self) -> bool: ...
    def wait(self, timeout_s: float) -> None: ...
    def hold_back(self, streams: list[tuple[int, int]]) -> None: ...  # (device, handle)

def snapshot(
    arena: Arena,
    table: StageTable,
    workers: int,
    after: SourceEvents | None = None,
    overlap: bool = False,
) -> StagedCopies | None: ...  # of `overlap` alone

class SourceEvents:
    # (CUDA ordinal, stream handle; 0: the default stream). Raises StagingError.
    def __init__(self, streams: Sequence[tuple[int, int]]) -> None: ...
    def devices(self) -> list[int]: ...  # ascending, each once

def device_driver() -> dict[str, Any]: ...  # version, devices, failure, has_kernel, kernel_refusal
def device_counters() -> dict[str, int]: ...
def clear_device_counters() -> None: ...

# Keeps `owners` of memory as long as copies that took too long may use it; else does nothing.
def keep_while_copied(owners: object) -> None: ...
def set_copy_timeouts(copy_timeout_s: float, unwind_timeout_s: float) -> None: ...  # for tests
def take_device_warning() -> str: ...  # why memory was not pinned; "": nothing, or taken before
def set_pack_image(image: bytes | None) -> None: ...  # for tests; None: the embedded one
def forget_device_driver() -> None: ...  # for tests: driver, kernel and warning are asked for anew
