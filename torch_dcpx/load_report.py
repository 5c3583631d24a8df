"""What `dcpx.load` did on one rank."""

from __future__ import annotations

from dataclasses import dataclass

from torch_dcpx.reports import ReadReport


@dataclass(frozen=True)
class LoadReport:
    """What one `dcpx.load` did on this rank. The four phases add up to `total_s`.

    Attributes:
        path: directory of the checkpoint.
        items: read items of this rank's plan: tensors, their shards, and Python objects.
        nbytes: bytes of these that the state asked for.
        missing: names of the state that the checkpoint does not hold, left as they were: with
            `strict=False`, by `allow_missing`, or by a planner with `allow_partial_load`.
        unexpected: names of the checkpoint that no rank asked for; with metadata of each rank's
            own, those that this rank did not ask for.
        casts: (name, stored dtype, dtype of the state) of what was converted, as `copy_` does;
            dtypes by name, such as "float32". Empty for a planner that finds targets its own way.
        plan_s: `state_dict()` of `Stateful` objects, metadata, checks and this rank's plan.
        read_s: reading, up to the last byte of this rank.
        apply_s: `load_state_dict()` of `Stateful` objects.
        wait_s: the rest: other ranks.
        total_s: the whole call.
        read: the reader's own report; None for a subclass that reads its own way.
    """

    path: str
    items: int
    nbytes: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    casts: tuple[tuple[str, str, str], ...]
    plan_s: float
    read_s: float
    apply_s: float
    wait_s: float
    total_s: float
    read: ReadReport | None

    @property
    def is_whole(self) -> bool:
        """Whether the state got all it asked for, as it was stored."""
        return not (self.missing or self.casts)
