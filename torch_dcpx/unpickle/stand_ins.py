"""Unpickling without executing: every name in a pickle becomes an inert stand-in.

A pickle is a program: it names classes and functions, calls them, and sets attributes of their
results and of themselves (BUILD on a global patches the process). So an allow-list of real objects
is not enough. Here `find_class` knows exact (module, name) pairs only, never imports, and gives a
*stand-in* for each: a class whose instances write down their arguments, state and elements and do
nothing else. While the pickle runs, no real object exists that it could call or change.
`settle.Settler` then builds the real ones from checked parts.
"""

from __future__ import annotations

import pickle
from _compat_pickle import REVERSE_IMPORT_MAPPING, REVERSE_NAME_MAPPING
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NoReturn

from torch_dcpx.errors import UnsafePickleError

GlobalTable = Mapping[tuple[str, str], Any]  # (module, name) as written in the pickle -> object


def brief(value: object, limit: int = 40) -> str:
    """Returns the start of a plain number's or text's repr; of any other value only its type.

    Forty times "a pair of the last one, twice" is a tuple whose repr has 2^40 characters.
    """
    if value is None or type(value) in (bool, int, float):
        return repr(value)[:limit]
    if isinstance(value, (str, bytes)):
        return repr(value[:limit])[:limit]
    return f"a {type(value).__name__}"


EMPTY: Any = object()  # no state was set (None is a state), a name has no value, and the like


class StandInType(type):
    """Metaclass of the stand-ins: a name of the pickle, callable and unchangeable."""

    def __setattr__(cls, name: str, value: object) -> NoReturn:
        # BUILD with a "slot state" is setattr on any object on the stack, classes included.
        raise pickle.UnpicklingError(f"sets attribute {name!r} of a global")

    def __delattr__(cls, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"deletes attribute {name!r} of a global")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        self: Any = cls.__new__(cls, *args, **kwargs)  # type: ignore[arg-type]
        self.is_called = True  # REDUCE; NEWOBJ goes to __new__ directly
        return self


class StandIn(metaclass=StandInType):
    """Writes down what a pickle does with an object of an allowed name, and does none of it."""

    __slots__ = ("args", "elements", "is_called", "kwargs", "pairs", "state")

    global_name: ClassVar[str] = ""
    build: ClassVar[Callable[[StandIn, Any], Any]]  # makes the real object
    value: ClassVar[Any] = EMPTY  # what the bare name means as a value; EMPTY: refused

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_called: bool
    state: Any  # of BUILD
    elements: list[Any] | None  # of APPEND(S) and ADDITEMS
    pairs: list[tuple[Any, Any]] | None  # of SETITEM(S)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        self = object.__new__(cls)
        self.args, self.kwargs = args, kwargs
        self.is_called, self.state = False, EMPTY
        self.elements = self.pairs = None
        return self

    def __call__(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise UnsafePickleError(
            f"refuse to call what '{self.global_name}' returns, as pickles do for methods and for "
            "classes inside of classes: only trusted=True does",
            global_name=self.global_name,
        )

    def __setstate__(self, state: Any) -> None:
        if self.state is not EMPTY:
            raise pickle.UnpicklingError(f"sets the state of a {self.global_name} twice")
        self.state = state

    def append(self, element: Any) -> None:
        if self.elements is None:
            self.elements = []
        self.elements.append(element)

    add = append

    def extend(self, elements: Iterable[Any]) -> None:
        for element in elements:
            self.append(element)

    def __setitem__(self, key: Any, value: Any) -> None:
        if self.pairs is None:
            self.pairs = []
        self.pairs.append((key, value))


class StateStandIn(list[Any], metaclass=StandInType):
    """Stand-in of a class that is only ever made by NEWOBJ and BUILD; a list of the states set.

    A million of these are made for the metadata of a large model, so every step of one is a C
    function. Calling the class (REDUCE) fails for want of `is_called`.
    """

    __slots__ = ()

    global_name: ClassVar[str] = ""
    build: ClassVar[Callable[[StateStandIn, Any], Any]]
    value: ClassVar[Any] = EMPTY

    __setstate__ = list.append
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__
    __ne__ = object.__ne__


def stand_in(
    global_name: str,
    build: Callable[[Any, Any], Any],
    value: Any = EMPTY,
    base: StandInType = StandIn,
) -> StandInType:
    """Returns the stand-in class of one allowed name, "module.name".

    Args:
        build: called with the instance and the settler once the pickle has ended.
        value: the object where the pickle stores the name uncalled.
        base: `StandIn`, or `StateStandIn` for dataclasses that come in masses.
    """
    own = {"global_name": global_name, "build": staticmethod(build), "value": value}
    return StandInType(global_name, (base,), {"__slots__": (), **own})


def with_python2_names(table: GlobalTable) -> dict[tuple[str, str], Any]:
    """Adds the names by which pickles of protocol 2 and below call the same things."""
    result = dict(table)
    for (module, name), target in table.items():
        result.setdefault((REVERSE_IMPORT_MAPPING.get(module, module), name), target)
        result.setdefault(REVERSE_NAME_MAPPING.get((module, name), (module, name)), target)
    return result
