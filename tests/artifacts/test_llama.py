"""Models whose buffers are in no file: the recipe of docs/howto/pretrained.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_dcpx as dcpx
from torch_dcpx import UnsupportedError

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("llama_worker.py")
TRANSFORMERS = "transformers==5.24.0"


class Rotary(nn.Module):
    """Holds a buffer that it computes and does not save, as Llama's rotary embedding."""

    inv_freq: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        inv_freq = 1.0 / 10000.0 ** (torch.arange(0, width, 2).float() / width)
        self.register_buffer("inv_freq", inv_freq, persistent=False)


class Tiny(nn.Module):
    """Has the parts of Llama that matter to a load: the rotary buffer, and tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.rotary_emb = Rotary(8)
        self.head = nn.Linear(8, 16, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(len(tokens))[:, None] * self.rotary_emb.inv_freq
        turned = self.embed(tokens) * torch.cat([angles.cos(), angles.sin()], dim=1)
        return self.head(turned)  # type: ignore[no-any-return]


@pytest.mark.parametrize("target", ["out", "y.safetensors", "y.pt"])
def test_model_on_meta_computes_its_buffers_and_loads_the_rest(tmp_path: Path, target: str) -> None:
    source, tokens = Tiny(), torch.arange(10)
    dcpx.export(source, tmp_path / target, no_dist=True)
    with torch.device("meta"):
        model = Tiny()
    with pytest.raises(UnsupportedError, match=r"not persistent.*'rotary_emb\.inv_freq'"):
        dcpx.load_pretrained(model, tmp_path / target)
    model.rotary_emb = Rotary(8)
    model.tie_weights()
    assert dcpx.load_pretrained(model, tmp_path / target).is_whole
    assert model.head.weight is model.embed.weight
    assert torch.equal(model(tokens), source(tokens))


def test_the_page_prints_the_lines_that_the_worker_runs() -> None:
    page = (
        (ROOT / "docs" / "howto" / "pretrained.md").read_text().split("## Models whose buffers")[1]
    )
    block = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert block is not None
    code = [line.split("#")[0].strip() for line in block[1].splitlines()]
    *recipe, load = [line for line in code if line]
    worker = WORKER.read_text().replace(".eval()", "")
    assert [line for line in recipe if line not in worker] == []
    assert load == 'dcpx.load_pretrained(model, "out")'


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_llama_of_transformers_gives_the_logits_of_what_was_exported(tmp_path: Path) -> None:
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--target", site, TRANSFORMERS]
    subprocess.run(install, check=True, capture_output=True, text=True)
    # Behind this environment's own packages: torch and numpy are not shadowed.
    run = (
        "import runpy, sys; sys.path.append(sys.argv.pop(1)); sys.argv.pop(0); "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", run, site, WORKER, tmp_path],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
