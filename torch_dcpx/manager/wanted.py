"""What one rank asks of the checkpoint that a resume has chosen, and what it gets.

`Wanted` refuses parts that were not saved, before anything is read. It names what the load fills.
It decodes and merges the small values behind the read, and hands them over after the tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch_dcpx.checkpoint.load_part import LoadPart
from torch_dcpx.errors import CorruptionError, MismatchError
from torch_dcpx.keys.key_map import KeyMap
from torch_dcpx.manager.content import (
    Merge,
    PerRank,
    check_mergeable,
    decode_content,
    merged,
    with_own,
)
from torch_dcpx.manager.optimizer_part import OptimizerPart, by_name
from torch_dcpx.manager.save import Parts
from torch_dcpx.manager.state import ModelPart, StatePart, paired_states
from torch_dcpx.manager.stored import Stored
from torch_dcpx.manager.translate import NAMED_GROUPS, TrainingRules
from torch_dcpx.options import ReadOptions


class Wanted:
    """One rank's share of a resume from the chosen checkpoint."""

    def __init__(
        self,
        parts: Parts,
        chosen: Stored,
        rank: int,
        world_size: int,
        *,
        strict: bool,
        merge: Merge,
        translate: KeyMap | None = None,
        options: ReadOptions | None = None,
    ) -> None:
        """Raises MismatchError where the checkpoint lacks a part: the same on every rank."""
        self._parts = parts
        self._path = str(chosen.path)
        self._rank = rank
        self._world_size = world_size
        self._merge = merge
        record = chosen.record
        self._stored = frozenset() if record is None else frozenset(record.parts)
        self._own_names = () if record is None else record.per_rank
        saved_ranks = 0 if record is None else record.ranks
        self._is_same_size = saved_ranks == world_size
        self._check_parts(strict=strict)
        self._names = self._asked_own()
        check_mergeable(self._names, merge, saved_ranks, world_size, self._path)
        self._ranks: Iterable[int] = ()  # whose own is read
        if self._names:
            self._ranks = [rank] if self._is_same_size else range(saved_ranks)
        self._options = options
        self._given: dict[str, Any] = {}  # what is small, by part
        self._own_values: dict[str, Any] = {}  # what is this rank's own, by path
        self._strict = strict
        self._has_named_groups = NAMED_GROUPS in self._stored
        self.rules: TrainingRules | None = None  # that the load goes by
        if translate is not None:
            names = () if parts.optimizer is None else by_name(parts.optimizer)
            self.rules = TrainingRules(translate, names, has_named_groups=self._has_named_groups)

    def _check_parts(self, *, strict: bool) -> None:
        """Refuses small parts that were not saved; `load` refuses the others by name."""
        missing = [
            name
            for name in ("lr_scheduler", "dataloader")
            if getattr(self._parts, name) is not None and name not in self._stored
        ]
        own = [f"state.{k}" for k, v in (self._parts.state or {}).items() if type(v) is PerRank]
        missing += [name for name in own if name not in self._own_names]
        if missing and strict:
            raise MismatchError(
                f"resume from '{self._path}': {', '.join(missing)} was not saved there; "
                "strict=False leaves it as it is",
                fqn=missing[0],
                path=self._path,
                missing=tuple(missing),
            )

    def _asked_own(self) -> list[str]:
        """Returns the names of each rank's own values that this call gives back."""
        parts, state = self._parts, self._parts.state or {}
        given = {"user_content"}
        given |= {n for n in ("dataloader", "lr_scheduler") if getattr(parts, n) is not None}
        given |= {f"state.{key}" for key, value in state.items() if type(value) is PerRank}
        return [n for n in self._own_names if n in given or n.partition(".")[0] in given]

    def target(self) -> dict[str, Any]:
        """Returns the state that `dcpx.load` is to fill."""
        parts = self._parts
        target: dict[str, Any] = {}
        small: dict[str, Any] = {}
        if parts.model is not None:
            target["model"] = ModelPart(parts.model, strict=self._strict)
        if parts.optimizer is not None:
            target["optimizer"] = OptimizerPart(
                parts.model,
                parts.optimizer,
                strict=self._strict,
                has_named_groups=self._has_named_groups,
                rules=self.rules,
            )
        if parts.state is not None:
            target["state"] = StatePart(parts.state)
        if "user_content" in self._stored:
            small["user_content"] = b""
        if "lr_scheduler" in self._stored and parts.lr_scheduler is not None:
            small["lr_scheduler"] = b""
        if self._names:
            small["rank"] = {str(rank): b"" for rank in self._ranks}
        if small:
            target["dcpx"] = _SmallPart(self, small)
        return target

    @property
    def content(self) -> Any:
        """The user's content, when it was loaded."""
        return self._given.get("user_content")

    @property
    def has_small(self) -> bool:
        """Whether the caller's objects get small values."""
        parts = self._parts
        is_own = any(not name.startswith("user_content") for name in self._names)
        return is_own or (parts.lr_scheduler is not None and "lr_scheduler" in self._stored)

    def take_apart(self, small: dict[str, Any]) -> None:
        """Decodes and merges the small values; no object of the caller has any of them yet.

        Raises:
            CorruptionError: it is not what a manager saves.
            OptionError: there are more or fewer schedulers than were saved.
            What the user's merge raises.
        """
        path, options = self._path, self._options
        own = self._own(small, options)
        for name in ("user_content", "lr_scheduler"):
            if name in small:
                value = decode_content(small[name], f"dcpx.{name}", path, options)
                try:
                    self._given[name] = with_own(value, own)
                except (KeyError, TypeError, RecursionError) as error:
                    raise _none_of_ours(f"dcpx.{name}", path, error) from error
        self._own_values = own
        if "lr_scheduler" in self._given:
            paired_states(self._parts.lr_scheduler, self._given["lr_scheduler"])

    def hand_over(self) -> None:
        """Gives the small values to the caller's objects. REQUIRES: `take_apart`."""
        parts, own = self._parts, self._own_values
        if "lr_scheduler" in self._given:
            for one, state in paired_states(parts.lr_scheduler, self._given["lr_scheduler"]):
                one.load_state_dict(state)
        if parts.dataloader is not None and "dataloader" in own:
            parts.dataloader.load_state_dict(own["dataloader"])
        for key, value in (parts.state or {}).items():
            if type(value) is PerRank and f"state.{key}" in own:
                value.value = own[f"state.{key}"]

    def _own(self, small: dict[str, Any], options: ReadOptions | None) -> dict[str, Any]:
        """Returns this rank's own by path: what it saved, or what the merge gives."""
        if not self._names:
            return {}
        stored = [
            decode_content(small["rank"][str(rank)], f"dcpx.rank.{rank}", self._path, options)
            for rank in self._ranks
        ]
        for rank, value in zip(self._ranks, stored, strict=True):
            missing = [name for name in self._names if type(value) is not dict or name not in value]
            if missing:
                raise _none_of_ours(f"dcpx.rank.{rank}", self._path, f"no '{missing[0]:.80}'")
        if self._is_same_size:
            return {name: stored[0][name] for name in self._names}
        return merged(stored, self._names, self._merge, self._rank, self._world_size)


class _SmallPart(LoadPart):
    """The small values: objects get them when model, optimizers and state are filled."""

    is_last = True

    def __init__(self, wanted: Wanted, small: dict[str, Any]) -> None:
        self.is_applied = wanted.has_small
        self._wanted = wanted
        self._small = small

    def state_dict(self) -> dict[str, Any]:
        return self._small

    def check(self, state: dict[str, Any]) -> None:
        self._wanted.take_apart(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._wanted.hand_over()


def _none_of_ours(fqn: str, path: str, why: object) -> CorruptionError:
    return CorruptionError(
        f"take apart item '{fqn}' of '{path}': it is not what a manager saves: {why!s:.200}",
        fqn=fqn,
        path=path,
    )
