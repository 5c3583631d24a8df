"""examples/finetune_meta.py runs, and each rank reads and holds its own shards alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from support.machine import seconds
from support.rank_fixture import StartRanks

import torch_dcpx as dcpx

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
WIDTH = 2800  # ten matrices: 299 MiB


@pytest.mark.slow  # 10 s: two processes that import torch
@pytest.mark.multirank
def test_finetune_example_reads_shards_and_exports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(dcpx.__file__).parents[1]))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launch, str(ROOT / "examples" / "finetune_meta.py"), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=seconds(600))
    done = sorted(re.findall(r"rank (\d) done", ended.stdout))
    assert (ended.returncode, done) == (0, ["0", "1"]), ended.stdout + ended.stderr
    files = [path.name for path in (tmp_path / "finetune" / "tuned").iterdir()]
    assert files == ["model.safetensors"]
    source = (ROOT / "docs" / "howto" / "pretrained.md").read_text()
    assert re.search(r"examples/finetune_meta\.py", source)


def steps(path: Path, width: int) -> tuple[int, int, int]:
    """Returns the bytes of this rank's shards, and the peaks of the load and of the export."""
    import finetune_meta as example
    from meters import extra_peak_bytes

    example.WIDTH = width
    model = example.sharded_net(dist.get_world_size())
    pretrained, tuned = path / f"pretrained{width}", path / f"tuned{width}"
    load = extra_peak_bytes(
        lambda: dcpx.load_pretrained(model, pretrained, key_map=example.NAMES) and None
    )
    own = sum(tensor.to_local().nbytes for tensor in model.state_dict().values())
    dist.barrier()
    export = extra_peak_bytes(lambda: dcpx.export(model, tuned) and None)
    return own, load, export


def takes_its_share(path: Path, width: int) -> None:
    sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests" / "bench")]
    steps(path, 64)  # imports, first uses
    own, load, export = steps(path, width)
    whole = 10 * width**2 * 4
    said = f"own {own / MIB:.1f}, load {load / MIB:.1f}, export {export / MIB:.1f} MiB"
    assert own == whole // dist.get_world_size(), said
    # Kernels count resident pages for each core, and sum up late.
    assert 0.9 * own <= load <= own + dcpx.ReadOptions().host_memory_bytes, said
    assert export <= dcpx.WriteOptions().resolved_memory_bytes(), said


@pytest.mark.slow  # 20 s: 300 MiB written and read
@pytest.mark.multirank
def test_finetune_example_takes_its_share_of_the_model_and_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: StartRanks
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import finetune_meta as example

    for width in (64, WIDTH):
        monkeypatch.setattr(example, "WIDTH", width)
        (tmp_path / f"pretrained{width}").mkdir()
        example.publish(tmp_path / f"pretrained{width}")
    ranks(2, anew=True)(takes_its_share, tmp_path, WIDTH)
    tuned = tmp_path / f"tuned{WIDTH}" / "model.safetensors"
    assert tuned.stat().st_size > 10 * WIDTH * WIDTH * 4
