"""What `Optimizer.load_state_dict` makes otherwise than it was given, put back as it was.

It casts states to the dtypes of their parameters, and makes iterables anew: texts are the repr of a
generator then, and a deque has no `maxlen`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from torch_dcpx.manager.optimizer_kinds import GROUPS, PARAMS, STATE
from torch_dcpx.manager.translate import parameters_of


@contextmanager
def dtypes_kept(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keeps `load_state_dict` from casting states to the dtypes of their parameters.

    It acts behind an optimizer's own `__setstate__` and before other hooks of its loads. `put_back`
    does so for a wrapper without hooks.
    """
    given: dict[str, Any] = {}
    handles = []
    if has_hooks(optimizer):
        handles = [
            optimizer.register_load_state_dict_pre_hook(lambda _, state: given.update(state)),
            optimizer.register_load_state_dict_post_hook(
                lambda one: put_back(one, given), prepend=True
            ),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether `Optimizer.__init__` has run; a wrapper may not call it."""
    return hasattr(optimizer, "_optimizer_load_state_dict_pre_hooks")


def put_back(one: torch.optim.Optimizer, given: Mapping[str, Any]) -> None:
    """Gives an optimizer the states that its load was given, with their dtypes."""
    numbers = chain.from_iterable(group[PARAMS] for group in given[GROUPS])
    for number, parameter in zip(numbers, parameters_of([one]), strict=True):
        state, own = given[STATE].get(number), one.state.get(parameter)
        if state and own:
            one.state[parameter] = _as_given(own, state, parameter.dtype)


def _as_given(own: Any, given: Any, cast_to: torch.dtype, key: Any = None) -> Any:
    """Returns a loaded state, with the given tensors where the load cast them to `cast_to`."""
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
