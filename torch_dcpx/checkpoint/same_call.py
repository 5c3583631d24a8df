"""Do all ranks make the same call? They compare it before they write or read."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_dcpx.errors import PlanError
from torch_dcpx.keys.key_map import KeyMap
from torch_dcpx.keys.rules import Rule
from torch_dcpx.tensors.digests import conflicting_names

logger = logging.getLogger("torch_dcpx")

_MAX_SHOWN = 5
_MAX_TEXT = 80  # characters shown of one value
_MAX_SENT = 1000  # characters of globs that ranks send each other; of more, a digest


@dataclass(frozen=True)
class Call:
    """One rank's call of the method `name`, which the coordinator gets pickled; small."""

    name: str
    arguments: dict[str, Any]  # by name, equal on all ranks: texts, numbers, kinds of parts
    digests: dict[str, bytes] = field(default_factory=dict)  # of values; differences are logged
    note: Any = None  # anything else for the coordinator


def check_same_call(calls: Sequence[Call], of: str = "CheckpointManager") -> Call:
    """Returns the coordinator's call if all calls, by rank, are equal to it.

    Raises:
        PlanError: ranks differ; it names them, the method of the class `of`, and the differences.
    """
    first = calls[0]
    differing: list[str] = []
    for rank, call in enumerate(calls[1:], 1):
        if call.name != first.name:
            differing.append(f"rank {rank} called {call.name}, rank 0 {first.name}")
            continue
        wrong = [
            f"{name}={_shown(call, first, name)} where rank 0 has {_shown(first, call, name)}"
            for name in {**first.arguments, **call.arguments}
            if call.arguments.get(name) != first.arguments.get(name)
        ]
        if wrong:
            differing.append(f"rank {rank}: {'; '.join(wrong)}")
    if differing:
        shown = ". ".join(differing[:_MAX_SHOWN])
        more = f"; {len(differing)} ranks in all" if len(differing) > _MAX_SHOWN else ""
        raise PlanError(
            f"{first.name} of {of}: not the same call on every rank: {shown}{more}; "
            "nothing was done"
        )
    for name, ranks in conflicting_names(call.digests for call in calls).items():
        logger.warning(
            "%s: %s differs over the ranks (%s have values of their own); rank 0's is kept: put "
            "what is each rank's own into a PerRank",
            first.name,
            name,
            ", ".join(f"rank {rank}" for rank in ranks[:_MAX_SHOWN]),
        )
    return first


def told_globs(globs: Collection[str] | None) -> list[str] | str | None:
    """Returns globs as ranks compare them: sorted, each once; of many a digest."""
    if globs is None:
        return None
    each = sorted(set(globs))
    text = repr(each)
    if len(text) <= _MAX_SENT:
        return each
    return f"{text[:_MAX_SENT]}... {len(each)} globs ({_digest(text)})"


def told_rules(key_map: KeyMap | None) -> str | None:
    """Returns rules as ranks compare them: all but the code of functions."""
    if key_map is None:
        return None
    text = repr([_told(rule) for rule in key_map.rules])
    return f"{len(key_map.rules)} rules ({_digest(text)}), wrappers={key_map.wrappers}"


def has_functions(key_map: KeyMap) -> bool:
    """Returns whether the rules hold code, which `told_rules` leaves out."""
    is_own = type(key_map).resolve is not KeyMap.resolve
    return is_own or any(not isinstance(rule, (Mapping, tuple)) for rule in key_map.rules)


def _told(rule: Rule) -> object:
    if isinstance(rule, Mapping):
        return sorted(rule.items(), key=repr)
    if isinstance(rule, tuple):
        return type(rule).__name__, [_plain(value) for value in rule]
    return "a function"


def _plain(value: object) -> object:
    """Returns lists as tuples, and the text of a compiled pattern, whose `repr` cuts long ones."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    return (value.pattern, value.flags) if isinstance(value, re.Pattern) else value


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=6).hexdigest()


def _shown(call: Call, other: Call, name: str) -> str:
    """Returns an argument as text; of a long one, the part around the first difference."""
    if name not in call.arguments:
        return "nothing"
    text = repr(call.arguments[name])
    if len(text) <= _MAX_TEXT:
        return text
    pairs = zip(text, repr(other.arguments.get(name)), strict=False)
    differs = next((at for at, (own, its) in enumerate(pairs) if own != its), len(text))
    begin = max(0, min(differs - _MAX_TEXT // 2, len(text) - _MAX_TEXT))
    end = begin + _MAX_TEXT
    return f"{'...' if begin else ''}{text[begin:end]}{'...' if end < len(text) else ''}"
