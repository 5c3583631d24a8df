"""The parts of a training that a manager saves and resumes; its optimizers: `optimizer_part`.

Each part is a `Stateful` object. A save or a load calls it where all ranks raise an error of one.
DCP's own functions (`torch.distributed.checkpoint.state_dict`) give model and optimizers the names
of the plain model, however it is wrapped or sharded. Every rank calls them; with FSDP1 they run
collectives of the model's group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from torch_dcpx._text import counted, some
from torch_dcpx.checkpoint.same_call import Call
from torch_dcpx.checkpoint.stateful import EXTRA_STATE, LoadPart, Takes, is_extra_state
from torch_dcpx.errors import MismatchError, OptionError, must_be
from torch_dcpx.keys.wrappers import has_crossed_names, inside, plain_names
from torch_dcpx.manager.content import PerRank, encode_content, split_content
from torch_dcpx.manager.optimizer_part import OptimizerPart
from torch_dcpx.manager.optimizer_state import stored_names
from torch_dcpx.manager.schedulers import states_of
from torch_dcpx.manager.stored import Record
from torch_dcpx.manager.translate import (
    NAMED_GROUPS,
    TrainingRules,
    flat,
    kind_of,
    owner_of,
    parameters_of,
)
from torch_dcpx.tensors.digests import digests_of
from torch_dcpx.tensors.memory import refuse_meta


@dataclass(eq=False)
class ModelPart(LoadPart):
    """The parameters and buffers of a module. Belongs to one save or load."""

    model: torch.nn.Module
    strict: bool = True
    rules: TrainingRules | None = None
    base: Collection[int] = ()  # ids of parameters that a save leaves out, and a load may miss
    is_target: bool = False  # of a load

    def __post_init__(self) -> None:
        # DCP's functions rename one name after the other: of a wrapped model with "a" and
        # "module.a" one takes the place of the other.
        self._inside = inside(self.model)
        self._is_crossed = has_crossed_names(self._inside)  # of wrappers that lie in it
        self.left: list[str] = []  # names of the base's parameters that a load leaves

    takes = Takes.EXTRA_STATES

    def state_dict(self) -> dict[str, Any]:
        if self._is_crossed:
            own = self._inside.state_dict()
            names = plain_names({"": self._inside}, own)
            state = {names.get(name, name): value for name, value in own.items()}
        else:
            state = get_model_state_dict(self._inside)
        if self.rules is not None:
            self.rules.own = state.keys()
        if self.is_target or not self.base:
            return state
        base = names_of_base(self._inside, self.base, state)
        return {name: value for name, value in state.items() if name not in base}

    def fitted(self, state: dict[str, Any], metadata: Metadata, key: str) -> dict[str, Any]:
        """Leaves the base's parameters as they are, but for those that were saved all the same."""
        if not self.base:
            return state
        self.strict = False  # of torch's own load: `load` has compared the names
        stored = stored_names(metadata, f"{key}.", self.rules)
        self.left = list(names_of_base(self._inside, self.base, state).difference(stored))
        return {name: value for name, value in state.items() if name not in self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._is_crossed:
            names = plain_names({"": self._inside}, self._inside.state_dict())
            raw = {plain: name for name, plain in names.items()}
            state = {raw.get(name, name): value for name, value in state.items()}
            self._inside.load_state_dict(state, strict=self.strict)
            return
        set_model_state_dict(self._inside, state, options=StateDictOptions(strict=self.strict))


def base_of(model: torch.nn.Module, optimizers: Iterable[Any]) -> set[int]:
    """Returns ids of the parameters that nothing has trained: frozen, without optimizer state."""
    states = (getattr(one, "state", None) for one in optimizers)
    maps = [own for own in states if isinstance(own, Mapping)]
    stepped = {id(parameter) for own in maps for parameter, its in own.items() if its}
    return {id(one) for one in model.parameters() if not one.requires_grad} - stepped


def names_of_base(model: torch.nn.Module, base: Collection[int], names: Iterable[str]) -> set[str]:
    """Returns those of a state's plain names that are of these parameters, or lie beneath one, as
    the scales of a quantized weight do.
    """
    every = model.named_parameters(remove_duplicate=False)
    own = [name for name, parameter in every if id(parameter) in base]
    plain = plain_names({"": model}, own)
    roots = {plain.get(name, name) for name in own}
    return {name for name in names if name in roots or owner_of(name, roots)}


@dataclass(eq=False)
class StatePart(LoadPart):
    """A user's dict. A load replaces values in it that are not `Stateful`, and adds those that only
    the checkpoint has.
    """

    state: dict[str, Any]
    may_miss: Callable[[str], object] | None = None  # None: not strict

    takes = Takes.ALL

    def state_dict(self) -> dict[str, Any]:
        return {
            key: value.state_dict() if isinstance(value, Stateful) else value
            for key, value in self.state.items()
            if type(value) is not PerRank
        }

    def fitted(self, state: dict[str, Any], metadata: Metadata, key: str) -> dict[str, Any]:
        """Raises MismatchError: names were saved of a module that it has not, as torch would."""
        self._names = {
            k: set(state[k]) for k, v in self.state.items() if isinstance(v, torch.nn.Module)
        }
        begins = {f"{key}.{name}.": own for name, own in self._names.items()}
        left = [
            name
            for begin, own in begins.items()
            for name in metadata.state_dict_metadata
            if name.startswith(begin) and not _has(own, name[len(begin) :])
        ]
        if self.may_miss is not None and (left := [n for n in left if not self.may_miss(n)]):
            raise MismatchError(
                f"a module in state= has no place for {counted(len(left), 'name')} that was saved: "
                f"{some(left)}; strict=False, or allow_missing=[globs] leaves "
                "them out",
                fqn=left[0],
                left=tuple(left),
            )
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key, value in state.items():
            current = self.state.get(key)
            if isinstance(current, torch.nn.Module):
                names = self._names[key]
                its = {n: v for n, v in value.items() if n in names or is_extra_state(n)}
                current.load_state_dict(its)
            elif isinstance(current, Stateful):
                current.load_state_dict(value)
            elif type(current) is not PerRank:
                self.state[key] = value


def _has(keys: Collection[str], name: str) -> bool:
    """Returns whether a name is one of a module's keys, or lies beneath one, or an extra state."""
    parts = name.split(".")
    return EXTRA_STATE in parts or any(
        ".".join(parts[: end + 1]) in keys for end in range(len(parts))
    )


class Parts(NamedTuple):
    """The arguments of `save` or `resume` that are saved."""

    model: Any = None
    optimizer: Any = None
    lr_scheduler: Any = None
    dataloader: Any = None
    state: Any = None
    user_content: Any = None
    trainable_only: bool = False  # how the model is saved; no part

    def check(self) -> None:
        """Raises OptionError for a part of the wrong type."""
        model, optimizer, lr_scheduler, dataloader, state, *_ = self
        if model is not None and not isinstance(model, torch.nn.Module):
            raise must_be("model", model, "a torch.nn.Module", "; other things go into `state`")
        if optimizer is not None:
            if model is None:
                raise must_be(
                    "optimizer", optimizer, "given with its model, whose names its state has"
                )
            for one in flat(optimizer):
                if not isinstance(one, torch.optim.Optimizer):
                    wanted = "an Optimizer, or a list or dict of them"
                    raise must_be("optimizer", one, wanted, _way_out(one, "optimizer"))
            if isinstance(optimizer, (list, tuple)):
                _check_unshared(model, optimizer)
        stateful = "Stateful (state_dict, load_state_dict)"
        for one in flat(lr_scheduler):
            way_out = _way_out(one, "lr_scheduler")
            if way_out or not isinstance(one, Stateful):
                wanted = f"a scheduler, {stateful}, or a list or dict of such"
                raise must_be("lr_scheduler", one, wanted, way_out)
        way_out = _way_out(dataloader, "dataloader")
        if isinstance(dataloader, DataLoader) and not isinstance(dataloader, Stateful):
            way_out = "; torchdata's StatefulDataLoader (pip install torchdata) takes its place"
        if dataloader is not None and (way_out or not isinstance(dataloader, Stateful)):
            raise must_be("dataloader", dataloader, f"a data loader, {stateful}", way_out)
        if state is not None and not (type(state) is dict and all(type(k) is str for k in state)):
            raise must_be("state", state, "a dict with str as keys")

    def check_memory(self) -> None:
        """Raises UnsupportedError: tensors of the model, or of an optimizer, are on meta.

        A load would fill copies of them, which nobody keeps. State: `checkpoint.load_plan`.
        """
        model = torch.nn.Module() if self.model is None else self.model
        tensors = chain(model.named_parameters(), model.named_buffers())
        names = [f"model.{name}" for name, tensor in tensors if tensor.is_meta]
        way = (
            "give it memory before its optimizer is made, by load_pretrained, or by "
            "to_empty(device=...), which takes shared parameters apart; compute buffers that are "
            "not persistent anew"
        )
        refuse_meta(names, "the model", way)
        for number, parameter in enumerate(parameters_of(flat(self.optimizer))):
            own = [f"optimizer parameter {number}"] if parameter.is_meta else []
            refuse_meta(own, "the optimizer", "make it of parameters that have memory")

    def has_scheduler(self, optimizer: torch.optim.Optimizer) -> bool:
        """Returns whether a scheduler here is, or may be, of this optimizer."""
        known = [one.param_groups for one in flat(self.optimizer)]  # a wrapper's are those within
        beside = [one for one in (self.state or {}).values() if isinstance(one, LRScheduler)]
        owners = [getattr(one, "optimizer", None) for one in (*beside, *flat(self.lr_scheduler))]
        its = [getattr(owner, "param_groups", None) for owner in owners]
        unknown = [groups for groups in its[len(beside) :] if all(groups is not k for k in known)]
        return bool(unknown) or any(groups is optimizer.param_groups for groups in its)

    @property
    def per_rank(self) -> dict[str, PerRank]:
        """The values of the state that are each rank's own, by path."""
        state = self.state or {}
        return {f"state.{key}": value for key, value in state.items() if type(value) is PerRank}

    @property
    def given(self) -> dict[str, str]:
        """The sort of each given part, by name."""
        return {
            name: kind_of(part) if name in ("optimizer", "lr_scheduler") else "one"
            for name, part in self._asdict().items()
            if part is not None and name != "trainable_only"
        }

    def stateful(
        self,
        *,
        has_named_groups: bool,
        strict: bool = True,
        rules: TrainingRules | None = None,
        **of_optimizer: Any,
    ) -> dict[str, Any]:
        """Returns model, optimizer and state for a save or load, as `Stateful` objects."""
        found: dict[str, Any] = {}
        if self.model is not None:
            is_target = of_optimizer.get("is_target", False)
            base = base_of(self.model, flat(self.optimizer)) if self.trainable_only else ()
            found["model"] = ModelPart(self.model, strict, rules, base, is_target)
        if self.optimizer is not None:
            found["optimizer"] = OptimizerPart(
                self.model, self.optimizer, strict, has_named_groups, rules, **of_optimizer
            )
        if self.state is not None:
            may_miss = of_optimizer.get("may_miss") if strict else None
            found["state"] = StatePart(self.state, may_miss)
        return found

    def small(self) -> Small:
        """Returns encoded byte items: their objects may change. Raises: as `split_content`."""
        values: dict[str, Any] = {}
        if self.lr_scheduler is not None:
            values["lr_scheduler"] = states_of(self.lr_scheduler)
        if self.user_content is not None:
            values["user_content"] = self.user_content
        if self.dataloader is not None:
            values["dataloader"] = PerRank(self.dataloader.state_dict())
        own: dict[str, Any] = {}
        shared: dict[str, Any] = {}
        for path, value in (values | self.per_rank).items():
            rest, its_own = split_content(value, path)
            own |= its_own
            if path in ("lr_scheduler", "user_content"):
                shared[path] = rest
        encoded = {name: encode_content(value) for name, value in shared.items()}
        return Small(encoded, encode_content(own) if own else b"", sorted(own), digests_of(shared))

    def call(self, name: str, per_rank: list[str], **arguments: Any) -> Call:
        """Returns a call as all ranks compare it."""
        more = {"per_rank": per_rank, "trainable_only": self.trainable_only}
        return Call(name, {**arguments, **self.given, **more})

    def record(self, calls: list[Call], order: int) -> Record:
        """Returns the record of a save, whose calls note metrics and a digest of groups."""
        tag, step, per_rank = (calls[0].arguments[name] for name in ("tag", "step", "per_rank"))
        names = sorted(self.given)
        if len({call.note[1] for call in calls}) > 1:
            names.append(NAMED_GROUPS)
        metrics = calls[0].note[0]
        now = int(time.time())
        return Record(tag, step, order, len(calls), metrics, tuple(names), tuple(per_rank), now)


class Small(NamedTuple):
    """The values of one rank's byte items."""

    shared: dict[str, bytes]  # by part
    own: bytes  # this rank's own, b"" if there is nothing
    per_rank: list[str]  # their paths
    digests: dict[str, bytes]


def _way_out(part: Any, given_as: str) -> str:
    """Returns where an optimizer or a scheduler belongs that came as another part, else ""."""
    kinds = {"optimizer": torch.optim.Optimizer, "lr_scheduler": LRScheduler}
    places = (name for name, kind in kinds.items() if isinstance(part, kind) and name != given_as)
    return next((f"; give it as {name}=" for name in places), "")


def _check_unshared(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raises OptionError: optimizers of a list share a parameter."""
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
                )
