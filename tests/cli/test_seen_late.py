"""Commands on a node that sees late what another one has just saved."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.fuse_fixture import MountedClient

import torch_dcpx as dcpx
from torch_dcpx.cli.app import app
from torch_dcpx.integrity import facts

Clients = tuple[MountedClient, MountedClient]
COMMANDS = pytest.mark.parametrize("command", ["verify", "ls", "inspect", "gc"])


def save_beside_a_look(value: int, path: Path, seen_at: Path) -> None:
    """Saves while another client looks at the files, so that it keeps the sizes of half of them."""
    path.mkdir(exist_ok=True)
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            with suppress(OSError):
                for name in os.listdir(seen_at):
                    (seen_at / name).stat()

    watcher = threading.Thread(target=watch)
    watcher.start()
    state = {"w": torch.full((1 << 16,), float(value)), "v": value}
    dcpx.save(state, path, no_dist=True)
    stop.set()
    watcher.join()


@COMMANDS
def test_command_calls_no_checkpoint_damaged_whose_sizes_a_node_sees_late(
    two_clients: Clients, command: str
) -> None:
    first, second = two_clients
    for value in range(4):
        for name in ("same", f"new{value}"):
            path = second.path / name
            save_beside_a_look(value, first.path / name, path)
            ended = CliRunner().invoke(app, [command, str(path)])
            assert ended.exit_code == 0, (name, value, ended.output)
            assert "repair" not in ended.output


@COMMANDS
def test_command_names_the_damage_of_a_checkpoint_of_this_minute(
    two_clients: Clients, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "UNKNOWN_S", 0.2)
    first, second = two_clients
    save_beside_a_look(1, first.path / "cut", second.path / "cut")
    os.truncate(first.path / "cut" / ".metadata", 100)
    second.forget()
    ended = CliRunner().invoke(app, [command, str(second.path / "cut")])
    assert ended.exit_code != 0
    assert "dcpx repair" in ended.output
