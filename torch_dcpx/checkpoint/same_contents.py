"""Whether ranks hold equal tensors under one name: compared while they plan a save.

1. Each rank sends a digest of each tensor that nothing calls a copy, beside its plan.
2. The coordinator tells which differ. Of each name it gives the ranks factors that add up to 0. So
   the sum of all ranks' digests by their factors is 0 as long as they hold the same.
3. With a plan that is kept, a rank sends that sum alone, 8 bytes. If all do not add up to 0, the
   ranks plan anew, by digests. Of many tensors each save looks at a part, in turn. Of a state with
   tensors on a device ranks send no sum: it would wait for all that the device has to do.

What calls tensors copies: a mesh of all ranks, and DistributedDataParallel of all ranks, of the
parameters whose gradients it averages. Which buffers a rank has it decides, too: rank 0's.
"""

from __future__ import annotations

import array
import itertools
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.nn.parallel import DistributedDataParallel

from torch_dcpx.tensors import device as device_memory
from torch_dcpx.tensors.contents import content_sums
from torch_dcpx.tensors.memory import is_plain_dtensor, is_plain_tensor

_MOST_A_SAVE = 2048  # tensors: of more, saves by a kept plan look at a part in turn


class Told(NamedTuple):
    """A rank says this of the tensors of its plan."""

    sums: bytes = b""  # 8 bytes a digest; b"": there is nothing to compare
    places: bytes = b""  # of their items in the plan, int64, deflated; b"": of all items
    is_steady: bool = False  # whether it can tell a sum with each save
    settled: tuple[str, ...] = ()  # names of buffers, of which the lowest rank's count


class Kept:
    """A rank compares these tensors in later saves, by the plan that is kept."""

    def __init__(self, factors: Mapping[str, int], turns: int) -> None:
        self._turns: list[tuple[list[str], list[int]]] = [([], []) for _ in range(turns)]
        self._next = 0
        for name, factor in factors.items():
            # By the name alone: the same on all ranks.
            names, own = self._turns[zlib.crc32(name.encode(errors="surrogatepass")) % turns]
            names.append(name)
            own.append(factor)

    def total(self, state: Mapping[str, Any]) -> bytes:
        """Returns 8 bytes: the next digests of a state by their factors, added modulo 2**64."""
        names, factors = self._turns[self._next]
        self._next = (self._next + 1) % len(self._turns)
        sums = content_sums(names, [_local(state[name]) for name in names])
        total = (_numbers(sums) * torch.tensor(factors, dtype=torch.int64)).sum()
        return int(total).to_bytes(8, "little", signed=True)


class Compared(NamedTuple):
    """The coordinator found this, and tells all ranks."""

    differing: dict[str, list[int]]  # the first rank of each of the contents of a name
    settled: frozenset[str]
    factors: list[bytes]  # of each rank's digests, deflated; empty: nothing is kept
    turns: int = 1  # saves in which all are looked at


class Contents:
    """The tensors of one rank's plan. `given` is the state before its objects gave theirs."""

    def __init__(self, ranks: int, given: Mapping[str, Any]) -> None:
        self._ranks, self._given = ranks, given
        self._names: list[str] = []  # of the digests that were told

    def tell(self, plan: SavePlan, state: Mapping[str, Any]) -> Told:
        """Returns what this rank says of its plan. Raises: as `content_sums`."""
        if self._ranks == 1:
            return Told()
        copied, settled = _synchronised(self._given)
        places, names, tensors, lowest = [], [], [], []
        get, bytes_item = state.get, WriteItemType.BYTE_IO
        for place, item in enumerate(plan.items):
            if item.type is bytes_item:
                continue
            fqn = item.index.fqn
            tensor = self._compared(get(fqn))
            if tensor is None:
                continue
            address = tensor.data_ptr() if copied or settled else 0
            if address in settled:
                lowest.append(fqn)
            elif not address or address not in copied:
                places.append(place)
                names.append(fqn)
                tensors.append(tensor)
        sums = _numbers(content_sums(names, tensors))
        has_sum = (sums != 0).tolist()
        self._names = list(itertools.compress(names, has_sum))
        places = list(itertools.compress(places, has_sum))
        return Told(
            bytes(array.array("q", sums[sums != 0].tolist())),
            b"" if len(places) == len(plan.items) else _deflated(places),
            all(map(device_memory.is_host, tensors)),
            tuple(lowest),
        )

    def _compared(self, value: Any) -> torch.Tensor | None:
        """Returns this rank's part of a value that nothing calls a copy; None: there is none."""
        if is_plain_tensor(value):
            return value  # type: ignore[no-any-return]
        if not is_plain_dtensor(value) or value.device_mesh.size() >= self._ranks:
            return None
        # Terms of a sum differ by intent.
        is_sum = any(place.is_partial() for place in value.placements)
        return None if is_sum else _local(value)

    def kept(self, factors: bytes, turns: int) -> Kept | None:
        """Returns what later saves compare, of the coordinator's answer; None: nothing."""
        if not factors:
            return None
        numbers = _numbers(zlib.decompress(factors)).tolist()
        return Kept({n: own for n, own in zip(self._names, numbers, strict=True) if own}, turns)


def compare(told: Sequence[Told], plans: Sequence[SavePlan]) -> Compared:
    """Compares the digests of all ranks' plans, on the coordinator."""
    settled = frozenset(name for own in told for name in own.settled)
    is_steady = all(own.is_steady or not own.sums for own in told) and any(o.sums for o in told)
    if len({own.sums for own in told}) == 1:  # nearly always; digests are of names, too
        if not is_steady:
            return Compared({}, settled, [])
        count = len(told[0].sums) // 8
        by_rank = [*[1] * (len(told) - 1), 1 - len(told)]
        return _with_turns({}, settled, [[own] * count for own in by_rank])
    found: dict[Any, dict[bytes, int]] = {}  # by chunk: the first rank of each contents
    chunks = [list(_chunks(own, plan)) for own, plan in zip(told, plans, strict=True)]
    for rank, each in enumerate(chunks):
        for chunk, digest in each:
            found.setdefault(chunk, {}).setdefault(digest, rank)
    differing: dict[str, list[int]] = {}
    for chunk, own in found.items():
        if len(own) > 1:
            differing.setdefault(chunk[0], sorted(own.values()))
    holders = Counter(chunk for each in chunks for chunk, _ in each)
    left = holders.copy()
    factors: list[list[int]] = []
    for each in chunks if is_steady else ():
        its = []
        for chunk, _ in each:
            left[chunk] -= 1
            last = 1 - holders[chunk]  # 0 of what one rank alone has
            its.append(0 if chunk[0] in differing else 1 if left[chunk] else last)
        factors.append(its)
    return _with_turns(differing, settled, factors)


def _with_turns(
    differing: dict[str, list[int]], settled: frozenset[str], factors: list[list[int]]
) -> Compared:
    turns = max((-(-len(own) // _MOST_A_SAVE) for own in factors), default=1)
    return Compared(differing, settled, list(map(_deflated, factors)), max(turns, 1))


def add_up(totals: Sequence[bytes]) -> bool:
    """Returns whether the totals of all ranks say that they hold the same."""
    return sum(int.from_bytes(total, "little") for total in totals) % (1 << 64) == 0


def _chunks(told: Told, plan: SavePlan) -> Iterator[tuple[Any, bytes]]:
    """Yields ((fqn, offset), digest) of the items that have one."""
    count = len(told.sums) // 8
    places = _numbers(zlib.decompress(told.places)).tolist() if told.places else range(count)
    for number, place in enumerate(places):
        index = plan.items[place].index
        offset = index.offset if index.offset is not None and any(index.offset) else None
        yield (index.fqn, offset), told.sums[8 * number : 8 * number + 8]


def _numbers(sums: bytes | bytearray) -> torch.Tensor:
    if not sums:
        return torch.empty(0, dtype=torch.int64)
    return torch.frombuffer(bytearray(sums), dtype=torch.int64)


def _deflated(numbers: list[int]) -> bytes:
    return zlib.compress(array.array("q", numbers).tobytes(), 1)


def _local(value: Any) -> torch.Tensor:
    return value._local_tensor if is_plain_dtensor(value) else value  # type: ignore[no-any-return]


def _synchronised(given: Mapping[str, Any]) -> tuple[set[int], set[int]]:
    """Returns the addresses of parameters that modules hold equal on all ranks, and of buffers of
    which rank 0's count: those of modules in the state, and of attributes of its objects.
    """
    parameters: set[int] = set()
    buffers: set[int] = set()
    for one in _modules(given):
        if not isinstance(one, DistributedDataParallel):
            continue
        if dist.get_world_size(one.process_group) < dist.get_world_size():
            continue
        ignored = one.parameters_to_ignore
        # With a hook gradients are what it makes of them.
        if not getattr(one, "_comm_hooks", ()):
            named = one.module.named_parameters()
            own = (p for name, p in named if p.requires_grad and name not in ignored)
            parameters.update(p.data_ptr() for p in own)
        if one.broadcast_buffers:
            named = one.module.named_buffers()
            buffers.update(b.data_ptr() for name, b in named if name not in ignored)
    return parameters - {0}, buffers - {0}


def _modules(given: Mapping[str, Any]) -> Iterator[torch.nn.Module]:
    for value in given.values():
        for part in (value, *getattr(value, "__dict__", {}).values()):
            if isinstance(part, torch.nn.Module):
                yield from part.modules()
