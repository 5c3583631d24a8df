"""Names of checkpoints beneath a manager's root: a tag is the name of a directory there."""

from __future__ import annotations

import os
import re
from typing import Any

from torch_dcpx.errors import OptionError

_MAX_TAG_BYTES = 249  # a name may have 255
_STEP_NAME = re.compile(r"step-(0|[1-9][0-9]{0,17})")
_MAX_STEP = 10**18 - 1


def tag_of(tag_or_step: Any) -> str:
    """Returns the name of a checkpoint's directory: itself, or "step-N" of a step.

    Raises:
        OptionError: no step from 0 on, and no name that may be given to a checkpoint.
    """
    if type(tag_or_step) is int:
        check_step(tag_or_step)
        return f"step-{tag_or_step}"
    problem = "it is neither a str nor a step" if type(tag_or_step) is not str else ""
    problem = problem or _problem_of(tag_or_step)
    if problem:
        raise OptionError(
            f"name a checkpoint {tag_or_step!r:.80}: {problem}; a tag is a step (int), or the name "
            f"of one directory, of at most {_MAX_TAG_BYTES} B",
            option="tag",
            value=tag_or_step,
        )
    tag: str = tag_or_step
    return tag


def tag_or_none(tag_or_step: Any) -> str | None:
    """Returns as `tag_of`, None where that raises."""
    try:
        return tag_of(tag_or_step)
    except OptionError:
        return None


def _problem_of(tag: str) -> str:
    """Returns what is wrong with a name, "" if nothing is."""
    try:
        nbytes = len(os.fsencode(tag))
    except UnicodeEncodeError:
        return "the file system's encoding has no such character"
    if not tag or tag != tag.strip():
        return "it is empty, or begins or ends with a space"
    if nbytes > _MAX_TAG_BYTES:
        return f"it has {nbytes} B"
    if "/" in tag or not tag.isprintable():
        return "it has a slash or a character that cannot be printed"
    if tag.startswith("."):
        return "names that begin with a dot are the manager's own"
    if tag == "newest" or tag.startswith("newest."):
        return "the name is the manager's own"
    return ""


def is_tag(name: str) -> bool:
    """Whether a directory of this name may be a checkpoint of a manager's."""
    return not _problem_of(name)


def check_step(step: Any, option: str = "step") -> None:
    """Raises OptionError for what is no step."""
    if type(step) is not int or not 0 <= step <= _MAX_STEP:
        raise OptionError(
            f"{option} must be an int from 0 to {_MAX_STEP}, got {step!r:.80}",
            option=option,
            value=step,
        )


def step_of_name(tag: str) -> int | None:
    """Returns the step that a tag names, "step-N"; None of any other."""
    match = _STEP_NAME.fullmatch(tag)
    return int(match[1]) if match else None
