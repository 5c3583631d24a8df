"""Random programs of calls that ranks make together, in which some ranks do something else.

A program is the same on every rank: made by its seed and number. Each save has a number of its own,
which names its path and fills its tensors: so a checkpoint of two saves, and a load's answer for
another path, are seen.
"""

from __future__ import annotations

import random
from typing import NamedTuple

SAVES = ("save", "async_save", "manager.save")
LOADS = ("load", "manager.resume")
# What a rank may do instead of the call, or in it.
AWAY = ("skip", "other call", "bad argument", "other option")
INSIDE = ("raise in state_dict", "interrupt in state_dict", "interrupt in plan",
          "interrupt in write")  # fmt: skip


class Call(NamedTuple):
    """One call: of a function or a manager's method."""

    name: str
    number: int  # of the save that its path means; 0: of none, nobody has saved there


class Step(NamedTuple):
    """A call of all ranks, and what some of them do."""

    call: Call
    deviations: dict[int, str]  # by rank, one of AWAY and INSIDE
    late_s: dict[int, float]  # by rank, how much later than the others it comes
    others: dict[int, Call]  # by rank, what is called instead
    waits: bool  # whether a background save is waited for at once


class Program(NamedTuple):
    """What `ranks` ranks do."""

    seed: int
    number: int
    ranks: int
    timeout_s: float  # of its saves and loads
    is_async: bool  # whether its manager saves in the background
    steps: tuple[Step, ...]


def ranks_of(number: int) -> int:
    """Returns how many ranks play a program: 2, 3 or 4."""
    return 2 + number % 3


def program_of(seed: int, number: int) -> Program:
    """Returns a program: the same one for the same arguments."""
    rng = random.Random(f"{seed}/{number}")
    ranks = ranks_of(number)
    numbers = iter(range(1, 100))
    saved: list[Call] = []

    def call() -> Call:
        name = rng.choices(
            (*SAVES, *LOADS, "manager.delete", "manager.tags"), (6, 4, 4, 5, 2, 1, 1)
        )[0]
        if name in SAVES:
            saved.append(Call(name, next(numbers)))
            return saved[-1]
        is_managed = name.startswith("manager")
        there = [one.number for one in saved if one.name.startswith("manager") == is_managed]
        return Call(name, rng.choice([*there * 4, 0]))

    def step(index: int, count: int) -> Step:
        made = Step(call(), {}, {}, {}, rng.random() < 0.6)
        for rank in range(ranks):
            if rng.random() < 0.25:
                made.late_s[rank] = rng.uniform(0.005, 0.06)
        # The first steps of a program go wrong, so that the others meet what they left.
        if rng.random() < 0.8 and (index < count - 1 or count == 1):
            for rank in rng.sample(range(ranks), rng.choice((1, 1, 1, ranks - 1))):
                how = rng.choices((*AWAY, *INSIDE), (5, 4, 2, 1, 1, 1, 1, 1))[0]
                if how == "other call":
                    made.others[rank] = call()
                else:
                    made.deviations[rank] = how
        return made

    count = rng.randint(2, 4)
    steps = tuple(step(index, count) for index in range(count))
    return Program(seed, number, ranks, rng.choice((1.5, 2.0, 3.0)), rng.random() < 0.5, steps)
