"""load_pretrained: safetensors and checkpoints into models on meta, bit for bit."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path

import pytest
import safetensors.torch as st
import torch
import torch.distributed as dist
from support.rank_fixture import StartRanks
from support.states import assert_same
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import torch_dcpx as dcpx
from torch_dcpx import KeyMap, Split, Transpose


class Net(nn.Module):
    """Tied weights, a buffer, and dtypes of all widths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8).bfloat16())
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight


def net() -> Net:
    torch.manual_seed(3)
    return Net()


def meta_net() -> Net:
    with torch.device("meta"):
        return Net()


def save_two_files(state: dict[str, torch.Tensor], path: Path) -> None:
    names = sorted(state)
    halves = {"a-1.safetensors": names[::2], "b-2.safetensors": names[1::2]}
    for file, own in halves.items():
        st.save_file({name: state[name].contiguous() for name in own}, path / file)
    weight_map = {name: file for file, own in halves.items() for name in own}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def untied(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t for name, t in model.state_dict().items() if name != "head.weight"}


@pytest.mark.parametrize("kind", ["single", "file", "index", "parts", "model"])
def test_model_on_meta_gets_the_stored_bits_from_every_kind_of_path(
    tmp_path: Path, kind: str
) -> None:
    source, model, path = net(), meta_net(), tmp_path
    if kind in ("single", "file"):
        path = tmp_path / "model.safetensors"
        st.save_file(untied(source), path)
        path = tmp_path if kind == "single" else path
    elif kind == "index":
        save_two_files(untied(source), tmp_path)
    else:
        state = source.state_dict()
        dcpx.save(
            {"model": state, "optim": {"x": torch.ones(3)}} if kind == "parts" else state, path
        )
    report = dcpx.load_pretrained(model, path)
    assert report.is_whole
    assert_same(dict(model.state_dict()), dict(source.state_dict()))
    assert model.head.weight is model.embed.weight
    assert all(p.requires_grad for p in model.parameters())


def test_every_dtype_of_the_format_is_loaded(tmp_path: Path) -> None:
    from torch_dcpx._compat import dtype_by_name
    from torch_dcpx.reader.safetensors_header import DTYPE_CODES

    dtypes = [d for name in DTYPE_CODES if (d := dtype_by_name(name)) in st._SIZE]
    raw = torch.arange(64, dtype=torch.uint8)
    state = {str(d): raw.clone().view(d) if d != torch.bool else raw > 30 for d in dtypes}
    state |= {"scalar": torch.tensor(1.5), "empty": torch.zeros(0, 4), "odd": raw[:7].clone()}
    st.save_file(state, tmp_path / "x.safetensors")
    model = nn.Module()
    for name, tensor in state.items():
        model.register_buffer(name.replace(".", "_"), torch.empty_like(tensor, device="meta"))
    names = KeyMap({name: name.replace(".", "_") for name in state})
    dcpx.load_pretrained(model, tmp_path, key_map=names)
    assert len(dtypes) >= 15
    for name, stored in state.items():
        tensor = stored
        own = model.get_buffer(name.replace(".", "_"))
        assert own.dtype == tensor.dtype
        assert torch.equal(
            own.view(torch.uint8) if own.dim() else own,
            tensor.view(torch.uint8) if own.dim() else tensor,
        )


def test_key_map_splits_and_transposes_what_others_have_named(tmp_path: Path) -> None:
    qkv, w = torch.randn(6, 4), torch.randn(3, 5)
    st.save_file({"h.qkv": qkv, "h.w": w}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = nn.ModuleDict({n: nn.Linear(4, 2, bias=False) for n in "qkv"})
        model["w"] = nn.Linear(3, 5, bias=False)
    rules = KeyMap(
        Split(r"h\.qkv", ("q", "k", "v")), Transpose(r"h\.w"), (r"^h\.", ""),
        lambda name: f"{name}.weight",
    )  # fmt: skip
    dcpx.load_pretrained(model, tmp_path, key_map=rules)
    assert torch.equal(torch.cat([model[n].weight for n in "qkv"]), qkv)
    assert torch.equal(model["w"].weight, w.T)


def test_what_is_missing_is_refused_or_stays_on_meta(tmp_path: Path) -> None:
    state = untied(net())
    del state["body.0.weight"]
    st.save_file(state, tmp_path / "model.safetensors")
    model = meta_net()
    with pytest.raises(dcpx.MismatchError, match=r"body\.0\.weight"):
        dcpx.load_pretrained(model, tmp_path)
    assert all(p.is_meta for p in model.parameters())
    report = dcpx.load_pretrained(model, tmp_path, strict=False)
    assert report.missing == ("body.0.weight",)
    assert model.body[0].weight.is_meta and not model.body[0].bias.is_meta
    assert model.head.weight is model.embed.weight


def test_memory_that_is_there_is_filled_in_place_and_dtypes_are_cast_on_demand(
    tmp_path: Path,
) -> None:
    source, model = net(), copy.deepcopy(net()).double()
    st.save_file(untied(source), tmp_path / "model.safetensors")
    before = {name: t.data_ptr() for name, t in model.state_dict().items()}
    with pytest.raises(dcpx.MismatchError, match="float64"):
        dcpx.load_pretrained(model, tmp_path)
    report = dcpx.load_pretrained(model, tmp_path, cast="allow")
    assert report.casts
    assert {name: t.data_ptr() for name, t in model.state_dict().items()} == before
    assert torch.equal(model.embed.weight, source.embed.weight.double())


def test_links_fifos_and_directories_without_weights_are_refused(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    st.save_file(untied(net()), real / "model.safetensors")
    (tmp_path / "link").mkdir()
    (tmp_path / "link/model.safetensors").symlink_to(real / "model.safetensors")
    with pytest.raises(dcpx.UnsupportedError, match="is a link, which is not followed: name"):
        dcpx.load_pretrained(meta_net(), tmp_path / "link")
    (tmp_path / "fifo").mkdir()
    os.mkfifo(tmp_path / "fifo/model.safetensors")
    with pytest.raises(dcpx.CorruptionError):
        dcpx.load_pretrained(meta_net(), tmp_path / "fifo")
    (tmp_path / "none").mkdir()
    for path in (tmp_path / "none", tmp_path / "absent", tmp_path / "absent.safetensors"):
        with pytest.raises(dcpx.StorageError):
            dcpx.load_pretrained(meta_net(), path)


# ---- Shards --------------------------------------------------------------------------------------


def model_of() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(33, 65), nn.LayerNorm(65), nn.Linear(65, 7))


def sharded_on_meta() -> nn.Module:
    with torch.device("meta"):
        model = model_of()
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def assert_equals(model: nn.Module, source: nn.Module) -> None:
    expected = source.state_dict()
    for name, tensor in model.state_dict().items():
        assert isinstance(tensor, DTensor)
        assert torch.equal(tensor.full_tensor(), expected[name]), name


def load_own_shards(path: Path) -> None:
    rank = dist.get_rank()
    source = model_of()
    if rank == 0:
        st.save_file(source.state_dict(), path / "model.safetensors")
        st.save_file(
            {
                f"x.{n}": t.T.contiguous() if t.dim() == 2 else t
                for n, t in source.state_dict().items()
            },
            path / "turned.safetensors",
        )
    dist.barrier()
    model = sharded_on_meta()
    report = dcpx.load_pretrained(model, path / "model.safetensors")
    assert_equals(model, source)
    own = sum(t.to_local().numel() * 4 for t in model.state_dict().values())
    whole = sum(t.numel() * 4 for t in source.state_dict().values())
    assert report.nbytes == own < whole, (report.nbytes, own)  # byte ranges of its own shards
    turned = sharded_on_meta()
    rules = dcpx.KeyMap((r"^x\.", ""), dcpx.Transpose(r"\d\.weight"), wrappers=True)
    with pytest.raises(dcpx.PlanError, match=r"'x\.1\.weight' has 1 dimensions"):
        dcpx.load_pretrained(turned, path / "turned.safetensors", key_map=rules)
    assert all(p.is_meta for p in turned.parameters())
    rules = dcpx.KeyMap((r"^x\.", ""), dcpx.Transpose(r"[02]\.weight"))
    report = dcpx.load_pretrained(turned, path / "turned.safetensors", key_map=rules)
    assert report.nbytes == own
    assert_equals(turned, source)
    model(torch.randn(4, 33)).sum().backward()  # the memory is the model's own
    with pytest.raises(dcpx.StorageError, match=f"absent{rank}"):
        dcpx.load_pretrained(sharded_on_meta(), path / f"absent{rank}.safetensors")


@pytest.mark.slow  # 8 s
@pytest.mark.multirank
def test_two_ranks_fill_their_own_shards_of_an_fsdp_model(
    tmp_path: Path, ranks: StartRanks
) -> None:
    ranks(2)(load_own_shards, tmp_path)
