"""A small GPT over bytes, and the text it learns: the standard library's own sources.

Nothing here knows about checkpoints. The batch of a step is a pure function of the step, so
that any number of ranks sees the same samples, and a resumed run sees what the first would have.
"""

import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

VOCABULARY = 256  # every byte is a token
CORPUS_BYTES = 4_000_000


@dataclass(frozen=True)
class GptConfig:
    """The sizes of one model. `context` in bytes of text, `global_batch` in samples a step."""

    layers: int
    heads: int
    width: int
    context: int
    global_batch: int  # divisible by every number of ranks that trains on it
    dropout: float = 0.1


CONFIGS = {
    "tiny": GptConfig(
        layers=2, heads=2, width=16, context=32, global_batch=6
    ),  # 15 thousand parameters
    "demo": GptConfig(layers=4, heads=4, width=256, context=128, global_batch=12),  # 3.3 million
    "large": GptConfig(layers=6, heads=8, width=640, context=128, global_batch=12),  # 30 million
}


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each behind a norm and a residual."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.attention_out = nn.Linear(config.width, config.width)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, context, width]."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [batch, heads, context, _]
            for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        )
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.attention_out(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class ByteGpt(nn.Module):
    """Predicts the next byte. `forward` returns the mean cross-entropy, in nats a byte."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """inputs, targets: [batch, context], int64."""
        places = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.token(inputs) + self.position(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return cross_entropy(logits.flatten(0, 1), targets.flatten())


def load_corpus(limit_bytes: int = CORPUS_BYTES) -> Tensor:
    """Returns the sources of this Python's standard library as one tensor: [bytes], uint8."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if not {"site-packages", "dist-packages"} & set(path.parts[len(root.parts) :]):
            text += path.read_bytes()
        if len(text) >= limit_bytes:
            break
    return torch.frombuffer(text[:limit_bytes], dtype=torch.uint8)


def batch_for(
    corpus: Tensor, config: GptConfig, step: int, rank: int, world_size: int
) -> tuple[Tensor, Tensor]:
    """Returns (inputs, targets) of this rank's share of the global batch of `step`.

    Sample i of a step is the same text whatever the number of ranks: its place in the corpus is
    drawn from the sample's global index alone.
    """
    share = config.global_batch // world_size
    samples = []
    for i in range(rank * share, (rank + 1) * share):
        place = random.Random(step * config.global_batch + i)
        start = place.randrange(len(corpus) - config.context)
        samples.append(corpus[start : start + config.context + 1])
    batch = torch.stack(samples).long()
    return batch[:, :-1], batch[:, 1:]
