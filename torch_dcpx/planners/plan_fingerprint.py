"""What decides on a save plan, and nothing else: equal fingerprints, equal plans.

C++ reads the attributes of a state's tensors, without torch's dispatcher. What is rare is described
here. A value that says itself how it is planned (ShardedTensor, tensors of other classes, objects
with `__create_write_items__`) makes a state that has no fingerprint: it is planned each time.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from torch_dcpx._compat import HAS_STRIDES
from torch_dcpx._native import _C
from torch_dcpx.tensors.own_chunks import HOOKS

_PLACEMENTS = Placement.__module__
_LEAF, _MAPPING, _LIST, _TENSOR, _SHARDED = range(5)


def _kind_of(value: Any) -> int:
    """Returns how torch's `traverse_state_dict` takes a value."""
    if isinstance(value, Mapping):
        return _MAPPING
    if isinstance(value, list):
        return _LIST
    if isinstance(value, ShardedTensor):
        return _SHARDED
    return _TENSOR if isinstance(value, torch.Tensor) else _LEAF


def _describe_mesh(mesh: Any) -> bytes:
    """Returns what a mesh is, for this rank."""
    told = (mesh.device_type, mesh.mesh_dim_names, mesh.get_coordinate(), mesh.mesh.tolist())
    return repr(told).encode(errors="surrogatepass")


def _describe_placement(placement: Placement) -> bytes | None:
    """Returns a placement of torch's that is neither Shard nor Replicate: its fields differ by
    version, and a pickle has them all.
    """
    return pickle.dumps(placement) if type(placement).__module__ == _PLACEMENTS else None


def _describe_value(value: Any) -> bytes | None:
    """Returns that a value is planned as bytes, whatever it is; None for what plans itself."""
    is_planned_here = not isinstance(value, torch.Tensor) and not hasattr(
        value, "__create_write_items__"
    )
    return b"" if is_planned_here else None


STATE_READER = _C.StateReader(
    {
        "Tensor": torch.Tensor,
        "Parameter": torch.nn.Parameter,
        "DTensor": DTensor,
        "Shard": Shard,
        "Replicate": Replicate,
        "kind_of": _kind_of,
        "describe_mesh": _describe_mesh,
        "describe_placement": _describe_placement,
        "describe_value": _describe_value,
        "hooks": tuple(HOOKS),
        "has_strides": HAS_STRIDES,
    }
)


def flattened(
    state: Any, *, is_flat: bool, has_flat_shards: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a state as `DefaultSavePlanner.set_up_planner` keeps it, and the path of each name.

    Args:
        state: nested or not.
        is_flat: the planner's `flatten_state_dict`.
        has_flat_shards: the planner's `flatten_sharded_tensors`.

    Raises:
        ValueError: two values have one name (torch's text).

    Source: torch.distributed.checkpoint._nested_dict.flatten_state_dict, and its caller.
    """
    paths: dict[str, Any] = {}
    has_sharded = True
    if is_flat:
        # Whatever names another thread's load of an old checkpoint makes torch give meanwhile.
        state, paths, has_sharded, _ = STATE_READER.flatten(state)
    if has_flat_shards and has_sharded:
        state = _flatten_sharded_tensors(state)
    return state, paths


def fingerprint_of(
    state: dict[str, Any], paths: dict[str, Any] | None, about: tuple[Any, ...]
) -> bytes | None:
    """Returns 32 bytes that stand for what a plan is made of; None for a state that has none.

    Args:
        state: the planner's, by names.
        paths: of all names; None: the planner tells none.
        about: what decides besides the state, by its repr.
    """
    if type(state) is not dict:
        return None
    try:
        said = STATE_READER.fingerprint(state, paths)
    except Exception:  # noqa: BLE001  (a tensor without sizes: planning says what is wrong with it)
        return None
    if said is None:
        return None
    header = repr((*about, torch.is_grad_enabled())).encode(errors="surrogatepass")
    whole = hashlib.blake2b(len(header).to_bytes(8, "little") + header, digest_size=32)
    whole.update(said)
    return whole.digest()
