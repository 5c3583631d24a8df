"""A callback for the Trainer of transformers: its checkpoints are saved in the background.

The Trainer writes a checkpoint beside its place: its own files at once, model and optimizer when
the state is copied, while it trains on. When all is durable the folder gets its name, so that
`resume_from_checkpoint=True` never meets a half one. The Trainer alone reads these folders.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch_dcpx._answered_os import path_of
from torch_dcpx._arguments import check_bool
from torch_dcpx._keywords import telling
from torch_dcpx.errors import UnsupportedError
from torch_dcpx.integrations._dcp_calls import Part, base_names, loads_by_us, noted
from torch_dcpx.integrations._folder_record import beyond_limit
from torch_dcpx.integrations._folders import FolderSaves
from torch_dcpx.integrations._framework import needed
from torch_dcpx.options import WriteOptions

with needed(__name__, "transformers[torch]>=5.23"):
    from accelerate.state import AcceleratorState
    from torch.distributed.fsdp import StateDictType
    from transformers import (
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )
    from transformers.trainer import TRAINER_STATE_NAME
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, sort_checkpoints

_NUMBERED = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")


@telling
class DcpxCallback(TrainerCallback):
    """Saves the Trainer's checkpoints in the background, under FSDP with SHARDED_STATE_DICT.

    `Trainer(..., callbacks=[DcpxCallback()])`. A save that failed ends the training at the next
    one, or at its end. `save_total_limit` counts what is committed and what `.dcpx.folder` names;
    all else stays, and what is being read or is pinned. `state.log_history` gets the figures of
    each save: `save_bytes`, `save_s`, `save_blocked_s`.
    """

    def __init__(
        self, write_options: WriteOptions | None = None, *, trainable_only: bool = False
    ) -> None:
        """Saves nothing yet.

        Args:
            write_options: of saves, such as `WriteOptions(progress=True)`; not `overlap`,
                `node_local`, `max_in_flight`, `on_busy`. Default None: all defaults.
            trainable_only: leaves frozen parameters out of saves, and as they are in loads; such a
                folder is for this callback alone. Of a model of PEFT the Trainer itself saves the
                adapter alone. Default False.
        """
        check_bool("trainable_only", trainable_only)
        self._trainable_only = trainable_only
        self._saves = FolderSaves("save_checkpoint", write_options)
        self._step = 0  # of the save under way in the background

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_more: Any
    ) -> None:
        """Refuses what it cannot save.

        Raises:
            UnsupportedError: this is not FSDP with SHARDED_STATE_DICT; or `push_to_hub`,
                `save_on_each_node` or save_strategy="best" is set.
        """
        plugin = getattr(AcceleratorState(), "fsdp_plugin", None)
        if plugin is None:
            raise UnsupportedError(
                "DcpxCallback: this training has no FSDP: leave the callback out, and the Trainer "
                "saves as ever; of a model of PEFT the adapter alone"
            )
        kind = getattr(plugin, "state_dict_type", None)
        if kind != StateDictType.SHARDED_STATE_DICT:
            problem = "it saves FSDP with SHARDED_STATE_DICT"
            raise UnsupportedError(f"DcpxCallback with state_dict_type={kind}: {problem}")
        for name in ("push_to_hub", "save_on_each_node"):
            if getattr(args, name):
                raise UnsupportedError(f"DcpxCallback with {name}=True")
        if args.save_strategy == SaveStrategy.BEST:
            raise UnsupportedError("DcpxCallback with save_strategy='best': use 'steps' or 'epoch'")

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_more: Any
    ) -> None:
        """Raises UnsupportedError: the checkpoint was saved by something else."""
        if self._step != state.global_step:
            raise UnsupportedError(
                "DcpxCallback: this checkpoint was saved by another DcpxCallback, or by a Trainer "
                "whose _save_checkpoint does not call that of transformers"
            )

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_more: Any
    ) -> None:
        """Waits where the training ends: the Trainer may load the best one. Raises: it failed."""
        if control.should_training_stop:
            self._wait(state)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_more: Any
    ) -> None:
        """Puts the figures of a save that has ended into the Trainer's log."""
        if self._saves.has_ended_well:  # an error comes at the next save, on all ranks
            self._wait(state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_more: Any
    ) -> None:
        """Waits for the last save. Raises DcpxError: it failed."""
        self._wait(state)

    def save_checkpoint(self, trainer: Trainer, model: Any, trial: Any) -> None:
        """Saves in place of `Trainer._save_checkpoint`, in the background.

        Raises:
            DcpxError: of this save, or of the one before.
        """
        state, limit = trainer.state, trainer.args.save_total_limit
        root = path_of(trainer._get_output_dir(trial))
        target = self._saves.begin(lambda: root / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        self._note_figures(state)
        with self._saves.telling(), noted(target) as parts:
            with _saving_to(trainer, target.parent):
                _save_of_trainer(trainer, model, trial)
            _name_best(root, state)
            if trainer.args.should_save:
                state.save_to_json(str(target / TRAINER_STATE_NAME))
        parts = [part.without(self._base(part, trainer)) for part in parts]
        self._step, best = state.global_step, state.best_model_checkpoint
        kept = [root / target.name, *([] if best is None else [path_of(best)])]
        self._saves.commit(parts, lambda: _condemned(root, limit, kept))
        if trainer.control.should_training_stop or state.global_step >= state.max_steps:
            self._wait(state)  # the Trainer may load the best one before it ends

    def loading(self, trainer: Trainer, folder: Path) -> AbstractContextManager[None]:
        """Returns what lets the Trainer load a folder that holds what is trained alone."""
        if not self._trainable_only:
            return nullcontext()
        return loads_by_us(folder, lambda part: self._base(part, trainer))

    def _base(self, part: Part, trainer: Trainer) -> Collection[str]:
        """Returns the names of a part that saves leave out, and that loads may miss."""
        optimizers = [] if trainer.optimizer is None else [trainer.optimizer]
        if not self._trainable_only:
            return ()
        return base_names(part.state_dict, trainer.model, optimizers)

    def _wait(self, state: TrainerState) -> None:
        self._saves.wait()
        self._note_figures(state)

    def _note_figures(self, state: TrainerState) -> None:
        if figures := self._saves.take_figures():
            state.log_history.append({**figures, "step": self._step})


_save_of_trainer = Trainer._save_checkpoint


def _own_of(trainer: Trainer) -> DcpxCallback | None:
    callbacks = trainer.callback_handler.callbacks
    return next((one for one in callbacks if isinstance(one, DcpxCallback)), None)


def _save_checkpoint(self: Trainer, model: Any, trial: Any) -> None:
    own = _own_of(self)
    if own is None:
        _save_of_trainer(self, model, trial)
    else:
        own.save_checkpoint(self, model, trial)


_load_of_trainer, _load_best_of_trainer = Trainer._load_from_checkpoint, Trainer._load_best_model


def _load_from_checkpoint(self: Trainer, resume_from_checkpoint: str, model: Any = None) -> None:
    own = _own_of(self)
    with own.loading(self, path_of(resume_from_checkpoint)) if own else nullcontext():
        _load_of_trainer(self, resume_from_checkpoint, model)


def _load_best_model(self: Trainer) -> None:
    own = _own_of(self)
    with (
        own.loading(self, path_of(self.state.best_model_checkpoint or "")) if own else nullcontext()
    ):
        _load_best_of_trainer(self)


Trainer._save_checkpoint = _save_checkpoint
Trainer._load_from_checkpoint = _load_from_checkpoint
Trainer._load_best_model = _load_best_model


@contextmanager
def _saving_to(trainer: Trainer, folder: Path) -> Iterator[None]:
    """Lets a Trainer's checkpoint go below a folder, and nothing else of the Trainer's or the
    user's files.
    """
    vars(trainer)["_get_output_dir"] = lambda trial: str(folder)  # noqa: ARG005  (asked by its name)
    try:
        yield
    finally:
        del vars(trainer)["_get_output_dir"]


def _name_best(root: Path, state: TrainerState) -> None:
    """Notes the best checkpoint, for which the Trainer has looked elsewhere."""
    if state.best_global_step:
        best = root / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
        if best.exists() or state.best_global_step == state.global_step:
            state.best_model_checkpoint = str(best)


def _condemned(root: Path, limit: int | None, kept: Collection[Path]) -> list[Path]:
    """Returns the checkpoints that `save_total_limit` does not keep, in the Trainer's order."""
    if not limit or limit < 0:
        return []
    folders = map(Path, sort_checkpoints(str(root), use_mtime=True))
    return beyond_limit([one for one in folders if _NUMBERED.fullmatch(one.name)], limit, kept)
