"""A root that is renamed, mounted twice or left by exec: who holds it, and who does not any more."""

from __future__ import annotations

from pathlib import Path

import pytest
from root_jobs import PROOFS, manager_of, save

from torch_dcpx.storage import root_lock
from torch_dcpx.storage.holder import Holder
from torch_dcpx.storage.names import root_lock_name


@pytest.fixture(autouse=True)
def _proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PROOFS.items():
        monkeypatch.setattr(root_lock, name, value)


@pytest.mark.parametrize("goes_on", [True, False])
def test_renamed_root_is_given_back(tmp_path: Path, goes_on: bool) -> None:
    root, away = tmp_path / "run", tmp_path / "run.old"
    manager = manager_of(root)
    save(manager, 1)
    root.rename(away)
    if goes_on:
        save(manager, 2)
    else:
        manager.close()
    holder = Holder.decoded((away / root_lock_name(1)).read_bytes())
    assert holder is not None and holder.is_over
    with manager_of(away) as other:
        save(other, 3)
