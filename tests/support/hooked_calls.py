"""Cases of DCP's calls through the hook: states, what was replaced, what stock reads at the end."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.states import assert_same, blank_like, mixed_state
from support.worker import rank_case
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torch_dcpx.reports import REPLACED

FLAGS = (False, True)
LEFT: list[tuple[Path, dict[str, Any], dict[str, Any]]] = []  # (path, state, arguments of a load)


def case(body: Callable[[Path], None]) -> Callable[[Path], None]:
    """Registers a case, which gets a directory of its own."""

    @functools.wraps(body)
    def in_its_directory(root: Path) -> None:
        body(root / body.__name__)

    return rank_case()(in_its_directory)


def some(*values: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Returns a fifth of the combinations: each value, with most values of the others."""
    return itertools.islice(itertools.product(*values), 0, None, 5)


def whole_state(seed: int = 0) -> dict[str, Any]:
    """Returns a state with a tensor that the ranks share out, and values that all of them have."""
    state = mixed_state(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(seed)
    full = torch.randn(13, 40, generator=generator)
    return {**state, "sharded": distribute_tensor(full, mesh, [Shard(0)])}


def local(state: Any) -> Any:
    """Returns a state with this rank's part of each DTensor."""
    if isinstance(state, DTensor):
        return state.to_local()
    if isinstance(state, dict):
        return {key: local(value) for key, value in state.items()}
    return [local(value) for value in state] if isinstance(state, list) else state


def blank(state: Any) -> Any:
    """Returns the same structure to load into."""
    if isinstance(state, DTensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    return blank_like(state)


def assert_holds(path: Path, state: dict[str, Any], **arguments: Any) -> None:
    """Asserts that `dcp.load` finds the state."""
    target = blank(state)
    dcp.load(target, checkpoint_id=path, **arguments)
    assert_same(local(state), local(target), str(path))


def leave(path: Path, state: dict[str, Any], **arguments: Any) -> None:
    """Asserts the same, through the hook; at the end stock will be asked."""
    with replaced("reader"):
        assert_holds(path, state, **arguments)
    LEFT.append((path, state, arguments))


@contextlib.contextmanager
def replaced(*roles: str) -> Iterator[None]:
    """Asserts that objects of these roles were made, and were ours."""
    before = REPLACED.copy()
    yield
    more = REPLACED - before
    assert set(roles) <= more.keys(), (roles, more)


def own(root: Path) -> Path:
    """Returns a directory of this rank's own."""
    return root / f"rank{dist.get_rank()}"
