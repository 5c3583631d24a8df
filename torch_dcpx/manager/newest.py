"""Tells which whole checkpoint beneath a root is the newest, and which others may be newer.

The newest is, of the first of these that are there,
1. the last commit of this run. Clocks prove nothing, and steps fall when a training goes back;
2. the last commit of other runs, which the user has brought here;
3. of what no manager saved, what has the highest numbers in its name, "step-N" before others;
4. of copies and renamed ones, whose records name another directory, the last commit.

Only the first are the manager's own: retention neither counts nor removes what a user has made.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torch_dcpx.manager.stored import Record, Skipped, Stored

# Dates, with or without a time, are one number; fractions (losses, versions) are no order.
_TOKEN = re.compile(
    r"(?P<date>(?<![0-9])(?:19|20)[0-9]{2}(?:([-_.])[0-9]{2}\2[0-9]{2}"
    r"(?:[-_T ][0-9]{2}[-_.:]?[0-9]{2}(?:[-_.:]?[0-9]{2})?)?|[0-9]{4}[-_T][0-9]{6})(?![0-9]))"
    r"|(?P<fraction>[0-9]+(?:\.[0-9]+)+(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+][0-9]+)"
    r"|(?P<number>[0-9]+)"
)
_DIGIT = re.compile("[0-9]")
_PROCESS = uuid.uuid4()
_MAX_ASKED = 16

logger = logging.getLogger("torch_dcpx")


class Runs(NamedTuple):
    """The runs whose checkpoints are a root's own, as its pointer has them."""

    run: str
    root: str
    earlier: Mapping[str, int]

    def have(self, record: Record | None) -> bool:
        """Returns whether a checkpoint was saved beneath this root, or came with all of it."""
        if record is None:
            return False
        is_earlier = record.order <= self.earlier.get(record.run, -1)
        return is_earlier or record.run in ("", self.run)


def new_run(root: str) -> str:
    """Returns the id of a run that begins beneath a root: one in this process, another in others.

    Two managers of one process on one root are of one run.
    """
    return uuid.uuid5(_PROCESS, root).hex[:12]


def ranked(found: Iterable[Stored], runs: Runs) -> list[Stored]:
    """Returns checkpoints, the newest first; each says whether it is the root's own."""
    told = (each._replace(is_ours=each.is_in_place and runs.have(each.record)) for each in found)
    return sorted(told, key=_rank, reverse=True)


def _rank(stored: Stored) -> tuple[Any, ...]:
    record = stored.record
    if record is None:
        form, numbers = numbered(stored.tag)
        return False, False, True, form == numbered("step-0")[0], numbers, stored.tag
    return stored.is_ours, stored.is_in_place, False, record.order, record.step, stored.tag


def numbered(name: str) -> tuple[str, tuple[int, ...]]:
    """Returns the form of a name, without its numbers; and these."""
    numbers: list[int] = []

    def blank(match: re.Match[str]) -> str:
        if match["fraction"]:
            return "\0.\0"
        numbers.append(int("".join(_DIGIT.findall(match[0]))))
        return "\0" if match["number"] else _DIGIT.sub("\0", match[0])

    return _TOKEN.sub(blank, name), tuple(numbers)


def is_lower(name: str, other: str) -> bool:
    """Returns whether two names differ by numbers alone, none higher in the first."""
    (form, numbers), (other_form, others) = numbered(name), numbered(other)
    is_one_form = form == other_form and numbers != others
    return is_one_form and all(a <= b for a, b in zip(numbers, others, strict=True))


def is_older_by_name(name: str, chosen: Stored) -> bool:
    """Returns whether a name says that what it names is older than the chosen checkpoint."""
    # A manager's checkpoint has a step, whatever its name.
    step = f"step-{chosen.step}"
    return is_lower(name, chosen.tag) or (chosen.record is not None and is_lower(name, step))


def highest_first(names: Iterable[str]) -> list[str]:
    """Returns the names by their numbers, the highest first."""
    return sorted(names, key=lambda name: numbered(name)[1], reverse=True)


def to_ask(names: Iterable[str], chosen: Stored, date: Callable[[str], int]) -> list[str]:
    """Returns the names, at most 16, that have a later date than the chosen one, or do not say that
    they are older: the later ones first, then of each form the highest. Logs that there are more.
    """
    begin = date(chosen.tag)
    later = {name for name in names if date(name) > begin}
    found = highest_first(n for n in names if n in later or not is_older_by_name(n, chosen))
    places: Counter[str] = Counter()

    def place(name: str) -> tuple[bool, int]:
        form = numbered(name)[0]
        places[form] += 1
        return name not in later, places[form]

    found.sort(key=place)
    if len(found) > _MAX_ASKED:
        text = "'%s' is taken; of the %d names beside it that may be newer only %d are looked at, "
        text += "not '%s', for one"
        logger.warning(text, chosen.path, len(found), _MAX_ASKED, found[_MAX_ASKED])
    return found[:_MAX_ASKED]


def doubts(others: Iterable[Stored], chosen: Stored, runs: Runs) -> Skipped:
    """Returns which of the others, the newest first, may be newer than the chosen one, and why.

    Of those whose names have one form the highest stands for all.
    """
    told: list[tuple[str, str]] = []
    for other in others:
        why = _doubt(other, chosen, runs)
        if why and not any(is_lower(other.tag, tag) for tag, _ in told):
            taken = f"'{chosen.tag}' was taken, {_why(chosen, other)}"
            told.append((other.tag, f"whole, but {why}: {taken}; tag='{other.tag}' takes this one"))
    return tuple(told)


def _doubt(other: Stored, chosen: Stored, runs: Runs) -> str:
    """Returns why nobody knows whether `other` is newer; "" if it is older, or a copy."""
    record, taken = other.record, chosen.record
    if record is None:
        is_older = is_older_by_name(other.tag, chosen)
        return "" if is_older else "no manager saved it, and its name does not say that it is older"
    if other.is_ours or other.save_id == chosen.save_id:
        return ""
    if taken is not None:
        is_one_run = record.run == taken.run or "" in (record.run, taken.run)
        is_one_run = is_one_run or (runs.have(record) and runs.have(taken))
        is_lower_step = chosen.is_ours and record.step <= taken.step
        if record.order < taken.order if is_one_run else is_lower_step:
            return ""
    if not other.is_in_place:
        return f"its record names '{record.tag}', so it is a copy, or was renamed"
    if record.run and record.run == getattr(taken, "run", None):
        return "it is a later commit than the pointer knows, perhaps of a copied root"
    return "it is of another run"


def _why(chosen: Stored, other: Stored) -> str:
    """Returns why this one of two comes first."""
    if chosen.record is not None:
        of = "this root" if chosen.is_ours else "all runs" if chosen.is_in_place else "all copies"
        return f"the last commit of {of}"
    if other.record is not None:
        return "for it is no copy"
    (form, numbers), (_, others) = numbered(chosen.tag), numbered(other.tag)
    if form == numbered("step-0")[0]:
        return "for its name is 'step-N'"
    return "for the numbers in its name" if numbers > others else "the last by the alphabet"
