"""Checks the arguments of public calls, before anything happens.

An error names the argument, what came, and what is taken; one that belongs elsewhere is recognised:
a state where a path belongs, options that were given by position. Imports no torch.
"""

from __future__ import annotations

import functools
import math
import numbers
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar

from torch_dcpx._integers import plain_int
from torch_dcpx.errors import OptionError, must_be, shown, with_article

_MAX_TIMEOUT_S = 1e9  # what clocks and stores can count
_STATE = 'a dict of values by name, such as {"model": model}'

_DOTTED = re.compile(r"\w+(\.\w+)+")  # at least a module and a name

_T = TypeVar("_T")
_Classes: TypeAlias = type | tuple[type, ...]


def check_type(name: str, value: Any, classes: _Classes, wanted: str) -> None:
    """Raises OptionError unless the value is of one of the classes."""
    if not isinstance(value, classes):
        raise must_be(name, value, wanted, _way_out(value))


def check_bool(name: str, value: Any) -> None:
    """Raises OptionError for anything but True and False: a text, even "no", would count as yes."""
    if type(value) is not bool:
        raise must_be(name, value, "True or False", _way_out(value))


def check_bools(**switches: Any) -> None:
    """As `check_bool`, of several."""
    for name, value in switches.items():
        check_bool(name, value)


def checked_int(name: str, value: Any, low: int, high: int, *, or_none: bool = False) -> Any:
    """Returns an integer of any type as an int. Raises OptionError: it is none within bounds."""
    number = plain_int(value)
    if number is None and or_none:
        return None
    if type(number) is not int or not low <= number <= high:
        raise must_be(name, value, f"{'None or ' if or_none else ''}an int from {low} to {high}")
    return number


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raises OptionError for anything but one of the texts."""
    if type(value) is not str or value not in choices:
        raise must_be(name, value, " or ".join(map(repr, choices)))


def check_seconds(name: str, value: Any) -> None:
    """Raises OptionError unless a deadline of so many seconds can be kept."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and math.isfinite(value) and 0 < value <= _MAX_TIMEOUT_S):
        raise must_be(name, value, f"seconds above 0 and up to {_MAX_TIMEOUT_S:.0f}")


def check_wait(name: str, value: Any) -> None:
    """Raises OptionError unless a caller can wait so many seconds; None waits for the end."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 <= value <= _MAX_TIMEOUT_S):
        raise must_be(name, value, f"None, or seconds from 0 to {_MAX_TIMEOUT_S:.0f}")


def check_callable(name: str, value: Any, *, or_none: bool = True) -> None:
    """Raises OptionError for anything but what can be called, and None where that is a value."""
    if not callable(value) and not (value is None and or_none):
        raise must_be(name, value, f"{'None or ' if or_none else ''}a function")


def check_options(name: str, value: Any, cls: type) -> None:
    """Raises OptionError for anything but None and options of a class."""
    if value is None or isinstance(value, cls):
        return
    way = ""
    if isinstance(value, Mapping):
        way = f"; write {cls.__name__}(**{name})"
    elif isinstance(value, type) and issubclass(value, cls):
        way = "; call it"
    elif type(value).__name__ in ("ReadOptions", "WriteOptions"):
        way = f"; {type(value).__name__} are of {'loads' if cls.__name__[0] == 'W' else 'saves'}"
    raise must_be(name, value, f"{cls.__name__} or None", way)


def check_part(name: str, value: Any, cls: type, hooks: Iterable[str] = ()) -> None:
    """Raises OptionError for anything but None and an object of a class of DCP, or one that has
    its `hooks` without deriving from it.
    """
    if value is None or isinstance(value, cls):
        return
    hooks = tuple(hooks)
    has_hooks = bool(hooks) and all(callable(getattr(value, hook, None)) for hook in hooks)
    if isinstance(value, type) or not has_hooks:
        way = "; call it" if isinstance(value, type) and has_hooks else _way_out(value)
        raise must_be(name, value, f"{with_article(cls.__name__)} or None", way)


def named_arguments(*names: str) -> Callable[[type[_T]], type[_T]]:
    """Returns a class decorator: methods of these names raise OptionError, with a text that leads
    on, for arguments by position that they take by name.
    """

    def changed(cls: type[_T]) -> type[_T]:
        for name in names:
            setattr(cls, name, _with_names(cls.__name__, getattr(cls, name)))
        return cls

    return changed


def _with_names(cls_name: str, method: Any) -> Any:
    most = method.__code__.co_argcount
    taken = ", ".join(method.__code__.co_varnames[1:most]) or "nothing"
    call = cls_name if method.__name__ == "__init__" else f"{cls_name}.{method.__name__}"
    option = next(iter(method.__kwdefaults__))  # the first one by name

    @functools.wraps(method)
    def checked(*args: Any, **given: Any) -> Any:
        if len(args) > most:
            came = " and ".join(map(shown, args[1:]))
            places = [_name_of(value) for value in args[1:]]
            way_out = ", ".join(f"{name}=" for name in places if name) or f"{option}= and the like"
            text = f"{call} takes {taken} by position, and all else by name, got {came}"
            raise OptionError(f"{text}; write {way_out}", option=option)
        return method(*args, **given)

    return checked


def _name_of(value: Any) -> str:
    """Returns the name of a manager's argument that a value looks like, "" of none."""
    kinds = {"WriteOptions": "options", "ReadOptions": "read_options"}
    found = kinds.get(type(value).__name__, "")
    return found or ("model" if callable(getattr(value, "named_parameters", None)) else "")


def check_state(call: str, state: Any, path: Any = None) -> None:
    """Raises OptionError unless `state_dict` of a call can be saved or loaded.

    Args:
        call: its name, for the way out.
        path: of the same call.
    """
    is_state = isinstance(state, Mapping) or (has_items(state) and not isinstance(state, type))
    if is_state and (call != "load" or _takes_values(state)):
        return
    way = ""
    if is_path(state):
        is_swapped = isinstance(path, Mapping) or has_items(path) or hasattr(path, "state_dict")
        way = f"; {call}(state_dict, checkpoint_id) takes the state first"
        way += ", and the two are swapped" if is_swapped else ""
    elif callable(getattr(state, "state_dict", None)) and not isinstance(state, type):
        way = '; give it a name, {"model": model}, or give model.state_dict()'
    raise must_be("state_dict", state, _STATE, way)


def _takes_values(state: Any) -> bool:
    """Returns whether a load can put values into a state, or need not."""
    if not hasattr(state, "get"):
        return False
    values = (value for _, value in state.items())
    return hasattr(state, "__setitem__") or all(hasattr(v, "load_state_dict") for v in values)


def checked_globs(name: str, value: Any, example: str, what: str = "globs") -> tuple[str, ...]:
    """Returns globs. Raises OptionError for anything but an iterable of texts; one text is none."""
    is_list = isinstance(value, Iterable) and not isinstance(value, (str, bytes))
    globs = tuple(value) if is_list else ()
    if not is_list or not all(isinstance(glob, str) for glob in globs):
        raise must_be(name, value, f"a list of {what}, such as {example}")
    return globs


def checked_globals(value: Any) -> tuple[Any, ...]:
    """Returns `safe_globals`. Raises OptionError unless it holds classes, functions and names."""
    is_list = isinstance(value, Iterable) and not isinstance(value, (str, bytes, type))
    entries = tuple(value) if is_list else (value,)
    for entry in entries:
        is_name = isinstance(entry, str) and _DOTTED.fullmatch(entry) is not None
        is_object = callable(entry) and hasattr(entry, "__qualname__")
        if not is_list or not (is_name or is_object):
            wanted = 'a list of classes, functions, or their dotted names such as "pkg.module.Name"'
            raise must_be("safe_globals", entry, wanted)
    return entries


def has_items(value: Any) -> bool:
    """Returns whether a value gives names and values, as a dict, a UserDict, a ModuleDict."""
    return callable(getattr(value, "items", None))


def is_path(value: Any) -> bool:
    """Returns whether a value names something in a file system."""
    return isinstance(value, (str, bytes, os.PathLike))


def _way_out(value: Any) -> str:
    """Returns where options belong that came in another argument's place."""
    is_options = type(value).__name__ in ("ReadOptions", "WriteOptions")
    return "; give options by name, options=" if is_options else ""
