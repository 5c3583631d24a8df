"""Environment variables of options: DCPX_<NAME> where the caller did not give the argument.

Read when options are made, never later; an empty variable counts as not set. DCPX_TRUSTED=1 is
refused: that a load may execute anything belongs in code, where its reader sees it, and not in a
shell that a job happened to inherit. DCPX_SAFE_GLOBALS names classes, and allows no others.
"""

from __future__ import annotations

import functools
import os
import re
from dataclasses import fields
from typing import Any, TypeVar

from torch_dcpx.errors import OptionError

_Options = TypeVar("_Options")

_BOOLS = {"1": True, "true": True, "0": False, "false": False}


def variable_of(option: str) -> str:
    """Returns the name of an option's variable."""
    return f"DCPX_{option.upper()}"


def options_from_environment(cls: type[_Options]) -> type[_Options]:
    """Makes a dataclass of options take what its caller does not give from its variables.

    A copy (`dataclasses.replace`, pickle) has every value and asks no variable.
    """
    validated_init = cls.__init__
    annotations = {field.name: str(field.type) for field in fields(cls)}  # type: ignore[arg-type]

    @functools.wraps(validated_init)
    def init(self: _Options, *args: Any, **kwargs: Any) -> None:
        given = {*list(annotations)[: len(args)], *kwargs}
        texts = {}
        for name, annotation in annotations.items():
            text = os.environ.get(variable_of(name), "")
            if text and name not in given:
                texts[name] = text
                kwargs[name] = _parse(name, annotation, text)
        try:
            validated_init(self, *args, **kwargs)
        except OptionError as error:
            if not texts:
                raise
            raise _naming_variables(error, texts) from None

    cls.__init__ = init  # type: ignore[method-assign, assignment]
    return cls


def _parse(name: str, annotation: str, text: str) -> Any:
    """Returns the value of a variable's text, by the annotation of its option."""
    if annotation.startswith("Literal") or f"Literal[{text!r}]" in annotation:
        return text
    if annotation.startswith("bool"):
        if text.lower() not in _BOOLS:
            raise _bad(name, text, "must be 1, 0, true or false")
        is_set = _BOOLS[text.lower()]
        if name == "trusted" and is_set:
            why = "is refused: a variable cannot make loads execute what a checkpoint says; "
            raise _bad(name, text, why + "pass ReadOptions(trusted=True)")
        return is_set
    if annotation.startswith("int"):
        if not re.fullmatch("[0-9]{1,19}", text):
            raise _bad(name, text, "must be a plain integer, without unit, sign or separator")
        return int(text)
    if annotation.startswith("float"):
        if not re.fullmatch(r"[0-9]{1,19}(\.[0-9]*)?", text):
            raise _bad(name, text, "must be seconds as a plain number, such as 90 or 0.5")
        return float(text)
    if annotation.startswith("str"):
        return text
    if name == "safe_globals":
        return tuple(part.strip() for part in text.split(","))
    raise _bad(name, text, f"is refused: {name} is given in code only")


def _bad(name: str, text: str, why: str) -> OptionError:
    variable = variable_of(name)
    return OptionError(f"{variable}={text!r} {why}", option=variable, value=text)


def _naming_variables(error: OptionError, texts: dict[str, str]) -> OptionError:
    """Returns the error with the variables that had a part in it."""
    option, value = error.option, error.value
    if option in texts:
        is_told = error.value is not None  # else it may hold a password
        option, value = variable_of(option), texts[option] if is_told else None
        texts = texts if is_told else {}
    read = ", ".join(f"{variable_of(name)}={text!r}" for name, text in texts.items()) or option
    message = f"{error.message} (from the environment: {read})"
    return OptionError(message, option=option, value=value)


def threads_of_rank(threads_a_core: int) -> int:
    """Returns this rank's share of so many threads for each core of the process, 2 at least.

    LOCAL_WORLD_SIZE ranks share the cores. In a container that does not say which, all count.
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except (OSError, OverflowError):  # EINVAL: CPython offers more and more room, until it gives up
        cores = os.cpu_count() or 1
    local_ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    ranks = int(local_ranks) if local_ranks.isdigit() else 1
    return max(2, threads_a_core * cores // max(1, ranks))
