"""When it is said that a forkserver's processes do not learn of a change of the hook."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

import torch_dcpx

Warned = Callable[[], list[str]]


class Forkserver:
    """What `multiprocessing` knows of its own. Each test has other numbers: the hook notes them."""

    _forkserver_pid: int | None = None


@pytest.fixture
def forkserver(monkeypatch: pytest.MonkeyPatch) -> Forkserver:
    server = Forkserver()
    module = SimpleNamespace(_forkserver=server)
    monkeypatch.setitem(sys.modules, "multiprocessing.forkserver", module)
    return server


@pytest.fixture
def warned(hook_off: None, caplog: pytest.LogCaptureFixture) -> Warned:
    """Gives the warnings since the last call."""

    def taken() -> list[str]:
        texts = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
        caplog.clear()
        return texts

    return taken


def test_forkserver_that_began_before_install(forkserver: Forkserver, warned: Warned) -> None:
    forkserver._forkserver_pid = 7
    torch_dcpx.install()
    (text,) = warned()
    assert "process 7" in text and "without the hook" in text
    assert "DCPX_INSTALL=1" in text and "'spawn'" in text
    torch_dcpx.install()  # no change
    torch_dcpx.uninstall()  # it has what is now
    assert warned() == []
    with torch_dcpx.use():
        assert len(warned()) == 1
    assert warned() == []


def test_forkserver_that_began_behind_install(forkserver: Forkserver, warned: Warned) -> None:
    torch_dcpx.install()
    forkserver._forkserver_pid = 17
    torch_dcpx.install(durability="full")
    (text,) = warned()
    assert ", with the hook:" in text
    torch_dcpx.install()
    assert warned() == []
    torch_dcpx.uninstall()
    assert len(warned()) == 1
    forkserver._forkserver_pid = 18  # the first one has ended
    torch_dcpx.install()
    (text,) = warned()
    assert "process 18" in text and "without the hook" in text


def test_forkserver_that_began_in_a_block(forkserver: Forkserver, warned: Warned) -> None:
    with torch_dcpx.use():
        forkserver._forkserver_pid = 27
    (text,) = warned()
    assert ", with the hook:" in text


def test_python_that_shows_no_forkserver_is_no_error(
    monkeypatch: pytest.MonkeyPatch, warned: Warned
) -> None:
    for module in (None, SimpleNamespace(), SimpleNamespace(_forkserver=None)):
        monkeypatch.setitem(sys.modules, "multiprocessing.forkserver", module)
        torch_dcpx.install()
        torch_dcpx.uninstall()
        assert warned() == []
