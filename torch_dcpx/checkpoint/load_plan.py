"""The plan of `dcpx.load`: each rank offers its part, and the coordinator answers.

Stock's loader raises errors while it plans, rank by rank and name by name. Here a rank compares
first (`load_checks`), the coordinator joins the differences of all ranks, and only a state that
fits on every rank gets a plan.
"""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from torch_dcpx._hooks import PLAN_HOOKS, has_stock_hooks, is_own, takes
from torch_dcpx.checkpoint.containers import EMPTY, RECORD
from torch_dcpx.checkpoint.growth import Grower, Growth, new_names, paths_of
from torch_dcpx.checkpoint.load_checks import Differences, LoadRules, compare, mismatch_error
from torch_dcpx.checkpoint.stateful import (
    EXTRA_STATE,
    LoadPart,
    Takes,
    is_stateful,
    takes_of,
)
from torch_dcpx.errors import MismatchError, OptionError, PlanError
from torch_dcpx.keys.key_map import KeyMap, keeps_names
from torch_dcpx.keys.mapped_state import MappedState, map_state, model_part
from torch_dcpx.keys.wrappers import plain_names
from torch_dcpx.metadata.lazy import sizes_of
from torch_dcpx.planners.cache import STATE_READER
from torch_dcpx.planners.load_planner import DcpxLoadPlanner, planned_state, state_of
from torch_dcpx.planners.state_errors import naming_state_errors
from torch_dcpx.reader.coverage import check_shards
from torch_dcpx.reader.generation import Generation, check_same_generation
from torch_dcpx.reader.pretrained_reader import shown_path
from torch_dcpx.reader.reader import DcpxReader
from torch_dcpx.tensors.memory import names_on_meta, refuse_meta

_WITH_MEMORY = (
    "give it memory before, a module by to_empty(device=...); load_pretrained fills modules on meta"
)


class LoadOffer(NamedTuple):
    """A rank's part in the plan."""

    differences: Differences | None  # if the load cannot go on, or nothing is found
    plan: LoadPlan | None = None
    is_light: bool = False  # whether the plan has no items, since no hook looks at them
    stored_id: tuple[int, int] = (0, 0)  # number and checksum of all stored names
    unasked: bytes = b""  # for each stored name 1 if this rank does not ask for it; compressed
    has_stateful: bool = False
    new: tuple[str, ...] = ()  # stored names beneath this rank's parts that these do not have
    generation: Generation | None = None  # the save whose metadata this rank has read


class LoadAnswer(NamedTuple):
    """The coordinator's answer to one rank."""

    error: MismatchError | None
    plan: LoadPlan | None = None  # None: its own
    unasked: bytes | None = None  # 1 if no rank asks for it; None: ranks see different names
    has_stateful: bool = False  # on any rank
    is_again: bool = False  # ranks must grow their parts first, by names that no rank asks for


class RankLoad:
    """One rank's part in a load: its state, the differences from the checkpoint, its plan."""

    def __init__(
        self,
        reader: DcpxReader,
        planner: LoadPlanner,
        rules: LoadRules,
        key_map: KeyMap | None = None,
        *,
        model: nn.Module | None = None,
        twins: Mapping[str, Collection[str]] | None = None,
        is_handed: Callable[[Collection[str]], bool] | None = None,
    ) -> None:
        """Begins a load through `reader`.

        Args:
            key_map: from stored names to the state's.
            model: whose state it is: of a checkpoint that has parts the model's is loaded.
            twins: with a map: by name of the state, other names of the same tensor. The checkpoint
                need hold only one of them.
            is_handed: takes the missing names, and returns whether the caller hands the loaded
                state over after the read, as to a `Stateful` object. It may raise for tensors that
                cannot be filled. Default: only `Stateful` objects are handed theirs.
        """
        is_mapper = isinstance(planner, DcpxLoadPlanner) and planner.flatten_state_dict
        if key_map is not None and not is_mapper:
            raise OptionError(
                "key_map needs a DcpxLoadPlanner with flatten_state_dict=True, got "
                f"{type(planner).__name__}",
                option="key_map",
                value=key_map,
            )
        self._key_map = key_map
        self._model = model
        self._modules: dict[str, nn.Module] = {} if model is None else {"": model}
        self._twins = twins or {}
        self._is_handed = is_handed
        self._mapped: MappedState | None = None
        self.reader = reader
        self.planner = planner
        self.rules = rules
        self.state: dict[str, Any] = {}  # by the caller's keys, state dicts of Stateful objects
        self.differences = Differences()
        self.plan = LoadPlan([])
        self.growth = Growth()
        self._parts: dict[Any, Takes] = {}  # by the caller's keys
        self._numbered: set[tuple[str, ...]] = set()  # paths of optimizers' states
        self._part = ""  # prefix of the stored names that are meant
        self._asked: Mapping[str, Any] = {}  # the flat state
        self._metadata = Metadata({})
        self.stored: Mapping[str, Any] = {}

    def prepare(self, target: Mapping[str, Any], rank: int, is_coordinator: bool) -> LoadOffer:
        """Compares and plans as state_dict_loader's `_load_state_dict`; opens no file in vain."""
        reader, has_stateful = self.reader, False
        on_meta: list[str] = []  # of these a planner's copies would be filled, and lost
        for key in sorted(target, key=str):  # `state_dict` may be collective: in one order
            value = target[key]
            if is_stateful(value):
                has_stateful |= not isinstance(value, LoadPart) or value.is_applied
                if isinstance(value, nn.Module):
                    self._modules[str(key)] = value
                self._parts[key] = takes_of(value)
                if isinstance(value, torch.optim.Optimizer):
                    self._numbered.add((str(key), "state"))
                value = value.state_dict()
                on_meta += names_on_meta(value, str(key))
            self.state[key] = value
        refuse_meta(on_meta, "the state", _WITH_MEMORY)
        metadata, is_of_all = _read_metadata(reader, rank)
        self.rules.learn(metadata.state_dict_metadata)
        reader_args = {"rank": rank, "use_collectives": is_of_all}
        if not takes(reader.set_up_storage_reader, "kwargs"):
            reader_args = {}
        if not metadata.state_dict_metadata:  # a reader that has kept an error raises it here
            reader.set_up_storage_reader(metadata, is_coordinator, **reader_args)
        for key, value in target.items():
            if isinstance(value, LoadPart):
                self.state[key] = value.fitted(self.state[key], metadata, key)
        self._metadata, self.stored = metadata, metadata.state_dict_metadata
        self._is_coordinator, self._has_stateful = is_coordinator, has_stateful
        self._set_up_planner()
        reader.set_up_storage_reader(metadata, is_coordinator, **reader_args)
        self._part = "" if self._model is None else model_part(metadata)
        self._map_state()
        return self._offer(is_first=True)

    def prepare_again(self, unasked: bytes | None) -> LoadOffer:
        """As `prepare`, once the parts have what was saved beneath them and no rank asks for."""
        names = [name for name in self.unexpected(unasked) if name in self._new]
        paths = paths_of(names, self._metadata, self._taking())
        lost = self._grower().grow(self.state, self._taking(), paths) if self._new else ()
        self._set_up_planner()
        self._map_state()
        return self._offer(lost, is_first=False)

    def _grower(self) -> Grower:
        return Grower.of_saved(self.growth, self._metadata, self.reader, self._numbered)

    def _set_up_planner(self) -> None:
        planner, state = cast(Any, self.planner), self.state
        planner.set_up_planner(state, self._metadata, self._is_coordinator)
        if getattr(planner, "dcpx_is_odd", False):
            with naming_state_errors(state):  # of two keys with one text torch forgets one
                flat, paths, has_sharded, _ = STATE_READER.flatten(state)
            if not has_sharded:  # else torch gives names to empty dicts in lists, too
                planner.state_dict, planner.mappings = flat, paths

    def _taking(self) -> dict[Any, Takes]:
        """Returns the parts that take what only the checkpoint holds, by the caller's keys."""
        planner, parts = self.planner, self._parts
        if not (isinstance(planner, DefaultLoadPlanner) and planner.flatten_state_dict):
            return {}
        if self.rules.is_strict and not planner.allow_partial_load:
            return parts
        return dict.fromkeys(parts, Takes.EXTRA_STATES)

    def _new_names(self, stored_text: str) -> tuple[str, ...]:
        """Returns `LoadOffer.new`; `stored_text` has all stored names."""
        parts = self._taking()
        words = EXTRA_STATE, EMPTY
        if Takes.ALL not in parts.values() and not any(word in stored_text for word in words):
            return ()
        new = new_names(self.stored, self._asked, parts)
        if new and self._key_map is not None:  # those that it leaves alone
            entries = self._key_map.resolve(sizes_of(self.stored))
            new = [name for name in new if name in entries and entries[name].sources == (name,)]
        if EMPTY in stored_text and self._grower().lacks(self.state, parts):
            new.append(EMPTY)
        return tuple(new)

    def _offer(self, lost: Sequence[tuple[str, str]] = (), *, is_first: bool) -> LoadOffer:
        """Plans. Returns the offer."""
        planner, reader, has_stateful = self.planner, self.reader, self._has_stateful
        can_go_on = self._make_plan(lost)
        text = "\0".join(map(str, self.stored))
        stored_id = len(self.stored), zlib.crc32(text.encode(errors="surrogatepass"))
        self._new = frozenset(new := self._new_names(text) if is_first else ())
        if not can_go_on:
            offer = LoadOffer(self.differences, None, False, stored_id, self._unasked(), False, new)
            return offer._replace(generation=reader.generation)
        self.plan = reader.prepare_local_plan(self.plan)
        # Whether neither planner nor reader looks at the items of other ranks.
        is_light = (
            type(self.plan) is LoadPlan
            and has_stock_hooks(planner, ("create_global_plan",))
            and is_own(reader, DcpxReader, "prepare_global_plan")
        )
        if self._is_handed is not None:
            has_stateful |= self._is_handed(self.differences.missing)
        return LoadOffer(
            None if self.differences.found else self.differences,
            dataclasses.replace(self.plan, items=[]) if is_light else self.plan,
            is_light,
            stored_id,
            self._unasked(),
            has_stateful,
            new,
            reader.generation,
        )

    def loaded(self) -> dict[str, Any]:
        """Returns the state after the read, by the caller's keys."""
        planner = self.planner
        if isinstance(planner, DefaultLoadPlanner) and not planner.flatten_state_dict:
            # The planner has put objects into a dict of its own; stock leaves them there.
            for key, value in planner.state_dict.items():
                if key in self.state and not isinstance(value, torch.Tensor):
                    self.state[key] = value
        return self.state

    def unexpected(self, unasked: bytes | None) -> tuple[str, ...]:
        """Returns the stored names that no rank asks for; with None, that this one does not."""
        mask = zlib.decompress(self._unasked() if unasked is None else unasked)
        names = itertools.compress(self.stored, mask)
        return tuple(name for name in names if not str(name).startswith(RECORD))

    def _map_state(self) -> None:
        """Gives the planner the state by stored names, unless it has that already."""
        planner: Any = self.planner
        if isinstance(planner, DcpxLoadPlanner):
            planner.dcpx_is_mapped = False  # it was for an earlier load
        if self._key_map is None:
            return
        wanted = planner.state_dict.keys()
        if wanted <= self.stored.keys() and keeps_names(self._key_map, self.stored):
            return
        state = planner.state_dict
        plain = plain_names(self._modules, state)
        mapped = map_state(state, self.stored, self._key_map, self._part, plain)
        missing = frozenset(mapped.missing)
        mapped.missing[:] = [
            name for name in mapped.missing if missing.issuperset(self._twins.get(name, ()))
        ]
        is_same = len(planner.state_dict) == len(mapped.state) <= len(mapped.names) and all(
            name == stored for stored, name in mapped.names.items()
        )
        if not is_same:
            self._mapped = mapped
            planner.dcpx_use_mapped(mapped)

    def _compare(self, compared: Callable[..., Differences], rules: LoadRules) -> None:
        """Notes the differences of what the planner will plan."""
        planner, stored = self.planner, self.stored
        self._asked = planned_state(planner, stored)
        self.differences = compared(self._asked, stored, rules, mapped=self._mapped)
        if self._take_others():
            self._compare(compared, rules)

    def _take_others(self) -> bool:
        """Makes room by `Grower.replace`. Returns whether there was anything to replace."""
        found, saved = self.differences, self._metadata.planner_data or {}
        own: dict[str, Any] = getattr(self.planner, "mappings", {})
        paths = ChainMap(own, saved) if self._mapped is None else own
        lacking = [n for n in found.missing if EXTRA_STATE in n and not self.rules.may_miss(n)]
        args = self.state, (*found.unlike, lacking), self._metadata, paths, self._parts
        if not (any(args[1]) and self._grower().replace(*args)):
            return False
        self._set_up_planner()
        self._map_state()
        return True

    def _make_plan(self, lost: Sequence[tuple[str, str]] = ()) -> bool:
        """Has the planner plan. Returns whether `differences` allow the load."""
        planner, stored, rules = self.planner, self.stored, self.rules
        is_partial = getattr(planner, "allow_partial_load", False)
        if is_partial:
            rules = rules._replace(is_strict=False)
        compared = partial(compare, is_dtype_known=has_stock_hooks(planner))
        is_stock = has_stock_hooks(planner, ("create_local_plan",))
        if is_stock:
            self._compare(compared, rules)
            self.differences = self.differences._replace(lost=tuple(lost))
            more, less = self.differences.way_in
            if self._key_map is not None:  # it has done what it can
                self.differences = self.differences._replace(wrapped=0, way_in=("", ""))
            elif not isinstance(self.state.get(less), Mapping):
                self.differences = self.differences._replace(way_in=(more, ""))
            if self.differences.is_refused(rules):
                return False
        else:
            self._asked = state_of(planner)
        if isinstance(planner, DefaultLoadPlanner):
            planner.allow_partial_load = True  # `compare` finds the missing names
        try:
            self.plan = planner.create_local_plan()
        finally:
            if isinstance(planner, DefaultLoadPlanner):
                planner.allow_partial_load = is_partial
        if has_stock_hooks(planner, PLAN_HOOKS) and not isinstance(planner, DcpxLoadPlanner):
            check_shards(state_of(planner), stored)  # ours has checked
        if not is_stock:
            sources: dict[str, dict[str, None]] = {}
            for item in self.plan.items:
                sources.setdefault(item.dest_index.fqn, {})[item.storage_index.fqn] = None
            self.differences = compared(
                state_of(planner), stored, rules, sources=sources, mapped=self._mapped
            )
        return not self.differences.is_refused(rules)

    def _unasked(self) -> bytes:
        asked = {item.storage_index.fqn for item in self.plan.items}
        asked.update(self._asked)
        return zlib.compress(bytes(name not in asked for name in self.stored), 1)


def agree(own: RankLoad, offers: Sequence[LoadOffer]) -> list[LoadAnswer]:
    """Returns the coordinator's answers to the offers, by rank: one error, or a plan for each.
    Raises: PlanError, if ranks gave arguments that contradict each other; as `check_left`.
    """
    check_same_generation(offer.generation for offer in offers)  # before names of unlike saves
    if any(offer.new for offer in offers):
        unasked = _by_all(offers)
        names = {EMPTY, *own.unexpected(unasked)}
        if unasked is None or any(not names.isdisjoint(offer.new) for offer in offers):
            return [LoadAnswer(None, unasked=unasked, is_again=True)] * len(offers)
    differences = [offer.differences or Differences() for offer in offers]
    error = mismatch_error(shown_path(own.reader), differences, own.rules)
    if error is not None:
        return [LoadAnswer(error)] * len(offers)
    plans = [offer.plan for offer in offers if offer.plan is not None]
    if len(plans) < len(offers) or len({offer.is_light for offer in offers}) > 1:
        raise PlanError("ranks gave load different arguments: strict, cast or planner")
    unasked = _by_all(offers)
    if own.rules.check_left is not None and unasked is not None:
        own.rules.check_left(own.unexpected(unasked), own.stored)
    plans = own.reader.prepare_global_plan(own.planner.create_global_plan(plans))
    answer = LoadAnswer(None, None, unasked, any(offer.has_stateful for offer in offers))
    return [answer if offers[0].is_light else answer._replace(plan=plan) for plan in plans]


def _by_all(offers: Sequence[LoadOffer]) -> bytes | None:
    """Returns `LoadAnswer.unasked`."""
    if len({offer.stored_id for offer in offers}) > 1:
        return None
    by_all = -1
    for mask in {zlib.decompress(offer.unasked) for offer in offers}:
        by_all &= int.from_bytes(mask, "big")
    return zlib.compress(by_all.to_bytes(offers[0].stored_id[0], "big"), 1)


def _read_metadata(reader: DcpxReader, rank: int) -> tuple[Metadata, bool]:
    """Returns the metadata of all ranks, or of this rank as stock does; whether it is of all."""
    try:
        return reader.read_metadata(), True
    except Exception:
        if not takes(reader.read_metadata, "kwargs"):
            raise
    return reader.read_metadata(rank=rank), False
