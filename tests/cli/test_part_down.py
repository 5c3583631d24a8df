"""What `dcpx` says where a part of the file system is down: nothing hidden is called unfinished."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from support.cli import code_and_text
from support.fuse_fixture import MountedClient
from support.saves import save, save_rank_local

from torch_dcpx import CheckpointManager, WriteOptions

Clients = tuple[MountedClient, MountedClient]

LOOKUPS = pytest.mark.parametrize("lookup", [errno.ENOENT, errno.ENOTCONN])
COMMANDS = [
    ["gc"], ["gc", "--delete"], ["ls"], ["verify"], ["doctor"], ["inspect"],
    ["repair", "--dry-run"], ["repair", "--accept-assumptions"],
]  # fmt: skip
WRONG = ("did not end", "unfinished", "no repair can help", "`dcpx repair", "`dcpx gc")


def stored_files(root: Path) -> dict[str, bytes]:
    found = sorted(root.rglob("*"))
    return {str(p): p.read_bytes() for p in found if p.is_file() and p.name != ".dcpx.lock"}


def save_two(client: MountedClient) -> Path:
    """Saves "plain", and three steps beneath "root"."""
    root = client.path / "root"
    options = WriteOptions(durability="none", workers=1)
    with CheckpointManager(root, options=options, async_save=False, no_dist=True) as manager:
        for step in (1, 2, 3):
            manager.save(step, state={"x": torch.full((3,), float(step))})
    save({"x": torch.arange(6.0)}, client.path / "plain")
    client.forget()
    return client.path


def take_down(client: MountedClient, names: str, lookup: int) -> None:
    for place in ("root/step-2", "plain"):
        client.take_down(f"{place}/{names}", lookup=lookup)
    client.forget()


def assert_unharmed(client: MountedClient, path: Path, before: dict[str, bytes]) -> None:
    client.clear()
    client.forget()
    assert stored_files(path) == before


@pytest.mark.parametrize(
    ("down", "lookup"),
    [
        (".metadata", errno.ENOENT),
        (".[md]*", errno.ENOENT),
        (".*", errno.ENOENT),
        (".metadata", errno.ENOTCONN),
    ],
)
def test_hidden_metadata_are_no_save_that_did_not_end(
    two_clients: Clients, down: str, lookup: int
) -> None:
    client, _ = two_clients
    base = save_two(client)
    before = stored_files(base)
    take_down(client, down, lookup)
    says = os.strerror(lookup) if lookup == errno.ENOTCONN else "part of the file system"
    for where in ("root/step-2", "plain"):
        for words in COMMANDS:
            code, text = code_and_text(*words, base / where)
            assert code != 0 and says in text, (words, text)
            assert not any(wrong in text for wrong in WRONG), (words, text)
    assert_unharmed(client, base, before)
    assert code_and_text("verify", base)[0] == 0


@LOOKUPS
def test_one_hidden_checkpoint_hides_no_other(two_clients: Clients, lookup: int) -> None:
    client, _ = two_clients
    root = save_two(client) / "root"
    before = stored_files(root)
    take_down(client, ".metadata", lookup)
    for words in COMMANDS[:5]:
        code, text = code_and_text(*words, root)
        assert code == 2, (words, text)
        assert not any(wrong in text for wrong in WRONG), (words, text)
        assert "step-2" in text or "1 unreadable" in text, (words, text)
    assert_unharmed(client, root, before)


@LOOKUPS
def test_directory_in_which_all_is_hidden_is_no_empty_one(
    two_clients: Clients, lookup: int
) -> None:
    client, _ = two_clients
    root = save_two(client) / "root"
    before = stored_files(root)
    take_down(client, "*", lookup)
    os.utime(root / "step-2", (1e9, 1e9))
    client.forget()
    for words in COMMANDS[:5]:
        for path in (root, root / "step-2"):
            code, text = code_and_text(*words, path)
            assert code == 2, (words, text)
            assert not any(wrong in text for wrong in WRONG), (words, text)
    assert_unharmed(client, root, before)


@pytest.mark.parametrize("code", [errno.EIO, errno.ETIMEDOUT])
@pytest.mark.parametrize("down", [".metadata", "__0_0.distcp"])
def test_files_that_do_not_answer_are_neither_missing_nor_left(
    two_clients: Clients, down: str, code: int
) -> None:
    client, _ = two_clients
    path = save_two(client) / "plain"
    if down == ".metadata":
        client.fail("lookup getattr open read", code, f"plain/{down}")
    else:
        client.take_down(f"plain/{down}", lookup=code)
    client.forget()
    for words in COMMANDS[:5]:
        if down == ".metadata" or words[0] in ("ls", "verify", "doctor"):
            status, text = code_and_text(*words, path)
            assert status != 0 and os.strerror(code) in text, (words, text)
            assert not any(wrong in text for wrong in (*WRONG, "is missing")), (words, text)


def test_hidden_data_files_are_missing_and_a_part_may_be_down(two_clients: Clients) -> None:
    client, _ = two_clients
    path = save_two(client) / "plain"
    take_down(client, "__*", errno.ENOENT)
    code, text = code_and_text("ls", path)
    assert code == 1 and "'__0_0.distcp' is missing" in text and "part of the file system" in text


def test_files_of_a_killed_save_still_go(two_clients: Clients) -> None:
    client, _ = two_clients
    path = client.path / "killed"
    save({"x": torch.arange(6.0)}, path)
    (path / ".metadata").unlink()
    (path / ".dcpx.lock").write_text("host=gone pid=1 boot=none\n")
    (path / "__0_0.distcp").write_bytes((path / "__0_0.distcp").read_bytes())  # behind the lock
    client.forget()
    code, text = code_and_text("ls", path)
    assert code == 1 and "did not end" in text, text


def test_save_that_was_killed_over_a_checkpoint_leaves_it_alone(two_clients: Clients) -> None:
    client, _ = two_clients
    path = client.path / "twice"
    save({"x": torch.arange(6.0)}, path)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    (path / ".dcpx.lock").write_text(f"host=here pid=1 boot={boot}\n")
    before = stored_files(path)
    client.forget()
    client.take_down("twice/.metadata")
    for words in (["gc", "--delete"], ["ls"]):
        code, text = code_and_text(*words, path)
        assert code == 2 and "part of the file system" in text, (words, text)
    assert_unharmed(client, path, before)


def test_rank_whose_metadata_are_hidden_keeps_its_files(two_clients: Clients) -> None:
    client, _ = two_clients
    path = client.path / "each"
    for rank in range(2):
        save_rank_local({"x": torch.arange(6.0)}, path, rank)
    before = stored_files(path)
    client.forget()
    client.take_down("each/__1.metadata")
    client.fail("read", errno.EIO, "each/__1_*")
    for words in (["gc", "--delete"], ["ls"]):
        code, text = code_and_text(*words, path)
        assert code != 0 and "part of the file system" in text, (words, text)
        assert "`dcpx repair" not in text, (words, text)
    assert_unharmed(client, path, before)
