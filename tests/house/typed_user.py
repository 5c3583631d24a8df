"""What users write, by every public name: mypy --strict reads it (test_public_names.py)."""

from __future__ import annotations

import asyncio
import signal
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load  # mypy: DCP's own front door
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save, save

import torch_dcpx as dcpx
from torch_dcpx import CheckpointManager, KeyMap, PerRank, ReadOptions, SaveHandle, WriteOptions

VERSION: str = dcpx.__version__
MODEL = nn.Linear(4, 4)
OPTIMIZER = torch.optim.AdamW(MODEL.parameters())
SCHEDULER = torch.optim.lr_scheduler.StepLR(OPTIMIZER, 1)


def one_line() -> None:
    state = {"model": MODEL.state_dict(), "step": 1}
    save(state, storage_writer=dcpx.DcpxWriter("ckpt", options=WriteOptions(workers=2)))
    load(state, storage_reader=dcpx.DcpxReader(Path("ckpt"), options=ReadOptions()))
    stager = dcpx.DcpxStager(is_shared=True)
    stager.prewarm(state)
    response = async_save(state, checkpoint_id="ckpt", async_stager=stager)
    if isinstance(response, AsyncSaveResponse):
        response.upload_completion.result()
    save(state, checkpoint_id="ckpt", planner=dcpx.DcpxSavePlanner(on_conflict="error"))
    load(state, checkpoint_id="ckpt", planner=dcpx.DcpxLoadPlanner(allow_partial_load=True))


def one_line_for_any_framework() -> None:
    dcpx.install(durability="full", safe_globals=["pkg.module.Config", OrderedDict])
    with dcpx.use(stager=False, write_options=WriteOptions(workers=2), trusted=True):
        save({"a": 1}, checkpoint_id="ckpt")
    dcpx.uninstall()


def saves() -> None:
    state = {"model": MODEL, "loss": torch.ones(1)}
    dcpx.prewarm(state, options=WriteOptions(host_memory_bytes=1 << 30))
    report: dcpx.SaveReport = dcpx.save(state, "ckpt").result()
    print(report.checkpoint_id, report.summary(), report.total_s)
    tensors: dict[str, torch.Tensor] = MODEL.state_dict()
    with dcpx.async_save(tensors, b"ckpt", options=WriteOptions(overlap=True)) as handle:
        guard: dcpx.CopyGuard = handle.guard
        guard.wait()
        dcpx.guard_optimizer(OPTIMIZER)
        handle.staged.result()
    handle.add_done_callback(done)
    handle.add_done_callback(lambda ended: print(ended.result().ranks))
    error: BaseException | None = handle.exception(1)
    seconds: float = handle.result(timeout=1.5).total_s
    is_done: bool = handle.done() and handle.cancel()
    if handle.report() is None:
        print("skipped", error, seconds, is_done)
    dcpx.save(OrderedDict(MODEL.state_dict()), Path("ckpt"), process_group=dist.group.WORLD)
    dcpx.save({"a": 1}, storage_writer=dcpx.DcpxWriter("ckpt"), planner=dcpx.DcpxSavePlanner())
    dcpx.wait(10)
    dcpx.close()
    dcpx.drain_on_sigterm()


def done(ended: SaveHandle) -> None:
    print(ended.checkpoint_id, ended.exception())


async def waits(handle: SaveHandle) -> dcpx.SaveReport:
    reports: tuple[dcpx.SaveReport, dcpx.SaveReport] = await asyncio.gather(handle, handle)
    print(len(reports))
    first: dcpx.SaveReport = await asyncio.wait_for(handle, 10)
    print(first.files)
    return await handle


def loads() -> None:
    state: dict[str, Any] = {"model": MODEL, "head": torch.ones(1)}
    rules = KeyMap(
        (r"old\.(.*)", r"new.\1"),
        dcpx.Split("qkv", ("q", "k", "v")),
        dcpx.Merge(["a", "b"], "ab", dim=1),
        dcpx.Transpose("w"),
        {"x": "y"},
        lambda name: name.removeprefix("module."),
        wrappers=True,
    )
    report: dcpx.LoadReport = dcpx.load(
        state, "ckpt", strict=False, allow_missing=["head.*"], cast="allow", key_map=rules
    )
    print(report.missing, report.is_whole, rules.dry_run("ckpt"))
    tensors: dict[str, torch.Tensor] = {"w": torch.ones(1)}
    dcpx.load(tensors, storage_reader=dcpx.DcpxReader("ckpt"), planner=dcpx.DcpxLoadPlanner())
    loaded: dcpx.LoadReport = dcpx.load_pretrained(MODEL, "ckpt", device="cpu", strict=False)
    print(loaded.total_s)


def looks() -> None:
    every: dict[str, torch.Tensor] = dcpx.load_tensors("ckpt")
    some = dcpx.load_tensors(Path("ckpt"), ["model.*"], device=torch.device("cpu"), rank=0)
    print(some["model.w"].shape, every.keys(), dcpx.load_tensors("ckpt", "model.w"))
    with dcpx.open_checkpoint("ckpt", ReadOptions(safe_globals=(Path,))) as ckpt:
        opened: dcpx.OpenCheckpoint = ckpt
        as_mapping: Mapping[str, dcpx.LazyTensor] = ckpt
        lazy: dcpx.LazyTensor = opened["model.w"]
        shape: torch.Size = lazy.shape
        dtype: torch.dtype = lazy.dtype
        rows: torch.Tensor = lazy[3:7, ..., 0]
        last: torch.Tensor = as_mapping["model.w"][np.int64(-1)]
        step: int = ckpt.objects["step"]
        found = ckpt.get("model.b")
        if found is not None:
            print(found[...].sum(), len(ckpt), "model.b" in ckpt, list(ckpt), shape, dtype)
        for name, tensor in ckpt.items():
            print(name, tensor.nbytes, tensor.ndim, len(tensor), rows, last, step)
        print(ckpt.select("model.*"), ckpt.load_tensors(["model.w"]), ckpt.path)
    report: dcpx.DiffReport = dcpx.diff("ckpt", Path("other"), "model.*", rtol=1e-5)
    numbers: dcpx.StatsReport = dcpx.stats("ckpt", ["model.*"])
    print(report, report.is_equal, report.differences[0].max_abs, numbers.tensors[0].nan)
    beyond: list[int | None] = [one.beyond for one in report]
    print(len(report), beyond, [one.norm for one in numbers])


def listens() -> None:
    remove = dcpx.on_event(heard)
    remove()
    dcpx.on_event(lambda event: print(event.call, event.path, event.began_ns, event.ended_ns))


def heard(event: dcpx.Event) -> None:
    if isinstance(event, dcpx.SaveEnded):
        blocked_s: float | None = event.report.blocked_s if event.report else None
        nbytes: int = event.write.file_bytes if event.write else 0
        print(blocked_s, nbytes, event.staged_bytes, event.seconds)
    elif isinstance(event, dcpx.LoadEnded):
        print(event.report and event.report.nbytes, event.read and event.read.read_bytes)
    elif isinstance(event, (dcpx.SaveFailed, dcpx.LoadFailed)):
        error: BaseException = event.error
        print(error)


def trains() -> None:
    with CheckpointManager(
        Path("run"),
        keep_last=3,
        keep_every=100,
        keep_best=("loss", "min", 2),
        save_every=20,
        save_every_s=600,
        options=WriteOptions(save_timeout_s=600),
        read_options=ReadOptions(load_timeout_s=600),
    ) as manager:
        start: dcpx.ResumeInfo = manager.resume(
            model=MODEL,
            optimizer={"adam": OPTIMIZER},
            lr_scheduler=[SCHEDULER],
            state={"scale": torch.ones(1), "seed": PerRank(1)},
            tag="best",
            allow_missing=["model.head.*"],
            merge={"dataloader": merged},
            translate=KeyMap({"a": "b"}),
        )
        watch: dcpx.Preemption = manager.save_on_signal([signal.SIGTERM], time_left_s=30)
        print(start.tag, start.metrics.get("loss"), start.is_fresh, start.skipped)
        for over in start.passed_over:
            print(over.tag, over.file, over.reason)
        for step in range((start.step or 0) + 1, 100):
            if manager.should_save(step) or watch.requested(step):
                metrics = {"loss": 0.5}
                handle: SaveHandle = manager.save(
                    step, model=MODEL, optimizer=OPTIMIZER, metrics=metrics
                )
                print(handle.result().summary())
        count = torch.tensor(7)
        if manager.should_save(count):
            manager.save(count, model=MODEL, metrics={"loss": torch.ones(())})
        manager.save("best", model=MODEL, step=np.int64(7), metrics={"loss": np.float32(1)})
        manager.save(8, state={"x": 1}, user_content={"rng": PerRank(1)}, lr_scheduler=SCHEDULER)
        newest: str | None = manager.latest()
        tags: list[str] = manager.tags()
        print(newest, tags, manager.root, repr(manager))
        manager.pin("best")
        manager.unpin(np.int64(7))
        manager.delete(7)
        manager.wait(5)
        print(manager.dry_run(lambda name: name).dropped)
        exported: dcpx.ExportReport = manager.export(MODEL, "out", dtype=torch.bfloat16)
        print(exported.files, manager.export("best", Path("out"), keys=["model.*"]))
        manager.close()


def merged(values_by_rank: list[Any], rank: int, world_size: int) -> Any:
    return values_by_rank[rank % len(values_by_rank)]


def keeps() -> None:
    report: dcpx.ExportReport = dcpx.export(
        MODEL, "y.pt", format="torch", max_shard_bytes="2GB", metadata={"who": "me"}
    )
    print(report.nbytes, dcpx.export("ckpt", Path("out"), key_map=KeyMap(), dtype=torch.float16))
    checked: dcpx.VerifyReport = dcpx.verify("ckpt", workers=2)
    listing: dcpx.Listing = dcpx.ls("ckpts", with_all=True)
    newest: dcpx.ListedCheckpoint | None = listing.newest
    steps: list[int | None] = [one.step for one in listing]
    print(newest is not None and newest.age_s, steps, len(listing))
    held: dcpx.Inspection = dcpx.inspect("ckpt", keys=["model.*"])
    print(held.step, held.saved_at, held.state, [one.fqn for one in held])
    print(held, held.parameters, held.items[0].parts[0].nbytes)
    findings: list[dcpx.Finding] = list(checked.findings)
    for finding in findings:
        print(finding.file, finding.message, checked.ok)
    mended: dcpx.RepairReport = dcpx.repair("ckpt", dry_run=True)
    print(mended)


def fails() -> None:
    try:
        saves()
    except (dcpx.OptionError, dcpx.UnsupportedError, dcpx.PlanError) as error:
        print(error.message)
    except dcpx.MismatchError as error:
        print(error.missing)
    except dcpx.UnknownNameError as error:
        print(error.nearest)
    except dcpx.UnsafePickleError as error:
        print(error.global_name)
    except dcpx.CorruptionError as error:
        print(error.fqn, error.path, error.offset, error.touched)
    except dcpx.ConcurrentSaveError as error:
        print(error.owner)
    except (dcpx.NotCommittedError, dcpx.ShortReadError) as error:
        print(error.path, error.errno)
    except dcpx.StorageError as error:
        print(error.nbytes)
    except dcpx.RankLostError as error:
        print(error.ranks, error.phases)
    except dcpx.StoreLostError as error:
        print(error.waited_s)
    except dcpx.RankError as error:
        print(error.rank, error.original)
    except (dcpx.StagingError, dcpx.OutcomeUnknownError) as error:
        print(error)
    except dcpx.RepairError as error:
        print(error.candidates, error.is_good)
    except dcpx.DcpxError as error:
        print(error.message)
