"""`DcpxStager` and tensors of other classes on devices: all of it lands on the host, in order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_cuda.fake import HELD, FakeCuda
from support.device_snapshots import assert_bits
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata

from torch_dcpx import DcpxStager


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(tensors: list[torch.Tensor], device: str) -> ShardedTensor:
    """Returns a ShardedTensor of rows that says to be on `device`, as the fake's tensors cannot."""
    rows, shards = 0, []
    for tensor in tensors:
        metadata = ShardMetadata([rows, 0], list(tensor.shape), "rank:0/cpu")
        shards.append(Shard(tensor, metadata))
        rows += tensor.shape[0]
    spec = EnumerableShardingSpec([shard.metadata for shard in shards])
    made = ShardedTensor.__new__(
        ShardedTensor,
        spec,
        rows,
        tensors[0].shape[1],
        dtype=tensors[0].dtype,
        layout=torch.strided,
        pin_memory=False,
        requires_grad=True,
    )
    for metadata in (*made.metadata().shards_metadata, *spec.shards):
        placement: Any = metadata.placement
        placement._device = torch.device(device)
    made._local_shards = shards
    made._prepare_init()
    made._post_init()
    return made


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("copied by torch")


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("said", ["cuda:0", "cpu"])
def test_shards_on_a_device_are_part_of_the_one_snapshot(
    device: FakeCuda, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    monkeypatch.setattr(ShardedTensor, "cpu", refuse)
    stream = device.current_streams[0] = device.make_stream()
    device.set_pace(HELD)
    wanted = [torch.randn(300, 40), torch.randn(20, 40)]
    tensors = [device.device_tensor(torch.zeros_like(t)) for t in wanted]
    for tensor, data in zip(tensors, wanted, strict=True):
        device.stream_write(tensor, data, stream)
    value = sharded(tensors, said)
    device.clear_counts()
    staged = DcpxStager().stage({"s": value, "w": device.device_tensor(torch.ones(9))})
    assert device.count("cuStreamCreateWithPriority") == 1
    found = staged["s"]
    assert type(found) is ShardedTensor
    assert found.metadata().tensor_properties == value.metadata().tensor_properties
    for shard, source, data in zip(found.local_shards(), value.local_shards(), wanted, strict=True):
        assert_bits(shard.tensor, data)
        assert shard.metadata.shard_offsets == source.metadata.shard_offsets
        assert str(shard.metadata.placement) == "rank:0/cpu"
        assert str(source.metadata.placement) == f"rank:0/{said}"
    assert [str(one.placement) for one in found.metadata().shards_metadata] == ["rank:0/cpu"] * 2


class Tagged(torch.Tensor):
    """A class of a user's own, whose copies torch makes."""


class Box:
    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)


@pytest.fixture
def host_copies(device: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lets torch's `cpu` copy from the fake's devices; notes how many elements."""
    copied: list[int] = []

    def cpu(tensor: torch.Tensor) -> torch.Tensor:
        copied.append(tensor.numel())
        plain = tensor.as_subclass(torch.Tensor)
        return device.read_back(plain).as_subclass(type(tensor))

    def is_host(tensor: torch.Tensor) -> bool:
        return tensor.is_cpu and device.ordinal_of(tensor) < 0

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    monkeypatch.setattr("torch_dcpx.tensors.device.is_host", is_host)
    return copied


def test_tensors_of_other_classes_on_a_device_are_staged_on_the_host(
    device: FakeCuda, host_copies: list[int]
) -> None:
    data = torch.randn(50)
    tagged = device.device_tensor(data).as_subclass(Tagged)
    tagged.__dict__["tag"] = ["a"]
    staged = DcpxStager().stage({"t": tagged})["t"]
    assert type(staged) is Tagged
    assert staged.tag == ["a"]
    assert staged.tag is not tagged.__dict__["tag"]
    assert_bits(staged.as_subclass(torch.Tensor), data)
    assert host_copies == [50]


def test_tensors_in_objects_are_copied_to_the_host_once_and_stay_tied(
    device: FakeCuda, host_copies: list[int]
) -> None:
    data = torch.randn(60)
    weight, plain = device.device_tensor(data), torch.ones(3)
    parameter = torch.nn.Parameter(device.device_tensor(data[:20]))
    state = {"w": weight, "box": Box(own=device.device_tensor(data[:7]), w=weight, p=parameter)}
    state["other"] = Box(plain=plain, nested=[state["box"]])
    staged = DcpxStager().stage(state)
    box = staged["box"]
    assert box.w is staged["w"]
    assert_bits(box.own, data[:7])
    assert_bits(box.p.detach(), data[:20])
    assert staged["other"].nested[0] is box
    assert staged["other"].plain is not plain
    assert host_copies == [7, 20]
