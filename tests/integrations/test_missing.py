"""An adapter without its framework: one line that says what to install."""

from __future__ import annotations

import pytest

from torch_dcpx import UnsupportedError
from torch_dcpx.integrations._framework import needed


def test_missing_framework_is_one_line() -> None:
    with pytest.raises(UnsupportedError) as caught, needed("torch_dcpx.integrations.x", "x>=1"):
        import no_such_framework  # noqa: F401
    assert str(caught.value) == (
        "torch_dcpx.integrations.x needs no_such_framework, which is not installed: "
        "pip install 'x>=1'"
    )
    assert caught.value.__suppress_context__
