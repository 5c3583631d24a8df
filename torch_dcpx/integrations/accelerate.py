"""accelerate's `Accelerator`, whose `save_state` returns when the state is copied.

A folder of `save_state` holds a checkpoint of DCP for each model and each optimizer, and files that
accelerate writes. All of it is written beside its place and renamed when it is durable: the folder
is there as a whole, or not at all. accelerate's own `load_state` reads it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch_dcpx._answered_os import path_of
from torch_dcpx._arguments import check_bool
from torch_dcpx._keywords import telling
from torch_dcpx.checkpoint.handle import SaveHandle
from torch_dcpx.checkpoint.same_call import Call, check_same_call
from torch_dcpx.errors import NotCommittedError, OptionError, UnsupportedError
from torch_dcpx.integrations._dcp_calls import Part, base_names, loads_by_us, noted
from torch_dcpx.integrations._folder_record import beyond_limit, read_record
from torch_dcpx.integrations._folders import FolderSaves, is_whole
from torch_dcpx.integrations._framework import needed
from torch_dcpx.options import ReadOptions, WriteOptions
from torch_dcpx.ranks.call_id import CallId
from torch_dcpx.ranks.members import exchange_for

with needed(__name__, "accelerate>=1.15"):
    from accelerate import Accelerator
    from accelerate.utils import DistributedType
    from accelerate.utils.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME, RNG_STATE_NAME
    from torch.distributed.fsdp import StateDictType

logger = logging.getLogger("torch_dcpx")

_MODEL = re.compile(rf"{FSDP_MODEL_NAME}_(\d+)")
_NUMBERED = re.compile(r"checkpoint_(\d+)")  # of accelerate's automatic names


@telling
class DcpxAccelerator(Accelerator):
    """accelerate's `Accelerator`, which saves and loads by torch-dcpx, under FSDP1 and FSDP2.

    `state_dict_type` must be SHARDED_STATE_DICT. With `automatic_checkpoint_naming`, `total_limit`
    counts folders that are whole and ours; what is being read or is pinned stays, and all else: a
    save, too, removes only what `.dcpx.folder` names in a folder, as it was saved.
    """

    def __init__(
        self,
        *args: Any,
        write_options: WriteOptions | None = None,
        trainable_only: bool = False,
        **kwargs: Any,
    ) -> None:
        """Args: as accelerate's, and

        Args:
            write_options: of saves, such as `WriteOptions(progress=True)`; not `overlap`,
                `node_local`, `max_in_flight`, `on_busy`. Default None: all defaults.
            trainable_only: leaves frozen parameters out of saves, and as they are in loads; such a
                folder is for this class alone (docs/howto/lora.md). Default False.
        """
        check_bool("trainable_only", trainable_only)
        super().__init__(*args, **kwargs)
        self._saves = FolderSaves("save_state", write_options)
        self._trainable_only = trainable_only

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any
    ) -> SaveHandle:
        """Saves as accelerate does, in the background: the state may change when this returns.

        Args:
            output_dir, safe_serialization: as accelerate's.
            kwargs: as accelerate's, for the saves of models.

        Returns:
            The save: when it has ended, the folder is there (as it is behind `wait_for_saves`).

        Raises:
            UnsupportedError: this is not FSDP with SHARDED_STATE_DICT, or each node saves alone.
            OptionError: no `output_dir`; or the next automatic name is taken.
            PlanError: ranks save to other folders.
            DcpxError: of this save, or of the one before, which failed in the background.
        """
        config = self.project_configuration
        number, is_named = config.iteration, config.automatic_checkpoint_naming
        target = self._saves.begin(lambda: self._next_folder(output_dir), may_replace=not is_named)
        self._log_figures()
        try:
            with self._without_naming(), self._saves.telling(), noted(target) as parts:
                super().save_state(str(target), safe_serialization, **kwargs)
            parts = [part.without(self._base(part)) for part in parts]
            handle = self._saves.commit(parts, lambda: self._condemned(target.name))
        except BaseException:
            config.iteration = number  # accelerate has counted only where nothing was raised
            raise
        config.iteration = number + 1
        return handle

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Loads as accelerate does, and with automatic names the highest number that is whole.

        The next automatic name follows it. A WARNING says where that is a copy of the user's. Waits
        for a save under way.

        Args:
            input_dir, load_kwargs: as accelerate's.
            kwargs: as accelerate's, for the loads of models.

        Raises:
            NotCommittedError: `input_dir`, or every automatically named folder, is not whole.
            As `dcpx.load`.
        """
        self.wait_for_saves()
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            number = self._newest()
            input_dir = str(self._named_folder(number))
            self.project_configuration.iteration = max(self._numbers()) + 1
        with loads_by_us(path_of(input_dir or "").expanduser(), self._base):
            super().load_state(input_dir, load_kwargs, **kwargs)

    def wait_for_saves(self) -> None:
        """Waits for the save under way, and logs its report to the trackers.

        Raises:
            DcpxError: it failed, and nobody knows yet.
        """
        self._saves.wait()
        self._log_figures()

    def _log_figures(self) -> None:
        if figures := self._saves.take_figures():
            self.log(figures)

    def end_training(self) -> None:
        """Waits for the save under way, then ends the trackers. Raises: as `wait_for_saves`."""
        self.wait_for_saves()
        super().end_training()

    def _base(self, part: Part) -> Collection[str]:
        """Returns the names of a part that saves leave out, and that loads may miss."""
        found = _MODEL.fullmatch(part.path.name) if self._trainable_only else None
        if found is None or int(found[1]) >= len(self._models):
            return ()
        return base_names(part.state_dict, self._models[int(found[1])], self._optimizers)

    def _next_folder(self, output_dir: str | None) -> Path:
        """Returns where `save_state` saves. Raises: as `save_state`."""
        plugin, config = getattr(self.state, "fsdp_plugin", None), self.project_configuration
        kind = getattr(plugin, "state_dict_type", None)
        if (
            self.distributed_type != DistributedType.FSDP
            or kind != StateDictType.SHARDED_STATE_DICT
        ):
            raise UnsupportedError(
                f"DcpxAccelerator.save_state under {self.distributed_type.value} with "
                f"state_dict_type={kind}: it saves FSDP with SHARDED_STATE_DICT"
            )
        if config.save_on_each_node:
            raise UnsupportedError("DcpxAccelerator.save_state with save_on_each_node=True")
        if config.automatic_checkpoint_naming:
            return self._named_folder(config.iteration)
        if output_dir is None:
            raise OptionError("save_state needs an output_dir", option="output_dir")
        return path_of(output_dir).expanduser()

    def _named_folder(self, number: int) -> Path:
        return path_of(self.project_dir, "checkpoints", f"checkpoint_{number}")

    @contextmanager
    def _without_naming(self) -> Iterator[None]:
        """Lets accelerate save where it is told, and remove nothing."""
        config = self.project_configuration
        is_named, config.automatic_checkpoint_naming = config.automatic_checkpoint_naming, False
        try:
            yield
        finally:
            config.automatic_checkpoint_naming = is_named

    def _numbers(self) -> list[int]:
        """Returns the numbers of the folders with automatic names, the newest last."""
        root = self._named_folder(0).parent
        matches = [match for path in root.glob("*") if (match := _NUMBERED.fullmatch(path.name))]
        return sorted(int(match[1]) for match in matches)

    def _whole(self) -> list[int]:
        return [number for number in self._numbers() if self._is_whole(self._named_folder(number))]

    def _is_whole(self, folder: Path) -> bool:
        models = [f"{FSDP_MODEL_NAME}_{at}" for at in range(len(self._models))]
        optimizers = [f"{OPTIMIZER_NAME}_{at}" for at in range(len(self._optimizers))]
        has_rest = (folder / f"{RNG_STATE_NAME}_0.pkl").exists()
        return has_rest and all(is_whole(folder / name) for name in models + optimizers)

    def _newest(self) -> int:
        """Returns on all ranks the number of the newest whole folder that the main one finds."""

        def newest(calls: list[Call]) -> int:
            check_same_call(calls, of="DcpxAccelerator")
            numbers = self._whole()
            if not numbers:
                path = str(self._named_folder(0).parent)
                raise NotCommittedError(f"load_state: no folder in '{path}' is whole", path=path)
            self._tell_of_copy(numbers)
            return numbers[-1]

        call = CallId("load_state")
        with exchange_for(None, False, ReadOptions().load_timeout_s, "load", call) as exchange:
            return exchange.all_reduce("newest", lambda: Call("load_state", {}), newest)

    def _tell_of_copy(self, numbers: list[int]) -> None:
        """Warns where accelerate takes what is not ours, as the highest number, before ours."""
        *others, taken = map(self._named_folder, numbers)
        ours = [folder for folder in others if read_record(folder) is not None]
        if ours and read_record(taken) is None:
            logger.warning(
                "load_state: '%s' has the highest number, so accelerate takes it; no save of ours "
                "has made it under this name, the last of those is '%s': name one as input_dir",
                taken,
                ours[-1],
            )

    def _condemned(self, published: str) -> list[Path]:
        """Returns the folders with automatic names that `total_limit` does not keep."""
        config = self.project_configuration
        if not config.automatic_checkpoint_naming or not config.total_limit:
            return []
        whole = [self._named_folder(number) for number in self._whole()]
        return beyond_limit(whole, config.total_limit, [self._named_folder(0).with_name(published)])
