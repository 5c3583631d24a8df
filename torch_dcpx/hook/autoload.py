"""Makes the hook come on as `torch.distributed.checkpoint` is imported.

The entry point of `torch.backends` calls it at the end of `import torch`, with DCPX_INSTALL. An
error of ours breaks no import of torch, but for variables that say what cannot be; so nothing else
of ours is imported outside a `try`.
"""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGE = "torch.distributed.checkpoint"
WAITING: list[str] = []  # packages imported by `torch_dcpx.hook.install`, which then installs


def autoload() -> None:
    """Installs the hook if DCPX_INSTALL says so, now or as soon as DCP is imported.

    Raises:
        OptionError: a variable of the hook has a value that cannot be.
    """
    try:
        from torch_dcpx.errors import OptionError
        from torch_dcpx.hook.settings import is_asked, settings_from_environment
    except Exception:  # noqa: BLE001  (logged: torch must work without us)
        _log_failure()
        return
    try:
        if not is_asked():
            return
        settings_from_environment()  # what is wrong in them is said here
        if PACKAGE in sys.modules:
            _install()
        else:
            sys.meta_path.insert(0, _Finder())
    except OptionError:
        raise
    except Exception:  # noqa: BLE001  (as above)
        _log_failure()


def _install() -> None:
    hook = import_module("torch_dcpx.hook.install")  # needs torch
    if hasattr(hook, "install_from_environment"):
        hook.install_from_environment()
    else:  # the hook itself is what imports DCP: it goes on at its end
        WAITING.append(PACKAGE)


def _log_failure() -> None:
    logging.getLogger("torch_dcpx").exception(
        "DCPX_INSTALL is set, but torch-dcpx could not replace DCP's classes: they are torch's own"
    )


class _Finder(MetaPathFinder):
    """Finds DCP's package as Python would, until it is imported, and installs then."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Returns the package's own spec with a loader that installs; None for all else."""
        if name != PACKAGE:
            return None
        for finder in [one for one in sys.meta_path if one is not self]:
            find = getattr(finder, "find_spec", None)  # Python passes over those without, too
            spec: ModuleSpec | None = find and find(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self)
                return spec
        return None


class _Loader(Loader):
    """Loads by another loader, and installs afterwards."""

    def __init__(self, own: Any, finder: _Finder) -> None:
        self._own, self._finder = own, finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the module's own loader."""
        made: ModuleType | None = self._own.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Runs the package, and installs."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._own
        module.__loader__ = self._own
        self._own.exec_module(module)
        if self._finder in sys.meta_path:  # not before: a probe (find_spec) imports nothing
            sys.meta_path.remove(self._finder)
        try:
            _install()
        except Exception:  # noqa: BLE001  (logged: torch must work without us)
            _log_failure()
