"""What obstore alone costs: PUTs and GETs against the benches' own S3 server.

    python tests/bench/object_probe.py
    python tests/bench/object_probe.py --size smoke --sections put tiny

The server has a core, the client the others, so that the client's CPU seconds are its own. All
cases of a section take turns in shuffled rounds, after one that warms up; figures are medians and
their range. GB are 1e9 bytes. A `faults` of 244 is one for each page of the bytes: fresh memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import mmap
import os
import random
import resource
import statistics
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import obstore
from object_server import ObjectServer
from obstore.store import S3Store

MIB = 1 << 20
KEY = "probe/__0_0.distcp"  # dropped, by its name


class Size(NamedTuple):
    """How much a section moves."""

    put_mib: int
    one_mib: int
    get_mib: int
    small_puts: int
    tiny_gets: int
    rounds: int


SIZES = {"full": Size(1024, 64, 256, 20_000, 5_000, 5), "smoke": Size(32, 8, 16, 40, 20, 1)}


class Case(NamedTuple):
    labels: tuple[str, ...]
    work: Callable[[], object]
    latency_ms: int = 0


class Reading(NamedTuple):
    """What one run of a case took: seconds, and page faults."""

    wall_s: float
    client_s: float
    system_s: float  # the kernel's part of the client's
    faults: int
    server_s: float


def touched(nbytes: int) -> memoryview:
    """Returns memory that has all its pages."""
    memory = mmap.mmap(-1, nbytes)
    for at in range(0, nbytes, mmap.PAGESIZE):
        memory[at] = 1
    return memoryview(memory)


def make_store(endpoint: str, **options: Any) -> S3Store:
    """Returns a store of the server; `options` default to requests signed without their payload."""
    return S3Store(
        "bench",
        endpoint=endpoint,
        region="us-east-1",
        access_key_id="key",
        secret_access_key="secret",
        client_options={"allow_http": True, "timeout": "300s"},
        **(options or {"unsigned_payload": True}),
    )


# ---- Rounds -------------------------------------------------------------------------------------


def run_case(case: Case, server: ObjectServer) -> Reading:
    server.reset(latency_ms=case.latency_ms)
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    case.work()
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    system = after.ru_stime - before.ru_stime
    return Reading(
        wall,
        after.ru_utime - before.ru_utime + system,
        system,
        after.ru_minflt - before.ru_minflt,
        server.stats()["cpu_s"],
    )


def run_cases(cases: Sequence[Case], server: ObjectServer, rounds: int) -> list[list[Reading]]:
    """Returns the readings of each case."""
    readings: list[list[Reading]] = [[] for _ in cases]
    order = random.Random(0)
    for number in range(rounds + 1):
        for index in order.sample(range(len(cases)), len(cases)):
            found = run_case(cases[index], server)
            if number:
                readings[index].append(found)
        print(f"round {number} of {rounds}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    return readings


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Returns the median and the range, as text."""
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def print_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print(f"\n### {title}\n\n| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


class Column(NamedTuple):
    head: str
    figure: Callable[[Reading], float]
    digits: int = 2


def speeds_of(nbytes: int) -> list[Column]:
    gb = nbytes / 1e9
    return [
        Column("GB/s", lambda r: gb / r.wall_s),
        Column("client CPU s/GB", lambda r: r.client_s / gb),
        Column("of it system", lambda r: r.system_s / gb),
        Column("faults, 1000/GB", lambda r: r.faults / gb / 1000, 1),
        Column("server s/GB", lambda r: r.server_s / gb),
    ]


def requests_of(count: int) -> list[Column]:
    return [
        Column("requests/s", lambda r: count / r.wall_s, 0),
        Column("client CPU us/request", lambda r: r.client_s / count * 1e6, 0),
        Column("server us/request", lambda r: r.server_s / count * 1e6, 0),
    ]


def measure(
    title: str,
    names: Sequence[str],
    columns: Sequence[Column],
    cases: Sequence[Case],
    server: ObjectServer,
    rounds: int,
) -> None:
    """Runs the cases and prints a row for each."""
    readings = run_cases(cases, server, rounds)
    rows = [
        [*case.labels, *(spread([c.figure(r) for r in found], c.digits) for c in columns)]
        for case, found in zip(cases, readings, strict=True)
    ]
    print_table(title, [*names, *(column.head for column in columns)], rows)


# ---- Sections -----------------------------------------------------------------------------------

SIGNING: dict[str, dict[str, Any]] = {
    "unsigned_payload": {"unsigned_payload": True},
    "skip_signature": {"skip_signature": True},
    "payload signed": {"unsigned_payload": False},
}


def put_parts(store: S3Store, data: memoryview, part_bytes: int, in_flight: int) -> None:
    """Puts `data` from an iterator of views, a part each."""
    parts = (data[at : at + part_bytes] for at in range(0, len(data), part_bytes))
    obstore.put(store, KEY, parts, chunk_size=part_bytes, max_concurrency=in_flight)


def measure_puts(server: ObjectServer, size: Size) -> None:
    data = touched(size.put_mib * MIB)
    cases = []
    for name, part_mib, in_flight in itertools.product(SIGNING, (8, 16), (4, 8, 16)):
        store = make_store(server.endpoint, **SIGNING[name])
        work = functools.partial(put_parts, store, data, part_mib * MIB, in_flight)
        for latency in (0, 20) if name == "unsigned_payload" else (0,):
            labels = (name, str(part_mib), str(in_flight), str(latency))
            cases.append(Case(labels, work, latency))
    title, names = f"put, {size.put_mib} MiB", ("signing", "part MiB", "in flight", "latency ms")
    measure(title, names, speeds_of(len(data)), cases, server, size.rounds)


def measure_one_put(server: ObjectServer, size: Size) -> None:
    data, store = touched(size.one_mib * MIB), make_store(server.endpoint)
    cases = [
        Case(("one PUT",), lambda: obstore.put(store, KEY, data, use_multipart=False)),
        Case(("parts of 8 MiB, iterator",), lambda: put_parts(store, data, 8 * MIB, 4)),
        Case(
            ("parts of 8 MiB, the buffer itself",),
            lambda: obstore.put(store, KEY, data, chunk_size=8 * MIB, max_concurrency=4),
        ),
    ]
    title = f"put of one buffer, {size.one_mib} MiB"
    measure(title, ("how",), speeds_of(len(data)), cases, server, size.rounds * 2)


def measure_small_puts(server: ObjectServer, size: Size) -> None:
    data, count = touched(64 << 10), size.small_puts

    def by_threads(store: S3Store) -> None:
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda i: obstore.put(store, f"small/{i}.distcp", data), range(count)))

    async def by_tasks(store: S3Store, tasks: int) -> None:
        numbers = iter(range(count))

        async def put_some() -> None:
            for number in numbers:
                await obstore.put_async(store, f"small/{number}.distcp", data)

        await asyncio.gather(*(put_some() for _ in range(tasks)))

    cases = []
    for name, options in SIGNING.items():
        work = functools.partial(by_threads, make_store(server.endpoint, **options))
        cases.append(Case((name, "16 threads"), work))
    store = make_store(server.endpoint)
    cases.append(Case(("unsigned_payload", "16 tasks"), lambda: asyncio.run(by_tasks(store, 16))))
    title, rounds = f"put, {count} objects of 64 KiB", max(1, size.rounds // 2)
    measure(title, ("signing", "by"), requests_of(count), cases, server, rounds)


Fetch = Callable[[S3Store, memoryview, int, int], None]


def by_bytes(store: S3Store, out: memoryview, start: int, stop: int) -> None:
    answer = obstore.get(store, KEY, options={"range": (start, stop)})
    out[start:stop] = memoryview(answer.bytes())


def by_get_range(store: S3Store, out: memoryview, start: int, stop: int) -> None:
    out[start:stop] = memoryview(obstore.get_range(store, KEY, start=start, end=stop))


def by_stream(store: S3Store, out: memoryview, start: int, stop: int) -> None:
    answer = obstore.get(store, KEY, options={"range": (start, stop)})
    for data in answer.stream(min_chunk_size=0):
        out[start : start + len(data)] = data
        start += len(data)
    if start != stop:
        raise RuntimeError(f"the stream ended at {start}, not at {stop}")


def without_copy(store: S3Store, out: memoryview, start: int, stop: int) -> None:
    obstore.get(store, KEY, options={"range": (start, stop)}).bytes()


FETCHES: dict[str, Fetch] = {
    "get, bytes()": by_bytes,
    "get_range": by_get_range,
    "get, stream(0)": by_stream,
    "get, bytes(), no copy": without_copy,
}


def fetch_all(
    fetch: Fetch,
    store: S3Store,
    out: memoryview,
    starts: Iterable[int],
    range_bytes: int,
    pool: ThreadPoolExecutor,
) -> None:
    """Gets ranges to their places in `out`."""
    list(pool.map(lambda at: fetch(store, out, at, at + range_bytes), starts))


def measure_gets(server: ObjectServer, size: Size) -> None:
    out, store = touched(size.get_mib * MIB), make_store(server.endpoint)
    put_parts(store, out, 8 * MIB, 4)
    cases = []
    with contextlib.ExitStack() as stack:
        pools = {n: stack.enter_context(ThreadPoolExecutor(n)) for n in (4, 8, 16)}
        for how, range_mib, threads in itertools.product(FETCHES, (1, 2, 4, 8), pools):
            nbytes, fetch = range_mib * MIB, FETCHES[how]
            starts = range(0, len(out), nbytes)
            work = functools.partial(fetch_all, fetch, store, out, starts, nbytes, pools[threads])
            for latency in (0, 20):
                labels = (how, str(range_mib), str(threads), str(latency))
                cases.append(Case(labels, work, latency))
        title = f"get, {size.get_mib} MiB to a ready buffer"
        names = ("how", "range MiB", "threads", "latency ms")
        measure(title, names, speeds_of(len(out)), cases, server, size.rounds)


def measure_tiny_gets(server: ObjectServer, size: Size) -> None:
    out, count = touched(MIB), size.tiny_gets
    starts = [(number % 1024) << 10 for number in range(count)]
    put_parts(make_store(server.endpoint), out, MIB, 1)
    cases = []
    with contextlib.ExitStack() as stack:
        pools = {n: stack.enter_context(ThreadPoolExecutor(n)) for n in (1, 16)}
        for name, how, threads in itertools.product(SIGNING, ("get, bytes()", "get_range"), pools):
            store = make_store(server.endpoint, **SIGNING[name])
            work = functools.partial(
                fetch_all, FETCHES[how], store, out, starts, 1024, pools[threads]
            )
            cases.append(Case((name, how, str(threads)), work))
        title, names = f"get, {count} ranges of 1 KiB", ("signing", "how", "threads")
        measure(title, names, requests_of(count), cases, server, size.rounds)


def most_held(
    store: S3Store, buffer_bytes: int, part_bytes: int, in_flight: int, count: int
) -> int:
    """Returns how many buffers of a put's iterator are alive at once, at most."""
    lock, alive, most = threading.Lock(), 0, 0

    def gone() -> None:  # on obstore's thread
        nonlocal alive
        with lock:
            alive -= 1

    def buffers() -> Iterator[mmap.mmap]:
        nonlocal alive, most
        for _ in range(count):
            owner = mmap.mmap(-1, buffer_bytes)
            weakref.finalize(owner, gone)
            with lock:
                alive += 1
                most = max(most, alive)
            yield owner
            del owner

    obstore.put(store, KEY, buffers(), chunk_size=part_bytes, max_concurrency=in_flight)
    if alive:
        raise RuntimeError(f"put() has returned and holds {alive} buffers")
    return most


def measure_buffers(server: ObjectServer, size: Size) -> None:
    unit = MIB if size is SIZES["full"] else 64 << 10
    server.reset(latency_ms=20)
    store, rows = make_store(server.endpoint), []
    for buffer_units, in_flight in ((8, 1), (8, 2), (8, 4), (8, 8), (8, 16), (2, 4), (32, 4)):
        count = max(8, 4 * in_flight * 8 // buffer_units)
        most = most_held(store, buffer_units * unit, 8 * unit, in_flight, count)
        labels = (f"{buffer_units / 8:g}", str(in_flight), str(most))
        rows.append([*labels, f"{most * buffer_units / 8:g}"])
    heads = ("buffer, in parts", "in flight", "most buffers held", "in parts")
    print_table("buffers that put() holds, 20 ms latency", heads, rows)


SECTIONS: dict[str, Callable[[ObjectServer, Size], None]] = {
    "buffers": measure_buffers,
    "put": measure_puts,
    "one": measure_one_put,
    "small": measure_small_puts,
    "get": measure_gets,
    "tiny": measure_tiny_gets,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--rounds", type=int, help="counted rounds (default: by size)")
    args = parser.parse_args(arguments)
    size = SIZES[args.size]
    if args.rounds:
        size = size._replace(rounds=args.rounds)
    cores = sorted(os.sched_getaffinity(0))
    core = cores[-1] if len(cores) > 1 else None
    print(f"cores {cores}, server on {core}, load {os.getloadavg()}, obstore {obstore.__version__}")
    try:
        with ObjectServer(mode="drop", core=core) as server:
            os.sched_setaffinity(0, set(cores) - {core})
            for section in args.sections:
                SECTIONS[section](server, size)
    finally:
        os.sched_setaffinity(0, cores)
    print(f"\nload {os.getloadavg()}")


if __name__ == "__main__":
    main()
