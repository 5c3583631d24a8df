"""Says what the hook does, and carries it to child processes, by variables. Imports no torch.

DCPX_INSTALL              1, or roles: writer,reader,planners,stager
DCPX_INSTALL_DURABILITY   caller or full
DCPX_INSTALL_WRITE        WriteOptions as JSON; DCPX_INSTALL_READ: ReadOptions
DCPX_INSTALL_IN_CODE      arguments of `install` that no variable can carry
DCPX_SAFE_GLOBALS         dotted names of `safe_globals`
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

from torch_dcpx.errors import OptionError, UnsupportedError
from torch_dcpx.options import ReadOptions, WriteOptions

ROLES = ("writer", "reader", "planners", "stager")
INSTALL = "DCPX_INSTALL"
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"  # torch's own switch of its entry points
_DURABILITY, _WRITE, _READ = (f"{INSTALL}_{name}" for name in ("DURABILITY", "WRITE", "READ"))
_IN_CODE = f"{INSTALL}_IN_CODE"
_SAFE = "DCPX_SAFE_GLOBALS"
VARIABLES = (INSTALL, _DURABILITY, _WRITE, _READ, _IN_CODE, _SAFE)

_Options = TypeVar("_Options", WriteOptions, ReadOptions)


@dataclass(frozen=True)
class Settings:
    """Holds what `install` was told.

    Attributes:
        roles: those that are replaced.
        durability: "caller" or "full".
        write_options, read_options: of every writer and stager, and of every reader.
        in_code: arguments of the `install` of a parent that did not come along, with their roles.
    """

    roles: frozenset[str] = frozenset(ROLES)
    durability: Literal["caller", "full"] = "caller"
    write_options: WriteOptions = field(default_factory=WriteOptions)
    read_options: ReadOptions = field(default_factory=ReadOptions)
    in_code: tuple[str, ...] = ()

    def check_complete(self, role: str) -> None:
        """Raises UnsupportedError if this process lacks an argument that a role needs."""
        own = {"writer": ("write_options",), "reader": ("read_options", "trusted", "safe_globals")}
        lost = [name for name in self.in_code if name.startswith(own.get(role, ()))]
        if lost:
            raise UnsupportedError(
                f"install({lost[0].split('.')[0]}=...) of the parent process has "
                f"{' and '.join(lost)}, which no variable carries to this child: call "
                "torch_dcpx.install(...) here, too, before DCP is used"
            )


def is_asked() -> bool:
    """Returns whether DCPX_INSTALL asks for the hook."""
    return os.environ.get(INSTALL, "").lower() not in ("", "0", "false")


def is_autoload_off() -> bool:
    """Returns whether torch calls no entry point. Source: _is_device_backend_autoload_enabled."""
    return os.environ.get(AUTOLOAD, "1") != "1"


def variables_of(settings: Settings) -> dict[str, str]:
    """Returns the variables by which a child makes the same settings."""
    in_code = set(settings.in_code)
    write, read = _values(settings.write_options), _values(settings.read_options)
    if callable(write["progress"]):
        in_code.add("write_options.progress")
        del write["progress"]
    names = [_dotted(entry) for entry in read.pop("safe_globals")]
    if None in names:
        in_code.add("safe_globals")
    if read.pop("trusted"):
        in_code.add("trusted")
    return {
        INSTALL: "1" if settings.roles == set(ROLES) else ",".join(sorted(settings.roles)),
        _DURABILITY: settings.durability,
        _WRITE: json.dumps(write),
        _READ: json.dumps(read),
        _IN_CODE: ",".join(sorted(in_code)),
        _SAFE: ",".join(name for name in names if name is not None),
    }


def _values(options: WriteOptions | ReadOptions) -> dict[str, Any]:
    """Returns the options by name. Not by `asdict`, which copies what `progress` is bound to."""
    return {one.name: getattr(options, one.name) for one in fields(options)}


def _dotted(entry: Any) -> str | None:
    """Returns the name of a class or function that a child can import by it, or None."""
    if isinstance(entry, str):
        return entry
    module = getattr(entry, "__module__", None)  # methods of built-in classes have none
    name = f"{module}.{entry.__qualname__}"
    return None if module in (None, "__main__", "__mp_main__") or "<" in name else name


def settings_from_environment() -> Settings:
    """Returns the settings that the variables say.

    Raises:
        OptionError: one of them has a value that cannot be.
    """
    durability: Any = os.environ.get(_DURABILITY) or "caller"
    if durability not in ("caller", "full"):
        raise _bad(_DURABILITY, durability, "caller or full")
    return Settings(
        roles=_roles(os.environ.get(INSTALL, "")),
        durability=durability,
        write_options=_options(WriteOptions, _WRITE),
        read_options=_options(ReadOptions, _READ),
        in_code=_in_code(os.environ.get(_IN_CODE, "")),
    )


def _in_code(text: str) -> tuple[str, ...]:
    names = tuple(filter(None, text.split(",")))
    known = ("write_options.progress", "safe_globals", "trusted")
    if not set(names) <= set(known):
        raise _bad(_IN_CODE, text, f"some of {','.join(known)}, or nothing: install() sets it")
    return names


def _roles(text: str) -> frozenset[str]:
    if text.lower() in ("1", "true"):
        return frozenset(ROLES)
    roles = frozenset(role.strip() for role in text.split(","))
    if not roles <= set(ROLES):
        raise _bad(INSTALL, text, f"1, 0, or some of {','.join(ROLES)}")
    return roles


def _options(cls: type[_Options], variable: str) -> _Options:
    """Returns options of JSON; what it does not name comes from variables of its own, as ever."""
    text = os.environ.get(variable, "")
    try:
        given = json.loads(text) if text else {}
    except ValueError as error:
        raise _bad(variable, text, f"JSON ({error})") from None
    known = {one.name for one in fields(cls)} - {"trusted", "safe_globals"}
    if not isinstance(given, Mapping) or not given.keys() <= known:
        raise _bad(variable, text, f"a JSON object of {cls.__name__}: {', '.join(sorted(known))}")
    try:
        return cls(**given)
    except OptionError as error:
        if error.option not in given:
            raise
        message = f"{variable}: {error.message}"
        raise OptionError(message, option=variable, value=text) from None


def _bad(variable: str, text: str, wanted: str) -> OptionError:
    message = f"{variable}={text[:200]!r} must be {wanted}"
    return OptionError(message, option=variable, value=text)
