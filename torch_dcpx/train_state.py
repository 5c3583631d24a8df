"""Model, optimizers and the rest of a training as parts of one state.

Each part is a `Stateful` object, which a save or a load asks when the ranks are past the point
where an error of one is raised on all. Model and optimizers go through DCP's own functions
(`torch.distributed.checkpoint.state_dict`), so that names are those of the plain model, however it
is wrapped or sharded. These run on every rank, and with FSDP1 run collectives of the model's group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

from torch_dcpx.errors import OptionError
from torch_dcpx.manager_translate import TrainingRules
from torch_dcpx.optimizer_groups import (
    groups_by_parameter,
    settings_by_parameter,
    translated_groups,
)
from torch_dcpx.per_rank import PerRank
from torch_dcpx.plan_fingerprint import STATE_READER

__all__ = [
    "ModelPart",
    "OptimizerPart",
    "StatePart",
    "by_name",
    "check_parts",
    "flat",
    "kind_of",
    "load_states",
    "states_of",
]


class ModelPart:
    """The parameters and buffers of a module. Belongs to one save or load."""

    def __init__(self, model: torch.nn.Module, *, strict: bool = True) -> None:
        self._model = model
        self._options = StateDictOptions(strict=strict)

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self._model)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self._model, state, options=self._options)


class OptimizerPart:
    """One optimizer, several as one (a list), or several by name (a dict), of one model.

    With `has_named_groups` the settings of groups are kept by parameter: where ranks have other
    parameters in their groups, "group 0" means something else on each of them. With `is_target`
    it is to be loaded.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        *,
        strict: bool = True,
        has_named_groups: bool = False,
        rules: TrainingRules | None = None,
        is_target: bool = False,
    ) -> None:
        self._model = model
        self._named = by_name(optimizer)
        self._is_named = isinstance(optimizer, Mapping)
        self._options = StateDictOptions(strict=strict)
        self._has_named_groups = has_named_groups
        self._rules = rules
        self._is_target = is_target
        self._groups: dict[str, list[list[str]]] = {}  # parameters, by optimizer and group
        # Those that had no state yet, and the names of what DCP made for them.
        self._fresh: list[tuple[torch.optim.Optimizer, set[str]]] = []

    def state_dict(self) -> dict[str, Any]:
        states: dict[str, Any] = {}
        for name, optimizers in self._named.items():
            each = _each(optimizers)
            # DCP makes the state of such a one, with step 1 and zeros, so that it can be filled.
            new = [one for one in each if not one.state]
            fresh: dict[int, set[str]] = {id(one): set() for one in new}
            self._fresh += [(one, fresh[id(one)]) for one in new]
            with _without_gradients(new if self._is_target else ()):
                own: dict[str, Any] = get_optimizer_state_dict(self._model, each)
            groups = own["param_groups"]
            begin = f"{name}.state." if self._is_named else "state."
            numbered = iter(groups)
            for one in each:
                names = _state_names(own, islice(numbered, len(one.param_groups)))
                fresh.get(id(one), set()).update(begin + key for key in names)
            self._groups[name] = [list(group["params"]) for group in groups]
            if self._has_named_groups:
                own = {**own, "param_groups": settings_by_parameter(groups)}
            states[name] = own
        return states if self._is_named else states[""]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, optimizers in self._named.items():
            own = state[name] if self._is_named else state
            groups = own["param_groups"]
            if self._has_named_groups:
                groups = groups_by_parameter(groups, self._groups[name])
            elif self._rules is not None:
                groups = translated_groups(groups, self._groups[name], self._rules)
            with _without_empty_groups(_each(optimizers) if self._has_named_groups else ()):
                set_optimizer_state_dict(
                    self._model,
                    _each(optimizers),
                    optim_state_dict={**own, "param_groups": groups},
                    options=self._options,
                )

    def leave_fresh(self, missing: Set[str] | None = None) -> None:
        """Takes the state that was made to be filled, and was not, from optimizers that had none.

        Args:
            missing: names of this part that were not loaded. Default None: all of them.
        """
        for one, names in self._fresh:
            if missing is None or names <= missing:
                one.state.clear()


def _state_names(own: Mapping[str, Any], groups: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    """Returns the flat names of the states of the parameters in these groups."""
    names = [name for group in groups for name in group["params"] if name in own["state"]]
    flat_state: dict[str, Any] = STATE_READER.flatten({n: own["state"][n] for n in names})[0]
    return flat_state


@contextmanager
def _without_gradients(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Puts gradients aside: where there are any, DCP makes no state that could be filled."""
    parameters = [p for one in optimizers for group in one.param_groups for p in group["params"]]
    kept = [(parameter, parameter.grad) for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


@contextmanager
def _without_empty_groups(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Keeps groups without parameters as they are: of these nothing is stored by parameter, and
    DCP would take their settings away.
    """
    before = [one.param_groups for one in optimizers]
    for one in optimizers:
        one.param_groups = [group for group in one.param_groups if group["params"]]
    try:
        yield
    finally:
        for one, groups in zip(optimizers, before, strict=True):
            new = iter(one.param_groups)
            one.param_groups = [next(new) if group["params"] else group for group in groups]


class StatePart:
    """A user's dict. Its `Stateful` values are asked, the others replaced in it."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return {
            key: value.state_dict() if isinstance(value, Stateful) else value
            for key, value in self._state.items()
            if type(value) is not PerRank
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key, value in state.items():
            current = self._state[key]
            if isinstance(current, Stateful):
                current.load_state_dict(value)
            else:
                self._state[key] = value


def by_name(optimizers: Any) -> Mapping[str, Any]:
    """Returns optimizers by their names; one, and a list of them, under ""."""
    return optimizers if isinstance(optimizers, Mapping) else {"": optimizers}


def _each(optimizers: Any) -> list[torch.optim.Optimizer]:
    return [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)


def check_parts(model: Any, optimizer: Any, lr_scheduler: Any, dataloader: Any, state: Any) -> None:
    """Raises OptionError for parts that are not what they are given as."""
    if model is not None and not isinstance(model, torch.nn.Module):
        _refuse("model", model, "a torch.nn.Module; other things go into `state`")
    if optimizer is not None:
        if model is None:
            _refuse("optimizer", optimizer, "given with its model, whose names its state has")
        for one in flat(optimizer):
            if not isinstance(one, torch.optim.Optimizer):
                _refuse("optimizer", one, "an Optimizer, or a list or dict of them")
    for one in flat(lr_scheduler):
        if not isinstance(one, Stateful):
            _refuse("lr_scheduler", one, "Stateful (state_dict, load_state_dict), or a list or "
                    "dict of such")  # fmt: skip
    if dataloader is not None and not isinstance(dataloader, Stateful):
        _refuse("dataloader", dataloader, "Stateful (state_dict, load_state_dict)")
    if state is not None and not (type(state) is dict and all(type(k) is str for k in state)):
        _refuse("state", state, "a dict with str as keys")


def _refuse(name: str, value: Any, wanted: str) -> None:
    raise OptionError(
        f"{name} must be {wanted}; got a {type(value).__name__}", option=name, value=None
    )


def flat(parts: Any) -> Sequence[Any]:
    """Returns one part, or those in a list or dict, one after the other."""
    if parts is None:
        return ()
    if isinstance(parts, Mapping):
        return list(parts.values())
    return parts if isinstance(parts, (list, tuple)) else (parts,)


def states_of(parts: Any) -> Any:
    """Returns `state_dict()` of one Stateful object, or of each in a list or dict."""
    if isinstance(parts, Mapping):
        return {name: part.state_dict() for name, part in parts.items()}
    if isinstance(parts, (list, tuple)):
        return [part.state_dict() for part in parts]
    return parts.state_dict()


def load_states(parts: Any, states: Any) -> None:
    """Hands what `states_of` gave back. Raises OptionError: there are more or fewer of them."""
    fits, pairs = True, [(parts, states)]
    if isinstance(parts, Mapping):
        fits = type(states) is dict and states.keys() == parts.keys()
        pairs = [(part, states[name]) for name, part in parts.items()] if fits else []
    elif isinstance(parts, (list, tuple)):
        fits = type(states) is list and len(states) == len(parts)
        pairs = list(zip(parts, states, strict=True)) if fits else []
    if not fits:
        raise OptionError(
            f"lr_scheduler is {kind_of(parts)}, and another sort was saved: give as many, under "
            "the same names",
            option="lr_scheduler",
            value=None,
        )
    for part, state in pairs:
        part.load_state_dict(state)


def kind_of(part: Any) -> str:
    """Returns what sort of thing a part is, for all ranks to compare."""
    if isinstance(part, Mapping):
        return f"a dict of {', '.join(map(str, part))}"
    if isinstance(part, (list, tuple)):
        return f"a list of {len(part)}"
    return "one"
