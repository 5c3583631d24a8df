"""The error of one rank as all ranks of an operation raise it.

A DcpxError keeps its class and fields; any other error becomes a RankError. The first line of the
message names the place: "rank 3 (node7), writing: pwrite 4096 B at offset 0 of ...: No space left".
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch_dcpx.errors import DcpxError, RankError, RankLostError

NOT_BEGUN = "; every rank must make this call (is it beneath `if rank == 0`?)"

_MAX_NAMED = 8  # ranks in one message
_MAX_FRAMES = 3  # of the place where a foreign error was raised


def from_rank(pickled: bytes) -> Any:
    """Unpickles a value of a rank of this job. DCP gathers plans with the same trust."""
    return pickle.loads(pickled)  # noqa: S301


@dataclass(frozen=True)
class RankFailure:
    """A rank's error, as it tells the others: pickled, between ranks of one job only."""

    rank: int
    host: str
    phase: str
    text: str  # type and message, "KeyError: 'x'"
    frames: str  # where it was raised
    type_name: str  # "builtins.KeyError"
    pickled: bytes | None  # the error, where it survives
    calls: tuple[str, ...] = ()  # that it ends, by CallId.identity

    @classmethod
    def of(
        cls, error: BaseException, rank: int, host: str, phase: str, calls: tuple[str, ...] = ()
    ) -> RankFailure:
        """Returns the failure for an error of this rank, even one that pickle refuses."""
        kind = type(error)
        return cls(
            rank,
            host,
            phase,
            "".join(traceback.format_exception_only(kind, error)).strip(),
            "".join(traceback.format_tb(error.__traceback__)[-_MAX_FRAMES:]).rstrip(),
            f"{kind.__module__}.{kind.__qualname__}",
            _pickled(error),
            calls,
        )

    @property
    def where(self) -> str:
        return f"rank {self.rank} ({self.host}), {self.phase}: "


def lost_ranks(failure: RankFailure) -> tuple[int, ...]:
    """Returns the ranks that a failure reports as lost."""
    error = _original(failure)
    return (error.ranks or ()) if isinstance(error, RankLostError) else ()


def _pickled(error: BaseException) -> bytes | None:
    # A user's class may refuse, or come back as another: then the text has to serve.
    try:
        pickled = pickle.dumps(error)
        return pickled if type(from_rank(pickled)) is type(error) else None
    except Exception:  # noqa: BLE001 - whatever their __reduce__ raises
        return None


def _original(failure: RankFailure) -> BaseException | None:
    if failure.pickled is None:
        return None
    try:
        error = from_rank(failure.pickled)
    except Exception:  # noqa: BLE001 - a class that this rank cannot import
        return None
    return error if isinstance(error, BaseException) else None


def error_of(failures: Sequence[RankFailure], own: BaseException | None = None) -> DcpxError:
    """Returns the error that all ranks raise.

    Args:
        failures: at least one. The lowest rank's gives the class; the message names the others.
        own: this rank's own error, if it is the lowest rank's: it becomes the cause.
    """
    first, *others = sorted(failures, key=lambda failure: failure.rank)
    original = _original(first)
    if isinstance(original, RankLostError):
        return original  # names the lost ranks itself; who noticed does not matter
    also = [f"{other.where}{other.text}".split("\n", 1)[0] for other in others[: _MAX_NAMED - 1]]
    if len(others) > len(also):
        also.append(f"and {len(others) - len(also)} more ranks")
    if isinstance(original, DcpxError):
        fields = {name: getattr(original, name) for name in original.FIELDS}
        message = "\n".join([first.where + original.message, *also])
        typed = type(original)(message, **fields)
        typed.__cause__ = own
        return typed
    message = "\n".join([first.where + first.text, *also, first.frames]).rstrip()
    error = RankError(
        message, rank=first.rank, host=first.host, phase=first.phase, original=first.type_name
    )
    error.__cause__ = own if own is not None else original
    return error


def lost_error(lost: Sequence[tuple[int, str, str]], waited_s: float, step: str) -> RankLostError:
    """Returns the error of ranks that did not come.

    Args:
        lost: (rank, host, phase) of each, at least one; no host and phase if it never entered.
        step: for which this rank waited, "'plan' of the save".
    """
    names = [
        f"rank {rank} ({host}), {phase}" if phase else f"rank {rank}, not even begun"
        for rank, host, phase in lost[:_MAX_NAMED]
    ]
    if len(lost) > _MAX_NAMED:
        names.append(f"and {len(lost) - _MAX_NAMED} more")
    hint = "" if all(phase for _, _, phase in lost) else NOT_BEGUN
    return RankLostError(
        f"{'; '.join(names)}: no sign within {waited_s:.1f} s in {step}: "
        "killed, stopped or stuck, as where its storage does not answer, or it failed before it "
        f"made this call{hint}",
        ranks=tuple(rank for rank, _, _ in lost),
        phases=tuple(phase or "not begun" for _, _, phase in lost),
        waited_s=waited_s,
    )
