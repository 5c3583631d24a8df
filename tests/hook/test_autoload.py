"""DCPX_INSTALL and the variables beside it, and what of `install` they carry to a child."""

from __future__ import annotations

import functools
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

import torch_dcpx
from torch_dcpx import DcpxWriter, OptionError, ReadOptions, UnsupportedError, WriteOptions
from torch_dcpx.hook.autoload import autoload
from torch_dcpx.hook.settings import (
    ROLES,
    VARIABLES,
    Settings,
    settings_from_environment,
    variables_of,
)

pytestmark = pytest.mark.usefixtures("hook_off")


def test_autoload_does_nothing_where_the_variable_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("", "0", "false", "False"):
        monkeypatch.setenv("DCPX_INSTALL", text)
        autoload()
        assert type(FileSystemWriter("x")) is FileSystemWriter, text


def test_error_of_ours_is_logged_and_breaks_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise AttributeError("a newer torch")

    monkeypatch.setenv("DCPX_INSTALL", "1")
    monkeypatch.setattr("torch_dcpx.hook.install.install_from_environment", fail)
    with caplog.at_level(logging.ERROR, "torch_dcpx"):
        autoload()
    assert "a newer torch" in caplog.text


def test_call_of_install_counts_more_than_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_dcpx.install(write_options=WriteOptions(workers=3))
    monkeypatch.setenv("DCPX_INSTALL", "reader")
    autoload()
    writer: Any = FileSystemWriter("x")
    assert writer.options.workers == 3


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("DCPX_INSTALL", "yes", "1, 0, or some of"),
        ("DCPX_INSTALL", "writer,", "1, 0, or some of"),
        ("DCPX_INSTALL_DURABILITY", "none", "must be caller or full"),
        ("DCPX_INSTALL_IN_CODE", "trusted,writer", "must be some of write_options.progress"),
        ("DCPX_INSTALL_WRITE", "{", "must be JSON"),
        ("DCPX_INSTALL_WRITE", "[1]", "a JSON object of WriteOptions: "),
        ("DCPX_INSTALL_WRITE", '{"worker": 1}', "a JSON object of WriteOptions: "),
        ("DCPX_INSTALL_WRITE", '{"workers": 0}', "workers"),
        ("DCPX_INSTALL_READ", '{"trusted": true}', "a JSON object of ReadOptions: "),
        ("DCPX_TRUSTED", "1", "a variable cannot make loads execute"),
        ("DCPX_SAFE_GLOBALS", "Name", "safe_globals"),
        ("DCPX_SAFE_GLOBALS", "a.b c", "safe_globals"),
    ],
)
def test_variable_that_cannot_be_is_an_error_that_names_it(
    name: str, text: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DCPX_INSTALL", "1")
    monkeypatch.setenv(name, text)
    with pytest.raises(OptionError) as refused:
        autoload()
    assert wanted in str(refused.value)
    assert name in str(refused.value)
    assert type(FileSystemWriter("x")) is FileSystemWriter


# ---- What travels -------------------------------------------------------------------------------


def settings_in_child(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    for name, text in variables_of(settings).items():
        monkeypatch.setenv(name, text)
    return settings_from_environment()


@pytest.mark.parametrize("roles", [ROLES, ("reader",), ("writer", "stager")])
def test_settings_arrive_as_they_were(
    roles: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(
        roles=frozenset(roles),
        durability="full",
        write_options=WriteOptions(workers=2, save_timeout_s=7.5, in_place="never"),
        read_options=ReadOptions(verify="none", safe_globals=("pathlib.Path", "a.b")),
    )
    assert settings_in_child(settings, monkeypatch) == settings


def test_default_that_was_given_counts_more_than_a_variable_of_the_child(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = Settings()
    monkeypatch.setenv("DCPX_WORKERS", "7")
    assert settings_in_child(settings, monkeypatch).write_options.workers is None


def test_classes_travel_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(read_options=ReadOptions(safe_globals=[Path, logging.getLogger]))
    found = settings_in_child(settings, monkeypatch)
    assert found.read_options.safe_globals == (f"{Path.__module__}.Path", "logging.getLogger")
    assert not found.in_code


def test_progress_bound_to_what_cannot_be_copied_is_let_be() -> None:
    lock = threading.Lock()
    bound = functools.partial(lambda *_: None, lock)
    assert "progress" not in variables_of(Settings(write_options=WriteOptions(progress=bound)))


def test_method_of_a_builtin_class_does_not_travel() -> None:
    found = variables_of(Settings(read_options=ReadOptions(safe_globals=[list.append])))
    assert found["DCPX_INSTALL_IN_CODE"] == "safe_globals"
    assert found["DCPX_SAFE_GLOBALS"] == ""


def _of_main() -> type:
    return type("Local", (), {"__module__": "__main__"})


@pytest.mark.parametrize(
    ("settings", "lost", "call", "fine"),
    [
        (Settings(write_options=WriteOptions(progress=print)), "write_options.progress",
         FileSystemWriter, FileSystemReader),
        (Settings(read_options=ReadOptions(trusted=True)), "trusted",
         FileSystemReader, FileSystemWriter),
        (Settings(read_options=ReadOptions(safe_globals=[_of_main()])), "safe_globals",
         FileSystemReader, FileSystemWriter),
    ],
)  # fmt: skip
def test_what_cannot_travel_is_refused_at_its_first_use_by_name(
    settings: Settings, lost: str, call: Any, fine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_dcpx.install(write_options=settings.write_options, read_options=settings.read_options)
    assert {name: os.environ[name] for name in VARIABLES} == variables_of(settings)
    torch_dcpx.uninstall()
    assert settings_in_child(settings, monkeypatch).in_code == (lost,)
    autoload()
    with pytest.raises(UnsupportedError, match=f"has {lost}, which no variable carries"):
        call("x")
    fine("x")
    again = variables_of(settings_from_environment())  # of a grandchild
    assert again["DCPX_INSTALL_IN_CODE"] == lost
    torch_dcpx.install()  # in the child, as the error says
    assert type(FileSystemWriter("x")) is DcpxWriter
    call("x")
