"""Random programs of calls that ranks make together, in which some ranks do something else.

A program is the same on every rank: made by its seed and number. Each save has a number of its own,
which names its path and fills its tensors: so a checkpoint of two saves, and a load's answer for
another path, are seen.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

SAVES = ("save", "async_save", "manager.save")
LOADS = ("load", "manager.resume")
# What a rank may do instead of the call, or in it.
AWAY = ("skip", "other call", "bad argument", "other option")
INSIDE = (
    "raise in state_dict",
    "interrupt in state_dict",
    "interrupt in plan",
    "interrupt in write",
)


@dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
        name: of the function or the manager's method.
        number: of the save that its path means; 0: of none, nobody has saved there.
    """

    name: str
    number: int

    def __str__(self) -> str:
        return f"{self.name}({self.number})"


@dataclass(frozen=True)
class Step:
    """A call of all ranks, and what some of them do.

    Attributes:
        deviations: by rank, one of AWAY and INSIDE.
        late_s: by rank, how much later than the others it comes.
        others: by rank, what is called instead.
        waits: whether a background save is waited for at once.
    """

    call: Call
    deviations: dict[int, str] = field(default_factory=dict)
    late_s: dict[int, float] = field(default_factory=dict)
    others: dict[int, Call] = field(default_factory=dict)
    waits: bool = True

    def __str__(self) -> str:
        said = [f"rank {rank}: {how}" for rank, how in self.deviations.items()]
        said += [f"rank {rank} calls {call}" for rank, call in self.others.items()]
        said += [f"rank {rank} late" for rank in self.late_s]
        kept = "" if self.waits or self.call.name != "async_save" else ", waited for later"
        return f"{self.call}{kept} [{'; '.join(said)}]"


@dataclass(frozen=True)
class Program:
    """What `ranks` ranks do.

    Attributes:
        timeout_s: of its saves and loads.
        is_async: whether its manager saves in the background.
    """

    seed: int
    number: int
    ranks: int
    timeout_s: float
    is_async: bool
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        lines = [
            f"program {self.number} of DCPX_SEED={self.seed}, {self.ranks} ranks, "
            f"timeout {self.timeout_s} s, manager {'async' if self.is_async else 'sync'}:"
        ]
        return "\n".join([*lines, *(f"  {n}. {step}" for n, step in enumerate(self.steps))])


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
        made = Step(call(), waits=rng.random() < 0.6)
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
