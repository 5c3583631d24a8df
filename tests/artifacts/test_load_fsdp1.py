"""Loads on two ranks into FSDP1, whose `state_dict()` gives copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as st
import torch
import torch.distributed as dist
from support.copying import assert_holds, cloning, plain
from support.rank_fixture import StartRanks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp
from torch.distributed.fsdp import ShardingStrategy, StateDictType
from torch.nn.parallel import DistributedDataParallel

import torch_dcpx as dcpx

CPU = torch.device("cpu")
KINDS = (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT)


def fsdp(seed: int, kind: StateDictType, **given: Any) -> nn.Module:
    inner = plain(seed)
    inner[2] = Fsdp(inner[2], device_id=CPU, **given)  # nested units, as users have
    model = Fsdp(inner, device_id=CPU, **given)
    Fsdp.set_state_dict_type(model, kind)
    return model


def assert_fsdp_holds(model: nn.Module, source: nn.Module) -> None:
    with Fsdp.summon_full_params(model):
        assert_holds(model, source)


def every_kind_of_state_is_loaded(path: Path, source: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (2,))
    strategies = (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD)
    for kind in KINDS:
        for use_orig_params in (True, False):
            for given in ({}, {"device_mesh": mesh}, {"sharding_strategy": strategies[1]}):
                if given.get("sharding_strategy") and kind == KINDS[1]:
                    continue  # which FSDP1 itself does not do
                model = fsdp(1, kind, use_orig_params=use_orig_params, **given)
                report = dcpx.load_pretrained(model, path / "model.safetensors")
                assert report.is_whole
                assert_fsdp_holds(model, source)
                model(torch.randn(4, 5)).sum().backward()


def flat_parameters_are_memory_and_are_filled(path: Path) -> None:
    local = StateDictType.LOCAL_STATE_DICT
    old, new = (fsdp(seed, local, use_orig_params=False) for seed in (7, 1))
    dcpx.save(old.state_dict(), path / "local")
    new.load_state_dict = lambda *_, **__: pytest.fail("handed over")  # type: ignore[assignment]
    dcpx.load_pretrained(new, path / "local")
    for mine, its in zip(new.parameters(), old.parameters(), strict=True):
        assert torch.equal(mine, its)


def other_wrappers_are_filled(path: Path, source: nn.Module) -> None:
    for inner, wrap in (
        (plain(1), DistributedDataParallel),
        (plain(1), torch.compile),
        (DistributedDataParallel(plain(1)), torch.compile),
        (cloning(plain(1)), torch.compile),
    ):
        dcpx.load_pretrained(wrap(inner), path / "model.safetensors")  # type: ignore[operator]
        assert_holds(inner, source)
    inner = fsdp(1, KINDS[0])
    dcpx.load_pretrained(torch.compile(inner), path / "model.safetensors")  # type: ignore[arg-type]
    assert_fsdp_holds(inner, source)


def error_of_one_rank_is_raised_on_all(path: Path, source: nn.Module) -> None:
    rank = dist.get_rank()
    for kind in KINDS:
        model = fsdp(1, kind)
        paths = [path / "model.safetensors", path / "absent.safetensors"]
        with pytest.raises((dcpx.StorageError, dcpx.PlanError), match="absent"):
            dcpx.load_pretrained(model, paths[rank])
        with pytest.raises(dcpx.OptionError, match="cast"):
            dcpx.load_pretrained(model, path, cast=("error", "maybe")[rank])  # type: ignore[arg-type]
        dcpx.load_pretrained(model, paths[0])
        assert_fsdp_holds(model, source)
    mixed = cloning(plain(1)) if rank else plain(1)  # on rank 1 alone something is handed over
    dcpx.load_pretrained(mixed, paths[0])
    assert_holds(mixed, source)
    if rank:
        mixed.load_state_dict = lambda *_, **__: None  # type: ignore[assignment]
        mixed.get_parameter("0.weight").data.zero_()
    with pytest.raises(dcpx.UnsupportedError, match=r"gives copies.*'0\.weight'"):
        dcpx.load_pretrained(mixed, paths[0])


def load_and_manager_hand_copies_over(path: Path, source: nn.Module) -> None:
    for number, kind in enumerate(KINDS):
        old, new = fsdp(7, kind), fsdp(1, kind)
        dcpx.save({"model": old}, path / f"load{number}")
        dcpx.load({"model": new}, path / f"load{number}")
        assert_fsdp_holds(new, source)
        new = fsdp(1, kind)
        with dcpx.CheckpointManager(path / f"root{number}") as manager:
            manager.save(1, model=old)
            manager.wait()
            manager.resume(model=new)
        assert_fsdp_holds(new, source)


def load_by_every_kind(path: Path) -> None:
    source = plain(7)
    if dist.get_rank() == 0:
        st.save_file(source.state_dict(), path / "model.safetensors")
    dist.barrier()
    every_kind_of_state_is_loaded(path, source)
    flat_parameters_are_memory_and_are_filled(path)
    other_wrappers_are_filled(path, source)
    error_of_one_rank_is_raised_on_all(path, source)
    load_and_manager_hand_copies_over(path, source)


@pytest.mark.slow  # 40 s
@pytest.mark.multirank
def test_two_ranks_load_into_fsdp1_by_every_kind_of_its_state(
    tmp_path: Path, ranks: StartRanks
) -> None:
    ranks(2)(load_by_every_kind, tmp_path)
