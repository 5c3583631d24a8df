"""The model and the rest of a training as parts of one state; its optimizers: `optimizer_part`.

Each part is a `Stateful` object. A save or a load calls it when the ranks are past the point where
an error of one is raised on all. Model and optimizers go through DCP's own functions
(`torch.distributed.checkpoint.state_dict`), so that names are those of the plain model, however it
is wrapped or sharded. These run on every rank, and with FSDP1 run collectives of the model's group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

from torch_dcpx.errors import OptionError
from torch_dcpx.manager.content import PerRank


@dataclass(eq=False)
class ModelPart:
    """The parameters and buffers of a module. Belongs to one save or load."""

    model: torch.nn.Module
    strict: bool = True

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.model)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state, options=StateDictOptions(strict=self.strict))


@dataclass(eq=False)
class StatePart:
    """A user's dict. It asks its `Stateful` values, and replaces the others in the dict."""

    state: dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        return {
            key: value.state_dict() if isinstance(value, Stateful) else value
            for key, value in self.state.items()
            if type(value) is not PerRank
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key, value in state.items():
            current = self.state[key]
            if isinstance(current, Stateful):
                current.load_state_dict(value)
            else:
                self.state[key] = value


def check_parts(model: Any, optimizer: Any, lr_scheduler: Any, dataloader: Any, state: Any) -> None:
    """Raises OptionError for a part of the wrong type."""
    if model is not None and not isinstance(model, torch.nn.Module):
        _refuse("model", model, "a torch.nn.Module; other things go into `state`")
    if optimizer is not None:
        if model is None:
            _refuse("optimizer", optimizer, "given with its model, whose names its state has")
        for one in flat(optimizer):
            if not isinstance(one, torch.optim.Optimizer):
                _refuse("optimizer", one, "an Optimizer, or a list or dict of them")
        if isinstance(optimizer, (list, tuple)):
            _check_unshared(model, optimizer)
    stateful = "Stateful (state_dict, load_state_dict)"
    for one in flat(lr_scheduler):
        if not isinstance(one, Stateful):
            _refuse("lr_scheduler", one, f"{stateful}, or a list or dict of such")
    if dataloader is not None and not isinstance(dataloader, Stateful):
        _refuse("dataloader", dataloader, stateful)
    if state is not None and not (type(state) is dict and all(type(k) is str for k in state)):
        _refuse("state", state, "a dict with str as keys")


def _check_unshared(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raises OptionError: several optimizers that are saved as one share a parameter."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    owners: dict[int, int] = {}
    for at, one in enumerate(optimizers):
        for parameter in parameters_of([one]):
            first = owners.setdefault(id(parameter), at)
            if first != at:
                name = names.get(id(parameter), "one that is not the model's")
                raise OptionError(
                    f"optimizers {first} and {at} of the list share the parameter '{name}', and "
                    "one of their states would be lost: give them as a dict by name",
                    option="optimizer",
                    value=None,
                )


def _refuse(name: str, value: Any, wanted: str) -> None:
    raise OptionError(
        f"{name} must be {wanted}; got a {type(value).__name__}", option=name, value=None
    )


def flat(parts: Any) -> Sequence[Any]:
    """Returns one part, or those in a list or dict, one after the other; none of None."""
    if isinstance(parts, Mapping):
        return list(parts.values())
    alone = () if parts is None else (parts,)
    return parts if isinstance(parts, (list, tuple)) else alone


def by_name(optimizers: Any) -> Mapping[str, Any]:
    """Returns optimizers by their names; one, and a list of them, under ""."""
    return optimizers if isinstance(optimizers, Mapping) else {"": optimizers}


def parameters_of(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[torch.nn.Parameter]:
    """Returns the parameters of optimizers, group by group."""
    return (
        parameter
        for one in optimizers
        for group in one.param_groups
        for parameter in group["params"]
    )


def states_of(parts: Any) -> Any:
    """Returns `state_dict()` of one Stateful object, or of each in a list or dict."""
    if isinstance(parts, Mapping):
        return {name: part.state_dict() for name, part in parts.items()}
    if isinstance(parts, (list, tuple)):
        return [part.state_dict() for part in parts]
    return parts.state_dict()


def paired_states(parts: Any, states: Any) -> list[tuple[Any, Any]]:
    """Returns each object with its state of `states_of`. Raises OptionError: not as many."""
    if isinstance(parts, Mapping):
        if type(states) is dict and states.keys() == parts.keys():
            return [(part, states[name]) for name, part in parts.items()]
    elif not isinstance(parts, (list, tuple)):
        return [(parts, states)]
    elif type(states) is list and len(states) == len(parts):
        return list(zip(parts, states, strict=True))
    raise OptionError(
        f"lr_scheduler is {kind_of(parts)}, and another sort was saved: give as many, under "
        "the same names",
        option="lr_scheduler",
        value=None,
    )


def kind_of(part: Any) -> str:
    """Returns the sort of a part, for all ranks to compare."""
    if isinstance(part, Mapping):
        return f"a dict of {', '.join(map(str, part))}"
    if isinstance(part, (list, tuple)):
        return f"a list of {len(part)}"
    return "one"
