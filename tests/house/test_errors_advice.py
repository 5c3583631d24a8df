"""docs/reference/errors.md: each error is provoked on real input, and its advice carried out."""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.errors_page import assert_printed, raised, tool
from support.saves import change, data_files, read_footer
from support.store_ranks import Killed, Ranks
from test_errors_doc import CLASSES
from torch.distributed import HashStore, TCPStore

import torch_dcpx as dcpx
from torch_dcpx import DcpxSavePlanner, DcpxWriter, ReadOptions, WriteOptions
from torch_dcpx._native import _C
from torch_dcpx.checkpoint.save_run import SaveRun
from torch_dcpx.errors import DcpxError
from torch_dcpx.ranks.call_id import CallId
from torch_dcpx.ranks.store import StoreExchange
from torch_dcpx.storage.directory import Directory

SHORT_S = 2.0
LATE_S = 0.5


class Settings:
    """Of a user: on no allow-list."""

    rate = 0.5


def state() -> dict[str, Any]:
    return {"w": torch.ones(3000), "step": 3}


def assert_loads(path: Path, step: int = 3) -> None:
    target = {"w": torch.zeros(3000), "step": 0}
    dcpx.load(target, path)
    assert torch.equal(target["w"], torch.ones(3000)) and target["step"] == step


def command_in(text: str) -> list[str]:
    """Returns the arguments of the last command that a text names."""
    return re.findall(r"`dcpx ([^`]+)`", text)[-1].split()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    dcpx.save({**state(), "step": 2}, tmp_path / "run" / "step-2")
    dcpx.save(state(), tmp_path / "run" / "step-3")
    return tmp_path / "run" / "step-3"


# ---- One process -------------------------------------------------------------------------------


def option(saved: Path) -> None:
    text = str(raised(dcpx.OptionError, lambda: WriteOptions(workers=0)))
    (least,) = re.findall(r"an int from (\d+) to", text)
    dcpx.save(state(), saved, options=WriteOptions(workers=int(least)))
    assert_loads(saved)


def mismatch(saved: Path) -> None:
    nested = {"model": state()}
    text = str(raised(dcpx.MismatchError, lambda: dcpx.load(nested, saved)))
    assert "they are stored without 'model.': load(state_dict['model'], ...)" in text
    dcpx.load(nested["model"], saved)
    more = {**state(), "new": torch.zeros(1)}
    assert "strict=False, or allow_missing=" in str(
        raised(dcpx.MismatchError, lambda: dcpx.load(more, saved))
    )
    assert dcpx.load(more, saved, strict=False).missing == ("new",)
    assert dcpx.load(more, saved, allow_missing=["new"]).missing == ("new",)
    half = {"w": torch.zeros(3000).half()}
    assert "cast='allow'" in str(raised(dcpx.MismatchError, lambda: dcpx.load(half, saved)))
    dcpx.load(half, saved, cast="allow")
    assert torch.equal(half["w"], torch.ones(3000).half())
    wrapped = {"module.w": torch.zeros(3000)}
    assert "key_map=KeyMap()" in str(raised(dcpx.MismatchError, lambda: dcpx.load(wrapped, saved)))
    dcpx.load(wrapped, saved, key_map=dcpx.KeyMap())
    assert torch.equal(wrapped["module.w"], torch.ones(3000))


def unknown_name(saved: Path) -> None:
    raised(dcpx.UnknownNameError, lambda: dcpx.load_tensors(saved, "weight"))
    (name,) = re.findall(r"^float32 .* (\w+)$", tool("inspect", saved).stdout, re.MULTILINE)
    assert torch.equal(dcpx.load_tensors(saved, name)[name], torch.ones(3000))


def storage(saved: Path) -> None:
    _C.arm_fault(0, errno.ENOSPC, "pwrite")
    try:
        error = raised(dcpx.StorageError, lambda: dcpx.save({**state(), "step": 4}, saved))
    finally:
        _C.disarm_fault()
    assert_printed(error)
    assert error.errno == errno.ENOSPC and error.path is not None
    assert_loads(saved)  # what was there
    dcpx.save({**state(), "step": 4}, saved)  # there is room again
    assert_loads(saved, 4)


def short_read(saved: Path) -> None:
    own = {"w": torch.zeros(3000)}
    with dcpx.CheckpointManager(saved.parent / "root", async_save=False) as manager:
        for step in (1, 2):
            manager.save(step, state=state())
        path = saved.parent / "root" / "step-2"
        (name,) = data_files(path)
        with (path / name).open("r+b") as file:
            file.truncate(4096)
        assert_printed(
            raised(dcpx.ShortReadError, lambda: manager.resume(state=own, fallback=False))
        )
        assert name in tool("verify", path, code=1).output
        assert manager.resume(state=own).tag == "step-1"


def not_committed(saved: Path) -> None:
    text = str(raised(dcpx.NotCommittedError, lambda: dcpx.load(state(), saved.parent)))
    near = re.findall(r"'(step-\d)'", text)
    assert near[0] == "step-3"
    assert_loads(saved.parent / near[0])
    (saved / ".metadata").unlink()
    text = str(raised(dcpx.NotCommittedError, lambda: dcpx.load(state(), saved)))
    text = tool(*command_in(text), code=1).stderr  # it assumes something, and says so
    tool(*command_in(text))
    assert_loads(saved)


def concurrent_save(saved: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        real = Directory.rename

        def meanwhile(self: Directory, old: str, new: str, **how: bool) -> None:
            if new == ".metadata" and self.path == saved:
                patch.setattr(Directory, "rename", real)
                own = {"own": torch.ones(1)}
                options = WriteOptions(max_in_flight=2)
                error = raised(
                    dcpx.ConcurrentSaveError, lambda: dcpx.async_save(own, saved, options=options)
                )
                assert_printed(error)
            real(self, old, new, **how)

        patch.setattr(Directory, "rename", meanwhile)
        dcpx.async_save(state(), saved, options=WriteOptions(max_in_flight=2)).result()
    assert_loads(saved)
    dcpx.save({**state(), "step": 5}, saved)  # it has ended
    dcpx.save({**state(), "step": 6}, saved.parent / "elsewhere")
    assert_loads(saved, 5)
    assert_loads(saved.parent / "elsewhere", 6)


def corruption(saved: Path) -> None:
    (name,) = data_files(saved)
    change(saved / name, read_footer(saved / name).row("w").payload_offset + 9, b"\xff\xfe")
    error = raised(dcpx.CorruptionError, lambda: dcpx.load(state(), saved))
    assert_printed(error)
    assert error.path == str(saved / name) and error.offset is not None
    assert name in tool("verify", saved, code=1).output
    assert_loads(saved.parent / "step-2", 2)


def unsafe_pickle(saved: Path) -> None:
    dcpx.save({"args": Settings()}, saved)
    target: dict[str, Any] = {"args": None}
    error = raised(dcpx.UnsafePickleError, lambda: dcpx.load(target, saved))
    options = ReadOptions(safe_globals=[error.global_name])  # type: ignore[arg-type]
    dcpx.load(target, saved, options=options)
    assert type(target["args"]) is Settings


def staging(saved: Path) -> None:
    big = {"w": torch.ones(1 << 20)}
    text = str(
        raised(dcpx.StagingError, lambda: dcpx.DcpxStager(host_memory_bytes=2 << 20).stage(big))
    )
    (needed,) = re.findall(r"cannot stage (\d+) B", text)
    stager = dcpx.DcpxStager(host_memory_bytes=2 * int(needed))
    staged = stager.stage(big)
    assert torch.equal((staged if isinstance(staged, dict) else staged.result())["w"], big["w"])
    stager.close()


def repair(saved: Path) -> None:
    error = raised(dcpx.RepairError, lambda: dcpx.repair(saved))
    assert error.is_good is True
    assert_loads(saved)
    (name,) = data_files(saved)
    (saved / ".metadata").unlink()
    (saved / name).write_bytes(b"no file of a save")
    error = raised(dcpx.RepairError, lambda: dcpx.repair(saved))
    assert not error.is_good
    assert_loads(saved.parent / "step-2", 2)


def unsupported(saved: Path) -> None:
    on_meta = {**state(), "w": torch.ones(3000, device="meta")}
    text = str(raised(dcpx.UnsupportedError, lambda: dcpx.save(on_meta, saved)))
    assert "materialise it or leave it out" in text
    dcpx.save({"step": 3}, saved.parent / "without")
    dcpx.save({**on_meta, "w": torch.empty_like(on_meta["w"], device="cpu").fill_(1)}, saved)
    assert_loads(saved)


# ---- Several ranks: threads, each with its own client of a store --------------------------------


class Raising(DcpxSavePlanner):
    """Of a user: it fails on one rank."""

    def create_local_plan(self) -> Any:
        raise KeyError("boom")


def exchange_of(
    ranks: Ranks, rank: int, path: Path, timeout_s: float | None, call: str = "save"
) -> StoreExchange:
    seconds = ranks.timeout_s if timeout_s is None else timeout_s
    identity = CallId(call, str(path), is_write=call == "save")
    exchange = StoreExchange(ranks.clients[rank], rank, 2, seconds, call, identity)
    exchange.enter()
    return exchange


def save_on(
    ranks: Ranks, path: Path, step: int, timeout_s: float | None = None, late_s: float = 0.0
) -> list[Any]:
    def body(rank: int) -> Any:
        time.sleep(rank * late_s)
        planner = Raising() if step < 0 and rank == 1 else DcpxSavePlanner()
        exchange = exchange_of(ranks, rank, path, timeout_s)
        own = {"step": step, **({"w": torch.ones(3000)} if rank else {})}
        with SaveRun(own, path, DcpxWriter(path), planner, exchange) as run:
            plan = run.plan(lambda: None)
            return run.write_and_settle(lambda: (plan, run.planner))

    return ranks.run(body)


def assert_kind(kind: type[DcpxError], got: list[Any]) -> Any:
    assert {type(one) for one in got} == {kind}, got
    return got[0]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    found = Ranks(HashStore(), 2)
    yield found
    found.close()


def test_plan_error_ends_where_every_rank_makes_the_same_call(ranks: Ranks, saved: Path) -> None:
    def odd(rank: int) -> None:
        call = "save" if rank else "load"
        with exchange_of(ranks, rank, saved, None, call) as exchange:
            exchange.all_reduce("plan", lambda: 1, sum)

    error = assert_kind(dcpx.PlanError, ranks.run(odd))
    assert_printed(error)
    assert "every rank must make the same calls" in str(error)
    save_on(ranks, saved, 7)
    assert_loads(saved, 7)


def test_rank_error_names_the_rank_and_its_error_and_the_next_save_works(
    ranks: Ranks, saved: Path
) -> None:
    error = assert_kind(dcpx.RankError, save_on(ranks, saved, -1))
    assert_printed(error)
    assert (error.rank, error.phase) == (1, "planning") and "KeyError: 'boom'" in str(error)
    assert type(error.__cause__) is KeyError
    assert_loads(saved)
    save_on(ranks, saved, 8)
    assert_loads(saved, 8)


def test_rank_that_is_lost_is_named_and_a_longer_deadline_waits_for_a_slow_one(
    ranks: Ranks, saved: Path
) -> None:
    def alone(_: int) -> None:
        with exchange_of(ranks, 0, saved, LATE_S / 2) as exchange:
            exchange.all_reduce("plan", lambda: 1, sum)

    error = ranks.run(alone, [0])[0]
    assert type(error) is dcpx.RankLostError and error.ranks == (1,)
    assert_printed(error)
    assert "every rank must make this call (is it beneath `if rank == 0`?)" in str(error)
    again = Ranks(HashStore(), 2)  # the job, started again
    try:
        save_on(again, saved, 9, timeout_s=60.0, late_s=LATE_S)
        assert_loads(saved, 9)
    finally:
        again.close()


def served() -> tuple[int, int]:
    """Returns the process that hosts a store, and the port of it."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writer, str(store.port).encode())
        signal.pause()
    os.close(writer)
    try:
        return pid, int(os.read(reader, 9))
    finally:
        os.close(reader)


def test_store_that_is_lost_is_an_error_and_a_new_job_saves(saved: Path) -> None:
    pid, port = served()
    lost = Ranks(TCPStore("127.0.0.1", port, is_master=False), 2)
    try:
        save_on(lost, saved, 10)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    got = save_on(lost, saved, 11, timeout_s=SHORT_S)
    assert_printed(assert_kind(dcpx.StoreLostError, got))
    assert_loads(saved, 10)
    again = Ranks(HashStore(), 2)
    try:
        save_on(again, saved, 11)
        assert_loads(saved, 11)
    finally:
        again.close()


@pytest.mark.parametrize("is_renamed", [False, True])
def test_unknown_outcome_leaves_one_checkpoint_whole(
    ranks: Ranks, saved: Path, monkeypatch: pytest.MonkeyPatch, is_renamed: bool
) -> None:
    real, patch = Directory.rename, monkeypatch

    def silent(*_: object) -> None:
        raise Killed

    def killed(self: Directory, old: str, new: str, **how: bool) -> None:
        if new != ".metadata" or is_renamed:
            real(self, old, new, **how)
        if new == ".metadata":
            patch.setattr(ranks.clients[0], "call", silent)
            patch.setattr(ranks.clients[0], "post", silent)
            raise Killed

    patch.setattr(Directory, "rename", killed)
    got = save_on(ranks, saved, 12, timeout_s=SHORT_S)
    patch.undo()
    # What the others find in the storage is no longer unknown.
    assert is_renamed or type(got[1]) is dcpx.OutcomeUnknownError, got
    assert is_renamed or assert_printed(got[1]) is None
    assert_loads(saved, 12 if is_renamed else 3)  # resume from it


ALONE: dict[type[DcpxError], Callable[[Path], None]] = {
    dcpx.OptionError: option,
    dcpx.MismatchError: mismatch,
    dcpx.UnknownNameError: unknown_name,
    dcpx.StorageError: storage,
    dcpx.ShortReadError: short_read,
    dcpx.NotCommittedError: not_committed,
    dcpx.ConcurrentSaveError: concurrent_save,
    dcpx.CorruptionError: corruption,
    dcpx.UnsafePickleError: unsafe_pickle,
    dcpx.StagingError: staging,
    dcpx.RepairError: repair,
    dcpx.UnsupportedError: unsupported,
}
TOGETHER = {
    dcpx.PlanError,
    dcpx.RankError,
    dcpx.RankLostError,
    dcpx.StoreLostError,
    dcpx.OutcomeUnknownError,
}


@pytest.mark.parametrize("kind", ALONE, ids=lambda kind: kind.__name__)
def test_advice_of_one_process_leads_on(kind: type[DcpxError], saved: Path) -> None:
    ALONE[kind](saved)


def test_every_error_of_the_page_is_here() -> None:
    assert {*ALONE, *TOGETHER} == {cls for cls in CLASSES if cls is not DcpxError}
