"""Unpickling without executing: every name in a pickle becomes an inert stand-in.

A pickle is a program: it names classes and functions, calls them, and sets attributes on what it
got, on classes and functions too (BUILD on a global patches the process). An allow-list of real
objects is therefore not enough. Here `find_class` knows exact (module, name) pairs only, never
falls through to an import, and gives a *stand-in* for each: a class whose instances write down
their arguments, state and elements and do nothing else. While the pickle runs, no real object
exists that it could call or change. `settle.Settler` then builds the real ones from checked parts.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn

from torch_dcpx._compat import TORCH_VERSION, torch_lacks
from torch_dcpx._gc import paused_gc
from torch_dcpx._native import _C
from torch_dcpx.errors import CorruptionError, DcpxError, OptionError, UnsafePickleError
from torch_dcpx.unpickle.hashed_keys import MAX_COMPOUND_KEYS, KeyCheckedUnpickler

GlobalTable = Mapping[tuple[str, str], Any]  # (module, name) as written in the pickle -> object

MAX_MESSAGE = 300  # characters of a cause that are quoted: its text may come from the file

# What CPython's unpickler, torch and numpy raise for a pickle that is not what was written.
MALFORMED = (
    pickle.UnpicklingError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    NameError,
    RuntimeError,  # RecursionError and NotImplementedError too
    TypeError,
    ValueError,  # UnicodeDecodeError too
)


def brief(value: object, limit: int = 40) -> str:
    """The start of a value's repr; of what is no plain number or text only its type.

    Forty times "a pair of the last one, twice" is a tuple whose repr has 2^40 characters.
    """
    if value is None or type(value) in (bool, int, float):
        return repr(value)[:limit]
    if isinstance(value, (str, bytes)):
        return repr(value[:limit])[:limit]
    return f"a {type(value).__name__}"


class _Empty:
    """Type of `EMPTY`: no state was set (None is a state)."""

    __slots__ = ()


EMPTY = _Empty()


class StandInType(type):
    """Metaclass of the stand-ins: a name of the pickle, callable and unchangeable."""

    def __setattr__(cls, name: str, value: object) -> NoReturn:
        # BUILD with a "slot state" is setattr on whatever lies on the stack, classes included.
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
        self.args = args
        self.kwargs = kwargs
        self.is_called = False
        self.state = EMPTY
        self.elements = self.pairs = None
        return self

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
    """Make the stand-in class of one allowed name.

    Args:
        global_name: "module.name", for messages.
        build: called with the instance and the settler once the pickle has ended.
        value: what the name itself means where the pickle stores it uncalled.
        base: `StandIn`, or `StateStandIn` for dataclasses that come in masses.

    Returns:
        A class to put into a `GlobalTable`.
    """
    namespace = {
        "__slots__": (),
        "global_name": global_name,
        "build": staticmethod(build),
        "value": value,
    }
    return StandInType(global_name, (base,), namespace)


def with_python2_names(table: GlobalTable) -> dict[tuple[str, str], Any]:
    """Add the names by which pickles of protocol 2 and below call the same things."""
    modules = {"builtins": "__builtin__", "copyreg": "copy_reg"}
    names = {"range": "xrange", "str": "unicode", "int": "long"}
    result = dict(table)
    for (module, name), target in table.items():
        if module in modules:
            result[modules[module], name] = target
            if name in names:
                result[modules[module], names[name]] = target
    return result


def user_globals(
    safe_globals: Iterable[Any], build: Callable[[StandIn, Any], Any]
) -> dict[tuple[str, str], Any]:
    """Make the table of `ReadOptions(safe_globals=[...])`: exact names, for this read only.

    Raises:
        OptionError: an entry has no importable name.
    """
    table: dict[tuple[str, str], Any] = {}
    for entry in safe_globals:
        module, name = getattr(entry, "__module__", None), getattr(entry, "__qualname__", None)
        if type(module) is not str or type(name) is not str or not callable(entry):
            raise OptionError(
                f"use safe_globals entry {entry!r}: it is no class or function with a module "
                "and a name",
                option="safe_globals",
                value=entry,
            )
        table[module, name] = stand_in(f"{module}.{name}", build, value=entry)
    return with_python2_names(table)


@contextmanager
def malformed_is_corruption(verb: str, *, path: str, fqn: str | None) -> Iterator[None]:
    """Turn every error of a malformed pickle into `CorruptionError`, cause attached.

    Args:
        verb: what was tried, first words of the message.
        path: file the bytes came from.
        fqn: fully qualified name of the item, None for metadata.

    Raises:
        CorruptionError: the body raised it (then `path` and `fqn` are filled in) or `MALFORMED`.
    """
    where = f"{path!r}" if fqn is None else f"item {fqn!r} of {path!r}"
    try:
        yield
    except CorruptionError as error:
        if error.path == path:
            raise
        # Raised where file and item are not known, such as in the C++ core.
        fields = {name: getattr(error, name) for name in error.FIELDS}
        fields |= {"path": path, "fqn": fqn}
        raise type(error)(f"{verb} {where}: {error.message}", **fields) from error
    except DcpxError:
        raise
    except MALFORMED as error:
        cause = f"{type(error).__name__}: {error}"[:MAX_MESSAGE]
        raise CorruptionError(f"{verb} {where}: {cause}", path=path, fqn=fqn) from error


class RestrictedUnpickler(pickle.Unpickler):
    """Unpickler whose globals are exact table entries; anything else raises and imports nothing.

    Args:
        data: starts with the pickle; bytes behind its STOP are not read.
        table: the only names there are.
        path: file the bytes came from, for errors.
        fqn: fully qualified name of the item, None for metadata.
        load_storage: what a persistent id gives; None refuses them.
        compound_keys: of the caller's own `scan_keys`, where nothing is behind the pickle's STOP.
            None: it is scanned here.

    Raises:
        CorruptionError: the pickle is malformed or built to exhaust memory or stack.
    """

    def __init__(
        self,
        data: bytes | memoryview,
        table: GlobalTable,
        *,
        path: str,
        fqn: str | None = None,
        load_storage: Callable[[Any], Any] | None = None,
        compound_keys: int | None = None,
    ) -> None:
        # The scan comes first: CPython's unpickler allocates what a pickle claims before it
        # looks whether the bytes are there.
        nbytes = len(data)
        if compound_keys is None:
            with malformed_is_corruption("scan the pickle of", path=path, fqn=fqn):
                nbytes, compound_keys = _C.scan_keys(data, allow_persid=load_storage is not None)
        self._data = memoryview(data)[:nbytes]
        self._has_many_keys = compound_keys > MAX_COMPOUND_KEYS
        # utf-8 is what torch.load passes; it matters for strings of Python 2 only.
        super().__init__(io.BytesIO(self._data), encoding="utf-8")
        self._table, self._path, self._fqn = table, path, fqn
        self._load_storage = load_storage

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Return the table's entry for the exact pair, or raise `UnsafePickleError`."""
        found = self._table.get((module_name, global_name), EMPTY)
        if found is EMPTY:
            name = f"{module_name}.{global_name}"[:MAX_MESSAGE]
            where = "the metadata" if self._fqn is None else f"item {self._fqn!r}"
            if torch_lacks(module_name, global_name):
                why = f"torch {TORCH_VERSION} lacks: another torch wrote it, or it is damaged"
            else:
                why = (
                    f"is on no allow-list; allow it with ReadOptions(safe_globals=[{name}]), or if "
                    "you trust whoever wrote this checkpoint, pass trusted=True"
                )
            raise UnsafePickleError(
                f"refuse to unpickle {where} of {self._path!r}: it would use {name!r}, which {why}",
                global_name=name,
                path=self._path,
                fqn=self._fqn,
            )
        return found

    def persistent_load(self, pid: Any, /) -> Any:
        """Return the storage stand-in of a persistent id."""
        if self._load_storage is None:
            raise pickle.UnpicklingError("names a persistent id where none belongs")
        return self._load_storage(pid)

    def load(self) -> Any:
        """Run the pickle; returns plain builtins and stand-ins.

        Raises:
            UnsafePickleError: it names a global outside the table.
            CorruptionError: it is malformed.
        """
        with malformed_is_corruption("unpickle", path=self._path, fqn=self._fqn), paused_gc():
            if self._has_many_keys:
                checked = KeyCheckedUnpickler(self._data, self.find_class, self.persistent_load)
                return checked.load()
            return super().load()
