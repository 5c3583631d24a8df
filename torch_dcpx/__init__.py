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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .artifacts.export import ExportReport, export
    from .artifacts.pretrained import load_pretrained
    from .checkpoint.handle import SaveHandle
    from .checkpoint.load import load
    from .checkpoint.pending import drain_on_sigterm, wait
    from .checkpoint.save import async_save, close, prewarm, save
    from .errors import (
        ConcurrentSaveError,
        CorruptionError,
        DcpxError,
        MismatchError,
        NotCommittedError,
        OptionError,
        OutcomeUnknownError,
        PlanError,
        RankError,
        RankLostError,
        RepairError,
        ShortReadError,
        StagingError,
        StorageError,
        StoreLostError,
        UnsafePickleError,
        UnsupportedError,
    )
    from .integrity.findings import Finding, RepairReport, VerifyReport
    from .integrity.repair import repair
    from .integrity.verify import verify
    from .keys.key_map import KeyMap
    from .keys.rules import Merge, Split, Transpose
    from .load_report import LoadReport
    from .manager.content import PerRank
    from .manager.manager import CheckpointManager
    from .manager.preemption import Preemption
    from .manager.resume import ResumeInfo
    from .options import ReadOptions, WriteOptions
    from .planners.load_planner import DcpxLoadPlanner
    from .planners.save_planner import DcpxSavePlanner
    from .reader.reader import DcpxReader
    from .save_report import SaveReport
    from .staging.stager import DcpxStager
    from .tensors.copy_guard import CopyGuard, guard_optimizer
    from .writer.writer import DcpxWriter

__all__ = [
    "CheckpointManager",
    "ConcurrentSaveError",
    "CopyGuard",
    "CorruptionError",
    "DcpxError",
    "DcpxLoadPlanner",
    "DcpxReader",
    "DcpxSavePlanner",
    "DcpxStager",
    "DcpxWriter",
    "ExportReport",
    "Finding",
    "KeyMap",
    "LoadReport",
    "Merge",
    "MismatchError",
    "NotCommittedError",
    "OptionError",
    "OutcomeUnknownError",
    "PerRank",
    "PlanError",
    "Preemption",
    "RankError",
    "RankLostError",
    "ReadOptions",
    "RepairError",
    "RepairReport",
    "ResumeInfo",
    "SaveHandle",
    "SaveReport",
    "ShortReadError",
    "Split",
    "StagingError",
    "StorageError",
    "StoreLostError",
    "Transpose",
    "UnsafePickleError",
    "UnsupportedError",
    "VerifyReport",
    "WriteOptions",
    "__version__",
    "async_save",
    "close",
    "drain_on_sigterm",
    "export",
    "guard_optimizer",
    "load",
    "load_pretrained",
    "prewarm",
    "repair",
    "save",
    "verify",
    "wait",
]

_MODULE_OF = {
    "CheckpointManager": "manager.manager",
    "CopyGuard": "tensors.copy_guard",
    "DcpxLoadPlanner": "planners.load_planner",
    "DcpxReader": "reader.reader",
    "DcpxSavePlanner": "planners.save_planner",
    "DcpxStager": "staging.stager",
    "DcpxWriter": "writer.writer",
    "Finding": "integrity.findings",
    "KeyMap": "keys.key_map",
    "LoadReport": "load_report",
    "PerRank": "manager.content",
    "Preemption": "manager.preemption",
    "ReadOptions": "options",
    "RepairReport": "integrity.findings",
    "ResumeInfo": "manager.resume",
    "SaveHandle": "checkpoint.handle",
    "SaveReport": "save_report",
    "VerifyReport": "integrity.findings",
    "WriteOptions": "options",
    "guard_optimizer": "tensors.copy_guard",
    "load": "checkpoint.load",
    "repair": "integrity.repair",
    "verify": "integrity.verify",
    **dict.fromkeys(("ExportReport", "export"), "artifacts.export"),
    "load_pretrained": "artifacts.pretrained",
    **dict.fromkeys(("Merge", "Split", "Transpose"), "keys.rules"),
    **dict.fromkeys(("drain_on_sigterm", "wait"), "checkpoint.pending"),
    **dict.fromkeys(("async_save", "close", "prewarm", "save"), "checkpoint.save"),
}
_EXTENSION = f"{__name__}._C"


def __getattr__(name: str) -> Any:
    if name == "_C":  # where `from torch_dcpx import _C` ends up
        return _load(_EXTENSION)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_load(f"{__name__}.{_MODULE_OF.get(name, 'errors')}"), name)
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
        "Rebuild it with `pip install --force-reinstall --no-deps torch-dcpx`, or in a source tree "
        "with `pip install --no-build-isolation --no-deps -e .`",
        name=_EXTENSION,
        path=error.path,
    )
