"""The matrix of tensors on the ranks of one launch (test_tensor_matrix.py).

1. Every case in every placement: saved by stock and by us, loaded by both, compared bit for bit.
2. The odd ones each alone; a refused save must leave the directory as it was.
3. What the launch before, on another number of ranks, left is loaded, each tensor as it lay there
   and cut another way. The directory gets the same for the next one.
"""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.placements import OTHER_WAY, PLACEMENTS, Meshes, fits, make_meshes
from support.saves import READERS, WRITERS, files_in
from support.states import blank_like
from support.tensor_bits import bits
from support.tensor_cases import ODD, REGULAR, Case, allowed, generator
from torch.distributed.checkpoint.api import CheckpointException

from torch_dcpx import DcpxReader, ReadOptions, UnsafePickleError, UnsupportedError

CROSSINGS = [("stock", "stock"), ("ours", "stock"), ("stock", "ours"), ("ours", "ours")]
REFUSALS = (Exception, CheckpointException)  # the latter is a BaseException
Key = tuple[str, str]  # case, placement
Verdict = tuple[str, str]  # "ok", "refused" or "MISMATCH"; and why


def seed_of(key: Key, seed: int) -> int:
    return seed * 1000 + [*REGULAR, *ODD].index(key[0])


def case_of(key: Key) -> Case:
    return REGULAR.get(key[0]) or ODD[key[0]]


def placed(key: Key, full: Any, meshes: Meshes) -> Any:
    return full if key[1] == "plain" else PLACEMENTS[key[1]](full, meshes)


def source(key: Key, seed: int, meshes: Meshes) -> Any:
    return placed(key, case_of(key).make(generator(seed_of(key, seed))), meshes)


def target(key: Key, seed: int, meshes: Meshes) -> Any:
    """Returns what to load into: other values in the same layout, or zeros."""
    full = case_of(key).make(generator(seed_of(key, seed + 1)))
    if not case_of(key).is_like_target:
        full = blank_like(full)
    return placed(key, full, meshes)


def cause(error: BaseException) -> BaseException:
    if isinstance(error, CheckpointException):
        return next(iter(error.failures.values()))[0]
    return error


def text(error: BaseException) -> str:
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}"


def batches(keys: list[Key]) -> list[list[Key]]:
    """Parts tensors from nested states.

    On a rank where a ShardedTensor has no shard, stock's load takes any checkpoint for one of torch
    2.3, which did not take dicts apart that hold no tensor.
    """
    nested = [key for key in keys if not case_of(key).is_cut and not case_of(key).is_like_target]
    return [[key for key in keys if key not in nested], nested]


class Matrix:
    """Crosses writers and readers for one seed on this launch's ranks."""

    def __init__(self, seed: int, scratch: Path) -> None:
        self.seed = seed
        self.scratch = scratch
        self.meshes = make_meshes()
        self.verdicts: dict[Key, Verdict] = {}
        self._number = 0

    def keys(self) -> list[Key]:
        """Returns all cases in all placements on two ranks; on others, fewer of the dtypes."""
        is_whole = dist.get_world_size() == 2
        found: list[Key] = []
        for name, case in REGULAR.items():
            found.append((name, "plain"))
            if case.is_cut:
                full = case.make(generator(0))
                places = PLACEMENTS if is_whole or not case.is_rare else ("Shard(1)",)
                found += [(name, place) for place in places if fits(place, full)]
        return found

    def save_all(self, keys: list[Key], path: Path) -> None:
        for number, batch in enumerate(batches(keys)):
            for writer in WRITERS:
                self.save(batch, writer, path / f"{writer}{number}")

    def odd_keys(self) -> list[Key]:
        found: list[Key] = []
        for name, case in ODD.items():
            found.append((name, "plain"))
            if case.is_cut:
                found.append((name, "Shard(0)"))
        return [*found, ("dense", "Partial")]

    def directory(self, name: str) -> Path:
        """Returns a new directory, the same on every rank."""
        self._number += 1
        return self.scratch / f"{self._number}-{name}"

    def state(self, keys: list[Key], make: Callable[[Key, int, Meshes], Any]) -> dict[str, Any]:
        return {"|".join(key): make(key, self.seed, self.meshes) for key in keys}

    def save(self, keys: list[Key], writer: str, path: Path) -> None:
        dcp.save(self.state(keys, source), storage_writer=WRITERS[writer](path, sync_files=False))

    def load(self, keys: list[Key], reader: Any) -> list[Any]:
        state = self.state(keys, target)
        dcp.load(state, storage_reader=reader)
        return [bits(state["|".join(key)]) for key in keys]

    def cross(self, keys: list[Key]) -> None:
        """Tries all crossings of these cases at once; halves them when something raises."""
        paths = {writer: self.directory(writer) for writer in WRITERS}
        try:
            for writer, path in paths.items():
                self.save(keys, writer, path)
            found = {
                f"{writer} -> {reader}": self.load(keys, READERS[reader](paths[writer]))
                for writer, reader in CROSSINGS
            }
        except REFUSALS as error:
            if len(keys) == 1:
                self.verdicts[keys[0]] = "MISMATCH", text(cause(error))
                return
            half = len(keys) // 2
            self.cross(keys[:half])
            self.cross(keys[half:])
            return
        oracle = found["stock -> stock"]
        for number, key in enumerate(keys):
            wrong = [name for name, values in found.items() if values[number] != oracle[number]]
            if oracle[number] != bits(source(key, self.seed, self.meshes)):
                wrong.append("stock itself")
            self.verdicts[key] = ("MISMATCH", ", ".join(wrong)) if wrong else ("ok", "")

    def try_odd(self, key: Key) -> None:
        """Tries one case alone: kept as well as stock keeps it, or refused by name."""
        with allowed(case_of(key)):
            self.verdicts[key] = self._odd(key)

    def _odd(self, key: Key) -> Verdict:
        stock_path, path = self.directory("stock"), self.directory("ours")
        stock_error = oracle = None
        try:
            if case_of(key).kills_stock:
                raise MemoryError("stock dies of it")
            self.save([key], "stock", stock_path)
            oracle = self.load([key], READERS["stock"](stock_path))
        except REFUSALS as error:
            stock_error = cause(error)

        kept = {"w": torch.arange(9)}
        dcp.save(kept, storage_writer=WRITERS["ours"](path, sync_files=False))
        before = files_in(path)
        dist.barrier()
        try:
            self.save([key], "ours", path)
        except REFUSALS as error:
            dist.barrier()
            if files_in(path) != before:
                return "MISMATCH", f"a refused save changed the directory: {text(cause(error))}"
            return self._refusal(key, cause(error), stock_error)
        written = bits(source(key, self.seed, self.meshes))
        expected = [written] if oracle is None else oracle
        for reader in READERS:
            try:
                found = self.load([key], READERS[reader](path))
            except REFUSALS as error:
                if reader == "stock" and oracle is None:
                    continue
                return self._refused_load(key, path, cause(error), stock_error, expected)
            if found != expected:
                return "MISMATCH", f"ours -> {reader}"
        if oracle is not None and self.load([key], READERS["ours"](stock_path)) != oracle:
            return "MISMATCH", "stock -> ours"
        if oracle is not None and oracle != [written]:
            return "MISMATCH", "stock itself"
        return "ok", "" if stock_error is None else f"stock: {text(stock_error)}"

    @staticmethod
    def _refusal(key: Key, error: BaseException, stock_error: BaseException | None) -> Verdict:
        if isinstance(error, UnsupportedError) and "|".join(key) in str(error):
            return "refused", text(error)
        if stock_error is not None and text(error) == text(stock_error):
            return "refused", f"as stock: {text(error)}"
        return "MISMATCH", f"{text(error)}; stock: {stock_error and text(stock_error)}"

    def _refused_load(
        self,
        key: Key,
        path: Path,
        error: BaseException,
        stock_error: BaseException | None,
        expected: list[Any],
    ) -> Verdict:
        if not isinstance(error, UnsafePickleError):
            return "MISMATCH", f"load: {text(error)}; stock: {stock_error and text(stock_error)}"
        trusting = DcpxReader(path, options=ReadOptions(trusted=True))
        if self.load([key], trusting) != expected:
            return "MISMATCH", "ours -> ours, trusted"
        return "refused", f"unless trusted: {text(error).replace(str(path), '...')}"

    def exchange(self, keys: list[Key], load_dir: Path) -> None:
        """Loads what other ranks saved: as it lies here, and cut another way."""
        for number, batch in enumerate(batches(keys)):
            self._exchange(batch, {key: key for key in batch}, load_dir, number)
            moved = {key: (key[0], OTHER_WAY.get(key[1], key[1])) for key in batch}
            moved = {key: to for key, to in moved.items() if to != key and to in batch}
            self._exchange(list(moved), moved, load_dir, number)

    def _exchange(
        self, keys: list[Key], moved: dict[Key, Key], load_dir: Path, number: int
    ) -> None:
        expected = [bits(source(moved[key], self.seed, self.meshes)) for key in keys]
        for writer, reader in CROSSINGS[1:] if keys else ():
            state = {"|".join(key): target(moved[key], self.seed, self.meshes) for key in keys}
            dcp.load(state, storage_reader=READERS[reader](load_dir / f"{writer}{number}"))
            for key, value in zip(keys, expected, strict=True):
                if bits(state["|".join(key)]) != value:
                    why = f"resharded as {moved[key][1]}, {writer} -> {reader}"
                    self.verdicts[key] = "MISMATCH", why

    def merged(self) -> dict[Key, Verdict]:
        """Returns the worst verdict of all ranks for each case."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self.verdicts)
        worst: dict[Key, Verdict] = dict(everyone[0])
        for verdicts in everyone[1:]:
            for key, verdict in verdicts.items():
                if verdict[0] != worst[key][0]:
                    worst[key] = "MISMATCH", f"ranks differ: {worst[key]}, {verdict}"
                elif verdict[0] == "MISMATCH":
                    worst[key] = verdict
        return worst


def matrix(save_dir: Path, seed: int, load_dir: Path | None) -> dict[Key, Verdict]:
    """Returns the verdicts of all ranks."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)  # refusals are logged by DCP, at length
    matrix = Matrix(seed, save_dir / "scratch")
    keys = matrix.keys()
    for batch in batches(keys):
        matrix.cross(batch)
    if dist.get_world_size() == 2:
        for key in matrix.odd_keys():
            matrix.try_odd(key)
    if load_dir is not None:
        matrix.exchange(keys, load_dir)
    merged = matrix.merged()
    matrix.save_all([key for key in keys if merged[key][0] == "ok"], save_dir)
    if dist.get_rank() == 0:
        shutil.rmtree(matrix.scratch)
    return merged
