"""Each adapter where its framework is not installed: one line, and nothing of it is left."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest

from torch_dcpx import UnsupportedError


@pytest.mark.parametrize(
    ("adapter", "framework"),
    [("torchtitan", "torchtitan"), ("accelerate", "accelerate"), ("trainer", "accelerate")],
)
def test_import_says_what_to_install(adapter: str, framework: str) -> None:
    if importlib.util.find_spec(framework) is not None:
        pytest.skip(f"{framework} is installed here")
    name = f"torch_dcpx.integrations.{adapter}"
    with pytest.raises(UnsupportedError) as caught:
        importlib.import_module(name)
    text = str(caught.value)
    assert text.startswith(f"{name} needs {framework}, which is not installed: pip install '")
    assert "\n" not in text
    assert name not in sys.modules
