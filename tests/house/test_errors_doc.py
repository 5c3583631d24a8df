"""docs/reference/errors.md: its sections; each error is provoked, and its advice carried out.

What the texts of `MismatchError` and `NotCommittedError` recommend, test_hints.py follows.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from support.cli import dcpx as run
from support.saves import change, data_files, read_footer

import torch_dcpx as dcpx
from torch_dcpx import ReadOptions, WriteOptions, errors
from torch_dcpx._native import _C
from torch_dcpx.errors import DcpxError
from torch_dcpx.storage.directory import Directory

CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, DcpxError)
]


PAGE = (ROOT / "docs" / "reference" / "errors.md").read_text()


def section_of(name: str) -> str:
    """Returns what stands between the heading of a class and the next heading."""
    (section,) = re.findall(rf"^### {name}\n(.*?)(?=^##)", PAGE, re.DOTALL | re.MULTILINE)
    return str(section)


def raised(kind: type[DcpxError], call: Callable[[], object]) -> Any:
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    return caught.value


def assert_printed(error: DcpxError) -> None:
    """Checks that a real error begins as the page prints it, but for names and numbers."""
    (printed,) = re.findall(r"```text\n(.*?)\n```", section_of(type(error).__name__), re.DOTALL)
    pattern = re.sub(r"'[^']*'", "'[^']*'", re.escape(printed))
    pattern = re.sub(r"boot=[^)]*\\", r"boot=[^)]*\\", pattern)
    pattern = re.sub(r"\d+(\\\.\d+)?", r"\\d+(\\.\\d+)?", pattern.replace("node7", r"[^ )]+"))
    assert re.match(pattern, str(error)), (printed, str(error))


class Settings:
    """Of a user: on no allow-list."""

    rate = 0.5


def state() -> dict[str, Any]:
    return {"w": torch.ones(3000), "step": 3}


def assert_loads(path: Path, step: int = 3) -> None:
    target = {"w": torch.zeros(3000), "step": 0}
    dcpx.load(target, path)
    assert torch.equal(target["w"], torch.ones(3000)) and target["step"] == step


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    dcpx.save({**state(), "step": 2}, tmp_path / "run" / "step-2")
    dcpx.save(state(), tmp_path / "run" / "step-3")
    return tmp_path / "run" / "step-3"


def test_the_page_has_a_section_for_each_class_with_its_bases_fields_and_a_text() -> None:
    headings = re.findall(r"^### (.+)$", PAGE, re.MULTILINE)
    assert headings[0] == "DcpxError"
    assert sorted(headings) == sorted(cls.__name__ for cls in CLASSES)
    for cls in CLASSES[1:]:
        section = section_of(cls.__name__)
        assert section.count("```text\n") == 1, cls
        for base in cls.__bases__:
            assert base is DcpxError or f"`{base.__name__}`" in section, cls
        assert all(f"`{field}`" in section for field in cls.__annotations__), cls
        named = set(re.findall(r"`(\w+)`", section.partition("Field")[2]))
        assert named <= set(cls.FIELDS), cls


# ---- One process -------------------------------------------------------------------------------


def option(saved: Path) -> None:
    error = raised(dcpx.OptionError, lambda: WriteOptions(workers=0))
    assert_printed(error)
    text = str(error)
    (least,) = re.findall(r"an int from (\d+) to", text)
    dcpx.save(state(), saved, options=WriteOptions(workers=int(least)))
    assert_loads(saved)


def unknown_name(saved: Path) -> None:
    error = raised(dcpx.UnknownNameError, lambda: dcpx.load_tensors(saved, "weight"))
    assert_printed(error)
    (name,) = re.findall(r"^float32 .* (\w+)$", run("inspect", saved).stdout, re.MULTILINE)
    assert torch.equal(dcpx.load_tensors(saved, name)[name], torch.ones(3000))


def storage(saved: Path) -> None:
    _C.arm_fault(0, errno.ENOSPC, "pwrite")
    try:
        error = raised(dcpx.StorageError, lambda: dcpx.save({**state(), "step": 4}, saved))
    finally:
        _C.disarm_fault()
    assert_printed(error)
    assert error.errno == errno.ENOSPC and error.path is not None
    assert_loads(saved)  # what was there
    dcpx.save({**state(), "step": 4}, saved)  # there is room again
    assert_loads(saved, 4)


def short_read(saved: Path) -> None:
    own = {"w": torch.zeros(3000)}
    with dcpx.CheckpointManager(saved.parent / "root", async_save=False) as manager:
        for step in (1, 2):
            manager.save(step, state=state())
        path = saved.parent / "root" / "step-2"
        (name,) = data_files(path)
        with (path / name).open("r+b") as file:
            file.truncate(4096)
        assert_printed(
            raised(dcpx.ShortReadError, lambda: manager.resume(state=own, fallback=False))
        )
        assert name in run("verify", path).output
        assert manager.resume(state=own).tag == "step-1"


def concurrent_save(saved: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        real = Directory.rename

        def meanwhile(self: Directory, old: str, new: str, **how: bool) -> None:
            if new == ".metadata" and self.path == saved:
                patch.setattr(Directory, "rename", real)
                own = {"own": torch.ones(1)}
                options = WriteOptions(max_in_flight=2)
                error = raised(
                    dcpx.ConcurrentSaveError, lambda: dcpx.async_save(own, saved, options=options)
                )
                assert_printed(error)
            real(self, old, new, **how)

        patch.setattr(Directory, "rename", meanwhile)
        dcpx.async_save(state(), saved, options=WriteOptions(max_in_flight=2)).result()
    assert_loads(saved)
    dcpx.save({**state(), "step": 5}, saved)  # it has ended
    dcpx.save({**state(), "step": 6}, saved.parent / "elsewhere")
    assert_loads(saved, 5)
    assert_loads(saved.parent / "elsewhere", 6)


def corruption(saved: Path) -> None:
    (name,) = data_files(saved)
    change(saved / name, read_footer(saved / name).row("w").payload_offset + 9, b"\xff\xfe")
    error = raised(dcpx.CorruptionError, lambda: dcpx.load(state(), saved))
    assert_printed(error)
    assert error.path == str(saved / name) and error.offset is not None
    assert error.touched is not None and error.expected != error.found
    assert name in run("verify", saved).output
    assert_loads(saved.parent / "step-2", 2)


def unsafe_pickle(saved: Path) -> None:
    dcpx.save({"args": Settings()}, saved)
    target: dict[str, Any] = {"args": None}
    error = raised(dcpx.UnsafePickleError, lambda: dcpx.load(target, saved))
    assert error.global_name == f"{Settings.__module__}.{Settings.__qualname__}"
    options = ReadOptions(safe_globals=[error.global_name])  # type: ignore[arg-type]
    dcpx.load(target, saved, options=options)
    assert type(target["args"]) is Settings


def staging(saved: Path) -> None:
    big = {"w": torch.ones(1 << 20)}
    text = str(
        raised(dcpx.StagingError, lambda: dcpx.DcpxStager(host_memory_bytes=2 << 20).stage(big))
    )
    (needed,) = re.findall(r"cannot stage (\d+) B", text)
    stager = dcpx.DcpxStager(host_memory_bytes=2 * int(needed))
    staged = stager.stage(big)
    assert torch.equal((staged if isinstance(staged, dict) else staged.result())["w"], big["w"])
    stager.close()


def repair(saved: Path) -> None:
    error = raised(dcpx.RepairError, lambda: dcpx.repair(saved))
    assert error.is_good is True
    assert_loads(saved)
    (name,) = data_files(saved)
    (saved / ".metadata").unlink()
    (saved / name).write_bytes(b"no file of a save")
    error = raised(dcpx.RepairError, lambda: dcpx.repair(saved))
    assert not error.is_good
    assert_loads(saved.parent / "step-2", 2)


def unsupported(saved: Path) -> None:
    on_meta = {**state(), "w": torch.ones(3000, device="meta")}
    assert_printed(raised(dcpx.UnsupportedError, lambda: dcpx.save(on_meta, saved)))
    dcpx.save({"step": 3}, saved.parent / "without")
    dcpx.save({**on_meta, "w": torch.empty_like(on_meta["w"], device="cpu").fill_(1)}, saved)
    assert_loads(saved)


ALONE: dict[type[DcpxError], Callable[[Path], None]] = {
    dcpx.OptionError: option,
    dcpx.UnknownNameError: unknown_name,
    dcpx.StorageError: storage,
    dcpx.ShortReadError: short_read,
    dcpx.ConcurrentSaveError: concurrent_save,
    dcpx.CorruptionError: corruption,
    dcpx.UnsafePickleError: unsafe_pickle,
    dcpx.StagingError: staging,
    dcpx.RepairError: repair,
    dcpx.UnsupportedError: unsupported,
}
# With what makes the next call work.
ELSEWHERE = {
    dcpx.MismatchError: "house/test_hints.py",
    dcpx.NotCommittedError: "house/test_hints.py",
    dcpx.PlanError: "ranks/test_calls_differ.py",
    dcpx.RankError: "checkpoint/test_failed_rank.py",
    dcpx.RankLostError: "ranks/test_exchange_lost.py",
    dcpx.StoreLostError: "ranks/test_exchange_lost.py",
    dcpx.OutcomeUnknownError: "ranks/test_ballot_lost.py",
}


@pytest.mark.parametrize("kind", ALONE, ids=lambda kind: kind.__name__)
def test_advice_of_one_process_leads_on(kind: type[DcpxError], saved: Path) -> None:
    ALONE[kind](saved)


def test_every_error_of_the_page_is_here() -> None:
    assert {*ALONE, *ELSEWHERE} == {cls for cls in CLASSES if cls is not DcpxError}
    assert all((ROOT / "tests" / name).is_file() for name in ELSEWHERE.values())
