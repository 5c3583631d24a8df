"""One rank's part of a resume: the state for the load to fill, and the small values.

`Wanted` raises for missing parts before the read. Behind it, it decodes and merges small values,
and gives them to their objects after the tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from torch_dcpx._text import counted, some
from torch_dcpx.checkpoint.load import load_for_another_call
from torch_dcpx.checkpoint.load_checks import LoadRules
from torch_dcpx.checkpoint.stateful import LoadPart
from torch_dcpx.errors import CorruptionError, MismatchError
from torch_dcpx.keys.key_map import KeyMap
from torch_dcpx.keys.mapped_tensor import Sizes
from torch_dcpx.manager.content import (
    Merge,
    PerRank,
    check_mergeable,
    decode_content,
    merged,
    with_own,
)
from torch_dcpx.manager.optimizer_kinds import GROUPS, STATE
from torch_dcpx.manager.schedulers import (
    SCHEDULER_CLASSES,
    are_unlike,
    check_alike,
    check_sort,
    noted_classes,
    paired_states,
)
from torch_dcpx.manager.state import Parts
from torch_dcpx.manager.stored import Record, Stored
from torch_dcpx.manager.translate import (
    MODEL,
    NAMED_GROUPS,
    OPTIMIZER,
    TrainingRules,
    owner_of,
    owners_of,
)
from torch_dcpx.options import ReadOptions
from torch_dcpx.reader.reader import quiet_reader

_SMALL = ("lr_scheduler", "dataloader")  # parts that are saved as small values


@dataclass(eq=False)
class Wanted(LoadPart):
    """One rank's share of a resume from the chosen checkpoint; as a part, its small values."""

    parts: Parts
    chosen: Stored
    rank: int
    world_size: int
    loads: LoadRules
    merge: Merge
    translate: KeyMap | None
    options: ReadOptions

    is_last = True  # objects get small values when model, optimizers and state are filled

    def __post_init__(self) -> None:
        """Raises MismatchError where the checkpoint lacks a part: the same on every rank."""
        parts, path = self.parts, str(self.chosen.path)
        record = self.chosen.record or Record(self.chosen.tag, 0, 0, 0, {}, (), ())
        self._path, self.record = path, record
        self.loads.learn({*record.per_rank, *(f"state.{key}" for key in parts.state or ())})
        self._check_parts()
        # Each rank's own values that this call gives back; below, the ranks whose values it reads.
        given = {"user_content", *parts.per_rank, *(n for n in _SMALL if n in parts.given)}
        if self.loads.is_strict and parts.state is not None:  # also what only the checkpoint has
            new = (name for name in record.per_rank if name.startswith("state."))
            given |= {n for n in new if n.partition(".")[2] not in parts.state}
        self._names = [n for n in record.per_rank if n in given or n.partition(".")[0] in given]
        check_mergeable(self._names, self.merge, record.ranks, self.world_size, path)
        self._is_same_size = record.ranks == self.world_size
        ranks = [self.rank] if self._is_same_size else range(record.ranks)
        self._ranks = ranks if self._names else ()
        self._shared: dict[str, Any] = {}  # decoded small values, by part
        self._own: dict[str, Any] = {}  # this rank's own values, by path
        self._schedulers: list[tuple[Any, Any]] = []  # each with its state
        self._noted: dict[str, set[str]] = {}  # classes of the saved ones, by place
        self.rules: TrainingRules | None = None  # of the load
        self._model: Any = None  # its part of the load
        self._optimizer: Any = None  # likewise
        self.handed: set[str] = set()  # small parts that have got a value, whole or in part
        self._has_scheduler = parts.lr_scheduler is not None and "lr_scheduler" in record.parts
        self.is_applied = self._has_scheduler or any(
            not name.startswith("user_content") for name in self._names
        )

    def _check_parts(self) -> None:
        """Raises for small parts that were not saved; `load` raises for the others by name."""
        parts, record = self.parts, self.record
        missing = [n for n in _SMALL if n in parts.given and n not in record.parts]
        missing += [name for name in parts.per_rank if name not in record.per_rank]
        missing = [name for name in missing if not self.loads.may_miss(name)]
        if missing and self.loads.is_strict:
            ways = f"allow_missing={missing}, or strict=False, leaves what is missing as it is"
            problem = f"{', '.join(missing)} was not saved there; {ways}"
            message = f"resume from '{self._path}': {problem}"
            raise MismatchError(message, fqn=missing[0], path=self._path, missing=tuple(missing))
        others = [f"state.{key}" for key in parts.state or () if f"state.{key}" in record.per_rank]
        others = [n for n in others if n not in parts.per_rank and not self.loads.may_miss(n)]
        if others and self.loads.is_strict:
            raise MismatchError(
                f"resume from '{self._path}': {', '.join(others)} was saved as a PerRank: give "
                f"PerRank(None); allow_missing={others}, or strict=False, leaves what is there",
                fqn=others[0],
                path=self._path,
                left=tuple(others),
            )

    def target(self) -> dict[str, Any]:
        """Returns the state for `dcpx.load` to fill."""
        parts, is_named = self.parts, NAMED_GROUPS in self.record.parts
        given = parts if self._has_scheduler else parts._replace(lr_scheduler=None)
        self.rules = self._rules(has_named_groups=is_named)
        target = parts.stateful(
            strict=self.loads.is_strict,
            has_named_groups=is_named,
            rules=self.rules,
            may_miss=self.loads.may_miss,
            read=self._read,
            has_scheduler=given.has_scheduler,
            is_target=True,
        )
        self._model, self._optimizer = target.get("model"), target.get("optimizer")
        if self.state_dict():
            target["dcpx"] = self
        return target

    def _read(self, names: Sequence[str]) -> dict[str, Any]:
        """Returns small items of the checkpoint."""
        items: dict[str, Any] = dict.fromkeys(names, "")
        load_for_another_call(items, quiet_reader(self.chosen.path, self.options))
        return items

    def check_left(self, left: Sequence[str], stored: Collection[str]) -> None:
        """Raises MismatchError: nobody takes names that were saved of a part that is given.

        Without `strict` these are left out, but for states of a parameter that the model still has:
        its training would go on without them.
        """
        parts, loads, rules = self.parts, self.loads, self.rules
        owners = tuple(owners_of(parts.optimizer))
        states = tuple(f"{owner}{STATE}." for owner in owners)
        begins = states
        if loads.is_strict:
            begins += tuple(f"{owner}{GROUPS}." for owner in owners)
            begins += (MODEL,) if parts.model is not None else ()
            begins += tuple(f"state.{key}." for key in parts.state or ())
        is_one_lost = loads.is_strict and isinstance(parts.optimizer, Mapping)
        others = {
            name
            for name in left
            if is_one_lost and name.startswith(OPTIMIZER) and not name.startswith(owners)
        }
        owed = [
            name
            for name in left
            if (f"{name}.".startswith(begins) or name in others)
            and not loads.may_miss(name)
            and not (rules is not None and rules.leaves_out(name))
        ]
        if owed and not loads.is_strict:
            taken = {name.removeprefix(MODEL) for name in set(stored).difference(left)}
            rests = {one: next(filter(one.startswith, states)) for one in owed}
            owed = [one for one, begin in rests.items() if owner_of(one[len(begin) :], taken)]
        if owed:
            way = "strict=False, or " if loads.is_strict else ""
            if any(name.startswith(states) for name in owed):
                way = f"add_param_group before the resume takes what an optimizer had; {way}"
            elif not others.isdisjoint(owed):
                way = f"give each optimizer that was saved, under its name; {way}"
            raise MismatchError(
                f"resume from '{self._path}': it holds {counted(len(owed), 'name')} of what was "
                f"saved that nothing here takes: {some(owed)}; {way}"
                "allow_missing=[globs] leaves them out",
                fqn=owed[0],
                path=self._path,
                left=tuple(owed),
            )

    def _rules(self, *, has_named_groups: bool) -> TrainingRules | None:
        if self.translate is None:
            return None
        owners = owners_of(self.parts.optimizer)
        return TrainingRules(self.translate, owners, has_named_groups=has_named_groups)

    @property
    def kept(self) -> list[str]:
        """Names of parameters, and of their states, that the load left as they were."""
        left = [] if self._model is None else [f"{MODEL}{name}" for name in self._model.left]
        return left if self._optimizer is None else [*left, *self._optimizer.kept]

    def held(self, missing: Sequence[str], stored: Mapping[str, Sizes | None]) -> list[str]:
        """Returns those of `missing` and of `kept` that another checkpoint, whose stored names and
        sizes these are, would have filled. Raises: as `TrainingRules.resolve`.
        """
        rules, names = self._rules(has_named_groups=True), stored.keys()
        if rules is not None and self.rules is not None:
            rules.own = self.rules.own
            names = rules.resolve(stored).keys()
        begins = tuple(f"{name}." for name in self.kept)
        left = (name for name in names if f"{name}.".startswith(begins))
        return [*(name for name in missing if name in names), *left]

    @property
    def content(self) -> Any:
        """The user's content, after the load."""
        return self._shared.get("user_content")

    def state_dict(self) -> dict[str, Any]:
        """Returns blank small values."""
        small: dict[str, Any] = {}
        if "user_content" in self.record.parts:
            small["user_content"] = b""
        if self._has_scheduler:
            small["lr_scheduler"] = b""
        if self._names:
            small["rank"] = {str(rank): b"" for rank in self._ranks}
        return small

    def fitted(self, state: dict[str, Any], metadata: Metadata, key: str) -> dict[str, Any]:
        begin = f"{key}.{SCHEDULER_CLASSES}."
        names = metadata.state_dict_metadata
        self._noted = noted_classes(n.removeprefix(begin) for n in names if n.startswith(begin))
        if self._has_scheduler:
            check_sort(self.parts.lr_scheduler, self._noted)
            if are_unlike(self.parts.lr_scheduler, self._noted):  # before anything is filled
                item = f"{key}.lr_scheduler"
                value = decode_content(self._read([item])[item], item, self._path, self.options)
                self._pair(value)
        return state

    def _pair(self, states: Any) -> None:
        """Gives each scheduler its state. Raises: as `paired_states`, `check_alike`."""
        parts, loads = self.parts.lr_scheduler, self.loads
        self._schedulers = paired_states(parts, states)
        check_alike(parts, self._schedulers, self._noted, loads.may_miss, is_strict=loads.is_strict)

    def check(self, state: dict[str, Any]) -> None:
        """Decodes and merges small values. Raises: CorruptionError; as `_pair`, a merge."""
        self._own = self._own_values(state)
        for name in ("user_content", "lr_scheduler"):
            if name in state:
                fqn = f"dcpx.{name}"
                value = decode_content(state[name], fqn, self._path, self.options)
                try:
                    self._shared[name] = with_own(value, self._own)
                except (KeyError, TypeError, RecursionError) as error:
                    raise self._none_of_ours(fqn, error) from error
        if "lr_scheduler" in self._shared:
            self._pair(self._shared["lr_scheduler"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Gives the small values to the caller's objects."""
        parts, own = self.parts, self._own
        for one, its_state in self._schedulers:
            self.handed.add("lr_scheduler")
            one.load_state_dict(its_state)
        if parts.dataloader is not None and "dataloader" in own:
            self.handed.add("dataloader")
            parts.dataloader.load_state_dict(own["dataloader"])
        for name in own.keys() - {"dataloader"}:
            if name.startswith("state."):
                key = name.partition(".")[2]
                self.handed.add(name)
                parts.state.setdefault(key, PerRank(None)).value = own[name]

    def _own_values(self, small: dict[str, Any]) -> dict[str, Any]:
        """Returns this rank's own values by path, saved or merged."""
        stored = []
        for rank in self._ranks:
            fqn = f"dcpx.rank.{rank}"
            value = decode_content(small["rank"][str(rank)], fqn, self._path, self.options)
            missing = [name for name in self._names if type(value) is not dict or name not in value]
            if missing:
                raise self._none_of_ours(fqn, f"no '{missing[0]:.80}'")
            stored.append(value)
        if self._is_same_size:
            return {name: stored[0][name] for name in self._names}
        return merged(stored, self._names, self.merge, self.rank, self.world_size)

    def _none_of_ours(self, fqn: str, why: object) -> CorruptionError:
        problem = f"it is not what a manager saves: {why!s:.200}"
        message = f"take apart item '{fqn}' of '{self._path}': {problem}"
        return CorruptionError(message, fqn=fqn, path=self._path)
