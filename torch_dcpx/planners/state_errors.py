"""Errors of a state that has no names: it contains itself, or two of its values have one name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch_dcpx.errors import OptionError, PlanError, with_article
from torch_dcpx.tensors.memory import names_on_meta, refuse_meta

_MAX_SHOWN = 200  # characters of a name
_DUPLICATED = "duplicated flatten key "  # torch's text, behind which the name comes


@contextmanager
def naming_state_errors(state: Any) -> Iterator[None]:
    """Raises the errors of a block that flattens `state` with the name of the value.

    Raises:
        OptionError: the state contains itself, or is nested deeper than Python can follow.
        PlanError: two of its values have one name (torch's text first).
        UnsupportedError: torch gives tensors on meta no memory.
    """
    try:
        yield
    except RecursionError:
        # Not as its cause: a thousand frames would keep the state.
        raise _endless(state) from None
    except ValueError as error:
        name = str(error).removeprefix(_DUPLICATED)
        if isinstance(error, PlanError):
            raise
        if name == str(error):  # torch's, as of tensors on meta without a process group
            way = "give them a device, as torch.empty_like(tensor, device='cpu')"
            refuse_meta(list(names_on_meta(state)), "the state", way)
            raise
        text = f"{error}: two values of the state have this name; rename one of them"
        raise PlanError(text, fqn=name) from error


def _endless(state: Any) -> OptionError:
    """Returns the error of a state in which a dict or list contains itself."""
    names: list[str] = []
    around: list[Any] = [state]  # what lies around the value at hand, by `names`
    depths = {id(state): 0}
    left = [_parts(state)]
    while left:
        name, value = next(left[-1], ("", None))
        if not name:
            left.pop()
            del depths[id(around.pop())]
            del names[-1:]
            continue
        if not isinstance(value, (Mapping, list, tuple)):
            continue
        depth = depths.get(id(value))
        if depth is not None:
            path, kind = _joined([*names, name]), with_article(type(value).__name__)
            where = f"'{_joined(names[:depth])}'" if depth else "the state"
            text = f"state_dict contains itself: '{path}' is {kind} that is {where} again"
            return OptionError(f"{text}; leave it out", option="state_dict")
        depths[id(value)] = len(around)
        names.append(name)
        around.append(value)
        left.append(_parts(value))
    text = "state_dict is nested deeper than Python can follow; save what lies deep as one value"
    return OptionError(f"{text} of its own", option="state_dict")


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields names and values of a dict, list or tuple."""
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
    return ((str(name) or "''", part) for name, part in pairs)


def _joined(names: list[str]) -> str:
    text = ".".join(names)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
