"""Times saves to a store and loads of them, beside obstore alone, s3fs and s3torchconnector.

    python tests/bench/objects.py --rounds 5 --latency-ms 0 20

The server (object_server.py) has core 1 to itself, and the client core 0. Saves are dropped there,
loads are served from memory. Each round runs every side once, in a random order; a round before
them is checked, and not counted. Prints medians of GB/s and of the client's CPU seconds a GB, and
of the rounds' ratios to obstore alone.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import obstore
import s3fs
import torch
import torch.distributed.checkpoint as dcp
from object_server import ObjectServer, make_store

import torch_dcpx as dcpx

MIB = 1 << 20
CASES = {"large": (64 * MIB, 32), "small": (64 << 10, 20_000)}
BUCKET, REGION = "bench", "us-east-1"
PART, PARTS = 8 * MIB, 16


class Side(NamedTuple):
    """One way to save or load; `rounds` counts those of slow ones."""

    name: str
    run: Callable[[str], None]
    rounds: int


def set_up(server: ObjectServer) -> None:
    """Points every client at the server, without signing, which all could do without."""
    s3fs.S3FileSystem.clear_instance_cache()  # of the server before
    os.environ.update(
        AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b", AWS_REGION=REGION,
        AWS_ENDPOINT_URL=server.endpoint, AWS_ALLOW_HTTP="true",
    )  # fmt: skip


def state_of(tensor_bytes: int, count: int) -> dict[str, Any]:
    """Returns tensors of one arena, touched."""
    whole = torch.randint(0, 255, (count, tensor_bytes), dtype=torch.uint8)
    return {f"t{i}": whole[i] for i in range(count)}


def views_of(state: dict[str, Any]) -> list[memoryview]:
    whole = memoryview(next(iter(state.values()))._base.numpy().reshape(-1)).cast("B")
    return [whole[at : at + PART] for at in range(0, len(whole), PART)]


def amazons(kind: str, url: str, endpoint: str) -> Any:
    from s3torchconnector import S3ClientConfig
    from s3torchconnector import dcp as connector

    made = getattr(connector, kind)(
        REGION, url, s3client_config=S3ClientConfig(force_path_style=True)
    )
    made.fs._client._endpoint = endpoint
    return made


def save_sides(state: dict[str, Any], server: ObjectServer, slow_rounds: int) -> list[Side]:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    store, views = make_store(server.endpoint), views_of(state)

    def alone(url: str) -> None:
        key = url.partition(f"{BUCKET}/")[2] + "/x.distcp"
        obstore.put(store, key, iter(views), chunk_size=PART, max_concurrency=PARTS)

    def by(writer: Callable[[str], Any]) -> Callable[[str], None]:
        return lambda url: dcp.save(state, storage_writer=writer(url), no_dist=True)

    return [
        Side("obstore alone", alone, 99),
        Side("dcpx.save", lambda url: void(dcpx.save(state, url)), 99),
        Side("dcp.save, DcpxWriter", by(dcpx.DcpxWriter), 99),
        Side("FsspecWriter (s3fs)", by(FsspecWriter), slow_rounds),
        Side(
            "S3StorageWriter (s3torchconnector)",
            by(lambda url: amazons("S3StorageWriter", url, server.endpoint)),
            slow_rounds,
        ),
    ]


def load_sides(
    state: dict[str, Any], server: ObjectServer, slow_rounds: int
) -> tuple[list[Side], str]:
    """Returns the sides, and the URL of the checkpoint that they load."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    source = f"s3://{BUCKET}/source"
    dcpx.save(state, source)
    store = make_store(server.endpoint)
    key = next(one for one in listed(store) if one.endswith(".distcp"))
    ready = np.zeros(sum(tensor.numel() for tensor in state.values()), dtype=np.uint8)
    arena = torch.ones_like(next(iter(state.values()))._base)  # touched
    target = dict(zip(state, arena, strict=True))

    def alone(_: str) -> None:
        def fetch(at: int) -> None:
            end = min(at + PART, len(ready))
            body = obstore.get(store, key, options={"range": (at, end)}).bytes()
            np.copyto(ready[at:end], np.frombuffer(body, dtype=np.uint8))

        with ThreadPoolExecutor(PARTS) as pool:
            list(pool.map(fetch, range(0, len(ready), PART)))

    def by(reader: Callable[[str], Any]) -> Callable[[str], None]:
        return lambda url: dcp.load(target, storage_reader=reader(url), no_dist=True)

    sides = [
        Side("obstore alone", alone, 99),
        Side("dcpx.load", lambda url: void(dcpx.load(target, url)), 99),
        Side("dcp.load, DcpxReader", by(dcpx.DcpxReader), 99),
        Side("FsspecReader (s3fs)", by(FsspecReader), slow_rounds),
        Side(
            "S3StorageReader (s3torchconnector)",
            by(lambda url: amazons("S3StorageReader", url, server.endpoint)),
            slow_rounds,
        ),
    ]
    checked = [side._replace(run=checking(side, state, target)) for side in sides]
    return checked, source


def checking(side: Side, state: dict[str, Any], target: dict[str, Any]) -> Callable[[str], None]:
    """Returns the side, which compares what it loaded the first time."""
    if side.name == "obstore alone":
        return side.run
    is_checked = False

    def run(url: str) -> None:
        nonlocal is_checked
        if not is_checked:
            for tensor in target.values():
                tensor.fill_(7)
        side.run(url)
        if not is_checked and not all(torch.equal(state[name], target[name]) for name in state):
            raise SystemExit(f"{side.name} loaded something else")
        is_checked = True

    return run


def listed(store: Any) -> list[str]:
    return [str(one["path"]) for batch in obstore.list(store) for one in batch]


def void(_: object) -> None:
    """Takes what nobody wants."""


def cpu_s() -> float:
    return time.process_time()


def measure(
    sides: list[Side], nbytes: int, rounds: int, url_of: Callable[[Side, int], str]
) -> list[tuple[str, str, str, str]]:
    """Returns a row a side: name, GB/s, CPU s/GB, ratio to obstore alone."""
    seconds: dict[str, dict[int, float]] = {side.name: {} for side in sides}
    cpu: dict[str, list[float]] = {side.name: [] for side in sides}
    for number in range(rounds + 1):
        for side in random.sample(sides, len(sides)):
            if number > side.rounds or side.rounds == 0:
                continue
            began, cpu_began = time.perf_counter(), cpu_s()
            side.run(url_of(side, number))
            if number:
                seconds[side.name][number] = time.perf_counter() - began
                cpu[side.name].append((cpu_s() - cpu_began) / nbytes * 1e9)
        print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
    base = seconds[sides[0].name]
    sides = [side for side in sides if seconds[side.name]]
    rows = []
    for side in sides:
        own = seconds[side.name]
        speeds = sorted(nbytes / one / 1e9 for one in own.values())
        ratios = sorted(base[number] / one for number, one in own.items())
        rows.append((side.name, spread(speeds), spread(sorted(cpu[side.name])), spread(ratios)))
    return rows


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({values[0]:.2f} to {values[-1]:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--what", nargs="+", choices=["save", "load"], default=["save", "load"])
    parser.add_argument("--latency-ms", nargs="+", type=float, default=[0.0, 20.0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slow-rounds", type=int, default=2, help="of the others; 0: none")
    parser.add_argument("--scale", type=int, default=1, help="a part of each case, for a test")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1])
    torch.set_num_threads(1)  # two on one core wait for each other
    print("| case | what | latency | side | GB/s | CPU s/GB | of obstore alone |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for case in args.cases:
        tensor_bytes, count = CASES[case]
        state = state_of(tensor_bytes, max(count // args.scale, 1))
        nbytes = sum(tensor.numel() for tensor in state.values())
        for what in args.what:
            mode = "drop" if what == "save" else "keep"
            memory_mib = 0 if what == "save" else nbytes // MIB * 2 + 64
            with ObjectServer(mode=mode, core=cores[-1], memory_mib=memory_mib) as server:
                set_up(server)
                if what == "save":
                    sides, source = save_sides(state, server, args.slow_rounds), ""
                else:
                    sides, source = load_sides(state, server, args.slow_rounds)
                for latency_ms in args.latency_ms:
                    server.reset(latency_ms=latency_ms)
                    made = time.time_ns()

                    def url_of(side: Side, number: int) -> str:
                        name = f"{made}-{abs(hash(side.name))}-{number}"  # noqa: B023
                        return source or f"s3://{BUCKET}/{name}"  # noqa: B023

                    for row in measure(sides, nbytes, args.rounds, url_of):
                        print(f"| {case} | {what} | {latency_ms:g} ms | {' | '.join(row)} |")
                    sys.stdout.flush()


if __name__ == "__main__":
    main()
