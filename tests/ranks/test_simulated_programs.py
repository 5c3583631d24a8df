"""Random programs of saves, loads and manager's calls, in which any rank may do something else.

Whatever ranks do, no checkpoint is of two saves, nobody gets the answer of another call, each call
ends in time by a typed error, and the next call that all ranks make works. Ranks are threads by a
clock of their own (simulated_ranks), so a program repeats by its number.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from support.machine import points
from support.simulated_ranks import Client, Store, Task, World

from torch_dcpx.checkpoint.same_call import Call, check_same_call
from torch_dcpx.errors import DcpxError, NotCommittedError
from torch_dcpx.ranks import store_keys
from torch_dcpx.ranks.ballot import Ballot
from torch_dcpx.ranks.call_id import CallId
from torch_dcpx.ranks.store import StoreExchange

TIMEOUT_S = 8.0
KINDS = ["save", "async_save", "load", "manager.save", "manager.resume"]
ODD_WAYS = ["skips", "fails", "interrupted", "late", "other call", "other path", "leaves"]
WAYS = ["calls"] * 12 + ODD_WAYS


class InjectedError(Exception):
    """What a rank's own code raises."""


class Step(NamedTuple):
    """What one rank does at one step of a program."""

    number: int
    kind: str
    path: str
    way: str


class Storage:
    """What is committed, by path: what each rank has written, by the step at which it did."""

    def __init__(self) -> None:
        self.committed: dict[str, list[int]] = {"first": []}
        self.save_ids: dict[str, str] = {}


class Rank:
    """One rank of a program."""

    def __init__(self, world: World, store: Store, storage: Storage, rank: int, ranks: int) -> None:
        self.world, self.storage = world, storage
        self.client = Client(world, store)
        self.rank, self.ranks = rank, ranks
        self.pending: list[Task] = []
        self.meetings = 0
        self.seen: list[str] = []  # what it did, for a failure
        self.saved: set[str] = set()  # paths whose saves returned

    def exchange(self, what: str, call: CallId) -> StoreExchange:
        exchange = StoreExchange(
            self.client, self.rank, self.ranks, TIMEOUT_S, what, call, self.world
        )
        return exchange.entered()  # type: ignore[return-value]

    def do(self, step: Step) -> None:
        """Makes a step's call, in its way; whatever is raised must be typed, and in time."""
        if step.way == "skips":
            return
        if step.way == "late":
            self.world.sleep(self.world.chance.choice([0.01, 0.5, 3.0]))
        if step.way == "interrupted":
            self.client.thread = threading.get_ident()
            self.client.interrupt_in = self.world.chance.randrange(30)
        if step.way == "leaves":  # interrupted before the exchange could tell anybody
            self.client.next_number()
            self.client.next_call()
            return
        began = self.world.now
        try:
            self.call(step)
        except (DcpxError, KeyboardInterrupt, InjectedError) as error:
            self.seen.append(f"{step.number} {step.kind} {step.path} {step.way}: {error!r}")
            is_other = type(error) is NotCommittedError and f"'{step.path}'" not in str(error)
            is_others = type(error) is KeyboardInterrupt and step.way != "interrupted"
            if is_other or is_others:
                raise AssertionError("the answer of another call") from error
        else:
            self.seen.append(f"{step.number} {step.kind} {step.path} {step.way}: done")
        finally:
            self.client.interrupt_in = None
        # One deadline of the call and, of a save, one of the vote and one of its answer.
        assert self.world.now - began <= 5 * TIMEOUT_S, f"too long: {step}"

    def call(self, step: Step) -> None:
        kind = step.kind
        if kind.startswith("manager."):
            name = f"CheckpointManager.{kind.removeprefix('manager.')}"
            target = step.path if kind == "manager.save" else "root"

            def local() -> Call:
                self.fail_if(step)
                return Call(kind, {"tag": step.path})

            with self.exchange(kind, CallId(name, target)) as exchange:
                exchange.all_reduce("agree", local, check_same_call)
            kind = "async_save" if kind == "manager.save" else "load"
        if kind == "load":
            self.load(step)
        else:
            self.save(step, kind)

    def fail_if(self, step: Step) -> None:
        if step.way == "fails":
            raise InjectedError(f"of rank {self.rank}")

    def load(self, step: Step) -> None:
        def local() -> list[int]:
            self.fail_if(step)
            if step.path not in self.storage.committed:
                raise NotCommittedError(f"load of '{step.path}'", errno=2, path=step.path)
            return self.storage.committed[step.path]

        with self.exchange("load", CallId("load", step.path)) as exchange:
            content = exchange.all_reduce("plan", local, lambda found: found[0])
            assert content == self.storage.committed[step.path], "the answer of another load"
            exchange.all_reduce("read", lambda: None, lambda _: None)

    def save(self, step: Step, kind: str) -> None:
        exchange = self.exchange("save", CallId(kind, step.path))
        try:
            save_id = exchange.reduce_scatter(
                "plan", lambda: self.fail_if(step), lambda all_: [f"of {step.number}"] * len(all_)
            )
            ballot = Ballot(exchange, exchange.deadline.anew())
        except BaseException as error:
            exchange.fail(error)
            exchange.close()
            raise

        def commit(payloads: list[Any]) -> str:
            assert len({number for number, _ in payloads}) == 1, f"a mix: {payloads}"
            assert len({path for _, path in payloads}) == 1, f"a mix: {payloads}"
            self.storage.committed[step.path] = [number for number, _ in payloads]
            self.storage.save_ids[step.path] = save_id
            return step.path

        def settle() -> None:
            error: BaseException | None = None
            try:
                exchange.note_phase("writing")
                ballot.vote((step.number, step.path))
                ballot.settle(commit, lambda: self.storage.save_ids.get(step.path) == save_id)
                assert step.path in self.storage.committed, "a save that returned is not there"
                self.saved.add(step.path)
            except BaseException as raised:
                error = raised
                ballot.fail(raised)
                raise
            finally:
                exchange.close()
                self.seen.append(f"{step.number} settled: {error!r}")

        if kind == "save":
            settle()
            return
        self.pending.append(self.world.start(lambda: _typed(settle)))


def _typed(body: Callable[[], None]) -> None:
    with contextlib.suppress(DcpxError):  # it is in `seen`
        body()


def program(number: int) -> tuple[int, list[list[Step]]]:
    """Returns how many ranks there are, and what each does at each step."""
    chance = random.Random(number)
    ranks = chance.choice([2, 2, 3, 4])
    steps: list[list[Step]] = []
    for at in range(chance.randrange(1, 6)):
        kind = chance.choice(KINDS)
        read = chance.choice(["first", f"step-{at - 1}", "none"])
        path = f"step-{at}" if "save" in kind else read
        own = []
        for _ in range(ranks):
            way = chance.choice(WAYS)
            own_kind = chance.choice(KINDS) if way == "other call" else kind
            own_path = f"other-{at}" if way == "other path" else path
            if "save" in own_kind and not own_path.endswith(f"-{at}"):
                own_path = f"step-{at}"
            own.append(Step(at, own_kind, own_path, way))
        steps.append(own)
    return ranks, steps


def run_program(number: int) -> None:
    ranks, steps = program(number)
    world, store, storage = World(number), Store(), Storage()
    members = [Rank(world, store, storage, rank, ranks) for rank in range(ranks)]
    wrong: list[BaseException] = []
    met: dict[int, int] = {}  # how many are at a barrier

    def meet(member: Rank) -> None:
        member.meetings += 1
        number = member.meetings
        met[number] = met.get(number, 0) + 1
        while met[number] < ranks and not wrong:
            world.sleep(0.05)

    def one(member: Rank) -> None:
        try:
            for step in steps:
                member.do(step[member.rank])
            while member.pending:
                world.join(member.pending.pop())
            meet(member)
            # A call of a name that was called before: each of its two operations may meet once what
            # is left of an earlier one.
            for _ in range(3):
                member.do(Step(98, "manager.resume", "first", "calls"))
                meet(member)
            assert member.seen[-1] == "98 manager.resume first calls: done"
            member.call(Step(99, "save", "final", "calls"))
            member.call(Step(99, "load", "final", "calls"))
        except BaseException as error:  # noqa: BLE001 - told below
            wrong.append(error)

    for member in members:
        world.start(lambda member=member: one(member))  # type: ignore[misc]
    world.run()
    said = "\n".join(f"rank {m.rank}: {line}" for m in members for line in m.seen)
    again = f"DCPX_PROGRAM={number}"
    assert not wrong, f"{again}: {wrong[0]!r}\n{steps}\n{said}"
    assert storage.committed["final"] == [99] * ranks, f"{again}\n{said}"


@pytest.fixture(autouse=True)
def _few_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Polls are events of the simulation: eight a deadline tell as much as four hundred."""
    monkeypatch.setattr(store_keys, "_MAX_POLL_S", 1.0)


@pytest.mark.slow
def test_ten_thousand_programs_in_which_ranks_err_mix_nothing_and_go_on(seed: int) -> None:
    only = os.environ.get("DCPX_PROGRAM")  # repeats one
    for number in [int(only)] if only else range(seed, seed + points(10_000)):
        run_program(number)
