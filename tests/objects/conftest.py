"""Fixtures of the tests of object stores."""

from __future__ import annotations

import pytest

from torch_dcpx.storage.object_store import Bucket


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds by which the store's clock is ahead of the dates of its objects."""
    shift = [0.0]
    now_s = Bucket.now_s
    monkeypatch.setattr(Bucket, "now_s", lambda self, prefix: now_s(self, prefix) + shift[0])
    return shift
