"""What was exported to a store is read again from there: bit for bit, or a typed error."""

from __future__ import annotations

import pytest
import torch
from object_exports import SINGLE, export, exported, tensors_of
from object_outcomes import MIB
from support.object_server import ObjectServer

import torch_dcpx as dcpx
from torch_dcpx import NotCommittedError, ReadOptions, StorageError, WriteOptions


def _model(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(500, 700), torch.nn.Linear(700, 500, bias=False))
    model[1].weight = torch.nn.Parameter(model[0].weight.detach().T.clone())
    return model


@pytest.mark.parametrize("most", ["5GB", "1MB"])
def test_model_comes_back_from_its_artifact(
    object_server: ObjectServer, object_prefix: str, object_endpoint: str, most: str
) -> None:
    """By the endpoint of the options, on both sides."""
    options = WriteOptions(endpoint=object_endpoint, host_memory_bytes=20 * MIB)
    model = _model(1)
    report = export(model, object_prefix, max_shard_bytes=most, options=options)
    assert len(report.files) == (1 if most == "5GB" else 3)
    with torch.device("meta"):
        target = _model(2)
    read = ReadOptions(endpoint=object_endpoint)
    dcpx.load_pretrained(target, object_prefix, no_dist=True, options=read)
    wanted = model.state_dict()
    for name, tensor in target.state_dict().items():
        assert torch.equal(tensor, wanted[name])
    with dcpx.open_checkpoint(object_prefix, read) as opened:
        assert opened.keys() == wanted.keys()
        assert torch.equal(opened["0.weight"][3:9], wanted["0.weight"][3:9])
    found, _ = exported(object_server, object_prefix)
    assert found.keys() == wanted.keys() and torch.equal(found["0.weight"], wanted["0.weight"])


def test_artifact_is_exported_again_from_one_url_to_another(object_prefix: str) -> None:
    new = tensors_of(3, 2 * MIB)
    export(new, f"{object_prefix}/a", "shards")
    export(f"{object_prefix}/a", f"{object_prefix}/b.safetensors", dtype=torch.bfloat16)
    found = dcpx.load_tensors(f"{object_prefix}/b.safetensors")
    assert all(torch.equal(found[name], one.bfloat16()) for name, one in new.items())


def test_artifact_that_is_replaced_while_it_is_open_is_an_error(
    object_server: ObjectServer, object_prefix: str
) -> None:
    for kind in ("single", "shards"):
        url = f"{object_prefix}/{kind}"
        export(tensors_of(1), url, kind)
        with dcpx.open_checkpoint(url) as opened:
            export(tensors_of(2), url, kind)
            with pytest.raises(StorageError):
                opened["a"][...]
    object_server.delete(f"{object_prefix}/single/{SINGLE}")
    with pytest.raises(NotCommittedError):
        dcpx.load_tensors(f"{object_prefix}/single")
