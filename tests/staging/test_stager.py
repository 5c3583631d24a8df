"""DcpxStager and DcpxWriter.stage: the state of one moment, in memory that is used again."""

from __future__ import annotations

import dataclasses
import gc
import io
import os
import pickle
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.machine import seconds
from support.staged import stage_tensors
from support.states import assert_same, blank_like, mixed_state
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import AsyncStager, StagingOptions

from torch_dcpx import DcpxStager, DcpxWriter, OptionError, StagingError, UnsupportedError, load
from torch_dcpx._compat import HAS_STRIDES, dlpack_dtypes
from torch_dcpx.staging.arena import ArenaPool, process_pool

MIB = 1 << 20
Point = namedtuple("Point", ["x", "y"])


@pytest.fixture(autouse=True)
def fresh_pool() -> Iterator[ArenaPool]:
    gc.collect()
    process_pool().close()
    yield process_pool()
    gc.collect()
    process_pool().close()


def test_stager_and_writer_are_async_stagers_of_stock(tmp_path: Path) -> None:
    assert isinstance(DcpxStager(), AsyncStager)
    assert isinstance(DcpxWriter(tmp_path), AsyncStager)
    assert not DcpxStager().should_synchronize_after_execute
    assert pickle.loads(pickle.dumps(DcpxStager(timeout_s=3.0))).timeout_s == 3.0


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("is_async", [True, False])
def test_options_of_torchs_stager_mean_what_they_mean_there(
    tmp_path: Path, is_shared: bool, is_async: bool
) -> None:
    config = StagingOptions(use_shared_memory=is_shared, use_async_staging=is_async)
    state = mixed_state(7)
    for stager in (DcpxStager(config), DcpxStager(config=config)):
        staged: Any = stager.stage(state)
        assert isinstance(staged, Future) is is_async
        staged = staged.result(seconds(60)) if is_async else staged
        assert_same(state, staged)
        assert (staged.arena.fd >= 0) is is_shared
        del staged
    assert DcpxStager(config, overlap=True).overlap
    assert not DcpxStager(config, is_shared=False).is_shared
    saved: Any = dcp.async_save(
        state, storage_writer=DcpxWriter(tmp_path), async_stager=DcpxStager(config), no_dist=True
    )
    (saved.upload_completion if is_async else saved).result(seconds(60))
    target = blank_like(state)
    load(target, tmp_path, no_dist=True)
    assert_same(state, target)


def test_options_of_torchs_stager_that_nobody_knows_are_refused_by_name() -> None:
    @dataclasses.dataclass
    class Newer(StagingOptions):
        use_magic: bool = False

    assert DcpxStager(Newer()).overlap
    with pytest.raises(UnsupportedError, match="use_magic=True"):
        DcpxStager(Newer(use_magic=True))
    wrong: Any
    for wrong in (True, {"use_shared_memory": True}, StagingOptions):
        with pytest.raises(OptionError, match="config must be a StagingOptions"):
            DcpxStager(wrong)
    wrong = "no"
    with pytest.raises(OptionError, match="use_async_staging must be True or False, not 'no'"):
        DcpxStager(StagingOptions(use_async_staging=wrong))


# ---- What comes out -----------------------------------------------------------------------------


def test_stage_returns_plain_tensors_of_exact_storages_with_their_strides() -> None:
    state = mixed_state(3)
    state["parameter"] = torch.nn.Parameter(torch.randn(7, 5))
    staged = DcpxStager().stage(state)
    assert_same(state, staged)
    for key, tensor in staged.items():
        if isinstance(tensor, torch.Tensor):
            assert type(tensor) is torch.Tensor, key
            assert not tensor.requires_grad, key
            assert tensor.untyped_storage().nbytes() == tensor.nbytes, key
    for key in ("transposed", "channels_last"):
        assert staged[key].stride() == state[key].stride()
    assert staged["strided"].is_contiguous()
    assert staged["expanded"].is_contiguous()


def test_containers_are_copied_deeply_keep_their_kind_and_share_what_they_shared() -> None:
    inner = {"w": torch.ones(3)}
    cycle: list[Any] = [torch.zeros(2)]
    cycle.append(cycle)
    ordered = OrderedDict(b=torch.ones(1), a=2)
    state: dict[str, Any] = {
        "one": inner, "two": inner, "cycle": cycle, "ordered": ordered,
        "default": defaultdict(list, {"x": [torch.ones(2)]}), "point": Point(torch.ones(2), 1),
        "size": torch.Size([1, 2]), "stream": io.BytesIO(b"abc"), "pair": (1, (torch.ones(1),)),
        "values": {"numbers": {1}, "lists": [[1, 2], {"k": bytearray(b"x")}]},
    }  # fmt: skip
    staged = DcpxStager().stage(state)
    assert staged["one"] is staged["two"]
    assert staged["one"] is not inner
    assert staged["cycle"][1] is staged["cycle"]
    assert type(staged["ordered"]) is OrderedDict
    assert list(staged["ordered"]) == ["b", "a"]
    assert staged["default"]["new"] == []
    assert type(staged["point"]) is Point
    assert staged["point"].y == 1
    assert type(staged["size"]) is torch.Size
    assert_same(state["pair"], staged["pair"])
    values = state["values"]
    state["stream"].truncate(0)
    values["numbers"].add(3)
    values["lists"][0].append(9)
    values["lists"][1]["k"][0] = 0
    assert staged["stream"].getvalue() == b"abc"
    assert staged["values"] == {"numbers": {1}, "lists": [[1, 2], {"k": bytearray(b"x")}]}


def test_value_that_cannot_be_copied_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"'deep\.0' cannot be staged: .*generator"):
        DcpxStager().stage({"deep": [(i for i in range(3))]})


def test_tied_tensors_are_staged_once(fresh_pool: ArenaPool) -> None:
    weight = torch.randn(MIB)
    staged = DcpxStager().stage({f"tied{i}": weight.view(2, -1) for i in range(20)})
    assert fresh_pool.nbytes < 8 * MIB
    assert len({tensor.data_ptr() for tensor in staged.values()}) == 1


# ---- At one moment ------------------------------------------------------------------------------


@pytest.mark.parametrize("is_shared", [False, True])
def test_no_later_change_of_the_state_shows_in_what_was_staged(is_shared: bool) -> None:
    base = torch.arange(3 * MIB, dtype=torch.int32)
    state = {"whole": base, "view": base[5:77], "columns": base.view(3, -1).t(), "n": [1]}
    expected = {key: value.clone() for key, value in state.items() if key != "n"}
    staged = DcpxStager(is_shared=is_shared).stage(state)
    base.add_(1)
    base.view(-1)[5:50].zero_()
    state["n"].append(2)
    del base, state
    gc.collect()
    for _ in range(4):  # what was freed is allocated, and written, again
        torch.full((3 * MIB,), -1, dtype=torch.int32)
    assert staged.pop("n") == [1]
    assert_same(expected, staged)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_first_stage_where_tensors_are_made_elsewhere_spoils_none_behind_it(device: str) -> None:
    state, known = mixed_state(5), dlpack_dtypes()
    assert len(known) > 10
    dlpack_dtypes.cache_clear()
    with torch.device(device):
        staged = DcpxStager().stage(state)
    assert_same(state, staged)
    assert dlpack_dtypes() == known
    assert_same(state, DcpxStager().stage(state))


# ---- Memory -------------------------------------------------------------------------------------


def test_new_states_of_many_saves_are_staged_in_one_arena(
    tmp_path: Path, fresh_pool: ArenaPool
) -> None:
    def save(step: int) -> None:
        state = {f"w{i}": torch.full((MIB // 4,), float(step + i)) for i in range(4)}
        future: Any = dcp.async_save(
            state, storage_writer=DcpxWriter(tmp_path, sync_files=False), no_dist=True
        )
        future.result(seconds(60))

    save(0)
    save(1)
    arenas, resident = fresh_pool.nbytes, resident_bytes()
    for step in range(2, 22):
        save(step)
    assert (fresh_pool.count, fresh_pool.nbytes) == (1, arenas)
    assert resident_bytes() <= resident + 16 * MIB  # of the 80 MiB that were staged since


def is_mapped(address: int) -> bool:
    """Returns whether a mapping of an arena is there."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    arenas = [fields[0].split("-") for fields in lines if "dcpx-arena" in "".join(fields[5:])]
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in arenas)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_kept_planner_gets_the_next_save_another_arena_and_then_an_error(
    tmp_path: Path, fresh_pool: ArenaPool
) -> None:
    stager = DcpxStager(host_memory_bytes=5 * MIB, timeout_s=0.3)
    kept = []
    for step in range(2):
        planner = DefaultSavePlanner()
        future: Any = dcp.async_save(
            {"w": torch.full((MIB // 2,), float(step))},
            storage_writer=DcpxWriter(tmp_path / str(step)),
            async_stager=stager, planner=planner, no_dist=True,
        )  # fmt: skip
        future.result(seconds(60))
        kept.append(planner)
    assert fresh_pool.count == 2
    with pytest.raises(StagingError, match=r"no staging memory .* after 0\.3 s: .* planner"):
        stager.stage({"w": torch.zeros(MIB // 2)})
    first = kept[0].state_dict["w"]
    assert torch.equal(first, torch.zeros(MIB // 2))  # never overwritten
    del first
    kept.pop(0)
    stager.stage({"w": torch.ones(MIB // 2)})
    assert fresh_pool.count == 2


def test_failed_save_whose_error_is_kept_holds_its_arena(
    tmp_path: Path, fresh_pool: ArenaPool
) -> None:
    class Failing(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            raise ZeroDivisionError

    future: Any = dcp.async_save(
        {"w": torch.ones(9)}, storage_writer=DcpxWriter(tmp_path), async_stager=DcpxStager(),
        planner=Failing(), no_dist=True,
    )  # fmt: skip
    error = future.exception(seconds(60))
    assert error is not None
    DcpxStager().stage({"w": torch.ones(9)})
    assert fresh_pool.count == 2
    del error, future
    gc.collect()
    # Within what there is, two at once: only where both arenas come back.
    stager = DcpxStager(host_memory_bytes=fresh_pool.nbytes, timeout_s=seconds(60))
    both = [stager.stage({"w": torch.ones(9)}) for _ in range(2)]
    assert fresh_pool.count == len(both)


def test_close_gives_memory_back_and_leaves_what_is_staged_alone(fresh_pool: ArenaPool) -> None:
    stager = DcpxStager()
    state = {"w": torch.arange(20 * MIB, dtype=torch.uint8)}
    staged = stager.stage(state)
    address = staged["w"].data_ptr()
    stager.close()
    assert fresh_pool.count == 0
    assert_same(state, staged)
    assert is_mapped(address)
    del staged
    assert not is_mapped(address)


def test_stage_in_a_forked_child_is_refused(fresh_pool: ArenaPool) -> None:
    DcpxStager().stage({"w": torch.ones(3)})
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            DcpxStager().stage({"w": torch.ones(3)})
        except StagingError as error:
            code = 0 if "forked" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert_same({"w": torch.ones(3)}, DcpxStager().stage({"w": torch.ones(3)}))


def test_stage_tensors_names_what_has_lost_its_memory() -> None:
    freed = torch.ones(9)
    freed.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedError, match=r"'w' needs 36 B of a storage that holds 0 B"):
        stage_tensors([torch.ones(2), freed], names=["v", "w"])


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.skipif(HAS_STRIDES, reason="this torch's own planner asks tensors for strides")
def test_save_of_what_has_no_address_takes_no_notice_of_arenas(tmp_path: Path) -> None:
    process_pool().prewarm(MIB)
    state = {"sparse": torch.eye(3).to_sparse_csr(), "w": torch.ones(3)}
    dcp.save(state, storage_writer=DcpxWriter(tmp_path), no_dist=True)
    assert len(list(tmp_path.glob("*.distcp"))) == 1
    process_pool().close()
