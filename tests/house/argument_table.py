"""What arguments of public calls do not take, by call and argument: of test_call_arguments.py."""

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
NOT_GROUPS = ("gloo", 3, object(), nn.Linear(1, 1), [0, 1])
NOT_ENDPOINTS = (1, b"http://x", "minio:9000", "http://", "http://u:p@minio")
NOT_SECONDS = ("1", -1, float("nan"), True, object())
NOT_GLOBALS = (None, "os.system", int, ["system"], ["os:system"], [nn.Linear(1, 1)], 3)
NOT_GLOBS = (None, "head.*", [1], 3)
NOT_MAPS = ({"a": "b"}, ("a", "b"), "a", str, 3)
NOT_TAGS = (1.5, "", "a/b", "newest", b"x", -1, True, object())
NOT_MODULES = ("ckpt", {"w": torch.ones(1)}, [nn.Linear(1, 1)], nn.Linear)
NOT_OPTIMIZERS = ("adam", 3, nn.Linear(1, 1), torch.optim.SGD)
GROUP = {"process_group": NOT_GROUPS, "no_dist": NOT_SWITCHES}
LOADS = {
    "strict": NOT_SWITCHES,
    "allow_missing": NOT_GLOBS,
    "cast": (None, "deny", True, 3),
    "key_map": NOT_MAPS,
}
NOT_KEYS = (3, [1], b"w", {"w": 1}, object())
LOOKS = {"options": NOT_READ, "rank": (-1, 1.5, "1", True)}
INSTALL = {
    "writer": NOT_SWITCHES,
    "reader": NOT_SWITCHES,
    "planners": NOT_SWITCHES,
    "stager": NOT_SWITCHES,
    "write_options": NOT_WRITE,
    "read_options": NOT_READ,
    "durability": (None, "none", True, 3),
    "safe_globals": NOT_GLOBALS,
    "trusted": NOT_SWITCHES,
}
STATE = {"w": torch.ones(2)}
MODEL = nn.Linear(1, 1)

# By call: how it is called, and what each of its arguments does not take. `...` takes anything.
Table = dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]]
TABLE: Table = {
    "save": (
        dcpx.save,
        {"state_dict": STATE, "checkpoint_id": "out"},
        {
            "state_dict": NOT_STATES,
            "checkpoint_id": (None, "", *NOT_PATHS),
            "storage_writer": ("out", 3, DcpxReader("out"), FileSystemWriter("out"), DcpxWriter),
            "planner": (DefaultLoadPlanner(), DefaultSavePlanner, "x", 3),
            "options": NOT_WRITE,
            **GROUP,
        },
    ),
    "prewarm": (
        dcpx.prewarm,
        {"state_dict": STATE},
        {"state_dict": NOT_STATES, "options": NOT_WRITE},
    ),
    "load": (
        dcpx.load,
        {"state_dict": STATE, "checkpoint_id": "out"},
        {
            "state_dict": NOT_STATES,
            "checkpoint_id": (None, "", *NOT_PATHS),
            "storage_reader": ("out", 3, DcpxWriter("out"), FileSystemReader("out"), DcpxReader),
            "planner": (DefaultSavePlanner(), DefaultLoadPlanner, "x", 3),
            "options": NOT_READ,
            **LOADS,
            **GROUP,
        },
    ),
    "wait": (dcpx.wait, {}, {"timeout_s": NOT_SECONDS}),
    "on_event": (dcpx.on_event, {}, {"callback": (None, 3, "print", [print], object())}),
    "export": (
        dcpx.export,
        {"source": STATE, "path": "out"},
        {
            "source": (None, 3, [1], object(), "~/ckpt"),
            "path": (None, b"out", *NOT_PATHS),
            "format": ("onnx", True, 3),
            "overwrite": NOT_SWITCHES,
            "keys": (3, [1], b"x"),
            "key_map": NOT_MAPS,
            "max_shard_bytes": (None, 0, -1, "5XB", 1.5, True),
            "dtype": ("bfloat16", torch.int32, 3, float),
            "metadata": ([("a", "b")], {"a": 1}, {1: "a"}, "a", {"format": "tf"}),
            "config": (3, [1], "no/such/directory"),
            "merge_lora": (3, [1], "no/such/directory"),
            "options": NOT_WRITE,
            **GROUP,
        },
    ),
    "load_pretrained": (
        dcpx.load_pretrained,
        {"model": MODEL, "path": "out"},
        {
            "model": (None, *NOT_MODULES),
            "path": (None, *NOT_PATHS),
            "device": ("gpu", object(), []),
            "options": NOT_READ,
            **LOADS,
            **GROUP,
        },
    ),
    "open_checkpoint": (
        dcpx.open_checkpoint,
        {"path": "good"},
        {"path": (None, *NOT_PATHS), **LOOKS},
    ),
    "load_tensors": (
        dcpx.load_tensors,
        {"path": "good"},
        {
            "path": (None, *NOT_PATHS),
            "keys": NOT_KEYS,
            "device": (None, "gpu", "meta", object(), []),
            **LOOKS,
        },
    ),
    "diff": (
        dcpx.diff,
        {"a": "good", "b": "good"},
        {
            "a": (None, *NOT_PATHS),
            "b": (None, *NOT_PATHS),
            "keys": NOT_KEYS,
            "rtol": NOT_SECONDS,
            "atol": NOT_SECONDS,
            "quick": NOT_SWITCHES,
            **LOOKS,
        },
    ),
    "inspect": (dcpx.inspect, {"path": "good"}, {"path": (None, *NOT_PATHS), "keys": NOT_KEYS}),
    "stats": (dcpx.stats, {"path": "good"}, {"path": NOT_PATHS, "keys": NOT_KEYS, **LOOKS}),
    "verify": (
        dcpx.verify,
        {"path": "good"},
        {
            "path": (None, *NOT_PATHS),
            "workers": (0, 1.5, "2", True, 257),
            "host_memory_bytes": (0, 1.5, "1", True),
            "safe_globals": NOT_GLOBALS,
            "progress": (True, 3, "bar"),
        },
    ),
    "ls": (dcpx.ls, {"path": "good"}, {"path": (None, *NOT_PATHS), "with_all": NOT_SWITCHES}),
    "repair": (
        dcpx.repair,
        {"path": "good"},
        {
            "path": (None, *NOT_PATHS),
            "files": ("__0_0.distcp", 3, [1]),
            "rank_local": ("yes", 1, object()),
            "safe_globals": NOT_GLOBALS,
            "dry_run": NOT_SWITCHES,
            "accept_assumptions": NOT_SWITCHES,
        },
    ),
    "guard_optimizer": (dcpx.guard_optimizer, {}, {"optimizer": (None, *NOT_OPTIMIZERS)}),
    "DcpxWriter": (
        DcpxWriter,
        {"path": "out"},
        {
            "path": (None, *NOT_PATHS),
            "single_file_per_rank": NOT_SWITCHES,
            "sync_files": ("yes", WriteOptions(), 1.5),
            "thread_count": (0, 1.5, "2", True, WriteOptions()),
            "per_thread_copy_ahead": (None, -1, 1.5, "1", WriteOptions()),
            "cache_staged_state_dict": NOT_SWITCHES,
            "overwrite": NOT_SWITCHES,
            "_extensions": (3, "zstd", object(), [object()], WriteOptions()),
            "serialization_format": (None, "safetensors", 3, WriteOptions()),
            "options": NOT_WRITE,
        },
    ),
    "DcpxReader": (
        DcpxReader,
        {"path": "good"},
        {
            "path": (None, *NOT_PATHS),
            "_extension_registry": (3, "zstd", object(), ReadOptions(trusted=True)),
            "options": NOT_READ,
        },
    ),
    "DcpxStager": (
        dcpx.DcpxStager,
        {},
        {
            "config": (3, {"use_async_staging": True}, WriteOptions()),
            "is_shared": NOT_SWITCHES,
            "host_memory_bytes": (-1, 1.5, "1", True),
            "workers": (0, 1.5, "1", True),
            "timeout_s": (None, 0, *NOT_SECONDS),
            "overlap": NOT_SWITCHES,
        },
    ),
    "DcpxStager.prewarm": (dcpx.DcpxStager().prewarm, {}, {"state_dict": NOT_STATES}),
    "DcpxSavePlanner": (
        dcpx.DcpxSavePlanner,
        {},
        {
            "flatten_state_dict": NOT_SWITCHES,
            "flatten_sharded_tensors": NOT_SWITCHES,
            "dedup_replicated_tensors": ("yes", 1.5),
            "dedup_save_to_lowest_rank": NOT_SWITCHES,
            "enable_plan_caching": NOT_SWITCHES,
            "on_conflict": (None, "ignore", True),
            "split_replicas": ("yes", 1.5, 1),
        },
    ),
    "DcpxLoadPlanner": (
        dcpx.DcpxLoadPlanner,
        {},
        {
            "flatten_state_dict": NOT_SWITCHES,
            "flatten_sharded_tensors": NOT_SWITCHES,
            "allow_partial_load": NOT_SWITCHES,
        },
    ),
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
            "durability": (None, "fast", True),
            "host_memory_bytes": (1, 1.5, "1", True),
            "workers": (0, 1.5, "1", True),
            "slot_bytes": (None, 1, 1.5, "1", True),
            "direct_io": NOT_SWITCHES,
            "files_per_rank": (None, 0, 1.5, "1", True),
            "progress": (None, "bar", 1),
            "in_place": (None, True, "yes"),
            "save_timeout_s": (None, 0, *NOT_SECONDS),
            "max_in_flight": (None, 0, 1.5, "1", True),
            "on_busy": (None, "drop", True),
            "overlap": NOT_SWITCHES,
            "node_local": NOT_SWITCHES,
            "endpoint": NOT_ENDPOINTS,
            "check_visible": (None, 1, "always", "yes", object()),
            "visible_s": (None, 0, *NOT_SECONDS),
            "conditional_commit": NOT_SWITCHES,
        },
    ),
    "ReadOptions": (
        ReadOptions,
        {},
        {
            "verify": (None, "full", True),
            "trusted": NOT_SWITCHES,
            "safe_globals": NOT_GLOBALS,
            "host_memory_bytes": (None, 1, 1.5, "1", True),
            "workers": (0, 1.5, "1", True),
            "slot_bytes": (None, 1, 1.5, "1", True),
            "direct_io": NOT_SWITCHES,
            "load_timeout_s": (None, 0, *NOT_SECONDS),
            "visible_s": (None, 0, *NOT_SECONDS),
            "node_local": NOT_SWITCHES,
            "endpoint": NOT_ENDPOINTS,
        },
    ),
    "install": (dcpx.install, {}, INSTALL),
    "use": (dcpx.use, {}, INSTALL),
    "CheckpointManager": (
        CheckpointManager,
        {"root": "out"},
        {
            "root": (None, *NOT_PATHS),
            "keep_last": (0, -1, 1.5, "1", True),
            "keep_every": (0, -1, 1.5, "1", True),
            "save_every": (0, -1, 1.5, "1", True),
            "save_every_s": (0, *NOT_SECONDS),
            "keep_best": ("loss", 3, ("loss", "min"), ("loss", "low", 1), ("loss", "min", "1")),
            "async_save": NOT_SWITCHES,
            "options": NOT_WRITE,
            "read_options": NOT_READ,
            "allow_fresh": NOT_SWITCHES,
            "allow_older": NOT_SWITCHES,
            "grace_s": (60.0, *NOT_SECONDS),  # of a directory
            "trainable_only": NOT_SWITCHES,
            **GROUP,
        },
    ),
}  # fmt: skip
TABLE["async_save"] = (dcpx.async_save, *TABLE["save"][1:])

MANAGER = CheckpointManager("out")
PARTS = {
    "model": NOT_MODULES,
    "optimizer": NOT_OPTIMIZERS,
    "lr_scheduler": ("cosine", 3, object()),
    "dataloader": ("data", 3, [1], object()),
    "state": ([1], "x", 3, {1: 2}, MODEL),
}
TABLE |= {
    "CheckpointManager.save": (
        MANAGER.save,
        {"tag_or_step": 1, "model": MODEL},
        {
            "tag_or_step": (None, *NOT_TAGS, {"w": 1}, MODEL),
            **PARTS,
            "user_content": (MODEL, object(), {"f": print}),
            "metrics": ([1], "loss", {"loss": "low"}, {1: 1.0}),
            "step": (1.5, "1", -1, True, 2),
        },
    ),
    "CheckpointManager.resume": (
        MANAGER.resume,
        {"model": MODEL},
        {
            **PARTS,
            "tag": NOT_TAGS,
            "strict": NOT_SWITCHES,
            "allow_missing": NOT_GLOBS,
            "cast": (None, "deny", True),
            "load_optimizer": NOT_SWITCHES,
            "merge": (3, "sum", {"a": 3}, {1: print}),
            "translate": ({"a": "b"}, "a", 3),
            "fallback": NOT_SWITCHES,
        },
    ),
    "CheckpointManager.export": (
        MANAGER.export,
        {"tag_or_model": MODEL, "path": "artifact"},
        {
            "tag_or_model": (None, *NOT_TAGS, {"w": 1}),
            **{
                name: wrong
                for name, wrong in TABLE["export"][2].items()
                if name not in ("source", *GROUP)
            },
        },
    ),
    "CheckpointManager.dry_run": (
        MANAGER.dry_run,
        {"translate": KeyMap()},
        {"translate": (None, {"a": "b"}, "a", 3), "tag": NOT_TAGS},
    ),
    **{
        f"CheckpointManager.{name}": (getattr(MANAGER, name), {}, {"tag": (None, *NOT_TAGS)})
        for name in ("pin", "unpin", "delete")
    },
    "CheckpointManager.should_save": (
        CheckpointManager("out", save_every=2).should_save,
        {"step": 1},
        {"step": (None, "1", -1, 1.5, True)},
    ),
    "CheckpointManager.save_on_signal": (
        MANAGER.save_on_signal,
        {},
        {
            "signals": (None, signal.SIGTERM, "SIGTERM", ["SIGTERM"], [], [0], [10_000]),
            "time_left_s": NOT_SECONDS,
        },
    ),
    "CheckpointManager.wait": (MANAGER.wait, {}, {"timeout_s": NOT_SECONDS}),
}
