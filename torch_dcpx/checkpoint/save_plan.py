"""The ranks of a save agree on a plan, in a few bytes if nothing has changed.

1. Each rank offers its local plan. If it knows a plan for the fingerprint of its state, it offers
   the name of that plan's agreement instead, a digest of its Python values, and a total of its
   tensors (`same_contents`).
2. If all offers have one name and one digest, and totals that add up, the coordinator confirms it,
   and each rank takes the plan that it has kept. If all are plans, the coordinator plans, and draws
   a name.
3. Else the coordinator answers "again", and each rank offers its plan.

So plans of two agreements never meet: names are random, and a rank that has lost its plan, or has
kept an older one, makes all ranks plan again. Each rank keeps its plan once all of planning has
succeeded there.
"""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType

from torch_dcpx._compat import HAS_KNOWN_ITEMS
from torch_dcpx._hooks import has_hooks
from torch_dcpx._plan_classes import MAKER
from torch_dcpx.checkpoint.same_contents import Compared, Contents, Told, add_up, compare
from torch_dcpx.errors import PlanError
from torch_dcpx.planners import cache as plan_cache
from torch_dcpx.planners.cache import Agreement, KnownPlan, Planning, values_digest
from torch_dcpx.planners.save_planner import DcpxSavePlanner, keeps_plans
from torch_dcpx.ranks.failures import from_rank
from torch_dcpx.ranks.plan_wire import RankPlan, WirePlan, offered
from torch_dcpx.tensors.digests import TENSORS, digests_of, report_conflicts, report_differing
from torch_dcpx.tensors.offences import refuse_unlike
from torch_dcpx.writer.rows import SAVE_ROWS
from torch_dcpx.writer.table import check_shapes, gives_state_as_it_is
from torch_dcpx.writer.writer import DcpxWriter


class SaveOffer(NamedTuple):
    """A rank's part in the plan."""

    plan: SavePlan | None  # None: that of `agreement`
    objects: tuple[str, ...] | None = None  # names of Python values; None: keep nothing
    agreement: str = ""
    values: bytes = b""  # with an agreement one digest, with a plan that has none all digests
    told: Told | None = None  # of the tensors of a plan
    total: bytes = b""  # of those that an agreement compares


class SaveAnswer(NamedTuple):
    """The coordinator's answer to one rank."""

    save_id: str  # the coordinator's, for its `.metadata`
    plan: SavePlan | None = None  # of this rank; None: that of the agreement
    is_again: bool = False  # all ranks must offer plans
    agreement: str = ""  # its name; "": keep nothing
    compared: tuple[str, ...] = ()
    factors: bytes = b""  # for totals of later saves
    turns: int = 1
    probe: str = ""  # a file to look for first, if paths or nodes differ
    looks: Literal["", "waits", "looks"] = ""  # what this rank does once the save is committed


class PlanRound:
    """One save's agreement on this rank."""

    def __init__(
        self,
        planner: SavePlanner,
        writer: DcpxWriter,
        rank: int,
        ranks: int,
        group: str = "",
        given: Mapping[str, Any] | None = None,
    ) -> None:
        """Begins an agreement of `ranks` ranks; `group` is their name in this process, "" for one
        process by itself, `given` the state before its objects gave theirs.
        """
        self._planner: Any = planner
        self._contents = Contents(ranks, given or {})
        self._writer = writer
        self._group = (rank, ranks, group)
        # Taken once: other saves of this process may replace them meanwhile.
        self._known: KnownPlan | None = None
        self._offered: Agreement | None = None
        self._planning: Planning | None = None  # if plans are kept
        self._is_private = False  # whether no user's code sees the metadata: no copy is needed
        self._full: SavePlan | None = None  # this rank's local plan
        self.metadata: Metadata | None = None  # the coordinator's, for the end of the save

    def offer(self) -> SaveOffer:
        """Makes this rank's offer. REQUIRES: planner and writer are set up.
        Raises PlanError: a tensor has another shape than planned; and errors of hooks.
        """
        if keeps_plans(self._planner) and has_hooks(self._writer, _PLAN_HOOKS):
            self._planning = self._planner.dcpx_planning
            self._planning.group = self._group
            is_default = self._planning.plans is _DEFAULT_PLANS
            self._is_private = is_default and has_hooks(self._writer, _FINISH)
        plan = self._planner.create_local_plan()
        values = b""
        if not isinstance(self._planner, DcpxSavePlanner):  # ours has checked
            check_shapes(plan.items, self._planner)
            values = self._digests(plan)
        known = self._known = None if self._planning is None else self._planning.known
        agreement = self._offered = known.agreement if known is not None else None
        if agreement is None:
            self._full = self._writer.prepare_local_plan(plan)
            return self._offer_of_plan(values)
        # Its items were checked when they were new.
        prepared = self._writer.prepare_local_plan(dataclasses.replace(plan, items=[]))
        self._full = dataclasses.replace(prepared, items=plan.items)
        if self._group[1] > 1:
            values = values_digest(plan.digests, agreement.compared)
        contents = agreement.contents
        total = contents.total(self._planner.state_dict) if contents is not None else b""
        return SaveOffer(None, None, agreement.name, values, total=total)

    def _offer_of_plan(self, values: bytes = b"") -> SaveOffer:
        plan, known = self._full, self._known
        told = None
        if plan is not None and gives_state_as_it_is(self._planner):
            told = self._contents.tell(plan, self._planner.state_dict)
        return SaveOffer(plan, known.objects if known is not None else None, "", values, told)

    def _digests(self, plan: SavePlan) -> bytes:
        """Returns the digests of the Python values that a planner with stock's hooks plans,
        pickled; b"" without digests or other ranks.
        """
        if self._group[1] == 1 or not gives_state_as_it_is(self._planner):
            return b""
        names = [item.index.fqn for item in plan.items if item.type is WriteItemType.BYTE_IO]
        state = self._planner.state_dict
        digests = digests_of({name: state[name] for name in names if name in state})
        return pickle.dumps(digests) if digests else b""

    def offer_again(self) -> SaveOffer:
        """Makes this rank's second offer, which is its plan."""
        known = self._known
        if known is not None and known.agreement is self._offered:
            known.agreement = None  # some rank does not know it: saves the next save a round
        if self._offered is not None and self._full is not None:
            self._full = offered(self._full)  # the writer has seen none of its items
        self._offered = None
        return self._offer_of_plan()

    def answer(self, save_id: str, offers: Sequence[SaveOffer]) -> list[SaveAnswer]:
        """Returns the coordinator's answers, by rank."""
        if all(offer.plan is None for offer in offers) and _are_alike(offers):
            kept = self._agreement().metadata
            self.metadata = kept and self._handed(kept)
            for name in ("global_plan", "metadata"):  # of another save
                vars(self._planner).pop(name, None)
            return [SaveAnswer(save_id)] * len(offers)
        plans = [offer.plan for offer in offers if offer.plan is not None]
        if len(plans) < len(offers):
            return [SaveAnswer(save_id, is_again=True)] * len(offers)
        if not isinstance(self._planner, DcpxSavePlanner) and HAS_KNOWN_ITEMS:  # ours checks
            refuse_unlike(plans, MAKER.unlike_items([list(plan.items) for plan in plans]))
            digests = (from_rank(offer.values) if offer.values else {} for offer in offers)
            report_conflicts(digests, "warn", _DEFAULT.dcpx_logged)
        contents = compare([offer.told or Told() for offer in offers], plans)
        plans, self.metadata = self._global_plan(plans, contents)
        plans = self._writer.prepare_global_plan(plans)
        compared = self._compared(offers)
        name = uuid.uuid4().hex if compared is not None else ""
        factors = contents.factors if compared is not None else []
        return [
            SaveAnswer(save_id, plan, False, name, compared or (), own, contents.turns)
            for plan, own in zip(
                plans, itertools.chain(factors, itertools.repeat(b"")), strict=False
            )
        ]

    def _global_plan(
        self, plans: list[SavePlan], contents: Compared
    ) -> tuple[list[SavePlan], Metadata]:
        """Returns all plans and the metadata. Raises PlanError: as the planner, and with
        `on_conflict="error"` where contents differ.
        """
        planner, on_conflict, logged = self._planner, "warn", _DEFAULT.dcpx_logged
        if isinstance(planner, DcpxSavePlanner):
            on_conflict, logged = planner.on_conflict, planner.dcpx_logged
            planner.dcpx_planning.lowest_names = contents.settled.union(contents.differing)
        try:
            made: tuple[list[SavePlan], Metadata] = planner.create_global_plan(plans)
        finally:
            if isinstance(planner, DcpxSavePlanner):
                planner.dcpx_planning.lowest_names = frozenset()
        # What is no one tensor on all ranks was refused.
        report_differing(contents.differing, TENSORS, on_conflict, logged)
        return made

    def finish(self, answer: SaveAnswer) -> SavePlan:
        """Returns this rank's final plan. Raises PlanError: a kept plan does not fit the state."""
        piece = answer.plan if answer.plan is not None else self._agreement().plan
        if self._planning is None:
            plan: SavePlan = self._planner.finish_plan(piece)
            return plan
        # Our planner and writer change no item. Other code gets a copy of the kept plan.
        is_ours = type(self._planner) is DcpxSavePlanner and type(self._writer) is DcpxWriter
        items = list(piece.items) if is_ours else _copied(piece.items)
        plan = self._planner.finish_plan(dataclasses.replace(piece, items=items))
        known = self._known
        if answer.plan is None:
            self._check_piece(plan)
        elif answer.agreement and known is not None:
            if isinstance(piece, RankPlan) and isinstance(plan, RankPlan):
                # Else each save would search for rows.
                piece = dataclasses.replace(piece, can_split=bool(plan.cut_names))
            contents = self._contents.kept(answer.factors, answer.turns)
            agreement = Agreement(answer.agreement, piece, answer.compared, self.metadata, contents)
            if len(known.items) + agreement.weight <= plan_cache.MAX_ITEMS:
                metadata = None if self.metadata is None else self._handed(self.metadata)
                known.agreement = dataclasses.replace(agreement, metadata=metadata)
                self._planning.plans.trim()
        return plan

    def _agreement(self) -> Agreement:
        """Returns the agreement that this rank has offered. Raises PlanError: there is none."""
        if self._offered is None:
            raise PlanError("the coordinator names an agreement that this rank does not know")
        return self._offered

    def _check_piece(self, plan: SavePlan) -> None:
        """Raises PlanError if a kept plan does not fit the state: a tensor would silently be
        written under another's sizes.
        """
        state = self._planner.state_dict
        for number in SAVE_ROWS.strangers(plan.items, state):
            item = plan.items[number]
            fqn, about = item.index.fqn, item.tensor_data
            value = state.get(fqn)
            has, wants = "nothing", "a value"
            if isinstance(value, torch.Tensor):
                local = getattr(value, "_local_tensor", value)
                # A tensor that is planned whole knows its own part.
                if self._known is not None and fqn in self._known.whole_names:
                    continue
                has = f"{local.dtype} of {list(local.shape)}"
            if about is not None:
                wants = f"{about.properties.dtype} of {list(about.chunk.sizes)}"
            raise PlanError(
                f"'{fqn}': a plan that was kept writes {wants}, the state has {has}", fqn=fqn
            )

    def _compared(self, offers: Sequence[SaveOffer]) -> tuple[str, ...] | None:
        """Returns the names of Python values that ranks compare; None: no rank keeps the plan."""
        names = [frozenset(offer.objects) for offer in offers if offer.objects is not None]
        if self._planning is None or self._planning.has_conflicts or len(names) < len(offers):
            return None
        if len(set(names)) == 1:
            return tuple(sorted(names[0]))
        counts = Counter(name for own in names for name in own)
        shared = frozenset(name for name, count in counts.items() if count > 1)
        # One digest of them must be equal on all ranks.
        return tuple(sorted(shared)) if all(shared <= own for own in names) else None

    def _handed(self, metadata: Metadata) -> Metadata:
        """Returns the metadata for other code, as a copy that it may change."""
        entries, paths = metadata.state_dict_metadata, metadata.planner_data
        own = dict(entries) if self._is_private else MAKER.copied_entries(dict(entries))
        return dataclasses.replace(
            metadata, state_dict_metadata=own, planner_data=dict(paths) if paths else paths
        )


def _are_alike(offers: Sequence[SaveOffer]) -> bool:
    """Returns whether all ranks offer one agreement, and what it compares is still equal."""
    is_one = len({offer._replace(total=b"") for offer in offers}) == 1
    return is_one and add_up([offer.total for offer in offers])


def _copied(items: Sequence[Any]) -> Any:
    """Returns copies of items that share nothing mutable with them."""
    return pickle.loads(pickle.dumps(WirePlan(list(items)))).items  # noqa: S301  (our own)


# Our writer's hooks that see a plan before it is final, and its hook that sees the metadata.
_PLAN_HOOKS = {
    "prepare_local_plan": DcpxWriter.prepare_local_plan,
    "prepare_global_plan": DcpxWriter.prepare_global_plan,
}
_FINISH = {"finish": DcpxWriter.finish}

_DEFAULT = DcpxSavePlanner()
_DEFAULT_PLANS = _DEFAULT.dcpx_planning.plans


def default_save_planner() -> DcpxSavePlanner:
    """Returns a planner for one save. All of them share kept plans, and log a conflict once."""
    planner = DcpxSavePlanner()
    planner.dcpx_planning.plans = _DEFAULT_PLANS
    planner.dcpx_logged = _DEFAULT.dcpx_logged
    return planner


def forget_default_plans() -> None:
    """Drops the plans that default planners have kept."""
    _DEFAULT_PLANS.clear()
