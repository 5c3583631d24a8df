"""DcpxSavePlanner: the drop-in for `torch.distributed.checkpoint.DefaultSavePlanner`.

create_local_plan     this rank's items, made by C++; digests of its Python values
create_global_plan    gives each chunk to one rank, balanced; makes and checks the metadata
finish_plan           rows of a tensor, where several ranks share it out
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, Literal, TypeGuard

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.tensor import DTensor

from torch_dcpx._arguments import check_bool, check_choice, check_type
from torch_dcpx._compat import HAS_KNOWN_ITEMS, stock_write_items
from torch_dcpx._gc import bounded_pause, paused_gc
from torch_dcpx._hooks import check_switches, has_hooks, is_own
from torch_dcpx._plan_classes import MAKER
from torch_dcpx.errors import PlanError
from torch_dcpx.planners.cache import KnownPlan, Planning, fingerprint_of, flattened
from torch_dcpx.planners.replicas import (
    Replicas,
    RowPieces,
    doubtful_names,
    replicas_of,
    with_pieces,
)
from torch_dcpx.ranks.plan_wire import RankPlan
from torch_dcpx.tensors.digests import report_conflicts, report_nested, shared_digests
from torch_dcpx.tensors.memory import ChunkFinder, is_plain_dtensor, is_plain_tensor
from torch_dcpx.tensors.offences import check_shape, refuse_opaque, refuse_unlike
from torch_dcpx.tensors.tiling import offence_text

_MAX_TEXT = 500  # of an error of many tensors, as stock's
# Hooks that see the tensor of an item: where one is overridden, items are not cut.
_LOOKUP_HOOKS = ("resolve_data", "lookup_object", "transform_object")
_SWITCH = (int, type(None))
_DATA_HOOKS = (*_LOOKUP_HOOKS, "finish_plan")


class DcpxSavePlanner(DefaultSavePlanner):
    """Plans a save as `DefaultSavePlanner` does, in a fraction of the time, and balanced.

    Arguments, hooks and errors are those of `DefaultSavePlanner`; a subclass may override any hook.
    Works with any storage writer; stock's readers and planners read what it plans.

    What several ranks hold is written once: ranks share it by real bytes, and large tensors by rows
    where their copies are known to be equal. Equal plans are always shared alike.

    Args:
        flatten_state_dict: plan nested dicts and lists by names joined with dots. Default True.
        flatten_sharded_tensors: take a ShardedTensor of ShardedTensors for one. Default True.
        dedup_replicated_tensors: no effect, as with stock. Default None.
        dedup_save_to_lowest_rank: the lowest rank writes all that several hold. Default False.
        enable_plan_caching: keep the plans of up to four states and use them again for a state of
            the same names, shapes, dtypes, strides, placements and meshes. Default True. They
            belong to this planner and hold no tensors. `torch_dcpx.save` and `async_save` also keep
            the ranks' agreement; all ranks renew it when anything has changed on one. `dcp.save`,
            and a subclass that overrides a planning hook, make the global plan anew each time.
        on_conflict: for Python values and tensors that differ over the ranks under one name, of
            which a checkpoint keeps the lowest rank's only, and for values on one rank where
            another has a dict or list with values. "warn" (default) logs them, once a planner and
            name, "error" raises. Tensors are compared by `torch_dcpx.save`, `async_save` and
            managers, those that no mesh or DistributedDataParallel of all ranks keeps equal. Above
            4 KiB they are compared by samples, which finds what differs nearly everywhere. With a
            kept plan each save compares 2,048 of them, in turn, and none of a state with tensors on
            devices.
        split_replicas: cut tensors of 64 KiB or more that would unbalance the ranks by rows, so
            that several ranks write one. Default None: cut DTensors that one mesh and placement
            replicates over the ranks, for a DcpxWriter. False: cut nothing. True: cut plain tensors
            too, for any writer; this is right only where both of these hold, which nobody checks:
            - The writer keeps several chunks of a name, as DcpxWriter and FileSystemWriter do.
              HuggingFaceStorageWriter with `fqn_to_index_mapping` does not: a file of one rank
              replaces that of another, and rows are lost.
            - Ranks hold equal tensors under one name; else the checkpoint mixes their rows. Buffers
              that ranks do not synchronise differ.
            A row is the smallest piece, so a tensor of few large rows is not shared evenly. Never
            cut are tensors of unequal dtypes or sizes, and those of a rank whose planner may not
            cut or overrides a hook that sees the data (`lookup_object`, `transform_object`,
            `resolve_data`, `finish_plan`) when it plans.

    Raises:
        OptionError: an argument that cannot work.
    """

    _can_split = False  # whether this rank may get rows
    dcpx_is_odd = False  # whether the state has what names do not tell, see `flattened`
    _cut: tuple[dict[str, Any], Any] | None = None  # the state with pieces, and the one before

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_replicated_tensors: bool | None = None,
        dedup_save_to_lowest_rank: bool = False,
        enable_plan_caching: bool = True,
        *,
        on_conflict: Literal["warn", "error"] = "warn",
        split_replicas: bool | None = None,
    ) -> None:
        super().__init__(
            flatten_state_dict,
            flatten_sharded_tensors,
            dedup_replicated_tensors,
            dedup_save_to_lowest_rank,
            enable_plan_caching=False,  # stock's, by the name of the class
        )
        check_switches(self)
        check_type("dedup_replicated_tensors", dedup_replicated_tensors, _SWITCH, "None: no effect")
        check_bool("enable_plan_caching", enable_plan_caching)
        check_choice("on_conflict", on_conflict, ("warn", "error"))
        if split_replicas is not None:
            check_bool("split_replicas", split_replicas)
        self.on_conflict = on_conflict
        self.split_replicas = split_replicas
        self.dcpx_planning = Planning(enable_plan_caching)
        self.dcpx_logged: set[str] = set()  # names of logged conflicts

    def __getstate__(self) -> dict[str, Any]:  # of copies, too, which have no plans
        return {**vars(self), "dcpx_planning": Planning(self.dcpx_planning.is_enabled)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._enable_plan_caching = False  # in a pickle of stock's, which the hook makes ours

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Takes the state. Source: DefaultSavePlanner.set_up_planner.

        Raises:
            OptionError: the state contains itself.
            PlanError: two values have one name (torch's text).
        """
        with paused_gc():
            self.state_dict, mappings, self.dcpx_is_odd = flattened(
                state_dict,
                is_flat=self.flatten_state_dict,
                has_flat_shards=self.flatten_sharded_tensors,
            )
        if self.flatten_state_dict:
            self.mappings = mappings
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """Plans an item for each tensor, shard or object of this rank.

        Raises:
            ValueError: a DTensor with a Partial placement (torch's text).
            PlanError: a DTensor's shard has another shape than its placement says.
        """
        self._restore_state()
        may_split = HAS_KNOWN_ITEMS and (self.split_replicas is None or self.split_replicas)
        self._can_split = may_split and is_own(self, DcpxSavePlanner, *_DATA_HOOKS)
        plan = self._kept_local_plan() if keeps_plans(self) else self._local_plan()
        self._can_split = plan.can_split or bool(plan.replicas)
        if self.flatten_state_dict:
            plan = dataclasses.replace(plan, planner_data=self.mappings)
        self.plan = plan
        return plan

    def _kept_local_plan(self) -> RankPlan:
        """Returns the plan of a state that was planned before, or a new one."""
        planning = self.dcpx_planning
        planning.known = None
        who = type(self).__qualname__, planning.group, self.is_coordinator
        flat = self.flatten_state_dict, self.flatten_sharded_tensors
        split = self.dedup_save_to_lowest_rank, self.split_replicas, self._can_split
        paths = self.mappings if self.flatten_state_dict else None
        about = (*who, *flat, *split, self.on_conflict)
        fingerprint = fingerprint_of(self.state_dict, paths, about)
        if fingerprint is None:
            return self._local_plan()
        known = planning.plans.get(fingerprint)
        if known is None:
            items, whole, replicas, objects = self._local_items()
            known = KnownPlan(tuple(items), whole, replicas, tuple(objects))
            planning.plans.keep(fingerprint, known)
        else:
            objects = {name: self.state_dict[name] for name in known.objects}
        plan = self._rank_plan(list(known.items), known.whole_names, known.replicas, objects)
        planning.known, planning.handed = known, plan.items
        return plan

    def _restore_state(self) -> None:
        """Takes the pieces of an earlier plan out of the state, unless it was replaced since."""
        if self._cut is not None and self.state_dict is self._cut[0]:
            self.state_dict = self._cut[1]
        self._cut = None

    def _local_plan(self) -> RankPlan:
        if not HAS_KNOWN_ITEMS:
            stock = create_default_local_save_plan(self.state_dict, self.is_coordinator)
            return RankPlan(stock.items)
        return self._rank_plan(*self._local_items())

    def _local_items(self) -> tuple[list[Any], frozenset[str], Replicas | None, dict[str, Any]]:
        """Returns (items, names of values without rows, known copies, Python values).

        Source: create_default_local_save_plan.
        """
        rows: list[Any] = []
        whole: set[str] = set()
        chunks = ChunkFinder()
        uses_grad = torch.is_grad_enabled()
        objects: dict[str, Any] = {}
        gives_state = is_own(self, DcpxSavePlanner, *_LOOKUP_HOOKS)  # else hooks may give the shape
        with bounded_pause(len(self.state_dict)):
            for fqn, value in self.state_dict.items():
                if is_plain_tensor(value):
                    rows.append((fqn, value))
                    if not _has_rows(value):
                        whole.add(fqn)
                elif is_plain_dtensor(value):
                    part, local = chunks.part_of(value), value._local_tensor
                    if part is None:
                        continue
                    is_odd = local.shape != part.sizes
                    if is_odd and gives_state:
                        check_shape(fqn, local.shape, part)
                    # Terms of a sum, which differ by intent: where torch plans them at all.
                    is_sum = any(place.is_partial() for place in value._spec.placements)
                    if is_odd or is_sum or not _has_rows(local):
                        whole.add(fqn)
                    # Of what `to_local` returns, a view that follows the DTensor.
                    needs_grad = value.requires_grad if uses_grad else local.requires_grad
                    rows.append((fqn, local, needs_grad, *part, value.shape))
                elif isinstance(value, torch.Tensor) or hasattr(value, "__create_write_items__"):
                    if isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None:
                        continue  # this rank is no part of its mesh
                    is_sharded = isinstance(value, ShardedTensor)  # which has no `is_nested`
                    if isinstance(value, torch.Tensor) and not is_sharded and value.is_nested:
                        refuse_opaque(fqn, value)
                    rows.append(stock_write_items(fqn, value))
                    whole.add(fqn)
                else:
                    rows.append(fqn if type(fqn) is str else stock_write_items(fqn, value))
                    objects[fqn] = value
            try:
                items = MAKER.write_items(rows)
            except RuntimeError:  # torch's, of tensors without sizes or memory
                for fqn, value in self.state_dict.items():
                    if is_plain_tensor(value):
                        refuse_opaque(fqn, value)
                raise
            is_asked = self._can_split and self.split_replicas is None
            replicas = replicas_of(self.state_dict, items, chunks, whole) if is_asked else None
        return items, frozenset(whole), replicas, objects

    def _rank_plan(
        self,
        items: list[Any],
        whole: frozenset[str],
        replicas: Replicas | None,
        objects: Mapping[str, Any],
    ) -> RankPlan:
        return RankPlan(
            items,
            can_split=self._can_split and self.split_replicas is not None,
            whole_names=whole | replicas.unknown if replicas is not None else whole,
            replicas=replicas.key if replicas is not None else b"",
            names_hash=replicas.names_hash if replicas is not None else 0,
            digests=shared_digests(objects),
            is_shared=type(self) is DcpxSavePlanner,
            has_paths=self.flatten_state_dict and is_own(self, DcpxSavePlanner, "finish_plan"),
        )

    def _dedup_save_plans(self, all_plans: list[SavePlan]) -> list[SavePlan]:
        """Returns the plans with each chunk in one of them only, or rows of it in several.

        Raises:
            PlanError: under a name ranks have other kinds, or with `on_conflict="error"` values.
        """
        unlike: list[tuple[str, int, int]] = []
        cut = [plan for plan in all_plans if isinstance(plan, RankPlan) and plan.can_split]
        digests = (plan.digests if isinstance(plan, RankPlan) else {} for plan in all_plans)
        conflicts = report_conflicts(digests, self.on_conflict, self.dcpx_logged)
        self.dcpx_planning.has_conflicts = bool(conflicts)
        items = MAKER.dedup_items(
            [list(plan.items) for plan in all_plans],
            [isinstance(plan, RankPlan) and plan.can_split for plan in all_plans],
            self.dedup_save_to_lowest_rank,
            conflicts | self.dcpx_planning.lowest_names,
            doubtful_names(cut).union(*(plan.whole_names for plan in cut)),
            unlike,
        )
        refuse_unlike(all_plans, unlike)
        return [_with_items(plan, its) for plan, its in zip(all_plans, items, strict=True)]

    def _create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Returns all plans and the metadata. Source: DefaultSavePlanner._create_global_plan.

        Raises:
            PlanError: chunks reach out of their tensor, overlap, or do not fill it.
        """
        if not HAS_KNOWN_ITEMS:
            return super()._create_global_plan(all_plans)
        with bounded_pause(sum(len(plan.items) for plan in all_plans)):
            kept = [plan.items is self.dcpx_planning.handed for plan in all_plans]
            deduped = self._dedup_save_plans(all_plans)
            items, entries, offences = MAKER.global_plan(
                [list(plan.items) for plan in deduped], kept
            )
            plans = [_with_items(plan, its) for plan, its in zip(deduped, items, strict=True)]
        metadata = Metadata(entries)
        if self.flatten_state_dict:
            metadata.planner_data = {}
            paths = [plan.planner_data for plan in plans]
            for own in reversed(paths):  # the first rank's path of a name is kept
                metadata.planner_data.update(own)
            if max(map(len, paths)) < len(metadata.planner_data):
                report_nested(paths, self.on_conflict, self.dcpx_logged)
        # One rank alone may save its part of a tensor.
        errors = [row for row in offences if row[1] != "hole" or len(plans) > 1]
        if errors:
            texts = "; ".join(offence_text(entries, *row) for row in errors)
            shown = texts[:_MAX_TEXT] + ("... (truncated)" if len(texts) > _MAX_TEXT else "")
            raise PlanError(f"Failed to validate global plan: {shown}", fqn=errors[0][0])
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Takes this rank's piece of the global plan.

        Raises:
            PlanError: it asks for rows that this rank does not have.
        """
        if isinstance(new_plan, RankPlan) and new_plan.has_paths and new_plan.planner_data is None:
            new_plan = dataclasses.replace(new_plan, planner_data=self.mappings)  # not sent back
        plan = super().finish_plan(new_plan)
        self._restore_state()
        if self._can_split and getattr(new_plan, "can_split", True):
            is_rare = self.split_replicas is None
            state = with_pieces(self.state_dict, plan.items, is_rare=is_rare)
            if state is not None:
                self._cut, self.state_dict = (state, self.state_dict), state
            if isinstance(plan, RankPlan):
                cut = (name for name, value in (state or {}).items() if type(value) is RowPieces)
                plan = dataclasses.replace(plan, cut_names=frozenset(cut))
        return plan


def keeps_plans(planner: SavePlanner) -> TypeGuard[DcpxSavePlanner]:
    """Returns whether a planner uses earlier plans again: it may, and all its planning hooks are
    ours. Hooks that only see the data (`lookup_object`, ...) may be anybody's.
    """
    return (
        isinstance(planner, DcpxSavePlanner)
        and planner.dcpx_planning.is_enabled
        and HAS_KNOWN_ITEMS
        and has_hooks(planner, _PLANNING)
    )


# What decides on a plan, private parts included.
_PLANNING = {
    name: getattr(DcpxSavePlanner, name)
    for base in (DefaultSavePlanner, DcpxSavePlanner)
    for name, value in vars(base).items()
    if inspect.isfunction(value) and name not in ("__init__", "set_up_planner", *_LOOKUP_HOOKS)
}


def _has_rows(tensor: torch.Tensor) -> bool:
    """Returns whether rows of a tensor are a tensor of its kind: not of a sparse one."""
    return tensor.layout is torch.strided and not tensor.is_quantized


def _with_items(plan: SavePlan, items: list[Any]) -> SavePlan:
    """Returns the plan with other items, and without the fields that only the coordinator needs."""
    if isinstance(plan, RankPlan):
        return plan.planned(items)
    return dataclasses.replace(plan, items=items)
