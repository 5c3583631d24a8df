"""One rank of test_call_programs.py: plays a random program, and makes common calls.

After each program the ranks meet through a store of the test's own and make common calls. Rank 0
then looks at what is there and at what every rank says.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from call_programs import SAVES, Call, Program, Step
from support.machine import seconds

import torch_dcpx as dcpx
from torch_dcpx import DcpxError, DcpxLoadPlanner, DcpxSavePlanner, ReadOptions, WriteOptions

HANG_S = seconds(60)  # for a call whose own deadline is 3 s


class InjectedError(Exception):
    """Raised by this test's own objects."""


class Bomb:
    """A `Stateful` that cannot say its state."""

    def __init__(self, error: type[BaseException]) -> None:
        self._error = error

    def state_dict(self) -> dict[str, Any]:
        raise self._error

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise self._error


class InterruptedSavePlanner(DcpxSavePlanner):
    def finish_plan(self, new_plan: Any) -> Any:
        raise KeyboardInterrupt


class InterruptedLoadPlanner(DcpxLoadPlanner):
    def finish_plan(self, new_plan: Any) -> Any:
        raise KeyboardInterrupt


def interrupt(_done: int, _total: int) -> None:
    raise KeyboardInterrupt


def state_of(number: int) -> dict[str, Any]:
    """What a rank saves: a tensor of its own and one that all have, filled with the number."""
    return {
        "all": torch.full((300,), float(number)),
        f"rank{dist.get_rank()}": torch.full((200,), float(number)),
    }


def is_state_of(number: int, state: dict[str, Any]) -> bool:
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    return all(bool((tensor == number).all()) for tensor in tensors)


def from_all(name: str, said: Any) -> list[Any]:
    """Returns what each rank says, by a store that is not the library's, when all have spoken."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    wait = timedelta(seconds=4 * HANG_S)
    asked = dist.TCPStore(host, port, is_master=False, timeout=wait)
    store = dist.PrefixStore("programs", asked)
    store.set(f"{name}/{dist.get_rank()}", pickle.dumps(said))
    keys = [f"{name}/{rank}" for rank in range(dist.get_world_size())]
    return [pickle.loads(store.get(key)) for key in keys]


class Player:
    """This rank in one program."""

    def __init__(self, program: Program, root: Path) -> None:
        self.program, self.rank, self.top = program, dist.get_rank(), root
        self.root = root / f"program{program.number}"
        self.timeouts = {"durability": "none", "workers": 1, "save_timeout_s": program.timeout_s}
        self.read = ReadOptions(workers=1, load_timeout_s=program.timeout_s)
        self.is_async = program.is_async  # saves of the manager
        self.manager = dcpx.CheckpointManager(
            self.root / "managed",
            async_save=program.is_async,
            options=WriteOptions(**self.timeouts),
            read_options=self.read,
            allow_fresh=True,
        )
        self.waits: list[tuple[str, dcpx.SaveHandle]] = []
        self.begun: list[Path] = []  # where saves in the background go
        self.told: list[str] = []  # how each call ended
        self.returned: list[str] = []  # paths of saves that did
        self.bad: list[str] = []
        self.has_injected = False

    def path(self, call: Call) -> Path:
        is_managed = call.name.startswith("manager")
        name = f"managed/step-{call.number}" if is_managed else f"s{call.number}"
        return self.root / name

    # ---- Steps ---------------------------------------------------------------------------------

    def play(self) -> None:
        for number, step in enumerate(self.program.steps):
            time.sleep(step.late_s.get(self.rank, 0))
            how = step.deviations.get(self.rank, "")
            if how == "skip":
                self.told.append(f"{number}. skipped")
                continue
            call = step.others.get(self.rank, step.call)
            self.has_injected |= bool(how)
            self.guarded(f"{number}. {call}", call, lambda c=call, s=step, h=how: self.act(c, s, h))
        for name, handle in self.waits:
            self.guarded(f"wait for {name}", None, lambda h=handle: self.settle(h))
        self.guarded("wait", None, lambda: dcpx.wait(HANG_S))
        self.guarded("manager.close", None, self.manager.close)

    def guarded(self, what: str, call: Call | None, act: Callable[[], object]) -> bool:
        """Makes one call, which returns or raises what it may, and in time."""
        begin = time.monotonic()
        faulthandler.dump_traceback_later(2 * HANG_S, exit=True)  # it does not even raise
        try:
            act()
            self.told.append(f"{what}: returned")
            return True
        except BaseException as error:  # noqa: BLE001 - judged here
            text = "".join(traceback.format_exception_only(error)).strip()
            self.told.append(f"{what}: {text[:500]}")
            is_own = isinstance(error, (InjectedError, KeyboardInterrupt)) and self.has_injected
            if not isinstance(error, DcpxError) and not is_own:
                self.bad.append(f"{what} raised {text}\n{traceback.format_exc()}")
            if call is not None:
                self.check_path(what, call, error)
            return False
        finally:
            faulthandler.cancel_dump_traceback_later()
            taken = time.monotonic() - begin
            if taken > HANG_S:
                self.bad.append(f"{what} took {taken:.0f} s")

    def check_path(self, what: str, call: Call, error: BaseException) -> None:
        """An error is about the call's own path: another's is an answer to another call."""
        told = getattr(error, "path", None)
        own = [self.root / "managed" if call.name.startswith("manager") else self.path(call)]
        if call.name in SAVES:  # also raises what nobody has asked an earlier one for
            own += self.begun
        if told is not None and not any(map(Path(told).is_relative_to, own)):
            self.bad.append(f"{what}: it is told of '{told}': {error}")

    def settle(self, handle: dcpx.SaveHandle) -> None:
        if handle.result(HANG_S) is not None:
            self.returned.append(handle.checkpoint_id)

    def act(self, call: Call, step: Step, how: str) -> None:
        if call.name in SAVES:
            self.save(call, step, how)
        elif call.name == "load":
            self.load(call, how)
        else:
            self.ask_manager(call, how)

    def save(self, call: Call, step: Step, how: str) -> None:
        options: dict[str, Any] = dict(self.timeouts)
        given: dict[str, Any] = {}
        state = state_of(call.number)
        if how.endswith("state_dict"):
            state["bomb"] = Bomb(InjectedError if how.startswith("raise") else KeyboardInterrupt)
        elif how == "interrupt in plan":
            given["planner"] = InterruptedSavePlanner()
        elif how == "interrupt in write":
            options["progress"] = interrupt
        elif how == "other option":
            options["files_per_rank"] = 2
        path = self.path(call)
        self.begun += [path] if call.name != "save" else []
        if call.name == "manager.save":
            step_number: Any = f"{'x' * 300}" if how == "bad argument" else call.number
            made = self.manager.save(step_number, state=state)
        else:
            if how == "bad argument":
                given["storage_writer"] = dcpx.DcpxWriter(path)  # and options: one too many
            function = getattr(dcpx, call.name)
            made = function(state, path, options=WriteOptions(**options), **given)
        is_blocking = call.name == "save" or not (call.name == "async_save" or self.is_async)
        if is_blocking or step.waits:
            self.settle(made)
        else:
            self.waits.append((str(call), made))

    def load(self, call: Call, how: str) -> None:
        target: dict[str, Any] = state_of(0)
        given: dict[str, Any] = {"options": self.read}
        if how.endswith("state_dict"):
            target["bomb"] = Bomb(InjectedError if how.startswith("raise") else KeyboardInterrupt)
        elif how == "interrupt in plan":
            given["planner"] = InterruptedLoadPlanner()
        elif how == "other option":
            given["cast"] = "allow"
        if how == "bad argument":
            os.environ["DCPX_LOAD_TIMEOUT_S"] = "soon"
            given = {}
        try:
            dcpx.load(target, self.path(call), **given)
        finally:
            os.environ.pop("DCPX_LOAD_TIMEOUT_S", None)
        self.check_loaded(call.number, target)

    def check_loaded(self, number: int, target: dict[str, Any]) -> None:
        if not number or not is_state_of(number, target):
            self.bad.append(f"load of save {number} returned {target}")

    def ask_manager(self, call: Call, how: str) -> None:
        manager, number = self.manager, call.number
        if call.name == "manager.tags":
            manager.tags()
        elif call.name == "manager.delete":
            manager.delete("" if how == "bad argument" else number)
        else:
            target = state_of(0)
            if how.endswith("state_dict"):
                target["bomb"] = Bomb(
                    InjectedError if how.startswith("raise") else KeyboardInterrupt
                )
            info = manager.resume(state=target, tag=number if number else None)
            if info.tag is None:
                return
            found = int(info.tag.removeprefix("step-"))
            if number and found != number:
                self.bad.append(f"resume of {number} took {info.tag}")
            self.check_loaded(found, target)

    # ---- What must work again ------------------------------------------------------------------

    def common(self) -> None:
        """A save and a load of it that all ranks make."""
        number = 1000 + self.program.number
        options = WriteOptions(**{**self.timeouts, "save_timeout_s": HANG_S})
        read = ReadOptions(workers=1, load_timeout_s=HANG_S)
        target = state_of(0)
        # A call with a wrong tag is known by its function alone: see "Wrong tags" in
        # docs/explain/guarantees.md.
        saves = [step for step in self.program.steps if step.call.name == "manager.save"]
        has_wrong_tag = any("bad argument" in step.deviations.values() for step in saves)
        if self.program.number % 2 and not has_wrong_tag:
            root = self.top / "managed"
            with dcpx.CheckpointManager(
                root, keep_last=2, options=options, read_options=read
            ) as manager:
                manager.save(number, state=state_of(number))
                manager.wait(HANG_S)
                info = manager.resume(state=target)
                assert info.tag == f"step-{number}", info
        else:
            dcpx.save(state_of(number), self.top / "common", options=options)
            dcpx.load(target, self.top / "common", options=read)
        assert is_state_of(number, target), target

    def play_all(self) -> str:
        """Returns what is wrong, for all ranks the same; "" if nothing is."""
        self.play()
        name = str(self.program.number)
        from_all(f"{name}/played", None)
        if not self.guarded("the common call", None, self.common):
            self.bad.append(f"{self.told[-1]}")
        said = from_all(f"{name}/said", [self.told, self.bad, self.returned])
        wrong = ""
        if self.rank == 0:
            bad = [f"rank {rank}: {text}" for rank, one in enumerate(said) for text in one[1]]
            bad += self.wrong_checkpoints({path for one in said for path in one[2]})
            if bad:
                ends = [f"rank {r}:\n    " + "\n    ".join(one[0]) for r, one in enumerate(said)]
                wrong = "\n".join([str(self.program), *ends, *bad])
        return str(from_all(f"{name}/verdict", wrong)[0])

    def wrong_checkpoints(self, returned: set[str]) -> list[str]:
        """Returns what is wrong with what lies there: all of it is whole, and of one save."""
        bad: list[str] = []
        calls = [one for step in self.program.steps for one in (step.call, *step.others.values())]
        deleted = {str(self.path(call)) for call in calls if call.name == "manager.delete"}
        for call in {call for call in calls if call.name in SAVES}:
            path = self.path(call)
            if not (path / ".metadata").exists():
                if str(path) in returned - deleted:
                    bad.append(f"{path}: a save returned, and nothing is there")
                continue
            prefix = "state." if call.name == "manager.save" else ""
            names = ["all", *(f"rank{rank}" for rank in range(dist.get_world_size()))]
            found = {f"{prefix}{name}": torch.zeros(200 + 100 * (name == "all")) for name in names}
            try:
                report = dcpx.verify(path)
                bad += [] if report.ok else [str(report)]
                dcpx.load(found, path, no_dist=True)
            except DcpxError as error:
                bad.append(f"{path}: {error}")
                continue
            if not is_state_of(call.number, found):
                values = {name: tensor.unique().tolist() for name, tensor in found.items()}
                bad.append(f"{path}: a mix of saves: {values}")
        return bad
