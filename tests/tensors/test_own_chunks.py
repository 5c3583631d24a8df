"""Which part of a tensor a rank has: as torch says, by arithmetic of our own."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from torch_dcpx.tensors.memory import is_plain_tensor, plain_part

PLACEMENTS = [Shard(0), Shard(1), Replicate()]


@pytest.mark.parametrize("mesh", [(1,), (4,), (2, 3), (3, 2), (2, 2, 2)])
def test_part_at_every_place_of_a_mesh_is_torchs(mesh: tuple[int, ...]) -> None:
    sizes = range(10) if len(mesh) < 3 else (1, 5, 7)
    for size, placements in itertools.product(
        sizes, itertools.product(PLACEMENTS, repeat=len(mesh))
    ):
        for at in itertools.product(*map(range, mesh)):
            part = plain_part((size, 5), mesh, at, placements)
            assert part is not None
            wanted = _compute_local_shape_and_global_offset((size, 5), mesh, list(at), placements)
            assert (tuple(part.sizes), tuple(part.offsets)) == wanted, (size, placements, at)


def test_other_placements_are_left_to_torch() -> None:
    class Odd(Shard):
        pass

    assert plain_part((4,), (2,), (0,), [Partial()]) is None
    assert plain_part((4,), (2,), (0,), [Odd(0)]) is None
    assert plain_part((4,), (2,), (0,), [Shard(1)]) is None


def test_tensor_that_says_more_of_itself_is_not_plain() -> None:
    tensor = torch.ones(3)
    tensor.note = "of a trainer"  # type: ignore[attr-defined]
    assert is_plain_tensor(tensor) and is_plain_tensor(torch.nn.Parameter(tensor))
    tensor.global_shape = (6,)  # type: ignore[attr-defined]
    assert not is_plain_tensor(tensor)
    assert not is_plain_tensor(3)
