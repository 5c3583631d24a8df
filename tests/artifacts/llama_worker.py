"""The recipe of docs/howto/pretrained.md for buffers that are in no file, with the real Llama.

    python llama_worker.py DIRECTORY

It runs in a process of its own, with the `transformers` that its caller has put on the path.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import torch_dcpx as dcpx


def main(path: Path, is_tied: bool) -> None:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=is_tied,
    )
    torch.manual_seed(3)
    source = LlamaForCausalLM(config).eval()
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        expected = source(tokens).logits
    for target in ("out", "y.pt"):
        dcpx.export(source, path / target, no_dist=True)
        with torch.device("meta"):
            model = LlamaForCausalLM(config).eval()
        with pytest.raises(dcpx.UnsupportedError, match=r"model\.rotary_emb\.inv_freq"):
            dcpx.load_pretrained(model, path / target)
        model.model.rotary_emb = LlamaRotaryEmbedding(config)
        model.tie_weights()
        report = dcpx.load_pretrained(model, path / target)
        assert report.is_whole
        assert not [name for name, one in model.named_buffers() if one.is_meta]
        with torch.no_grad():
            assert torch.equal(model(tokens).logits, expected)
    # What Hugging Face itself reads of the export.
    source.config.save_pretrained(path / "out")
    again = LlamaForCausalLM.from_pretrained(path / "out").eval()
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, expected)


if __name__ == "__main__":
    for number, is_tied in enumerate((False, True)):
        main(Path(sys.argv[1]) / str(number), is_tied)
