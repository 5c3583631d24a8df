"""Does a state fit a checkpoint? All differences at once, before a byte is read.

Stock raises at the first name, converts dtypes silently, puts objects where tensors were, and does
not tell the other ranks. Here one error names all differences of all ranks, and stored names that
are near to missing ones.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torch_dcpx._arguments import check_bool, check_choice, checked_globs
from torch_dcpx._compat import dtype_name, wanted_sizes
from torch_dcpx._globs import Patterns
from torch_dcpx._text import counted, grouped
from torch_dcpx.errors import MismatchError
from torch_dcpx.keys.mapped_state import MappedState, MappedTarget
from torch_dcpx.keys.wrappers import unwrapped
from torch_dcpx.metadata.lazy import outline_of
from torch_dcpx.planners.load_planner import unlike_names
from torch_dcpx.reader.hints import command
from torch_dcpx.tensors.memory import refuse_nested

_T = TypeVar("_T")

_MAX_SHOWN = 10  # of each list, in the message
_MAX_EXAMPLES = 3  # of more names than that
_MAX_NAME = 160  # characters of a name, in the message
_MAX_LENGTH = 300  # characters of names that are compared letter by letter
_MAX_COMPARED = 1000  # stored names, with each missing one
_MAX_NEAREST = 3  # stored names for a missing one


class LoadRules(NamedTuple):
    """The differences that are no error."""

    is_strict: bool  # whether a name that is not stored is an error
    may_miss: Callable[[str], object]  # true for names that may be missing even so
    is_cast_allowed: bool
    globs: tuple[str, ...] = ()  # of names that may be missing
    call: str = "load"  # whose arguments a message names
    must_find: bool = False  # whether it is an error that no rank's names are stored
    # Raises for names that no rank asks for, of all stored ones. None: nobody need ask.
    check_left: Callable[[Sequence[str], Collection[str]], None] | None = None
    learn: Callable[[Collection[str]], None] = lambda _: None  # names, which then are no globs

    @classmethod
    def of(cls, strict: Any, allow_missing: Any, cast: Any, call: str = "load") -> LoadRules:
        """Returns the rules of `load`'s arguments. Raises OptionError: one of them cannot work."""
        check_bool("strict", strict)
        check_choice("cast", cast, ("error", "allow"))
        globs = checked_globs("allow_missing", allow_missing, "['head.*']")
        patterns = Patterns(globs)
        return cls(strict, patterns, cast == "allow", globs, call, learn=patterns.learn)


class Differences(NamedTuple):
    """The differences between the state of one rank and the checkpoint."""

    missing: tuple[str, ...] = ()  # not stored, forgiven or not
    refused: tuple[str, ...] = ()  # those of them that are not forgiven
    shapes: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()  # name, stored, wanted
    dtypes: tuple[tuple[str, str, str], ...] = ()  # name, stored, wanted; forgiven or not
    kinds: tuple[tuple[str, str, str], ...] = ()  # name, stored, wanted
    lost: tuple[tuple[str, str], ...] = ()  # stored names that a part cannot take, and why
    nearest: Mapping[str, tuple[str, ...]] = {}  # stored names for the first refused ones
    wrapped: int = 0  # number of refused ones that `KeyMap()` finds
    found: int = 1  # number of names that are stored
    way_in: tuple[str, str] = ("", "")  # part of the stored names, or of the state's, that is more

    @property
    def unlike(self) -> tuple[list[str], list[str]]:
        """Names of stored tensors of other sizes or dtypes, and of other kinds."""
        sized = [row[0] for row in (*self.shapes, *self.dtypes)]
        return sized, [row[0] for row in self.kinds]

    def is_refused(self, rules: LoadRules) -> bool:
        """Returns whether the load cannot go on."""
        casts = self.dtypes and not rules.is_cast_allowed
        lost = self.lost and rules.is_strict
        # A rank alone may find nothing, but not all of them: `mismatch_error`.
        return bool(self.refused or self.shapes or self.kinds or casts or lost)


def compare(
    state: Mapping[str, Any],
    stored: Mapping[str, Any],
    rules: LoadRules,
    *,
    sources: Mapping[str, Collection[str]] | None = None,
    is_dtype_known: bool = True,
    mapped: MappedState | None = None,
) -> Differences:
    """Compares a flat state with the entries of a checkpoint's metadata.

    Args:
        sources: if a user's planner has planned, the stored names that fill each value: shapes and
            kinds are not compared. None: each value has the entry of its own name.
        is_dtype_known: whether the read fills the state's own tensors.
        mapped: if `state` has stored names, the differences that the map has noted.

    Raises:
        UnsupportedError: a nested tensor without sizes.
    """
    rules.learn(state)
    missing, shapes, dtypes, kinds = [], [], [], []
    outline = outline_of(stored)
    asked = unlike_names(state, stored, has_dtypes=is_dtype_known) if sources is None else state
    for fqn in asked:
        target, entry = state[fqn], outline(fqn)
        names = (sources or {}).get(fqn, () if entry is None else (fqn,))
        is_tensor = isinstance(target, torch.Tensor) or hasattr(target, "__create_chunk_list__")
        if not names:
            missing.append(fqn)
        elif sources is None and is_tensor != isinstance(entry, TensorStorageMetadata):
            kind = "tensor" if is_tensor else f"object ({type(target).__name__})"
            kinds.append((fqn, "object" if is_tensor else "tensor", kind))
        elif is_tensor:
            refuse_nested(fqn, target)
            entries = [one for one in map(outline, names) if isinstance(one, TensorStorageMetadata)]
            if sources is None:
                shapes += _shape_rows(fqn, target, entries)
            if is_dtype_known:
                dtypes += _dtype_rows(fqn, target, entries)
    count = len(state) - len(missing)
    if mapped is not None:
        missing += mapped.missing
        shapes += mapped.shapes
        dtypes += mapped.dtypes if is_dtype_known else []
        kinds += mapped.kinds
    refused = [fqn for fqn in missing if rules.is_strict and not rules.may_miss(fqn)]
    found = Differences(
        tuple(missing), tuple(refused), tuple(shapes), tuple(dtypes), tuple(kinds), found=count
    )
    if not refused and (count or not missing):
        return found
    near = NearNames(name for name in stored if name not in state)
    nearest = {fqn: near.nearest(fqn) for fqn in (refused or missing)[:_MAX_SHOWN]}
    if refused and mapped is None:
        wrapped = _count_wrapped(refused, state, stored)
        found = found._replace(wrapped=wrapped, way_in=near.way_in(refused))
    return found._replace(nearest=nearest)


def mismatch_error(
    path: str, all_differences: Sequence[Differences], rules: LoadRules
) -> MismatchError | None:
    """Returns one error of the differences of all ranks, by rank; None if the load can go on."""
    ranks = [rank for rank, own in enumerate(all_differences) if own.is_refused(rules)]
    missing = _union(own.refused for own in all_differences)
    is_vain = rules.must_find and not any(own.found for own in all_differences)
    if is_vain and not ranks:
        missing = _union(own.missing for own in all_differences)
        ranks = [rank for rank, own in enumerate(all_differences) if own.missing]
    if not ranks:
        return None
    tables: dict[str, Sequence[Any]] = {
        "shapes": _union(own.shapes for own in all_differences),
        "dtypes": () if rules.is_cast_allowed else _union(own.dtypes for own in all_differences),
        "kinds": _union(own.kinds for own in all_differences),
    }
    lost = _union(own.lost for own in all_differences) if rules.is_strict else ()
    nearest = {fqn: near for own in all_differences for fqn, near in own.nearest.items() if near}
    differing = ", ".join(_counts(len(missing), tables, len(lost)))
    where = ""
    if len(ranks) < len(all_differences):
        which = f"rank{'s' if len(ranks) > 1 else ''} {_listed(ranks, str)}"
        where = f" on {which} of {len(all_differences)}"
    lines = [
        f"the state does not fit the checkpoint in '{path}': {differing}{where}; nothing was read"
    ]
    if is_vain:
        lines[0] = f"'{path}' holds nothing of what is asked for: {differing}; nothing was read"
    if missing:
        if len(missing) > _MAX_SHOWN:
            lines.append(f"missing: {grouped(missing)}")
            some = [*nearest, *(name for name in missing if name not in nearest)][:_MAX_EXAMPLES]
            lines.append(f"  such as {', '.join(_missing_text(name, nearest) for name in some)}")
        else:
            lines.append(f"missing: {_listed(missing, lambda fqn: _missing_text(fqn, nearest))}")
        if is_vain:
            ways = [_way_of_vain(path, missing, nearest)]
        else:
            ways = [*_ways_out(all_differences, missing, rules)]
        lines += [f"  {way}" for way in ways]
    for what, rows in tables.items():
        if rows:
            way = "; cast='allow' converts them" if what == "dtypes" else ""
            lines.append(f"{what}: {_listed(rows, _difference_text)}{way}")
    if lost:
        why = _listed(lost, lambda row: f"{_short(row[0])} ({row[1]})")
        lines.append(f"saved, and not given back: {why}; strict=False leaves them out")
    names = (*missing, *(row[0] for rows in (*tables.values(), lost) for row in rows))
    return MismatchError(
        "\n".join(lines),
        fqn=names[0],
        path=path,
        missing=missing,
        nearest=nearest,
        ranks=tuple(ranks),
        **tables,
    )


_TABLES = {"shapes": "shape", "dtypes": "dtype", "kinds": "kind"}


def _counts(missing: int, tables: Mapping[str, Sequence[Any]], lost: int) -> Iterator[str]:
    """Yields "3 names are missing", "1 dtype differs" and so on."""
    if lost:
        yield f"{counted(lost, 'entry', 'entries')} {'has' if lost == 1 else 'have'} no place"
    if missing:
        yield f"{counted(missing, 'name')} {'is' if missing == 1 else 'are'} missing"
    for what, rows in tables.items():
        if rows:
            yield f"{counted(len(rows), _TABLES[what])} {'differs' if len(rows) == 1 else 'differ'}"


def _ways_out(
    all_differences: Sequence[Differences],
    missing: Sequence[str],
    rules: LoadRules,
) -> Iterator[str]:
    """Yields what a caller can do about missing names, by arguments that the call has."""
    wrapped = max(own.wrapped for own in all_differences)
    if wrapped:
        name = "translate" if rules.call == "resume" else "key_map"
        stored = "is stored under a name" if wrapped == 1 else "are stored under names"
        yield f"{wrapped} of them {stored} with other wrappers: {name}=KeyMap() leaves them out"
    ways = {own.way_in for own in all_differences if own.refused}
    (more, less), *others = ways
    is_plain = not (others or wrapped) and rules.call == "load"
    if is_plain and more:
        yield f"they are stored beneath {more!r}: load({{{more!r}: state_dict}}, ...)"
    if is_plain and less:
        yield f"they are stored without {less + '.'!r}: load(state_dict[{less!r}], ...)"
    if rules.call == "resume" and any(name.startswith("optimizer.") for name in missing):
        yield "load_optimizer=False leaves optimizer and scheduler as they are"
    if rules.call == "resume" and any(name.startswith("model.") for name in missing):
        yield "CheckpointManager(trainable_only=True) leaves frozen parameters as they are"
    yield "strict=False, or allow_missing=[globs], leaves them as they are"


def _way_of_vain(path: str, missing: Sequence[str], nearest: Mapping[str, Sequence[str]]) -> str:
    """Returns what to do where a model finds none of its names."""
    pairs = [(name, near) for name, nears in nearest.items() for near in nears]
    if "adapter_model." in path or any(".lora_" in near for _, near in pairs):
        return "it holds an adapter of peft: PeftModel.from_pretrained(base, folder) loads it"
    if any(".lora_" in name for name in missing):
        return "the model is peft's: load the base first, get_peft_model wraps it afterwards"
    mores = {name.removesuffix(near) for name, near in pairs if name.endswith(f".{near}")}
    lesses = {near.removesuffix(name) for name, near in pairs if near.endswith(f".{name}")}
    if len(mores) == 1 and not lesses:
        return f"the stored names lack {(more := mores.pop())!r}: key_map=KeyMap((r'^', {more!r}))"
    if len(lesses) == 1 and not mores:
        less = lesses.pop()
        return f"the model's names lack {less!r}: key_map=KeyMap((r'^{re.escape(less)}', ''))"
    return f"is it the file of this model? {command('inspect', path)} shows its names"


def _count_wrapped(names: Sequence[str], state: Iterable[str], stored: Iterable[str]) -> int:
    """Returns how many of these names of a state a load with `KeyMap()` finds: those that are the
    only one that differs from the only stored one by wrappers alone.
    """
    wanted, there = Counter(map(unwrapped, state)), Counter(map(unwrapped, stored))
    return sum(wanted[bare] == there[bare] == 1 for bare in map(unwrapped, names))


def _unwrapped(name: str) -> str:
    """Returns a name without the components of wrappers, and without a leading `model`."""
    parts = unwrapped(name).split(".")
    begin = next((i for i, part in enumerate(parts) if part != "model"), 0)
    return ".".join(parts[begin:])


class NearNames:
    """Finds stored names that are near to a missing one.

    Wrappers put a component into a name (`_orig_mod.` of torch.compile, `module.` of DDP) where the
    save had none, or the other way round. States are nested one level deeper or shallower. Names
    are mistyped.
    """

    def __init__(self, stored: Iterable[str]) -> None:
        self._stored = list(stored)
        self._by_unwrapped: dict[str, list[str]] = {}
        for name in self._stored:
            self._by_unwrapped.setdefault(_unwrapped(name), []).append(name)

    def way_in(self, names: Sequence[str]) -> tuple[str, str]:
        """Returns the first part of the stored names that all these lack, and the first part that
        all these have and the stored ones lack; "" where there is none.
        """
        stored, first = set(self._stored), names[0]
        mores = [one.removesuffix(f".{first}") for one in stored if one.endswith(f".{first}")]
        for more in mores:
            if "." not in more and all(f"{more}.{name}" in stored for name in names):
                return more, ""
        less = first.partition(".")[0]
        if all(name.startswith(f"{less}.") and name[len(less) + 1 :] in stored for name in names):
            return "", less
        return "", ""

    def nearest(self, name: str) -> tuple[str, ...]:
        """Returns up to three stored names, the most likely first."""
        found = self._by_unwrapped.get(_unwrapped(name), [])
        if not found:
            found = [
                one
                for one in self._stored
                if one.endswith(f".{name}") or (one and name.endswith(f".{one}"))
            ]
        return tuple((found or self._alike(name))[:_MAX_NEAREST])

    def _alike(self, name: str) -> list[str]:
        if len(name) > _MAX_LENGTH:
            return []
        last = name.rpartition(".")[2]
        short = [one for one in self._stored if len(one) <= _MAX_LENGTH]
        # Of too many, those of the same parameter are the most likely.
        short.sort(key=lambda one: one.rpartition(".")[2] != last)
        return difflib.get_close_matches(name, short[:_MAX_COMPARED], _MAX_NEAREST, cutoff=0.75)


def _shape_rows(
    fqn: str, target: Any, entries: Iterable[TensorStorageMetadata]
) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    sizes = wanted_sizes(target)
    if sizes is None:
        return []
    return [(fqn, tuple(one.size), sizes) for one in entries if tuple(one.size) != sizes]


def _dtype_rows(
    fqn: str, target: Any, entries: Iterable[TensorStorageMetadata]
) -> list[tuple[str, str, str]]:
    wanted: Iterable[Any] = (getattr(target, "dtype", None),)
    if isinstance(target, MappedTarget):
        wanted = target.dtypes()
    return [
        (fqn, dtype_name(one.properties.dtype), dtype_name(dtype))
        for one in entries
        for dtype in wanted
        if isinstance(dtype, torch.dtype) and dtype != one.properties.dtype
    ]


def _union(lists: Iterable[Sequence[_T]]) -> tuple[_T, ...]:
    return tuple(dict.fromkeys(one for own in lists for one in own))


def _short(name: str) -> str:
    return repr(name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}...")


def _listed(rows: Sequence[_T], text: Callable[[_T], str]) -> str:
    more = f" and {len(rows) - _MAX_SHOWN} more" if len(rows) > _MAX_SHOWN else ""
    return ", ".join(map(text, rows[:_MAX_SHOWN])) + more


def _missing_text(fqn: str, nearest: Mapping[str, Sequence[str]]) -> str:
    near = " or ".join(map(_short, nearest.get(fqn, ())))
    return _short(fqn) + (f" (did you mean {near}?)" if near else "")


def _difference_text(row: tuple[str, object, object]) -> str:
    fqn, stored, wanted = row
    return f"{_short(fqn)} stored {stored}, wanted {wanted}"
