"""Which hooks of a load planner are stock's, so that what they do is known without a call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.planner import LoadPlanner

_Planner = TypeVar("_Planner", bound=DefaultLoadPlanner)
_AnyPlanner = TypeVar("_AnyPlanner", bound=LoadPlanner)

_HOOKS = ("resolve_tensor", "lookup_tensor", "transform_tensor")
TAKING_HOOKS = ("commit_tensor", "load_bytes")
PLAN_HOOKS = ("create_local_plan", "create_global_plan", "finish_plan", *_HOOKS)
_LOOKUPS = ("get", "__getitem__", "__contains__")


def _torchs_own() -> dict[str, Any]:
    """Returns stock's hooks by name, without those that somebody replaced in torch's class before
    this module was imported: they are called as any other's are.
    """
    source = create_default_local_load_plan.__code__.co_filename
    hooks = {name: getattr(DefaultLoadPlanner, name) for name in (*PLAN_HOOKS, *TAKING_HOOKS)}
    codes = {name: getattr(hook, "__code__", None) for name, hook in hooks.items()}
    return {
        name: hooks[name]
        for name, code in codes.items()
        if code is not None and code.co_filename == source
    }


_STOCK = _torchs_own()
_ANY_ORDER: set[type[LoadPlanner]] = set()
_OURS: dict[str, Any] = {}  # those of our planner that come to the same, by their names


def plans_as_stock(planner: type[_Planner]) -> type[_Planner]:
    """Says that a class' own hooks make the plan that stock's make."""
    _OURS.update({name: vars(planner)[name] for name in PLAN_HOOKS if name in vars(planner)})
    return planner


def takes_in_any_order(planner: type[_AnyPlanner]) -> type[_AnyPlanner]:
    """Says that a class gives each item memory of its own, and takes what was read in any order."""
    _ANY_ORDER.add(planner)
    return planner


def is_any_order(planner: LoadPlanner) -> bool:
    """Returns whether many items of the planner may be under way at once."""
    return type(planner) in _ANY_ORDER


def has_stock_hooks(planner: LoadPlanner, names: Iterable[str] = _HOOKS) -> bool:
    """Returns whether the planner's hooks `names` are stock's, or do what stock's do; by default
    those whose stock form hands out views of the state's own tensors.
    """
    return isinstance(planner, DefaultLoadPlanner) and all(
        name in _STOCK
        and getattr(type(planner), name) in (_STOCK[name], _OURS.get(name))
        and name not in vars(planner)
        for name in names
    )


def has_plain_state(planner: LoadPlanner) -> bool:
    """Returns whether the planner's state is a dict that answers as dicts do."""
    state = type(getattr(planner, "state_dict", None))
    return issubclass(state, dict) and all(
        getattr(state, name) is getattr(dict, name) for name in _LOOKUPS
    )
