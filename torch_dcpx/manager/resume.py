"""What `resume` does where the newest checkpoint is damaged: it takes the commit before it.

1. Bytes of a checkpoint are not what was written: its load raises a `CorruptionError`, on which the
   ranks agree as on any error of a load.
2. All ranks pass it over and choose again: the newest of those that were not passed over. The
   coordinator notes what is damaged, so that retention lets it take no good one's place.
3. What is read then overwrites all that the damaged read may have filled. Where it would not, or
   does not fit, the damage is the error: nobody goes on with parts of two checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeGuard, TypeVar

from torch_dcpx.errors import CorruptionError, PlanError, UnsafePickleError, UnsupportedError
from torch_dcpx.load_report import LoadReport
from torch_dcpx.manager.root import ManagerRoot
from torch_dcpx.manager.wanted import Chosen, PassedOver, ResumeInfo, Wanted
from torch_dcpx.ranks.exchange import Exchange
from torch_dcpx.reader.pretrained_reader import stored_sizes

_T = TypeVar("_T")

_MAX_SHOWN = 5  # names in one message

logger = logging.getLogger("torch_dcpx")


class _Damage(NamedTuple):
    """What was passed over, and why. Not the error, whose frames would keep what was read."""

    over: PassedOver
    path: str
    fields: dict[str, Any]


class Attempts:
    """What one `resume` has tried so far: the same on every rank."""

    def __init__(self, root: ManagerRoot, tag: str | int | None, fallback: bool) -> None:
        """Begins with none.

        Args:
            root: of the checkpoints.
            tag: that is asked for; it has no other in its place.
            fallback: whether the newest has.
        """
        self.tag = tag
        self._root = root
        self._fallback = fallback
        self._damages: list[_Damage] = []
        self._skipped: tuple[tuple[str, str], ...] = ()

    @property
    def passed_over(self) -> tuple[PassedOver, ...]:
        """What was damaged, the newest first."""
        return tuple(damage.over for damage in self._damages)

    @property
    def passed_tags(self) -> list[str]:
        """The tags of what was damaged."""
        return [damage.over.tag for damage in self._damages]

    @property
    def told(self) -> dict[str, Any]:
        """What all ranks compare."""
        passed = self.passed_tags
        return {"fallback": self._fallback, **({"passed": passed} if passed else {})}

    def until_read(self, attempt: Callable[[], _T | None]) -> _T:
        """Returns what an attempt gives, and repeats one that gives None.

        Raises:
            CorruptionError: what was saved before something damaged does not fit.
        """
        while True:
            try:
                found = attempt()
            except (PlanError, UnsupportedError) as error:
                if self._damages:
                    self._raise(f"what was to take its place does not fit: {error}", error)
                raise
            if found is not None:
                return found

    def tell_damaged(self) -> None:
        """Writes down what was passed over so far; asked of the coordinator, in an exchange."""
        if self._damages:
            self._root.tell_damaged()

    def is_fresh(self, chosen: Chosen) -> bool:
        """Returns whether there is nothing to load; notes what was skipped on the way.

        Raises:
            CorruptionError: all that was there is damaged.
        """
        self._skipped = chosen.skipped
        if chosen.tag is None and self._damages:
            more = "".join(f"; '{tag}': {reason}" for tag, reason in self._skipped)
            self._raise(f"there is no other whole checkpoint{more}")
        return chosen.tag is None

    def passes_over(self, chosen: Chosen, error: BaseException, *, logs: bool) -> bool:
        """Returns whether an older checkpoint is to be loaded where this load has failed.

        Args:
            chosen: what was loaded.
            error: of the load, agreed by the ranks.
            logs: whether this rank says so.
        """
        if chosen.tag is None or not _is_damage(error, chosen.path):
            return False
        self._root.note_damaged(chosen.tag)
        if self.tag is not None or not self._fallback:
            return False
        file = str(error.path)
        fields = {name: getattr(error, name) for name in CorruptionError.FIELDS}
        over = PassedOver(chosen.tag, file, error.message)
        self._damages.append(_Damage(over, chosen.path, fields))
        if logs:
            logger.warning(
                "passed over checkpoint '%s' beneath '%s', for '%s' is damaged; the one before it "
                "is tried: %s", chosen.tag, self._root.path, file, error.message,
            )  # fmt: skip
        return True

    def check_filled(self, missing: Sequence[str], wanted: Wanted, exchange: Exchange) -> None:
        """Makes sure that nothing of a damaged checkpoint is left in what was filled.

        Args:
            missing: names that were not read, as `strict=False` allows.
            wanted: what was asked of the checkpoint that was read.
            exchange: in which the ranks agree.

        Raises:
            CorruptionError: something may be, on any rank.
        """

        def check() -> None:
            for damage in self._damages if missing else ():
                # Behind a map the names are not those that are stored.
                held = missing if wanted.rules is not None else stored_sizes(damage.path)
                left = [name for name in missing if name in held]
                if left:
                    names = ", ".join(left[:_MAX_SHOWN])
                    self._raise(f"what was read in its place does not hold {names}")

        with exchange:
            exchange.all_reduce("fallback", check, lambda _: None)

    def resumed(self, chosen: Chosen, content: Any, report: LoadReport) -> ResumeInfo:
        """Returns what `resume` returns."""
        metrics = {} if chosen.record is None else chosen.record.metrics
        return ResumeInfo(
            chosen.tag, chosen.step, content, metrics, report, chosen.skipped, self.passed_over
        )

    def _raise(self, why: str, cause: BaseException | None = None) -> NoReturn:
        damages = "; ".join(f"'{tag}' ('{file}': {text})" for tag, file, text in self.passed_over)
        raise CorruptionError(
            f"resume from '{self._root.path}': damaged: {damages}; {why}. What was to be filled "
            "may hold bytes of them; tag= takes a checkpoint by name",
            **self._damages[0].fields,
        ) from cause


def _is_damage(error: BaseException, path: str) -> TypeGuard[CorruptionError]:
    """Returns whether bytes of a file of the checkpoint in `path` are not what was written.

    A class that is on no list is no damage, nor are names in the metadata that contradict each
    other, and what some `load_state_dict` reads elsewhere is no part of the checkpoint.
    """
    if not isinstance(error, CorruptionError) or isinstance(error, UnsafePickleError):
        return False
    return error.path is not None and Path(error.path).is_relative_to(path)
