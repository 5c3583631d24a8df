"""Processes with the hook: as torch is imported, those of multiprocessing, DCP's that saves, and
the WARNING of one that ends with the hook on and nothing replaced.

What imports torch anew are three processes; others are forks of one that has done so.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import RunPython
from support.machine import seconds
from support.warm import warm_parent

import torch_dcpx
from torch_dcpx.hook.settings import VARIABLES

pytestmark = pytest.mark.usefixtures("hook_off", "entry_point")

UNUSED = "the hook of torch-dcpx was on, but nothing in this process made"
SILENT = ["torch_dcpx"]
HOOK = "torch_dcpx.hook.install"
STOCK = ["FileSystemWriter", "DefaultSavePlanner"]
OURS = ["DcpxWriter", "DcpxSavePlanner"]

# ---- As torch is imported -----------------------------------------------------------------------

IMPORT = """
import json, logging, os, sys
import torch

def names():
    return sorted(name for name in sys.modules if name.split(".")[0] == "torch_dcpx")

def found(code, makes):
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    before = names()
    exec(code)
    then = names()
    import torch.distributed.checkpoint as dcp
    made = []
    if makes:
        made = [type(dcp.FileSystemWriter("x")).__name__, type(dcp.DefaultSavePlanner()).__name__]
    print(json.dumps([before, then, names(), made, dcp.__spec__.loader is dcp.__loader__]))

"""
FRESH = f"{IMPORT}found('', True)"
# Torch calls no entry point as it is imported; forks do then what it does at the end of that.
FORKS = f"""{IMPORT}
import atexit, gc, traceback
import torch.distributed.tensor  # most of what DCP imports: once for all
assert names() == [] and "torch.distributed.checkpoint" not in sys.modules
gc.freeze()  # a collection in a fork would copy all that they share
gc.disable()
for at, (code, makes, variables) in enumerate(json.loads(sys.argv[1])):
    child = os.fork()
    if not child:
        for number, name in enumerate(("out", "err"), 1):
            os.dup2(os.open(f"{{sys.argv[2]}}/{{at}}.{{name}}", os.O_CREAT | os.O_WRONLY), number)
        os.environ.pop("TORCH_DEVICE_BACKEND_AUTOLOAD")
        os.environ.update(variables)
        try:
            torch._import_device_backends()
            found(code, makes)
        except BaseException:
            traceback.print_exc()
        atexit._run_exitfuncs()  # and no more of an end, for the same reason
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    os.waitpid(child, 0)
"""
ON = {"DCPX_INSTALL": "1"}


def test_variable_installs_when_dcp_is_imported(run_python: RunPython) -> None:
    ended = run_python(FRESH, env=ON)
    before, _, after, made, has_own_loader = json.loads(ended.stdout)
    assert HOOK not in before
    assert HOOK in after
    assert made == OURS
    assert has_own_loader
    (line,) = [line for line in ended.stderr.splitlines() if "torch-dcpx" in line]
    assert line.startswith("INFO torch-dcpx ")
    assert "FileSystemWriter" in line
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in line


def test_what_is_replaced_is_what_variables_and_calls_before_the_import_of_dcp_say(
    tmp_path: Path, run_python: RunPython
) -> None:
    torch_dcpx.install(planners=False)
    installed = {name: os.environ[name] for name in VARIABLES}
    torch_dcpx.uninstall()
    assert not any(name in os.environ for name in VARIABLES)
    probe = "import importlib.util; importlib.util.find_spec('torch.distributed.checkpoint')"
    only_writer = ["DcpxWriter", "DefaultSavePlanner"]
    rows: list[tuple[str, dict[str, str], list[str]]] = [
        ("", {}, STOCK),
        ("", installed, only_writer),
        (probe, ON, OURS),
        ("import torch_dcpx; torch_dcpx.install(planners=False)", ON, only_writer),
        ("import torch_dcpx; torch_dcpx.use", ON, OURS),
        ("import torch_dcpx; torch_dcpx.uninstall()", ON, STOCK),
        ("del os.environ['DCPX_INSTALL']", ON, STOCK),
        ("import torch.distributed.run", {"DCPX_INSTALL": "writer,planners"}, []),
        ("", {"DCPX_INSTALL": "wirter"}, []),
    ]
    asked = json.dumps([(code, bool(wanted), given) for code, given, wanted in rows])
    run_python(FORKS, asked, str(tmp_path), env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    outs, errs = (
        [(tmp_path / f"{at}.{name}").read_text() for at in range(len(rows))]
        for name in ("out", "err")
    )
    found = [json.loads(out) for out in outs[:-1]]
    for (code, given, wanted), (_, _, _, made, has_own_loader), said in zip(
        rows, found, errs, strict=False
    ):
        assert (made, has_own_loader, "Error" in said) == (wanted, True, False), (code, given, said)
    before, _, after, _, _ = found[0]  # without the variable
    assert before == after == SILENT
    assert "torch-dcpx" not in errs[0]
    _, then, after, _, _ = found[7]  # nothing made; an agent of torchrun does not import DCP
    assert HOOK not in then
    assert "torch_dcpx._C" not in after
    assert errs[7].count(f"WARNING {UNUSED}") == 1
    assert not outs[8]
    assert "DCPX_INSTALL='wirter' must be" in errs[8]


# ---- Processes of multiprocessing ---------------------------------------------------------------

PROCESSES = """
import multiprocessing, os, sys
import torch.distributed.checkpoint as dcp
import torch_dcpx
from torch_dcpx.reports import REPLACED

def kind(queue):
    queue.put(type(dcp.FileSystemWriter("x")).__name__)
    REPLACED.clear()  # as one that made nothing

def made(how):
    context = multiprocessing.get_context(how)
    queue = context.SimpleQueue()
    process = context.Process(target=kind, args=(queue,), daemon=True)
    process.start()
    print(queue.get(), flush=True)
    process.join()

if __name__ == "__main__":
    import logging
    logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
    for step in sys.argv[1:]:
        if step in ("fork", "spawn", "forkserver"):
            made(step)
        elif step == "child":
            child = os.fork()
            if not child:
                sys.exit(0)
            assert os.waitpid(child, 0)[1] == 0
        else:
            getattr(torch_dcpx, step)()
    dcp.DefaultSavePlanner()  # only the others made nothing
"""


def warm_script(tmp_path: Path, code: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Runs a file, which processes of multiprocessing can import."""
    script = tmp_path / "script.py"
    script.write_text(code)
    return warm_parent().run([str(script), *args], env=os.environ, timeout_s=seconds(600))


def test_processes_get_the_hook_or_it_is_said_that_they_do_not_and_are_not_warned(
    tmp_path: Path,
) -> None:
    steps = ["forkserver", "install", "forkserver", "spawn", "fork", "child"]
    done = warm_script(tmp_path, PROCESSES, *steps)
    lines = [line.split()[0] for line in done.stdout.splitlines() if "made a writer" not in line]
    ours, stock = "DcpxWriter", "FileSystemWriter"
    assert lines == [stock, "WARNING", stock, ours, ours], (done.stdout, done.stderr)
    assert UNUSED not in done.stdout + done.stderr
    assert done.returncode == 0, done.stderr


# ---- DCP's process that saves -------------------------------------------------------------------

# torch 2.9 makes the writer in the parent, and newer ones in the process that saves.
WRITER_IS_SENT = "_storage_setup(" in inspect.getsource(dcp.state_dict_saver.async_save)

# `install()` in Python: the process that saves learns of it by the variables alone.
SAVE = """
import sys
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
import torch_dcpx

if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch_dcpx.install()
    metadata = dcp.async_save(
        {"w": torch.ones(3)}, checkpoint_id=sys.argv[1], async_stager=BlockingAsyncStager(),
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    ).result()
    print(f"reported {metadata.dcpx_report.replaced}")  # in one piece: others print, too
"""


def test_install_in_python_reaches_the_process_that_saves_and_the_training_is_not_warned(
    tmp_path: Path,
) -> None:
    done = warm_script(tmp_path, SAVE, str(tmp_path / "saved"))
    said = done.stdout + done.stderr
    made = "{'planners': 1}" if WRITER_IS_SENT else "{'writer': 1, 'planners': 1}"
    assert f"reported {made}" in said
    assert UNUSED not in said
    target = {"w": torch.zeros(3)}
    dcp.load(target, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert target["w"].tolist() == [1, 1, 1]
    assert torch_dcpx.verify(tmp_path / "saved").ok
