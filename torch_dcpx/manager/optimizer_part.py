"""The state of optimizers as a part of a save or load, by the names of the model's parameters.

DCP's own functions step an optimizer without state, with zero gradients and a rate of zero. The
step counts, weights and moments of that make another training. Here nothing steps an optimizer: a
save writes the present state, and a resume gives each parameter its stored state, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, takewhile
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel

from torch_dcpx._text import counted
from torch_dcpx.checkpoint.stateful import LoadPart
from torch_dcpx.errors import MismatchError, UnsupportedError
from torch_dcpx.manager.optimizer_kinds import (
    GROUPS,
    PARAMS,
    RECORD,
    STATE,
    KindRecord,
    record_of,
    unmade,
)
from torch_dcpx.manager.optimizer_load import load_as_given
from torch_dcpx.manager.optimizer_state import Blanks, check_apart, stored_names
from torch_dcpx.manager.translate import (
    TrainingRules,
    beneath,
    by_name,
    check_classes,
    check_places,
    check_sources,
    check_taken,
    flat,
    groups_by_parameter,
    parameters_of,
    settings_by_parameter,
    translated_groups,
)


@dataclass
class _Own:
    """One optimizer, or a list of them that is saved as one, in a load."""

    optimizers: Sequence[torch.optim.Optimizer]
    names: list[list[str]]  # of parameters, by group of all of them
    present: dict[str, dict[Any, Any]]  # states that are there, by parameter
    groups: Any  # settings that are there: by group, or by parameter
    extras: dict[str, Any]  # entries beside these, of one optimizer
    record: KindRecord = field(default_factory=KindRecord)  # of the save
    stored: dict[str, str] = field(default_factory=dict)  # stored names of parameters
    saved: set[str] = field(default_factory=set)  # parameters with stored settings, if by name
    unsaved: set[int] = field(default_factory=set)  # groups without stored parameters, by number
    unsaved_keys: dict[str, Collection[str]] = field(default_factory=dict)  # settings, by number
    kept: dict[int, dict[str, Any]] = field(default_factory=dict)  # the stored groups, by number
    prefix: str = ""  # of the names of its states in the checkpoint
    filled: tuple[str, ...] = ()  # beginnings of names of settings that follow the parameters
    new: dict[str, Any] = field(default_factory=dict)  # groups and states, checked


@dataclass(eq=False)
class OptimizerPart(LoadPart):
    """One optimizer, several as one (a list), or several by name (a dict), of one model.

    With `has_named_groups` the settings of groups are saved by parameter, for ranks that have other
    parameters in "group 0".
    """

    model: torch.nn.Module
    optimizer: Any
    strict: bool = True
    has_named_groups: bool = False
    rules: TrainingRules | None = None
    may_miss: Callable[[str], object] = lambda _: False  # of names in the checkpoint
    read: Callable[[Sequence[str]], Mapping[str, Any]] = {}.fromkeys  # items of a few bytes
    has_scheduler: Callable[[Any], bool] = lambda _: False  # an optimizer, in this resume
    is_target: bool = False  # of a resume, which needs no record of what is there

    def __post_init__(self) -> None:
        self._is_named = isinstance(self.optimizer, Mapping)
        self._has_flat = any(isinstance(m, FullyShardedDataParallel) for m in self.model.modules())
        self._own: dict[str, _Own] = {}
        self.kept: list[str] = []  # names of states that were there and were not saved

    def state_dict(self) -> dict[str, Any]:
        """Raises UnsupportedError: no load could give an optimizer's state back."""
        states: dict[str, Any] = {}
        for name, optimizers in by_name(self.optimizer).items():
            each = flat(optimizers)
            raw = [self._raw_state(one) for one in each]
            extras = {key: v for own in raw for key, v in own.items() if key not in (STATE, GROUPS)}
            if extras and (len(each) > 1 or self._has_flat):
                why = "FSDP1" if self._has_flat else "a list of optimizers: give a dict by name"
                _refuse(each[0], f"its state_dict() has {_quoted(extras)} besides, not under {why}")
            shown: Any = [_Shown(one, own) for one, own in zip(each, raw, strict=True)]
            own: dict[str, Any] = get_optimizer_state_dict(self.model, shown)
            names = [list(group[PARAMS]) for group in own[GROUPS]]
            if self.has_named_groups:
                own = {**own, GROUPS: settings_by_parameter(own[GROUPS])}
            self._own[name] = _Own(each, names, own[STATE], own[GROUPS], extras)
            states[name] = own = {**own, **extras}
            if not self.is_target:
                templates = None if self._has_flat else self._templates(self._own[name])
                states[name] = own | record_of(own, templates, list(extras)).as_items()
        each_own = self._own.items()
        check_apart({n: (set(chain.from_iterable(o.names)), o.extras) for n, o in each_own})
        return states if self._is_named else states[""]

    def _raw_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Returns `optimizer.state_dict()`. Raises UnsupportedError: parameters cannot name it."""
        try:
            own: Any = optimizer.state_dict()
        except KeyError as error:
            _refuse_strays(optimizer, error)
            raise
        keys = list(own) if isinstance(own, Mapping) else []
        if not {STATE, GROUPS} <= set(keys) or not all(type(key) is str for key in keys):
            _refuse(optimizer, f"its state_dict() has {_quoted(keys)}, not 'state', 'param_groups'")
        known = set() if self._has_flat else set(map(id, self.model.parameters()))
        parameters = list(parameters_of([optimizer]))
        for number, parameter in enumerate(parameters if known else ()):
            if id(parameter) not in known:
                sizes = tuple(parameter.size())
                _refuse(optimizer, f"its parameter {number}, of sizes {sizes}, is not the model's")
        strange = [key for key in own[STATE] if key not in range(len(parameters))]
        if strange:
            _refuse(optimizer, f"its state has {_quoted(strange)}, which is of no parameter")
        for one in own[STATE].values():
            if not isinstance(one, Mapping):
                _refuse(optimizer, f"a parameter's state is a {type(one).__name__}, not a dict")
            if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
                continue  # it may take what torch's takes not
            for key, value in one.items():
                if kind := unmade(value):
                    raise UnsupportedError(
                        f"optimizer {type(optimizer).__name__} has a {kind} in the state "
                        f"{key!r:.80} of a parameter, of which Optimizer.load_state_dict makes no "
                        "new one; keep tensors, numbers, lists, tuples and dicts there"
                    )
        groups = [dict(group) for group in own[GROUPS]]
        return {**own, STATE: dict(own[STATE]), GROUPS: groups}  # DCP renames in them

    def fitted(self, state: dict[str, Any], metadata: Metadata, key: str) -> dict[str, Any]:
        """Raises: as `TrainingRules.resolve`, `Blanks`, and, if strict, as `check_classes`."""
        made = {}
        for name, own in self._own.items():
            prefix = f"{key}.{name}." if self._is_named else f"{key}."
            made[name] = self._fitted(own, name, prefix, metadata)
        return made if self._is_named else made[""]

    def _fitted(self, own: _Own, name: str, prefix: str, metadata: Metadata) -> dict[str, Any]:
        """Returns the state of one optimizer for the load to fill."""
        names = stored_names(metadata, prefix, self.rules)
        texts = list(beneath(f"{RECORD}.", names.items()).values())
        own.record = KindRecord.decoded(self.read(texts)) if texts else KindRecord()
        blanks = Blanks(names, prefix, metadata, own.record, self._templates(own))
        own.prefix, own.stored = prefix + STATE, blanks.stored
        made: dict[str, Any] = {STATE: blanks.states(own.present)}
        settings: set[str] = set()
        groups = own.groups
        if GROUPS not in names:  # else all groups are one object, by torch before 2.4
            every = set(chain.from_iterable(own.names)) if self.has_named_groups else None
            stored = blanks.groups(every)
            own.saved = set(stored)
            settings = {name.partition(".")[0] for one in stored.values() for name in one}
            live = groups if self.has_named_groups else dict(enumerate(groups))
            groups = {at: blanks.group(str(at), one) for at, one in live.items()}
            if not self.has_named_groups:
                numbers = count(len(own.names) if self.strict else len(stored))
                more = takewhile(lambda at: PARAMS in stored.get(str(at), ()), numbers)
                groups = [*groups.values(), *(blanks.group(str(at), {}) for at in more)]
                own.unsaved_keys = blanks.unsaved
                own.unsaved = {
                    at for at in range(len(own.names)) if PARAMS not in stored.get(str(at), ())
                }
        is_same = not self.strict or check_classes(
            name, own.optimizers, metadata.state_dict_metadata, settings
        )
        return {**made, GROUPS: groups, **self._fitted_extras(own, blanks, is_same=is_same)}

    def _fitted_extras(self, own: _Own, blanks: Blanks, *, is_same: bool) -> dict[str, Any]:
        """Returns the optimizer's own entries to fill. Raises MismatchError: it shows no such."""
        takes_any = is_same and len(own.optimizers) == 1 and not self._has_flat
        lost = [key for key in own.record.extras if key not in own.extras]
        if takes_any or not lost:
            return blanks.extras(own.extras)
        if self.strict:
            raise MismatchError(
                f"the optimizer that was saved had {_quoted(lost)} beside 'state' and "
                f"'param_groups', and {type(own.optimizers[0]).__name__} has no such; strict=False "
                "leaves it out, load_optimizer=False leaves the whole optimizer",
                fqn=lost[0],
            )
        return {}

    def _templates(self, own: _Own) -> dict[str, Any]:
        """Returns tensors of the parameters' sizes and shards, by name."""
        if self._has_flat:  # its optimizers hold parts of flat parameters
            return get_model_state_dict(self.model)
        names = chain.from_iterable(own.names)
        return dict(zip(names, parameters_of(own.optimizers), strict=True))

    def check(self, state: dict[str, Any]) -> None:
        """Raises MismatchError: settings of one group differ, or a parameter has none."""
        for name, own in self._own.items():
            loaded = dict(state[name] if self._is_named else state)
            groups, states = loaded.pop(GROUPS), loaded.pop(STATE)
            rekeyed = own.record.rekeyed
            if self.has_named_groups:
                settings = {p: rekeyed(f"{GROUPS}.{p}", one, None) for p, one in groups.items()}
                groups = groups_by_parameter(settings, own.names)
                own.kept = dict(enumerate(groups))
                saved = own.saved
            else:
                groups = [rekeyed(f"{GROUPS}.{at}", one, None) for at, one in enumerate(groups)]
                bare = {at for at, g in enumerate(groups) if not g[PARAMS]}
                if self.rules is not None:
                    groups = translated_groups(groups, self.rules)
                own.kept = kept = {
                    at: {k: v for k, v in g.items() if k not in own.unsaved_keys.get(str(at), ())}
                    for at, g in enumerate(groups)
                    if at not in own.unsaved
                }
                groups = [g for at, g in enumerate(groups) if at < len(own.names) or g[PARAMS]]
                saved = set(chain.from_iterable(g[PARAMS] for g in kept.values()))
                if self.strict:
                    model = None if self._has_flat else self.model
                    begin = own.prefix.removesuffix(STATE)
                    check_taken(kept, bare, own.names, begin, model, self.may_miss)
                    check_sources(list(kept.values()), own.names)
                each = (one for one in own.optimizers for _ in one.param_groups)
                timed = {at for at, one in enumerate(each) if self.has_scheduler(one)}
                check_places(kept, own.names, timed, is_strict=self.strict)
                own.filled = tuple(
                    f"{own.prefix.removesuffix(STATE)}{GROUPS}.{at}.{key}."
                    for at, names in enumerate(own.names)
                    for group in kept.values()
                    if not set(names).isdisjoint(group[PARAMS])
                    for key in group
                )
            extras = {key: rekeyed(key, one, own.extras.get(key)) for key, one in loaded.items()}
            own.new = {STATE: self._new_states(own, states, saved), GROUPS: groups, **extras}

    def fills(self, name: str) -> bool:
        """Returns whether a setting came along with the parameters of its group."""
        return any(f"{name}.".startswith(own.filled) for own in self._own.values())

    def _new_states(
        self, own: _Own, loaded: Mapping[str, Any], saved: set[str]
    ) -> dict[str, dict[Any, Any]]:
        """Returns the parameters' states, the present one of a parameter that was not saved."""
        states: dict[str, dict[Any, Any]] = {}
        strange = []
        for name in chain.from_iterable(own.names):
            if name in loaded:
                states[name] = own.record.rekeyed(
                    f"{STATE}.{own.stored.get(name, name)}", loaded[name], own.present.get(name)
                )
            elif name not in saved:
                strange.append(name)
                if own.present.get(name):
                    states[name] = own.present[name]
                    self.kept.append(f"{own.prefix}.{name}")
        if strange and not self._has_flat:
            templates = self._templates(own)
            strange = [name for name in strange if templates[name].requires_grad]
        strange = [name for name in strange if not self.may_miss(f"{own.prefix}.{name}")]
        if strange and self.strict:
            raise MismatchError(
                f"{counted(len(strange), 'parameter')} of the optimizer had no state in the one "
                f"that was saved: {', '.join(map(repr, strange[:5]))}; strict=False, or "
                f"allow_missing=['{own.prefix}.*'], leaves that of each as it is; "
                "load_optimizer=False leaves the whole optimizer",
                fqn=strange[0],
                missing=tuple(strange),
            )
        return states

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not all(own.new for own in self._own.values()):  # no load called `check` before
            self.check(state)
        for own in self._own.values():
            if self._has_flat:
                shown: Any = [_Shown(one) for one in own.optimizers]
                options = StateDictOptions(strict=False)
                set_optimizer_state_dict(
                    self.model, shown, optim_state_dict=own.new, options=options
                )
            else:
                _load(own)


def _load(own: _Own) -> None:
    """Gives optimizers their settings and states.

    A group takes the settings of its parameters' stored group. One without parameters takes those
    of the group in its place, if that has none either.
    """
    extras = dict(own.new)
    groups, states = extras.pop(GROUPS), extras.pop(STATE)
    owners = {name: at for at, group in own.kept.items() for name in group[PARAMS]}
    places = enumerate(own.names)
    for one in own.optimizers:
        new_groups: list[dict[str, Any]] = []
        numbers: dict[int, str] = {}  # names of this optimizer's parameters by their numbers
        for group in one.param_groups:
            place, names = next(places)
            sources = {owners[name] for name in names if name in owners}
            if not names and len(groups) >= len(own.names) and not groups[place][PARAMS]:
                sources = {place}
            made = dict(group)
            for source in sorted(sources):
                made.update(own.kept.get(source, {}))
            own_numbers = dict(enumerate(names, len(numbers)))
            new_groups.append({**made, PARAMS: list(own_numbers)})
            numbers |= own_numbers
        new_states = {number: states[name] for number, name in numbers.items() if name in states}
        load_as_given(one, {**extras, STATE: new_states, GROUPS: new_groups})


def _quoted(keys: Iterable[object]) -> str:
    return ", ".join(f"{key!r:.80}" for key in list(keys)[:5]) or "nothing"


def _refuse(optimizer: torch.optim.Optimizer, why: str) -> NoReturn:
    raise UnsupportedError(
        f"optimizer {type(optimizer).__name__} cannot be saved by names of parameters: {why}; give "
        "it in state= instead, which calls its own state_dict() and load_state_dict()"
    )


def _refuse_strays(optimizer: torch.optim.Optimizer, error: KeyError) -> None:
    """Raises UnsupportedError where a KeyError of a `state_dict` names a state of no group."""
    known = set(map(id, parameters_of([optimizer])))
    states = getattr(optimizer, "state", None) or ()
    strays = [one for one in states if isinstance(one, torch.Tensor) and id(one) not in known]
    if any(error.args == (id(one),) for one in strays):
        raise UnsupportedError(
            f"optimizer {type(optimizer).__name__} has no state_dict(): its state has "
            f"{counted(len(strays), 'entry', 'entries')} of parameters that are in no group; give "
            "these a group by add_param_group, or delete their states"
        ) from error


class _Shown:
    """Stands for an optimizer before DCP's functions, which step one that has no state."""

    def __init__(self, optimizer: torch.optim.Optimizer, own: Mapping[str, Any] | None = None):
        self.state = {"is": "there"}
        self.param_groups = optimizer.param_groups
        self._optimizer, self._own = optimizer, own

    def state_dict(self) -> Mapping[str, Any]:
        return self._optimizer.state_dict() if self._own is None else self._own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        load_as_given(self._optimizer, state_dict)
