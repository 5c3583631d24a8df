"""Waiting for other ranks: nobody waits long without a look at who is missing, and a word of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from torch_dcpx._waiting import Deadline
from torch_dcpx.ranks.store_keys import StoreKeys

logger = logging.getLogger("torch_dcpx")

_FIRST_LOOK_S = 1.0
_MAX_LOOK_S = 30.0
_FIRST_WARNING_S = 30.0
_WARNING_S = 60.0  # between two
_MAX_NAMED = 8


def wait_looking(
    keys: StoreKeys,
    key: str,
    deadline: Deadline,
    what: str,
    look: Callable[[], Sequence[int] | None],
) -> bytes | None:
    """Waits for a key; after 30 s a WARNING a minute says for whom.

    Args:
        keys: of the operation.
        key: to wait for.
        deadline: until when.
        what: who waits for what, "'plan' of the save on rank 3 (node7)".
        look: returns the ranks that are missing, now and then; None ends the wait.

    Returns:
        The key's value; None when the deadline has passed, or `look` has ended the wait.
    """
    waiting = deadline.anew(float("inf"))
    look_s, warn_at_s = _FIRST_LOOK_S, _FIRST_WARNING_S
    while True:
        value = keys.wait_for(key, deadline, deadline.sooner(look_s))
        if value is not None or deadline.has_passed:
            return value
        look_s = min(2 * look_s, _MAX_LOOK_S)
        missing = look()
        if missing is None:
            return None
        if waiting.waited_s >= warn_at_s:
            warn_at_s = waiting.waited_s + _WARNING_S
            _warn(what, missing, waiting.waited_s, deadline)


def _warn(what: str, missing: Sequence[int], waited_s: float, deadline: Deadline) -> None:
    named = ", ".join(map(str, missing[:_MAX_NAMED]))
    if len(missing) > _MAX_NAMED:
        named += f" and {len(missing) - _MAX_NAMED} more"
    whom = f"rank{'s' if len(missing) > 1 else ''} {named}" if missing else "the answer of rank 0"
    since = time.strftime("%H:%M:%S", time.localtime(time.time() - waited_s))
    logger.warning(
        "%s waits for %s since %s (%.0f s); it gives up in %.0f s",
        what, whom, since, waited_s, deadline.remaining_s,
    )  # fmt: skip
