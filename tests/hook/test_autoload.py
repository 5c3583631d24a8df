"""DCPX_INSTALL and the variables beside it: the hook in processes that call nothing."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from support.machine import seconds
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

import torch_dcpx
from torch_dcpx import DcpxWriter, OptionError, ReadOptions, UnsupportedError, WriteOptions
from torch_dcpx.hook.autoload import autoload
from torch_dcpx.hook.settings import ROLES, Settings, settings_from_environment, variables_of

pytestmark = pytest.mark.usefixtures("hook_off", "entry_point")

CHILD = """
import json, logging, sys
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
import torch
before = sorted(name for name in sys.modules if name.split(".")[0] == "torch_dcpx")
{before_dcp}
import torch.distributed.checkpoint as dcp
made = []
if len(sys.argv) > 1:
    made = [type(dcp.FileSystemWriter("x")).__name__, type(dcp.DefaultSavePlanner()).__name__]
after = sorted(name for name in sys.modules if name.split(".")[0] == "torch_dcpx")
print(json.dumps([before, after, made, dcp.__spec__.loader is dcp.__loader__]))
"""
SILENT = ["torch_dcpx"]


def child(*arguments: str, before_dcp: str = "", **variables: str) -> tuple[list[Any], str]:
    """Runs CHILD; returns what it found, and its stderr."""
    ended = subprocess.run(
        [sys.executable, "-c", CHILD.replace("{before_dcp}", before_dcp), *arguments],
        env={**os.environ, **variables}, capture_output=True, text=True, check=True,
        timeout=seconds(300),
    )  # fmt: skip
    return json.loads(ended.stdout), ended.stderr


# ---- Whole processes ----------------------------------------------------------------------------


def test_without_the_variable_nothing_of_ours_is_loaded() -> None:
    (before, after, made, _), said = child("make")
    assert before == after == SILENT
    assert made == ["FileSystemWriter", "DefaultSavePlanner"]
    assert "torch-dcpx" not in said


def test_bench_of_the_entry_point_says_milliseconds() -> None:
    """Of no test is how many: on an idle machine, and with compiled modules, half a millisecond."""
    command = [sys.executable, str(ROOT / "tests/bench/entry_point.py"), "--rounds", "3"]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.fullmatch(r"median [0-9.]+ ms, 10th [0-9.]+, 90th [0-9.]+\n", said.stdout)


def test_variable_installs_when_dcp_is_imported() -> None:
    (before, after, made, has_own_loader), said = child("make", DCPX_INSTALL="1")
    assert "torch_dcpx.hook.install" not in before
    assert "torch_dcpx.hook.install" in after
    assert made == ["DcpxWriter", "DcpxSavePlanner"]
    assert has_own_loader
    lines = [line for line in said.splitlines() if "torch-dcpx" in line]
    assert len(lines) == 1
    assert lines[0].startswith("INFO torch-dcpx ")
    assert "FileSystemWriter" in lines[0]
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in lines[0]


def test_look_for_dcp_without_an_import_keeps_the_hook() -> None:
    probe = "import importlib.util; importlib.util.find_spec('torch.distributed.checkpoint')"
    (_, _, made, has_own_loader), _ = child("make", before_dcp=probe, DCPX_INSTALL="1")
    assert made == ["DcpxWriter", "DcpxSavePlanner"]
    assert has_own_loader


@pytest.mark.parametrize(
    ("call", "made_by_child"),
    [
        ("torch_dcpx.install(planners=False)", ["DcpxWriter", "DefaultSavePlanner"]),
        ("torch_dcpx.use", ["DcpxWriter", "DcpxSavePlanner"]),
        ("torch_dcpx.uninstall()", ["FileSystemWriter", "DefaultSavePlanner"]),
    ],
)
def test_call_before_dcp_is_imported_logs_no_error(call: str, made_by_child: list[str]) -> None:
    code = f"import torch_dcpx; {call}"
    (_, _, made, _), said = child("make", before_dcp=code, DCPX_INSTALL="1")
    assert made == made_by_child
    assert "Error" not in said


def test_variable_that_is_taken_away_before_dcp_is_imported_counts() -> None:
    code = "import os; del os.environ['DCPX_INSTALL']"
    (_, _, made, _), said = child("make", before_dcp=code, DCPX_INSTALL="1")
    assert made == ["FileSystemWriter", "DefaultSavePlanner"]
    assert "Error" not in said


def test_process_that_replaced_nothing_warns_as_it_ends() -> None:
    (_, after, _, _), said = child(DCPX_INSTALL="writer,planners")
    assert "torch_dcpx._C" not in after
    assert "WARNING the hook of torch-dcpx was on, but nothing" in said


def test_autoload_of_torch_switches_it_off() -> None:
    (_, after, made, _), said = child("make", DCPX_INSTALL="1", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert after == []
    assert made[0] == "FileSystemWriter"
    assert "torch-dcpx" not in said


def test_child_of_a_process_that_called_install_has_the_hook() -> None:
    torch_dcpx.install(planners=False)
    (_, _, made, _), _ = child("make")
    assert made == ["DcpxWriter", "DefaultSavePlanner"]
    torch_dcpx.uninstall()
    (_, _, made, _), _ = child("make")
    assert made == ["FileSystemWriter", "DefaultSavePlanner"]


def test_bad_variable_fails_the_import_and_is_named() -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        child(DCPX_INSTALL="wirter")
    assert "DCPX_INSTALL='wirter' must be 1, 0, or some of writer,reader" in failed.value.stderr


# ---- In this process ----------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "0", "false", "False"])
def test_autoload_does_nothing_where_the_variable_says_no(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DCPX_INSTALL", text)
    autoload()
    assert type(FileSystemWriter("x")) is FileSystemWriter


def test_error_of_ours_is_logged_and_breaks_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise AttributeError("a newer torch")

    monkeypatch.setenv("DCPX_INSTALL", "1")
    monkeypatch.setattr("torch_dcpx.hook.install.install_from_environment", fail)
    with caplog.at_level(logging.ERROR, "torch_dcpx"):
        autoload()
    assert "could not replace DCP's classes: they are torch's own" in caplog.text
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
