"""An adapter without its framework: one line that says what to install."""

from __future__ import annotations

import importlib
import sys

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


def test_adapter_without_its_framework_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module, framework, package in (
        ("accelerate", "accelerate", "accelerate>=1.15"),
        ("lightning", "lightning", "lightning>=2.6"),
        ("megatron", "megatron", "megatron-core>=0.16"),
        ("opentelemetry", "opentelemetry", "torch-dcpx[otel]"),
        ("torchtitan", "torchtitan", "torchtitan>=0.3"),
        ("trainer", "accelerate", "transformers[torch]>=5.23"),
    ):
        name = f"torch_dcpx.integrations.{module}"
        monkeypatch.setitem(sys.modules, framework, None)
        monkeypatch.delitem(sys.modules, name, raising=False)
        with pytest.raises(UnsupportedError) as caught:
            importlib.import_module(name)
        start, _, end = str(caught.value).partition(", which is not installed: ")
        assert start.startswith(f"{name} needs {framework}")
        assert end == f"pip install '{package}'"
        assert name not in sys.modules
