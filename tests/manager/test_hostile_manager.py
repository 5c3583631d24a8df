"""Records and small values that no manager writes: typed errors, and the next checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from trainings import manager_of, save_steps

from torch_dcpx import CorruptionError, PerRank
from torch_dcpx.manager import state as manager_state
from torch_dcpx.manager.content import encode_content
from torch_dcpx.manager.stored import Record


@pytest.mark.parametrize(
    "lie",
    [{"metrics": {"loss": 10**400}}, {"ranks": 10**18}, {"ranks": -1}, {"metrics": [1]},
     {"per_rank": [1]}, {"step": "1"}],
    ids="".join,
)  # fmt: skip
def test_record_that_lies_is_skipped(
    tmp_path: Path, lie: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(manager_of(tmp_path), 1)
    with monkeypatch.context() as patch:
        patch.setattr(
            Record, "encoded", lambda self: json.dumps({"format": 1, **self._asdict(), **lie})
        )
        save_steps(manager_of(tmp_path), 2)
    info = manager_of(tmp_path).resume()
    assert info.tag == "step-1"
    assert [tag for tag, _ in info.skipped] == ["step-2"]
    with pytest.raises(CorruptionError, match="no record"):
        manager_of(tmp_path).resume(tag=2)


def cyclic() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


@pytest.mark.parametrize(
    "stored",
    [cyclic(), {"__dcpx_per_rank__": "elsewhere"}, {"__dcpx_per_rank__": []}, {}],
    ids=["cycle", "unknown", "unhashable", "nothing"],
)
def test_content_that_no_manager_saves_is_corrupt(
    tmp_path: Path, stored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lying(value: Any) -> bytes:
        is_own = "user_content.a" in value
        return encode_content(stored if is_own == (stored == {}) else value)

    with monkeypatch.context() as patch:
        patch.setattr(manager_state, "encode_content", lying)
        content = {"a": PerRank(1)}
        manager_of(tmp_path).save(1, state={"x": torch.zeros(1)}, user_content=content)
    with pytest.raises(CorruptionError, match="not what a manager saves") as info:
        manager_of(tmp_path).resume()
    assert info.value.fqn in ("dcpx.user_content", "dcpx.rank.0")
