"""The unpickler that imports nothing: a name in a pickle is an exact entry of a table, or refused.

`malformed_is_corruption` turns each error of a malformed pickle into one of ours. `user_globals`
makes entries of the table for the names that a user allows.
"""

from __future__ import annotations

import importlib
import io
import os
import pickle
import re
import traceback
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch_dcpx._compat import TORCH_VERSION, torch_lacks
from torch_dcpx._environment import variable_of
from torch_dcpx._gc import paused_gc
from torch_dcpx._native import _C
from torch_dcpx.errors import CorruptionError, DcpxError, OptionError, UnsafePickleError
from torch_dcpx.unpickle.hashed_keys import MAX_COMPOUND_KEYS, KeyCheckedUnpickler
from torch_dcpx.unpickle.stand_ins import (
    EMPTY,
    GlobalTable,
    StandIn,
    StandInType,
    stand_in,
    with_python2_names,
)

_MAX_NAMES = 16  # that an error lists
_TRUST = "if you trust whoever wrote this checkpoint, pass trusted=True"
_ANY_COST = 1 << 62
_STATES_EARN_PER_BYTE = 28  # of metadata: entries of few letters, and one part each, take 25
_DOTTED = re.compile(r"\w+(\.\w+)+")
MAX_MESSAGE = 200  # characters quoted of a cause, whose text may come from the file

# CPython's unpickler, torch and numpy raise these for a damaged pickle.
_MALFORMED = (
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


class NamedGlobal:
    """A name of `safe_globals`, which is imported when a pickle names it, and not before."""

    def __init__(self, module: str, name: str, build: Callable[[StandIn, Any], Any]) -> None:
        self._module, self._name, self._build = module, name, build
        self._found: Any = EMPTY

    def stand_in(self) -> Any:
        """Returns the stand-in of what it names. Raises OptionError: there is no such thing."""
        if self._found is EMPTY:
            value = imported(self._module, self._name)
            self._found = stand_in(f"{self._module}.{self._name}", self._build, value=value)
        return self._found


def way_to_allow(names: Sequence[str]) -> str:
    """Returns how to allow names, for errors."""
    before = os.environ.get(variable_of("safe_globals"), "")
    variable = f"{variable_of('safe_globals')}={','.join(filter(None, (before, *names)))}"
    entries = ", ".join(f'"{name}"' for name in names)
    use = f"ReadOptions(safe_globals=[{entries}]) or {variable}"
    return f"if it is yours, and no function that acts on files or processes, allow it with {use}"


def imported(module: str, name: str) -> Any:
    """Returns a class or function that the user allows by its name.

    Raises:
        OptionError: it cannot be imported, or is something else.
    """
    try:
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        wrong = f"safe_globals names '{module}.{name}', which cannot be imported: {why}"
        raise OptionError(wrong, option="safe_globals", value=f"{module}.{name}") from error
    if not callable(value):
        wrong = f"safe_globals names '{module}.{name}', which is no class or function"
        raise OptionError(wrong, option="safe_globals", value=f"{module}.{name}")
    return value


def user_globals(
    safe_globals: Iterable[Any], build: Callable[[StandIn, Any], Any]
) -> dict[tuple[str, str], Any]:
    """Returns the table of `ReadOptions(safe_globals=[...])`: exact names, for this read only."""
    table: dict[tuple[str, str], Any] = {}
    for entry in safe_globals:
        if isinstance(entry, str):
            parts = entry.split(".")
            for at in range(1, len(parts)):
                pair = ".".join(parts[:at]), ".".join(parts[at:])
                table.setdefault(pair, NamedGlobal(*pair, build))
            continue
        module, name = getattr(entry, "__module__", None), getattr(entry, "__qualname__", None)
        if type(module) is not str or type(name) is not str or not callable(entry):
            why = "it is no class or function with a module and a name"
            message = f"use safe_globals entry {entry!r}: {why}"
            raise OptionError(message, option="safe_globals", value=entry)
        table[module, name] = stand_in(f"{module}.{name}", build, value=entry)
    return with_python2_names(table)


@contextmanager
def malformed_is_corruption(verb: str, *, path: str, fqn: str | None) -> Iterator[None]:
    """Turns every error of a malformed pickle into `CorruptionError`, cause attached.

    Adds `path` and `fqn` (None for metadata) to a CorruptionError without them. `verb` begins the
    message. An error may be kept, and would keep all that was unpickled by the frames where it was:
    those below the caller's are cleared.
    """
    where = f"{path!r}" if fqn is None else f"item {fqn!r} of {path!r}"
    try:
        yield
    except CorruptionError as error:
        traceback.clear_frames(error.__traceback__)
        if error.path == path:
            raise
        # Raised where file and item are not known, such as in the C++ core.
        fields = {name: getattr(error, name) for name in error.FIELDS} | {"path": path, "fqn": fqn}
        raise type(error)(f"{verb} {where}: {error.message}", **fields) from error
    except DcpxError:
        raise
    except _MALFORMED as error:
        traceback.clear_frames(error.__traceback__)
        cause = f"{type(error).__name__}: {error}"[:MAX_MESSAGE]
        raise CorruptionError(f"{verb} {where}: {cause}", path=path, fqn=fqn) from error


def scanned(
    data: bytes | memoryview,
    *,
    path: str,
    fqn: str | None,
    allow_persid: bool = False,
    storages: int = 0,
    may_trust: bool = True,
    trusted: bool = False,
) -> tuple[int, int]:
    """Returns the size of the pickle with which `data` begins, and how many compound keys it has.

    Args: as `RestrictedUnpickler`; `trusted`: it may take any memory.

    Raises: CorruptionError: as `RestrictedUnpickler`.
    """
    room = {"base_cost": _ANY_COST} if trusted else {"storages": storages}
    if fqn is None:
        room["states_earn_per_byte"] = _STATES_EARN_PER_BYTE
    try:
        with malformed_is_corruption("scan the pickle of", path=path, fqn=fqn):
            return _C.scan_keys(data, allow_persid, **room)
    except CorruptionError as error:
        if is_heavy(error) and may_trust:
            error.message += f"; {_TRUST}"
        raise


def is_heavy(error: CorruptionError) -> bool:
    """Returns whether a pickle was refused for the memory that its objects would take."""
    return "of memory for its" in error.message


def _python3_name(module: str, name: str) -> str:
    """Returns the dotted name of what a pickle names, which may be by a name of Python 2."""
    pair = NAME_MAPPING.get((module, name)) or (IMPORT_MAPPING.get(module, module), name)
    return ".".join(pair)[:MAX_MESSAGE]


class _Namer(pickle.Unpickler):
    """Runs a pickle whose every name is an inert stand-in, and notes those that a table lacks.

    It ends at the first name that an error has no room for: each costs a class.
    """

    def __init__(self, data: memoryview, table: GlobalTable, names: dict[str, None]) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._table, self._names = table, names
        self._made: dict[tuple[str, str], StandInType] = {}

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        key = module_name, global_name
        if key not in self._made:
            if key not in self._table:
                self._names[_python3_name(*key)] = None
            if len(self._names) > _MAX_NAMES:
                raise pickle.UnpicklingError("names more than an error lists")
            self._made[key] = stand_in(".".join(key), lambda *_: None)
        return self._made[key]

    def persistent_load(self, pid: Any, /) -> None:
        """A storage is no name."""


class RestrictedUnpickler(pickle.Unpickler):
    """Unpickler whose globals are exact table entries; anything else raises and imports nothing.

    Args:
        data: begins with the pickle; bytes behind its STOP are not read.
        table: the only names there are.
        path, fqn: file and item (None: the metadata), for errors.
        load_storage: called with each persistent id; None refuses them.
        storages: how many its archive may have, each of which makes room for a tensor.
        compound_keys: as the caller's own `scan_keys` counted them, if the pickle fills `data`;
            None: they are counted here.
        may_trust: whether the error of a refused name offers `trusted=True`.

    Raises:
        CorruptionError: the pickle is malformed or built to exhaust memory or stack.
        UnsafePickleError: it names a global outside the table.
    """

    def __init__(
        self,
        data: bytes | memoryview,
        table: GlobalTable,
        *,
        path: str,
        fqn: str | None = None,
        load_storage: Callable[[Any], Any] | None = None,
        storages: int = 0,
        compound_keys: int | None = None,
        may_trust: bool = True,
    ) -> None:
        # First: CPython's unpickler allocates the sizes that a pickle claims before it looks at
        # the bytes.
        nbytes = len(data)
        if compound_keys is None:
            has_storages = load_storage is not None
            nbytes, compound_keys = scanned(
                data,
                path=path,
                fqn=fqn,
                allow_persid=has_storages,
                storages=storages,
                may_trust=may_trust,
            )
        self._data = memoryview(data)[:nbytes]
        self._has_many_keys = compound_keys > MAX_COMPOUND_KEYS
        # utf-8 is what torch.load passes; it matters for strings of Python 2 only.
        super().__init__(io.BytesIO(self._data), encoding="utf-8")
        self._table, self._path, self._fqn = table, path, fqn
        self._load_storage = load_storage
        self._may_trust = may_trust

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Returns the table's entry for the exact pair, or raises `UnsafePickleError`."""
        found = self._table.get((module_name, global_name), EMPTY)
        if type(found) is NamedGlobal:
            return found.stand_in()
        if found is not EMPTY:
            return found
        name = f"{module_name}.{global_name}"[:MAX_MESSAGE]
        where = "the metadata" if self._fqn is None else f"item {self._fqn!r}"
        why = f"torch {TORCH_VERSION} lacks: another torch wrote it, or it is damaged"
        if not torch_lacks(module_name, global_name):
            why = f"is on no allow-list{self._ways_out(module_name, global_name)}"
        raise UnsafePickleError(
            f"refuse to unpickle {where} of {self._path!r}: it would use {name!r}, which {why}",
            global_name=name,
            path=self._path,
            fqn=self._fqn,
        )

    def _ways_out(self, module_name: str, global_name: str) -> str:
        """Returns how to read the pickle all the same, for errors."""
        name = _python3_name(module_name, global_name)
        names = [name, *(one for one in self._other_names() if one != name)]
        ways = [way_to_allow(names)] if all(map(_DOTTED.fullmatch, names)) else []
        if self._may_trust:
            ways.append(_TRUST)
        return "; " + ", or ".join(ways) if ways else ""

    def _other_names(self) -> list[str]:
        """Returns the names that the table lacks, of all the pickle: it runs on inert stand-ins."""
        names: dict[str, None] = {}
        runner = _Namer(self._data, self._table, names)
        try:
            if not self._has_many_keys:
                runner.load()
        except (*_MALFORMED, UnsafePickleError):
            pass  # what it names up to here
        return list(names)[:_MAX_NAMES]

    def persistent_load(self, pid: Any, /) -> Any:
        if self._load_storage is None:
            raise pickle.UnpicklingError("names a persistent id where none belongs")
        return self._load_storage(pid)

    def load(self) -> Any:
        """Runs the pickle; returns plain builtins and stand-ins."""
        with malformed_is_corruption("unpickle", path=self._path, fqn=self._fqn), paused_gc():
            if self._has_many_keys:
                checked = KeyCheckedUnpickler(self._data, self.find_class, self.persistent_load)
                return checked.load()
            try:
                return super().load()
            except pickle.UnpicklingError as error:
                if "class argument" not in str(error):  # of NEWOBJ
                    raise
                raise UnsafePickleError(
                    "refuse to make an object of what a call returns, as pickles do for classes "
                    "inside of classes: only trusted=True does",
                    path=self._path,
                    fqn=self._fqn,
                ) from error
