"""Puts back what `Optimizer.load_state_dict` makes otherwise than it was given.

It casts states to the dtypes of their parameters, and makes iterables anew: texts are the repr of a
generator then, and a deque has no `maxlen`. An optimizer may hand its loads to one within it, whose
hooks are not its own: then what it shows after the load is compared with what it was given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from torch_dcpx._text import counted
from torch_dcpx.errors import UnsupportedError
from torch_dcpx.manager.optimizer_kinds import GROUPS, NAMES, PARAMS, STATE
from torch_dcpx.manager.translate import parameters_of


def load_as_given(one: torch.optim.Optimizer, given: Mapping[str, Any]) -> None:
    """Gives an optimizer a state, of which its groups keep their own names of parameters.

    Raises:
        UnsupportedError: it made something else of a state.
    """
    groups = [dict(group) for group in given[GROUPS]]
    for group, own in zip(groups, one.param_groups, strict=False):
        group.pop(NAMES, None)
        if NAMES in own:
            group[NAMES] = own[NAMES]
    given = {**given, GROUPS: groups}
    with _put_back_by_hooks(one) as seen:
        one.load_state_dict(given)
    if not seen:
        _put_back_behind(one, given)


@contextmanager
def _put_back_by_hooks(optimizer: torch.optim.Optimizer) -> Iterator[dict[str, Any]]:
    """Keeps `load_state_dict` from making states otherwise; yields what its hooks were given.

    It acts behind an optimizer's own `__setstate__` and before other hooks of its loads.
    """
    given: dict[str, Any] = {}
    handles = []
    # `Optimizer.__init__` makes the dicts of hooks; a wrapper may not call it.
    if hasattr(optimizer, "_optimizer_load_state_dict_pre_hooks"):
        handles = [
            optimizer.register_load_state_dict_pre_hook(lambda _, state: given.update(state)),
            optimizer.register_load_state_dict_post_hook(
                lambda one: _put_back(one, given), prepend=True
            ),
        ]
    try:
        yield given
    finally:
        for handle in handles:
            handle.remove()


def _put_back(one: torch.optim.Optimizer, given: Mapping[str, Any]) -> None:
    """Gives an optimizer the states that its load was given, with their dtypes."""
    for parameter, state in _states(one, given):
        own = one.state.get(parameter)
        if state and own:
            _as_given(own, state, parameter.dtype)


def _put_back_behind(one: torch.optim.Optimizer, given: Mapping[str, Any]) -> None:
    """Does so for an optimizer whose hooks did not run, also in the dicts that it shows.

    Its `state` may be a copy, or be of before the load. Raises: as `load_as_given`.
    """
    if not given[STATE]:
        return
    if isinstance(getattr(one, "state", None), Mapping):
        _put_back(one, given)
    wrong: list[str] = []
    for _ in range(2):  # the second time to see whether it holds
        shown, wrong = one.state_dict()[STATE], []
        for at, (parameter, state) in enumerate(_states(one, given)):
            own = shown.get(at)
            if state and own and _is_unlike(own, state, parameter.dtype):
                _as_given(own, state, parameter.dtype)
                wrong.append(f"parameter {at}, of sizes {tuple(parameter.size())}")
        if not wrong:
            return
    raise UnsupportedError(
        f"optimizer {type(one).__name__} has other dtypes or texts in the states of "
        f"{counted(len(wrong), 'parameter')} than its load_state_dict was given, and shows copies: "
        f"{', '.join(wrong[:5])}; give the optimizer within it, or load_optimizer=False"
    )


def _states(
    one: torch.optim.Optimizer, given: Mapping[str, Any]
) -> Iterator[tuple[torch.nn.Parameter, Any]]:
    """Yields an optimizer's parameters, each with its given state, or None."""
    numbers = chain.from_iterable(group[PARAMS] for group in given[GROUPS])
    for number, parameter in zip(numbers, parameters_of([one]), strict=True):
        yield parameter, given[STATE].get(number)


def _is_unlike(own: Any, given: Any, cast_to: torch.dtype, key: Any = None) -> bool:
    """Returns whether `_as_given` would change a loaded state."""
    if isinstance(own, torch.Tensor) and isinstance(given, torch.Tensor):
        return own.dtype == cast_to != given.dtype and key != "step"
    if type(given) in (str, set, frozenset):
        return type(own) is not type(given) or bool(own != given)
    if isinstance(own, dict) and isinstance(given, Mapping):
        return any(_is_unlike(own[key], given[key], cast_to, key) for key in own.keys() & given)
    if type(own) in (list, tuple, deque) and type(own) is type(given) and len(own) == len(given):
        lengths = {one.maxlen for one in (own, given) if type(one) is deque}
        pairs = zip(own, given, strict=True)
        return len(lengths) > 1 or any(_is_unlike(a, b, cast_to) for a, b in pairs)
    return False


def _as_given(own: Any, given: Any, cast_to: torch.dtype, key: Any = None) -> Any:
    """Returns a loaded state, with the given tensors where the load cast them to `cast_to`; dicts
    are the loaded ones.
    """
    if isinstance(own, torch.Tensor) and isinstance(given, torch.Tensor):
        is_cast = own.dtype == cast_to != given.dtype and key != "step"  # that one is as it must be
        return given.to(own.device) if is_cast else own
    if type(given) in (str, set, frozenset):  # torch gives texts back as the repr of a generator
        return given
    if isinstance(own, dict) and isinstance(given, Mapping):
        for name in own.keys() & given.keys():
            own[name] = _as_given(own[name], given[name], cast_to, name)
    elif type(own) in (list, tuple, deque) and type(own) is type(given) and len(own) == len(given):
        parts = [_as_given(a, b, cast_to) for a, b in zip(own, given, strict=True)]
        return deque(parts, given.maxlen) if type(given) is deque else type(own)(parts)
    return own
