"""`dcpx.open_checkpoint` and `dcpx.load_tensors`: tensors by name, without a model or other ranks.

Each process opens and reads for itself; no rank waits for another one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn

import torch

from torch_dcpx._answers import or_at_most
from torch_dcpx._arguments import check_options, checked_int
from torch_dcpx._globs import chosen_names, names_beneath, unmatched
from torch_dcpx._text import counted
from torch_dcpx.artifacts.named_reads import NamedReads
from torch_dcpx.checkpoint.load_checks import NearNames
from torch_dcpx.errors import (
    OptionError,
    UnknownNameError,
    UnsupportedError,
    must_be,
)
from torch_dcpx.options import ReadOptions

_MAX_SHOWN = 10  # names in an error
_MAX_RANK = 10**9 - 1  # that a file's name can have
_DLPACK_CPU = 1  # kDLCPU


def open_checkpoint(
    path: str | os.PathLike[str], options: ReadOptions | None = None, *, rank: int | None = None
) -> OpenCheckpoint:
    """Opens a checkpoint to look into it: reads its metadata, and no tensor.

        with dcpx.open_checkpoint("ckpt/step-100") as ckpt:
            weight = ckpt["model.layers.0.weight"]   # .shape, .dtype, .nbytes; nothing is read
            rows = weight[3:7]                       # reads these rows
            step = ckpt.objects["step"]

    No model, no process group: each process opens and reads for itself. Until it is closed, a
    manager's retention leaves the checkpoint alone. If a save replaces it meanwhile, reads raise
    StorageError; none mixes two saves.

    Args:
        path: a checkpoint, of ours or of stock's; or files of safetensors or torch.save, as
            `load_pretrained` finds them.
        options: see `ReadOptions`. Default None: `ReadOptions()`.
        rank: whose metadata to read of a checkpoint whose ranks have each their own. Default None:
            the metadata of all.

    Returns:
        A read-only mapping of names, as `dcpx inspect` shows them, to lazy tensors.

    Raises:
        NotCommittedError, CorruptionError, UnsafePickleError, StorageError, UnsupportedError: as
            `load`.
        OptionError: an argument that cannot work.
    """
    check_options("options", options, ReadOptions)
    rank = checked_int("rank", rank, 0, _MAX_RANK, or_none=True)
    return OpenCheckpoint(path, options or ReadOptions(), rank)


def load_tensors(
    path: str | os.PathLike[str],
    keys: str | Iterable[str] | None = None,
    *,
    options: ReadOptions | None = None,
    device: torch.device | str = "cpu",
    rank: int | None = None,
) -> dict[str, torch.Tensor]:
    """Loads tensors by name, without a model or a process group: for notebooks and evaluation.

    Shards (DTensor, ShardedTensor) come as whole tensors. Objects, such as a step count, are left
    out: `open_checkpoint(path).objects["step"]`.

    Args:
        path: as `open_checkpoint`.
        keys: names, or globs (`fnmatch`, case matters) of names, as `dcpx inspect` shows them: one,
            or several. Default None: all tensors.
        options: see `ReadOptions`. Default None: `ReadOptions()`.
        device: of the tensors. Default "cpu".
        rank: as `open_checkpoint`.

    Returns:
        The tensors by name, in the order in which they are stored.

    Raises:
        UnknownNameError: a name is not stored, or a glob matches no tensor.
        NotCommittedError, CorruptionError, UnsafePickleError: as `open_checkpoint`.
        StorageError, UnsupportedError, OptionError: as `open_checkpoint`.
    """
    with open_checkpoint(path, options, rank=rank) as checkpoint:
        return checkpoint.load_tensors(keys, device=device)


class OpenCheckpoint(Mapping[str, "LazyTensor"]):
    """A checkpoint that `open_checkpoint` has opened: names to lazy tensors, read-only.

    Threads, and children after a fork, may read at once. It cannot be pickled. After `close`, or
    the end of the `with` block, reads and look-ups raise OptionError.

    Attributes:
        path: the directory, or the file that was named, as text.
        objects: names of what is no tensor, such as step counts, to values. Each look-up reads and
            decodes, under the trust rules of `load`: `ReadOptions(safe_globals=, trusted=)`. Of a
            file of torch.save no class is made but those in `safe_globals`.
    """

    def __init__(
        self, path: str | os.PathLike[str], options: ReadOptions, rank: int | None
    ) -> None:
        self._is_closed = False
        with or_at_most(options.load_timeout_s, "load_timeout_s"):
            self._reads = NamedReads(path, options, rank)
        self.path = self._reads.name
        self.objects: Mapping[str, Any] = _Objects(self, self._reads.objects)

    def __getitem__(self, name: str) -> LazyTensor:
        self._check_open()
        entry = self._reads.tensors.get(name)
        if entry is None:
            raise self._unknown(name)
        return LazyTensor(self, name, entry.size, entry.properties.dtype)

    def __contains__(self, name: object) -> bool:
        self._check_open()
        return name in self._reads.tensors

    def __iter__(self) -> Iterator[str]:
        self._check_open()
        return iter(self._reads.tensors)

    def __len__(self) -> int:
        self._check_open()
        return len(self._reads.tensors)

    def __enter__(self) -> OpenCheckpoint:
        self._check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        what = "closed" if self._is_closed else f"{len(self._reads.tensors)} tensors"
        return f"OpenCheckpoint({self.path!r}: {what})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            f"the open checkpoint '{self.path}' cannot be pickled or copied: open the path again "
            "where it is needed"
        )

    def close(self) -> None:
        """Ends the use; safe to call twice. A read under way in another thread goes on."""
        self._is_closed = True
        self._reads.close()

    def load_tensors(
        self, keys: str | Iterable[str] | None = None, *, device: torch.device | str = "cpu"
    ) -> dict[str, torch.Tensor]:
        """Loads whole tensors in one read, which is faster than one by one.

        Args, Returns, Raises: as `dcpx.load_tensors`.
        """
        names = self.select(keys)
        return self._reads.read_tensors(names, _checked_device(device))

    @property
    def is_of_ours(self) -> bool:
        """Whether torch-dcpx wrote it: reads compare its bytes with checksums."""
        return self._reads.is_of_ours

    @property
    def has_checksums(self) -> bool:
        """Whether its bytes have checksums, whoever compares them: safetensors have none."""
        return self._reads.has_checksums

    def load_objects(self, names: Sequence[str]) -> list[Any]:
        """Loads some of `objects` in one read, which is faster than one by one.

        Raises: as `objects` does, for any of them.
        """
        self._check_open()
        return self._reads.read_objects(names)

    def object_bytes(self, name: str) -> int:
        """Returns how many bytes an object takes where it is stored."""
        self._check_open()
        return self._reads.object_bytes(name)

    def select(self, keys: str | Iterable[str] | None = None) -> list[str]:
        """Returns the tensors' names that `keys` mean, in the order in which they are stored.

        Args, Raises: as `dcpx.load_tensors`.
        """
        self._check_open()
        if keys is None:
            return list(self._reads.tensors)
        globs = [keys] if isinstance(keys, str) else keys
        if not isinstance(globs, Iterable) or isinstance(globs, (bytes, Mapping)):
            raise must_be("keys", keys, "None, a name or glob, or several of them")
        globs = tuple(globs)
        if not all(isinstance(one, str) for one in globs):
            raise must_be("keys", keys, "None, a name or glob, or several of them")
        for one in unmatched(self._reads.tensors, globs, self.objects):
            raise self._unknown(one)
        return chosen_names(self._reads.tensors, globs, self.objects)

    def check_claims(self) -> None:
        """Raises CorruptionError where the tensors claim far more bytes than the files hold, before
        anybody takes memory by their shapes: each read asks the same of its own.
        """
        self._check_open()
        self._reads.check_claims(self._reads.tensors)

    def _check_open(self) -> None:
        if self._is_closed:
            wrong = f"the checkpoint '{self.path}' is closed: open it again"
            raise OptionError(wrong, option="path", value=self.path)

    def _unknown(self, name: Any) -> UnknownNameError:
        """Returns the error of a name or glob that is no tensor's."""
        tensors, objects = self._reads.tensors, self._reads.objects
        nearest, why = names_beneath(str(name), tensors, objects)
        if name in self.objects:
            nearest, why = (), "is an object: open_checkpoint(path).objects has it"
        elif not why:
            if isinstance(name, str):
                nearest = NearNames(tensors).nearest(name) or NearNames(objects).nearest(name)
            shown = nearest or tuple(tensors)[:_MAX_SHOWN]
            names = ", ".join(map(repr, shown))
            more = "" if nearest or len(shown) == len(tensors) else ", ..."
            held = counted(len(tensors), "tensor")
            lead = "did you mean" if nearest else f"it holds {held}"
            why = f"is no tensor of it, nor a glob of some; {lead}: {names}{more}"
        message = f"'{self.path}': {name!r} {why}"
        return UnknownNameError(message, fqn=str(name), path=self.path, nearest=nearest)


class LazyTensor:
    """A tensor of an open checkpoint; an index reads what it names, and nothing else.

    Integers, slices with steps from 1 on, and `...` are taken as by torch; `t[...]` is all of it.
    `torch.as_tensor(t)` and `numpy.asarray(t)` read all of it, too; other functions refuse it.
    Blocks that must be verified are read whole (`ReadOptions.verify`). The result has memory of its
    own, on the CPU.

    Attributes:
        name: as stored.
        shape, dtype: of the whole tensor.
    """

    __slots__ = ("_checkpoint", "dtype", "name", "shape")

    def __init__(
        self, checkpoint: OpenCheckpoint, name: str, shape: torch.Size, dtype: torch.dtype
    ) -> None:
        self._checkpoint = checkpoint
        self.name = name
        self.shape = shape
        self.dtype = dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Reads a part.

        Raises:
            UnsupportedError: an index that is not taken: steps below 1, masks, lists, None.
            IndexError: one outside of the tensor.
            OptionError: the checkpoint was closed.
            CorruptionError, StorageError: as `load`.
        """
        self._checkpoint._check_open()
        return self._checkpoint._reads.read_part(self.name, index)

    def __dlpack__(self, **kwargs: Any) -> Any:
        """Reads it whole: for `torch.as_tensor`, `torch.tensor`, `torch.from_dlpack`."""
        return self[...].__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DLPACK_CPU, 0

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Reads it whole: for `numpy.asarray`. Raises UnsupportedError: numpy lacks its dtype."""
        try:
            array = self[...].numpy()
        except TypeError as error:
            problem = f"numpy has no {self.dtype}; t[...].float() is a tensor that it can take"
            raise UnsupportedError(f"make an array of '{self.name}': {problem}") from error
        return array if dtype is None else array.astype(dtype, copy=False)

    @classmethod
    def __torch_function__(cls, func: Any, *_types_and_arguments: Any) -> NoReturn:
        name = getattr(func, "__name__", func)
        raise UnsupportedError(f"torch's {name} got a LazyTensor: read it first, as t[...]")

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"'{self.name}' has no dimensions, and so no length")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"LazyTensor({self.name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            f"the lazy tensor '{self.name}' cannot be pickled or copied: t[...] is a tensor"
        )


class _Objects(Mapping[str, Any]):
    """The objects of an open checkpoint; each look-up decodes one."""

    def __init__(self, checkpoint: OpenCheckpoint, names: Sequence[str]) -> None:
        self._checkpoint = checkpoint
        self._names = dict.fromkeys(names)

    def __getitem__(self, name: str) -> Any:
        self._checkpoint._check_open()
        if name not in self._names:
            nearest = NearNames(self._names).nearest(name) if isinstance(name, str) else ()
            shown = nearest or tuple(self._names)[:_MAX_SHOWN]
            raise UnknownNameError(
                f"'{self._checkpoint.path}' holds no object {name!r} among {len(self._names)}: "
                f"{', '.join(map(repr, shown))}",
                fqn=str(name),
                path=self._checkpoint.path,
                nearest=nearest,
            )
        return self._checkpoint._reads.read_objects([name])[0]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"<{len(self._names)} objects of {self._checkpoint.path!r}>"


def _checked_device(device: Any) -> torch.device:
    try:
        made = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise must_be("device", device, "a torch device") from error
    if made.type == "meta":
        raise must_be("device", device, "a device with memory")
    return made
