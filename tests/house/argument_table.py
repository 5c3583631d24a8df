"""What arguments of public calls do not take: of test_call_arguments.py.

`OWN` has what one call's argument refuses. What an argument of a name refuses wherever it is not
there is in `BY_NAME`, and what any switch does in `NOT_SWITCHES`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

import torch_dcpx as dcpx
from torch_dcpx import (
    CheckpointManager,
    DcpxReader,
    DcpxWriter,
    KeyMap,
    Merge,
    ReadOptions,
    Split,
    Transpose,
    WriteOptions,
)

# Values of a wrong type, of a wrong class, classes instead of objects, something swapped.
_OBJECTS = object(), torch.ones(3), nn.Linear(1, 1), {"w": torch.ones(1)}, WriteOptions()
NOT_PATHS = (3, 1.5, *_OBJECTS, "~/ckpt", "a\0b")
NOT_STATES = (None, "ckpt", Path("ckpt"), [1, 2], 3, nn.Linear(1, 1), dict, torch.ones(1))
NOT_SWITCHES = (None, "yes", "", 2.0, torch.ones(3), WriteOptions(), object())
NOT_WRITE = (ReadOptions(), {"workers": 2}, "full", 3, WriteOptions, object())
NOT_READ = (WriteOptions(), {"trusted": True}, "blocks", 3, ReadOptions, object())
NOT_SECONDS = ("1", -1, float("nan"), True, object())
NOT_DEADLINES = (None, 0, *NOT_SECONDS)
NOT_COUNTS = (0, 1.5, "1", True)  # where None is a number that we choose
NOT_NUMBERS = (None, *NOT_COUNTS)
NOT_TAGS = (1.5, "", "a/b", "newest", b"x", -1, True, object())
NOT_MODULES = ("ckpt", {"w": torch.ones(1)}, [nn.Linear(1, 1)], nn.Linear)
NOT_OPTIMIZERS = ("adam", 3, nn.Linear(1, 1), torch.optim.SGD)
NOT_MAPS = ({"a": "b"}, ("a", "b"), "a", str, 3)
NOT_STEPS = (None, "1", -1, 1.5, True)

BY_NAME: dict[str, Any] = {
    "path": (None, *NOT_PATHS),
    "a": (None, *NOT_PATHS),
    "b": (None, *NOT_PATHS),
    "checkpoint_id": (None, "", *NOT_PATHS),
    "root": (None, *NOT_PATHS),
    "state_dict": NOT_STATES,
    "process_group": ("gloo", 3, object(), nn.Linear(1, 1), [0, 1]),
    "no_dist": NOT_SWITCHES,
    "allow_missing": (None, "head.*", [1], 3),
    "cast": (None, "deny", True, 3),
    "key_map": NOT_MAPS,
    "keys": (3, [1], b"w", {"w": 1}, object()),
    "rank": (-1, 1.5, "1", True),
    "safe_globals": (None, "os.system", int, ["system"], ["os:system"], [nn.Linear(1, 1)], 3),
    "durability": (None, "fast", True),
    "timeout_s": NOT_SECONDS,
    "time_left_s": NOT_SECONDS,
    "rtol": NOT_SECONDS,
    "atol": NOT_SECONDS,
    "save_timeout_s": NOT_DEADLINES,
    "load_timeout_s": NOT_DEADLINES,
    "visible_s": NOT_DEADLINES,
    "endpoint": (1, b"http://x", "minio:9000", "http://", "http://u:p@minio"),
    "host_memory_bytes": (1, 1.5, "1", True),
    "workers": NOT_COUNTS,
    "slot_bytes": (1, *NOT_NUMBERS),
    "tag": NOT_TAGS,
    "model": NOT_MODULES,
    "optimizer": NOT_OPTIMIZERS,
    "lr_scheduler": ("cosine", 3, object()),
    "dataloader": ("data", 3, [1], object()),
    "write_options": NOT_WRITE,
    "read_options": NOT_READ,
    "progress": (True, 3, "bar"),
    "translate": ({"a": "b"}, "a", 3),
    "keep_last": (0, -1, 1.5, "1", True),
    "keep_every": (0, -1, 1.5, "1", True),
    "save_every": (0, -1, 1.5, "1", True),
}
STATE = {"w": torch.ones(2)}
MODEL = nn.Linear(1, 1)
NOT_STATE = ([1], "x", 3, {1: 2}, MODEL)

# By call: how it is called, and what its own arguments do not take.
Table = dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]]
_SAVE = {
    "storage_writer": ("out", 3, DcpxReader("out"), FileSystemWriter("out"), DcpxWriter),
    "planner": (DefaultLoadPlanner(), DefaultSavePlanner, "x", 3),
    "options": NOT_WRITE,
}
_EXPORT = {
    "path": (None, b"out", *NOT_PATHS),
    "format": ("onnx", True, 3),
    "keys": (3, [1], b"x"),
    "max_shard_bytes": (None, 0, -1, "5XB", 1.5, True),
    "dtype": ("bfloat16", torch.int32, 3, float),
    "metadata": ([("a", "b")], {"a": 1}, {1: "a"}, "a", {"format": "tf"}),
    "config": (3, [1], "no/such/directory"),
    "merge_lora": (3, [1], "no/such/directory"),
    "options": NOT_WRITE,
}
OWN: Table = {
    "save": (dcpx.save, {"state_dict": STATE, "checkpoint_id": "out"}, _SAVE),
    "async_save": (dcpx.async_save, {"state_dict": STATE, "checkpoint_id": "out"}, _SAVE),
    "prewarm": (dcpx.prewarm, {"state_dict": STATE}, {"options": NOT_WRITE}),
    "load": (
        dcpx.load,
        {"state_dict": STATE, "checkpoint_id": "out"},
        {
            "storage_reader": ("out", 3, DcpxWriter("out"), FileSystemReader("out"), DcpxReader),
            "planner": (DefaultSavePlanner(), DefaultLoadPlanner, "x", 3),
        },
    ),
    "wait": (dcpx.wait, {}, {}),
    "on_event": (dcpx.on_event, {}, {"callback": (None, 3, "print", [print], object())}),
    "export": (
        dcpx.export,
        {"source": STATE, "path": "out"},
        {"source": (None, 3, [1], object(), "~/ckpt"), **_EXPORT},
    ),
    "load_pretrained": (
        dcpx.load_pretrained,
        {"model": MODEL, "path": "out"},
        {"model": (None, *NOT_MODULES), "device": ("gpu", object(), [])},
    ),
    "open_checkpoint": (dcpx.open_checkpoint, {"path": "good"}, {}),
    "load_tensors": (
        dcpx.load_tensors,
        {"path": "good"},
        {"device": (None, "gpu", "meta", object(), [])},
    ),
    "diff": (dcpx.diff, {"a": "good", "b": "good"}, {}),
    "inspect": (dcpx.inspect, {"path": "good"}, {}),
    "stats": (dcpx.stats, {"path": "good"}, {"path": NOT_PATHS}),
    "verify": (
        dcpx.verify,
        {"path": "good"},
        {"host_memory_bytes": NOT_COUNTS, "workers": (*NOT_COUNTS, 257)},
    ),
    "ls": (dcpx.ls, {"path": "good"}, {}),
    "repair": (
        dcpx.repair,
        {"path": "good"},
        {"files": ("__0_0.distcp", 3, [1]), "rank_local": ("yes", 1, object())},
    ),
    "guard_optimizer": (dcpx.guard_optimizer, {}, {"optimizer": (None, *NOT_OPTIMIZERS)}),
    "DcpxWriter": (
        DcpxWriter,
        {"path": "out"},
        {
            "sync_files": ("yes", WriteOptions(), 1.5),
            "thread_count": (0, 1.5, "2", True, WriteOptions()),
            "per_thread_copy_ahead": (None, -1, 1.5, "1", WriteOptions()),
            "_extensions": (3, "zstd", object(), [object()], WriteOptions()),
            "serialization_format": (None, "safetensors", 3, WriteOptions()),
            "options": NOT_WRITE,
        },
    ),
    "DcpxReader": (
        DcpxReader,
        {"path": "good"},
        {"_extension_registry": (3, "zstd", object(), ReadOptions(trusted=True))},
    ),
    "DcpxStager": (
        dcpx.DcpxStager,
        {},
        {
            "config": (3, {"use_async_staging": True}, WriteOptions()),
            "host_memory_bytes": (-1, 1.5, "1", True),
            "timeout_s": NOT_DEADLINES,
        },
    ),
    "DcpxStager.prewarm": (dcpx.DcpxStager().prewarm, {}, {}),
    "DcpxSavePlanner": (
        dcpx.DcpxSavePlanner,
        {},
        {
            "dedup_replicated_tensors": ("yes", 1.5),
            "on_conflict": (None, "ignore", True),
            "split_replicas": ("yes", 1.5, 1),
        },
    ),
    "DcpxLoadPlanner": (dcpx.DcpxLoadPlanner, {}, {}),
    "KeyMap": (
        KeyMap,
        {},
        {
            "rules": (
                None, 3, "a", [("a", "b")], ("(", "b"), ("a", r"\1"), ("a", 3), ("a", "b", "c"),
                Split(3, ("a",)), Split("a", "b"), Split("a", ("b",), dim="0"),
                Merge(("(",), "a"), Merge("a", 3), Transpose("a", (0, "1")), Transpose(None),
            ),
            "wrappers": NOT_SWITCHES[1:],
        },
    ),
    "KeyMap.dry_run": (KeyMap().dry_run, {}, {"source": (None, 3, b"good", "~/ckpt")}),
    "WriteOptions": (
        WriteOptions,
        {},
        {
            "files_per_rank": NOT_NUMBERS,
            "progress": (None, "bar", 1),
            "in_place": (None, True, "yes"),
            "max_in_flight": NOT_NUMBERS,
            "on_busy": (None, "drop", True),
            "check_visible": (None, 1, "always", "yes", object()),
        },
    ),
    "ReadOptions": (
        ReadOptions,
        {},
        {"verify": (None, "full", True), "host_memory_bytes": (None, 1, 1.5, "1", True)},
    ),
    "install": (dcpx.install, {}, {"durability": (None, "none", True, 3)}),
    "use": (dcpx.use, {}, {"durability": (None, "none", True, 3)}),
    "CheckpointManager": (
        CheckpointManager,
        {"root": "out"},
        {
            "save_every_s": (0, *NOT_SECONDS),
            "keep_best": ("loss", 3, ("loss", "min"), ("loss", "low", 1), ("loss", "min", "1")),
            "options": NOT_WRITE,
            "grace_s": (60.0, *NOT_SECONDS),  # of a directory
        },
    ),
}  # fmt: skip

MANAGER = CheckpointManager("out")
OWN |= {
    "CheckpointManager.save": (
        MANAGER.save,
        {"tag_or_step": 1, "model": MODEL},
        {
            "tag_or_step": (None, *NOT_TAGS, {"w": 1}, MODEL),
            "state": NOT_STATE,
            "user_content": (MODEL, object(), {"f": print}),
            "metrics": ([1], "loss", {"loss": "low"}, {1: 1.0}),
            "step": (1.5, "1", -1, True, 2),
        },
    ),
    "CheckpointManager.resume": (
        MANAGER.resume,
        {"model": MODEL},
        {"state": NOT_STATE, "merge": (3, "sum", {"a": 3}, {1: print})},
    ),
    "CheckpointManager.export": (
        MANAGER.export,
        {"tag_or_model": MODEL, "path": "artifact"},
        {"tag_or_model": (None, *NOT_TAGS, {"w": 1}), **_EXPORT},
    ),
    "CheckpointManager.dry_run": (
        MANAGER.dry_run,
        {"translate": KeyMap()},
        {"translate": (None, {"a": "b"}, "a", 3)},
    ),
    **{
        f"CheckpointManager.{name}": (getattr(MANAGER, name), {}, {"tag": (None, *NOT_TAGS)})
        for name in ("pin", "unpin", "delete")
    },
    "CheckpointManager.should_save": (
        CheckpointManager("out", save_every=2).should_save,
        {"step": 1},
        {"step": NOT_STEPS},
    ),
    "CheckpointManager.save_on_signal": (
        MANAGER.save_on_signal,
        {},
        {"signals": (None, signal.SIGTERM, "SIGTERM", ["SIGTERM"], [], [0], [10_000])},
    ),
    "CheckpointManager.wait": (MANAGER.wait, {}, {}),
}
