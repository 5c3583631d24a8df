"""Says which framework a module needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch_dcpx.errors import UnsupportedError


@contextlib.contextmanager
def needed(module: str, package: str) -> Iterator[None]:
    """Imports of a framework lie within: says what to install where it is missing.

    Args:
        module: name of the module that is imported, `__name__`.
        package: what pip installs, such as "torchtitan>=0.3".

    Raises:
        UnsupportedError: a module is not there.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"{module} needs {error.name}, which is not installed: pip install '{package}'"
        ) from None
