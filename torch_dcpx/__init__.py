"""Saves and loads `torch.distributed.checkpoint` at the speed of the storage.

    import torch.distributed.checkpoint as dcp
    from torch_dcpx import DcpxReader, DcpxWriter

    dcp.save(state, storage_writer=DcpxWriter("ckpt/step-100"))
    dcp.load(state, storage_reader=DcpxReader("ckpt/step-100"))

Importing this package loads neither torch nor the C++ extension: a name loads its module on first
use (PEP 562), so that command lines start at once.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._version import __version__ as __version__
    from .artifacts.export import ExportReport as ExportReport
    from .artifacts.export import export as export
    from .artifacts.opened import LazyTensor as LazyTensor
    from .artifacts.opened import OpenCheckpoint as OpenCheckpoint
    from .artifacts.opened import load_tensors as load_tensors
    from .artifacts.opened import open_checkpoint as open_checkpoint
    from .artifacts.pretrained import load_pretrained as load_pretrained
    from .checkpoint.handle import SaveHandle as SaveHandle
    from .checkpoint.load import load as load
    from .checkpoint.pending import drain_on_sigterm as drain_on_sigterm
    from .checkpoint.pending import wait as wait
    from .checkpoint.save import async_save as async_save
    from .checkpoint.save import close as close
    from .checkpoint.save import prewarm as prewarm
    from .checkpoint.save import save as save
    from .errors import ConcurrentSaveError as ConcurrentSaveError
    from .errors import CorruptionError as CorruptionError
    from .errors import DcpxError as DcpxError
    from .errors import MismatchError as MismatchError
    from .errors import NotCommittedError as NotCommittedError
    from .errors import OptionError as OptionError
    from .errors import OutcomeUnknownError as OutcomeUnknownError
    from .errors import PlanError as PlanError
    from .errors import RankError as RankError
    from .errors import RankLostError as RankLostError
    from .errors import RepairError as RepairError
    from .errors import ShortReadError as ShortReadError
    from .errors import StagingError as StagingError
    from .errors import StorageError as StorageError
    from .errors import StoreLostError as StoreLostError
    from .errors import UnknownNameError as UnknownNameError
    from .errors import UnsafePickleError as UnsafePickleError
    from .errors import UnsupportedError as UnsupportedError
    from .events import Event as Event
    from .events import LoadEnded as LoadEnded
    from .events import LoadFailed as LoadFailed
    from .events import SaveEnded as SaveEnded
    from .events import SaveFailed as SaveFailed
    from .events import on_event as on_event
    from .hook.install import install as install
    from .hook.install import uninstall as uninstall
    from .hook.install import use as use
    from .integrity.findings import Finding as Finding
    from .integrity.findings import RepairReport as RepairReport
    from .integrity.findings import VerifyReport as VerifyReport
    from .integrity.repair import repair as repair
    from .integrity.verify import verify as verify
    from .keys.key_map import KeyMap as KeyMap
    from .keys.rules import Merge as Merge
    from .keys.rules import Split as Split
    from .keys.rules import Transpose as Transpose
    from .manager.content import PerRank as PerRank
    from .manager.manager import CheckpointManager as CheckpointManager
    from .manager.preemption import Preemption as Preemption
    from .manager.resume import ResumeInfo as ResumeInfo
    from .options import ReadOptions as ReadOptions
    from .options import WriteOptions as WriteOptions
    from .planners.load_planner import DcpxLoadPlanner as DcpxLoadPlanner
    from .planners.save_planner import DcpxSavePlanner as DcpxSavePlanner
    from .reader.reader import DcpxReader as DcpxReader
    from .reports import LoadReport as LoadReport
    from .reports import SaveReport as SaveReport
    from .staging.stager import DcpxStager as DcpxStager
    from .tensors.copy_guard import CopyGuard as CopyGuard
    from .tensors.copy_guard import guard_optimizer as guard_optimizer
    from .views.diff import DiffReport as DiffReport
    from .views.diff import diff as diff
    from .views.inspect import Inspection as Inspection
    from .views.inspect import inspect as inspect
    from .views.ls import ListedCheckpoint as ListedCheckpoint
    from .views.ls import Listing as Listing
    from .views.ls import ls as ls
    from .views.stats import StatsReport as StatsReport
    from .views.stats import stats as stats
    from .writer.writer import DcpxWriter as DcpxWriter

# Module -> the public names that it has.
_PUBLIC = {
    "_version": "__version__",
    "artifacts.export": "ExportReport export",
    "artifacts.opened": "LazyTensor OpenCheckpoint load_tensors open_checkpoint",
    "artifacts.pretrained": "load_pretrained",
    "checkpoint.handle": "SaveHandle",
    "checkpoint.load": "load",
    "checkpoint.pending": "drain_on_sigterm wait",
    "checkpoint.save": "async_save close prewarm save",
    "errors": (
        "ConcurrentSaveError CorruptionError DcpxError MismatchError NotCommittedError "
        "OptionError OutcomeUnknownError PlanError RankError RankLostError RepairError "
        "ShortReadError StagingError StorageError StoreLostError UnknownNameError "
        "UnsafePickleError UnsupportedError"
    ),
    "events": "Event LoadEnded LoadFailed SaveEnded SaveFailed on_event",
    "hook.install": "install uninstall use",
    "integrity.findings": "Finding RepairReport VerifyReport",
    "integrity.repair": "repair",
    "integrity.verify": "verify",
    "keys.key_map": "KeyMap",
    "keys.rules": "Merge Split Transpose",
    "manager.manager": "CheckpointManager",
    "manager.content": "PerRank",
    "manager.preemption": "Preemption",
    "manager.resume": "ResumeInfo",
    "options": "ReadOptions WriteOptions",
    "planners.load_planner": "DcpxLoadPlanner",
    "planners.save_planner": "DcpxSavePlanner",
    "reader.reader": "DcpxReader",
    "reports": "LoadReport SaveReport",
    "staging.stager": "DcpxStager",
    "tensors.copy_guard": "CopyGuard guard_optimizer",
    "views.diff": "DiffReport diff",
    "views.stats": "StatsReport stats",
    "views.inspect": "Inspection inspect",
    "views.ls": "ListedCheckpoint Listing ls",
    "writer.writer": "DcpxWriter",
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names.split()}
__all__ = sorted(_MODULE_OF)  # noqa: PLE0605
_EXTENSION = f"{__name__}._C"


def _autoload() -> None:
    """The entry point of `torch.backends`, which torch calls at the end of `import torch`."""
    if os.environ.get("DCPX_INSTALL"):
        from .hook.autoload import autoload

        autoload()


def __getattr__(name: str) -> Any:
    if name == "_C":  # where `from torch_dcpx import _C` ends up
        return _load(_EXTENSION)
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ._keywords import telling

    module = _load(f"{__name__}.{_MODULE_OF[name]}")
    value = telling(getattr(module, name), name)
    setattr(module, name, value)  # by which it is pickled
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _load(module: str) -> Any:
    """Imports `module`; a missing or broken extension is an ImportError that says what to do."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        # The import system names a missing module in full, but one that does not load by its path.
        is_missing = error.name == _EXTENSION
        path = Path(error.path or "")
        is_broken = path.parent == Path(__file__).parent and path.match("_C.*.so")
        if isinstance(error.__cause__, ImportError) or not (is_missing or is_broken):
            raise  # said already, or not about the extension
        raise _extension_error(error) from error


def _extension_error(error: ImportError) -> ImportError:
    from ._version import __version__

    folder = Path(__file__).parent
    built = sorted(path.name for path in folder.glob("_C.*.so"))
    if not isinstance(error, ModuleNotFoundError):
        cause = f"it is there but does not load: {error}"
    elif built:
        cause = f"'{folder}' holds {', '.join(built)}, built for another Python or machine"
    else:
        cause = f"'{folder}' holds no _C.*.so: it was never built, or was not installed"
    return ImportError(
        f"cannot import {_EXTENSION}, the C++ part of torch-dcpx {__version__}: {cause}. "
        "Install it anew, with `pip install --force-reinstall --no-deps` and a wheel file for this "
        "Python or a checkout's folder; in a checkout, `pip install --no-build-isolation --no-deps "
        "-e .` rebuilds it",
        name=_EXTENSION,
        path=error.path,
    )
