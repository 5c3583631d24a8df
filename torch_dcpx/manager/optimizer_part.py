"""The state of optimizers as a part of a save or load, by the names of the model's parameters.

DCP's own functions step an optimizer without state, with zero gradients and a rate of zero. The
step counts, weights and moments of that make another training. Here nothing steps an optimizer: a
save writes the present state, and a resume gives each parameter its stored state, or none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

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
from torch_dcpx.errors import MismatchError
from torch_dcpx.manager.optimizer_state import blank_groups, blank_states, rekeyed, stored_names
from torch_dcpx.manager.translate import (
    TrainingRules,
    beneath,
    by_name,
    check_classes,
    check_sources,
    flat,
    groups_by_parameter,
    owner_of,
    parameters_of,
    settings_by_parameter,
    translated_groups,
)

_STATE, _GROUPS, _PARAMS = "state", "param_groups", "params"


@dataclass
class _Own:
    """One optimizer, or a list of them that is saved as one, in a load."""

    optimizers: Sequence[torch.optim.Optimizer]
    names: list[list[str]]  # of parameters, by group of all of them
    present: dict[str, dict[Any, Any]]  # states that are there, by parameter
    saved: set[str] = field(default_factory=set)  # parameters with stored settings, if by name
    unsaved: set[int] = field(default_factory=set)  # groups without stored parameters, by number
    prefix: str = ""  # of the names of its states in the checkpoint
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

    def __post_init__(self) -> None:
        self._is_named = isinstance(self.optimizer, Mapping)
        self._has_flat = any(isinstance(m, FullyShardedDataParallel) for m in self.model.modules())
        self._own: dict[str, _Own] = {}

    def state_dict(self) -> dict[str, Any]:
        states: dict[str, Any] = {}
        for name, optimizers in by_name(self.optimizer).items():
            each = flat(optimizers)
            with ExitStack() as stack:
                for one in each:
                    stack.enter_context(_unstepped(one))
                own: dict[str, Any] = get_optimizer_state_dict(self.model, each)
            groups = own[_GROUPS]
            self._own[name] = _Own(each, [list(g[_PARAMS]) for g in groups], own[_STATE])
            if self.has_named_groups:
                own = {**own, _GROUPS: settings_by_parameter(groups)}
            states[name] = own
        return states if self._is_named else states[""]

    def fitted(self, state: dict[str, Any], metadata: Metadata, key: str) -> dict[str, Any]:
        """Raises: as `TrainingRules.resolve`, and, if strict, as `check_classes`."""
        made = {}
        for name, own in self._own.items():
            prefix = f"{key}.{name}." if self._is_named else f"{key}."
            names = stored_names(metadata, prefix, self.rules)
            states = blank_states(
                beneath(f"{_STATE}.", names.items()),
                metadata,
                self._templates(own),
                own.present,
            )
            kept = state[name] if self._is_named else state
            own.prefix = prefix + _STATE
            made[name] = {**kept, _STATE: states}
            stored = beneath(f"{_GROUPS}.", names.items())
            settings = self._settings(own, stored)
            if _GROUPS not in names:  # else all groups are one object, by torch before 2.4
                numbers = range(len(own.names))
                own.unsaved = {at for at in numbers if f"{at}.{_PARAMS}" not in stored}
            if self.strict:
                check_classes(name, own.optimizers, metadata.state_dict_metadata, settings)
                if not self.has_named_groups:  # where parameters may have been: `check_sources`
                    more = blank_groups(stored, metadata, len(own.names))
                    made[name][_GROUPS] = [*kept[_GROUPS], *more]
        return made if self._is_named else made[""]

    def _templates(self, own: _Own) -> dict[str, Any]:
        """Returns tensors of the parameters' sizes and shards, by name."""
        if self._has_flat:  # its optimizers hold parts of flat parameters
            return get_model_state_dict(self.model)
        names = chain.from_iterable(own.names)
        return dict(zip(names, parameters_of(own.optimizers), strict=True))

    def _settings(self, own: _Own, names: Iterable[str]) -> set[str]:
        """Returns the settings in names "OWNER.SETTING"; notes their owners."""
        every = set(chain.from_iterable(own.names))
        owners = {
            name: owner_of(name, every) if self.has_named_groups else name.partition(".")[0]
            for name in names
        }
        pairs = [(name, owner) for name, owner in owners.items() if owner is not None]
        own.saved = {owner for _, owner in pairs}
        return {name[len(owner) + 1 :].partition(".")[0] for name, owner in pairs} - {""}

    def check(self, state: dict[str, Any]) -> None:
        """Raises MismatchError: settings of one group differ, or a parameter has none."""
        for name, own in self._own.items():
            loaded = state[name] if self._is_named else state
            groups = loaded[_GROUPS]
            if self.has_named_groups:
                groups = groups_by_parameter(groups, own.names)
                saved = own.saved
            else:
                if self.rules is not None:
                    groups = translated_groups(groups, self.rules)
                groups = [g for at, g in enumerate(groups) if at < len(own.names) or g[_PARAMS]]
                kept = [g for at, g in enumerate(groups) if at not in own.unsaved]
                saved = set(chain.from_iterable(g[_PARAMS] for g in kept))
                if self.strict:
                    check_sources(kept, own.names)
            own.new = {_STATE: self._new_states(own, loaded[_STATE], saved), _GROUPS: groups}

    def _new_states(
        self, own: _Own, loaded: Mapping[str, Any], saved: set[str]
    ) -> dict[str, dict[Any, Any]]:
        """Returns the parameters' states, the present one of a parameter that was not saved."""
        states: dict[str, dict[Any, Any]] = {}
        strange = []
        for name in chain.from_iterable(own.names):
            if name in loaded:
                states[name] = rekeyed(loaded[name], own.present.get(name))
            elif name not in saved:
                strange.append(name)
                if own.present.get(name):
                    states[name] = own.present[name]
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
            with ExitStack() as stack:
                for one in own.optimizers:
                    stack.enter_context(_dtypes_kept(one))
                    if self._has_flat:
                        stack.enter_context(_unstepped(one))
                if self._has_flat:
                    options = StateDictOptions(strict=False)
                    set_optimizer_state_dict(
                        self.model, own.optimizers, optim_state_dict=own.new, options=options
                    )
                else:
                    _load(own)


def _load(own: _Own) -> None:
    """Gives optimizers their settings and states.

    A group takes the settings of its parameters' stored group. One without parameters takes those
    of the group in its place, if that has none either.
    """
    groups, states = own.new[_GROUPS], own.new[_STATE]
    owners = {name: at for at, group in enumerate(groups) for name in group[_PARAMS]}
    places = enumerate(own.names)
    for one in own.optimizers:
        new_groups: list[dict[str, Any]] = []
        numbers: dict[int, str] = {}  # names of this optimizer's parameters by their numbers
        for group in one.param_groups:
            place, names = next(places)
            sources = {owners[name] for name in names if name in owners}
            if not names and len(groups) >= len(own.names) and not groups[place][_PARAMS]:
                sources = {place}
            made = dict(group)
            for source in sorted(sources):
                made.update(groups[source])
            own_numbers = dict(enumerate(names, len(numbers)))
            new_groups.append({**made, _PARAMS: list(own_numbers)})
            numbers |= own_numbers
        new_states = {number: states[name] for number, name in numbers.items() if name in states}
        given = {_STATE: new_states, _GROUPS: new_groups}
        one.load_state_dict(given)
        if not _has_hooks(one):
            _put_back(one, given)


class _Initialised(defaultdict[Any, Any]):
    """A state that DCP does not take for a missing one, though it is empty."""

    def __bool__(self) -> bool:
        return True


@contextmanager
def _unstepped(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keeps DCP's functions from stepping an optimizer that has no state."""
    before, initialised = optimizer.state, _Initialised(dict)
    with ExitStack() as stack:
        try:
            if not before:
                optimizer.state = initialised
        except AttributeError:  # a wrapper that only shows the state of another one
            stack.enter_context(_with_a_gradient(optimizer))
        try:
            yield
        finally:
            if optimizer.state is initialised:  # else it was loaded
                optimizer.state = before


@contextmanager
def _with_a_gradient(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Gives a parameter a gradient: DCP's functions step no optimizer that has one."""
    parameters = list(parameters_of([optimizer]))
    if not parameters or any(one.grad is not None for one in parameters):
        yield
        return
    smallest = min(parameters, key=torch.Tensor.numel)
    smallest.grad = torch.zeros_like(smallest)
    try:
        yield
    finally:
        smallest.grad = None


@contextmanager
def _dtypes_kept(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keeps `load_state_dict` from casting states to the dtypes of their parameters.

    It acts behind an optimizer's own `__setstate__` and before other hooks of its loads. `_load`
    does so for a wrapper without hooks.
    """
    given: dict[str, Any] = {}
    handles = []
    if _has_hooks(optimizer):
        handles = [
            optimizer.register_load_state_dict_pre_hook(lambda _, state: given.update(state)),
            optimizer.register_load_state_dict_post_hook(
                lambda one: _put_back(one, given), prepend=True
            ),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether `Optimizer.__init__` has run; a wrapper may not call it."""
    return hasattr(optimizer, "_optimizer_load_state_dict_pre_hooks")


def _put_back(one: torch.optim.Optimizer, given: Mapping[str, Any]) -> None:
    """Gives an optimizer's states the dtypes that its load was given."""
    numbers = chain.from_iterable(group[_PARAMS] for group in given[_GROUPS])
    for number, parameter in zip(numbers, parameters_of([one]), strict=True):
        state, own = given[_STATE].get(number), one.state.get(parameter)
        if state and own:
            one.state[parameter] = _as_given(own, state, parameter.dtype)


def _as_given(own: Any, given: Any, cast_to: torch.dtype, key: Any = None) -> Any:
    """Returns a loaded state, with the given tensors where the load cast them to `cast_to`."""
    if isinstance(own, torch.Tensor) and isinstance(given, torch.Tensor):
        is_cast = own.dtype == cast_to != given.dtype and key != "step"  # that one is as it must be
        return given.to(own.device) if is_cast else own
    if isinstance(own, dict) and isinstance(given, Mapping):
        for name in own.keys() & given.keys():
            own[name] = _as_given(own[name], given[name], cast_to, name)
    elif type(own) in (list, tuple) and type(own) is type(given) and len(own) == len(given):
        return type(own)(_as_given(a, b, cast_to) for a, b in zip(own, given, strict=True))
    return own
