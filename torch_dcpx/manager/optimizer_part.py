"""The state of optimizers as a part of a save or load, by the names of the model's parameters.

DCP's own functions step an optimizer that has no state, with zero gradients and a rate of zero, to
have some. The step counts, weights and moments that this leaves make another training. Here no
optimizer is stepped: a save writes the state that is there, and a resume gives each parameter the
state that is stored for it, or none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, count
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel

from torch_dcpx.checkpoint.stateful import LoadPart
from torch_dcpx.errors import MismatchError
from torch_dcpx.manager.optimizer_state import (
    StoredNames,
    blank_groups,
    blank_states,
    with_own_keys,
)
from torch_dcpx.manager.translate import (
    TrainingRules,
    check_classes,
    check_sources,
    groups_by_parameter,
    owner_of,
    settings_by_parameter,
    translated_groups,
)

_STATE, _GROUPS, _PARAMS = "state", "param_groups", "params"


class _Own(NamedTuple):
    """One optimizer, or a list of them that is kept as one, in a load."""

    optimizers: list[torch.optim.Optimizer]
    names: list[list[str]]  # of parameters, by group of all of them
    present: dict[str, dict[Any, Any]]  # what is there, by parameter


class OptimizerPart(LoadPart):
    """One optimizer, several as one (a list), or several by name (a dict), of one model.

    With `has_named_groups` the settings of groups are kept by parameter: where ranks have other
    parameters in their groups, "group 0" means something else on each of them.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        *,
        strict: bool = True,
        has_named_groups: bool = False,
        rules: TrainingRules | None = None,
    ) -> None:
        self._model = model
        self._optimizers = by_name(optimizer)
        self._is_named = isinstance(optimizer, Mapping)
        self._is_strict = strict
        self._has_named_groups = has_named_groups
        self._rules = rules
        self._has_flat = any(isinstance(m, FullyShardedDataParallel) for m in model.modules())
        self._own: dict[str, _Own] = {}
        self._saved: dict[str, set[str]] = {}  # parameters whose groups are stored, if by name
        self._unsaved_groups: dict[str, set[int]] = {}
        self._new: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {}  # groups, states

    def state_dict(self) -> dict[str, Any]:
        states: dict[str, Any] = {}
        for name, optimizers in self._optimizers.items():
            each = _each(optimizers)
            with _unstepped(each):
                own: dict[str, Any] = get_optimizer_state_dict(self._model, each)
            groups = own[_GROUPS]
            self._own[name] = _Own(each, [list(g[_PARAMS]) for g in groups], own[_STATE])
            if self._has_named_groups:
                own = {**own, _GROUPS: settings_by_parameter(groups)}
            states[name] = own
        return states if self._is_named else states[""]

    def fitted(self, state: dict[str, Any], metadata: Metadata, key: str) -> dict[str, Any]:
        """Raises: as `TrainingRules.resolve`, and, if strict, as `check_classes`."""
        made = {}
        for name, own in self._own.items():
            prefix = f"{key}.{name}." if self._is_named else f"{key}."
            names = StoredNames.of(metadata, prefix, self._rules)
            states = blank_states(
                names.beneath(f"{_STATE}."),
                self._templates(own),
                own.present,
                has_wrappers=self._rules is not None and self._rules.wrappers,
            )
            kept = state[name] if self._is_named else state
            made[name] = {**kept, _STATE: states}
            self._note_saved(name, names.beneath(_GROUPS))
            if self._is_strict:
                stored = names.beneath(f"{_GROUPS}.")
                settings = self._settings(own, stored)
                check_classes(name, own.optimizers, metadata.state_dict_metadata, settings)
                if not self._has_named_groups:  # where parameters may have been: `check_sources`
                    more = blank_groups(stored, len(own.names))
                    made[name][_GROUPS] = [*kept[_GROUPS], *more]
        return made if self._is_named else made[""]

    def _templates(self, own: _Own) -> dict[str, Any]:
        """Returns tensors of the parameters' sizes and shards, by name."""
        if self._has_flat:  # whose optimizers hold parts of flat parameters
            return get_model_state_dict(self._model)
        groups = chain.from_iterable(one.param_groups for one in own.optimizers)
        return {
            name: parameter
            for group, names in zip(groups, own.names, strict=True)
            for name, parameter in zip(names, group[_PARAMS], strict=True)
        }

    def _settings(self, own: _Own, names: StoredNames) -> set[str]:
        """Returns the names of settings that the checkpoint holds for its groups."""
        every = set(chain.from_iterable(own.names))
        found = set()
        for name in names.sources:
            owner = owner_of(name, every) if self._has_named_groups else name.partition(".")[0]
            if owner is not None:
                found.add(name[len(owner) + 1 :].partition(".")[0])
        return found - {""}

    def _note_saved(self, name: str, names: StoredNames) -> None:
        """Notes of which groups and parameters the checkpoint holds settings."""
        own = self._own[name]
        is_whole = "" in names.sources  # all groups as one object, by torch before 2.4
        self._unsaved_groups[name] = {
            at
            for at in range(len(own.names))
            if not is_whole and f".{at}.{_PARAMS}" not in names.sources
        }
        if self._has_named_groups:
            every = set(chain.from_iterable(own.names))
            owners = (owner_of(setting.removeprefix("."), every) for setting in names.sources)
            self._saved[name] = {owner for owner in owners if owner is not None}

    def check(self, state: dict[str, Any]) -> None:
        """Raises MismatchError: parameters that are one group now were saved with different
        settings, or were not in the optimizer that was saved.
        """
        for name, own in self._own.items():
            loaded = state[name] if self._is_named else state
            groups = loaded[_GROUPS]
            if self._has_named_groups:
                groups = groups_by_parameter(groups, own.names)
                saved = self._saved[name]
            else:
                if self._rules is not None:
                    groups = translated_groups(groups, own.names, self._rules)
                unsaved = self._unsaved_groups[name]
                ends = len(own.names)
                groups = [g for at, g in enumerate(groups) if at < ends or g[_PARAMS]]
                kept = [g for at, g in enumerate(groups) if at not in unsaved]
                saved = set(chain.from_iterable(g[_PARAMS] for g in kept))
                if self._is_strict:
                    check_sources(kept, own.names)
            self._new[name] = groups, self._new_states(own, loaded[_STATE], saved)

    def _new_states(
        self, own: _Own, loaded: Mapping[str, Any], saved: set[str]
    ) -> dict[str, dict[Any, Any]]:
        """Returns the state of each parameter that has one; what was not saved stays as it is."""
        states: dict[str, dict[Any, Any]] = {}
        strange = []
        for name in chain.from_iterable(own.names):
            if name in loaded:
                states[name] = with_own_keys(loaded[name], own.present.get(name))
            elif name not in saved:
                strange.append(name)
                if own.present.get(name):
                    states[name] = own.present[name]
        trained = strange
        if strange and not self._has_flat:
            templates = self._templates(own)
            trained = [name for name in strange if templates[name].requires_grad]
        if trained and self._is_strict:
            raise MismatchError(
                f"{len(trained)} parameters of the optimizer were not in the one that was saved: "
                f"{', '.join(map(repr, trained[:5]))}; strict=False leaves them as they are",
                fqn=trained[0],
                missing=tuple(trained),
            )
        return states

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self._new:  # nobody asked before
            self.check(state)
        for name, own in self._own.items():
            groups, states = self._new[name]
            with ExitStack() as stack:
                for one in own.optimizers:
                    stack.enter_context(_dtypes_kept(one))
                if self._has_flat:
                    stack.enter_context(_unstepped(own.optimizers))
                    set_optimizer_state_dict(
                        self._model,
                        own.optimizers,
                        optim_state_dict={_STATE: states, _GROUPS: groups},
                        options=StateDictOptions(strict=False),
                    )
                else:
                    _load(own, groups, states)


def _load(own: _Own, groups: Sequence[Mapping[str, Any]], states: Mapping[str, Any]) -> None:
    """Gives optimizers their settings and states.

    A group takes the settings of the stored one that holds its parameters, wherever that stood; one
    without parameters those of the one in its place, if that has none either.
    """
    owners = {name: at for at, group in enumerate(groups) for name in group[_PARAMS]}
    names_of_all = iter(own.names)
    place = 0
    for one in own.optimizers:
        new_groups: list[dict[str, Any]] = []
        new_states: dict[int, Any] = {}
        numbers = count()
        for group in one.param_groups:
            names = next(names_of_all)
            sources = {owners[name] for name in names if name in owners}
            if not names and len(groups) >= len(own.names) and not groups[place][_PARAMS]:
                sources = {place}
            made = dict(group)
            for source in sorted(sources):
                made.update(groups[source])
            own_numbers = [next(numbers) for _ in names]
            new_groups.append({**made, _PARAMS: own_numbers})
            pairs = zip(own_numbers, names, strict=True)
            new_states |= {number: states[name] for number, name in pairs if name in states}
            place += 1
        given = {_STATE: new_states, _GROUPS: new_groups}
        one.load_state_dict(given)
        if not _has_hooks(one):
            _put_back(one, given)


class _Initialised(defaultdict[Any, Any]):
    """A state that DCP takes for one that is there, also where it is empty."""

    def __bool__(self) -> bool:
        return True


@contextmanager
def _unstepped(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Keeps DCP's functions from stepping optimizers that have no state."""
    with ExitStack() as stack:
        for one in optimizers:
            if not one.state:
                stack.enter_context(_taken_for_stepped(one))
        yield


@contextmanager
def _taken_for_stepped(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    before, initialised = optimizer.state, _Initialised(dict)
    try:
        optimizer.state = initialised
    except AttributeError:  # a wrapper that only shows the state of another one
        with _with_a_gradient(optimizer):
            yield
        return
    try:
        yield
    finally:
        if optimizer.state is initialised:  # else it was loaded
            optimizer.state = before


@contextmanager
def _with_a_gradient(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """DCP's functions step no optimizer whose parameters have a gradient."""
    parameters = [one for group in optimizer.param_groups for one in group[_PARAMS]]
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
    """Keeps dtypes of states that `load_state_dict` would make those of their parameters.

    It does so behind an optimizer's own `__setstate__` and before other hooks of its loads. Of a
    wrapper without hooks `_load` does it.
    """
    if not _has_hooks(optimizer):
        yield
        return
    given: dict[str, Any] = {}

    def note(_: Any, state: dict[str, Any]) -> None:
        given.update(state)

    def put_back(one: torch.optim.Optimizer) -> None:
        _put_back(one, given)

    handles = [
        optimizer.register_load_state_dict_pre_hook(note),
        optimizer.register_load_state_dict_post_hook(put_back, prepend=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether it has what `Optimizer.__init__` makes, which a wrapper may not call."""
    return hasattr(optimizer, "_optimizer_load_state_dict_pre_hooks")


def _put_back(one: torch.optim.Optimizer, given: Mapping[str, Any]) -> None:
    numbers = chain.from_iterable(group[_PARAMS] for group in given[_GROUPS])
    parameters = chain.from_iterable(group[_PARAMS] for group in one.param_groups)
    for number, parameter in zip(numbers, parameters, strict=True):
        state, own = given[_STATE].get(number), one.state.get(parameter)
        if state and own:
            one.state[parameter] = _as_given(own, state, parameter.dtype)


def _as_given(own: Any, given: Any, cast_to: torch.dtype, key: Any = None) -> Any:
    """Returns a loaded state with the given tensors where they were cast to that dtype."""
    if isinstance(own, torch.Tensor) and isinstance(given, torch.Tensor):
        is_cast = own.dtype == cast_to != given.dtype and key != "step"  # that one is as it must be
        return given.to(own.device) if is_cast else own
    if isinstance(own, dict) and isinstance(given, Mapping):
        for name in own.keys() & given.keys():
            own[name] = _as_given(own[name], given[name], cast_to, name)
    elif type(own) in (list, tuple) and type(own) is type(given) and len(own) == len(given):
        return type(own)(_as_given(a, b, cast_to) for a, b in zip(own, given, strict=True))
    return own


def by_name(optimizers: Any) -> Mapping[str, Any]:
    """Returns optimizers by their names; one, and a list of them, under ""."""
    return optimizers if isinstance(optimizers, Mapping) else {"": optimizers}


def _each(optimizers: Any) -> list[torch.optim.Optimizer]:
    return [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
