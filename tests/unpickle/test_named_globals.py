"""`safe_globals` by dotted names: imported when a pickle names them, and not before."""

from __future__ import annotations

import dataclasses
import enum
import functools
import http
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hostile import pickles as hp
from support.rows import check_rows
from support.zip_samples import saved
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import Shard

from torch_dcpx import DcpxReader, OptionError, ReadOptions, UnsafePickleError
from torch_dcpx.unpickle.byte_items import decode_byte_item
from torch_dcpx.unpickle.settle import build_user_object
from torch_dcpx.unpickle.unpickler import RestrictedUnpickler, user_globals

MODULE = """
import dataclasses, enum, torch
class Colour(enum.Enum):
    RED = 1
@dataclasses.dataclass
class Config:
    width: int
    colour: Colour = Colour.RED
    class Inner:
        pass
    class Kind(enum.Enum):
        A = 1
class Tagged(torch.Tensor):
    pass
NUMBER = 3
"""


@dataclasses.dataclass
class Own:
    width: int


class Kind(enum.Enum):
    A = 1


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module that only this test knows; a test may unload it."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/dcpx_configs.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    import dcpx_configs  # type: ignore[import-not-found]

    yield dcpx_configs
    sys.modules.pop("dcpx_configs", None)


def decode(data: bytes, *names: Any) -> Any:
    return decode_byte_item(data, fqn="k", path="p", safe_globals=names)


def test_names_are_as_good_as_the_classes() -> None:
    data = saved([Own(3), Kind.A])
    names = [f"{__name__}.Own", f"{__name__}.Kind"]
    assert decode(data, *names) == [Own(3), Kind.A]
    assert decode(data, Own, names[1]) == [Own(3), Kind.A]
    with pytest.raises(UnsafePickleError) as refused:
        decode(data, names[0])
    assert refused.value.global_name == names[1]


def test_name_of_an_inner_class_is_taken(module: Any) -> None:
    data = saved(module.Config.Inner(), pickle_protocol=4)
    assert type(decode(data, "dcpx_configs.Config.Inner")) is module.Config.Inner


def test_module_is_imported_only_when_a_pickle_names_it(module: Any) -> None:
    config, plain = saved(module.Config(5)), saved([1, 2])
    del sys.modules["dcpx_configs"]
    assert decode(plain, "dcpx_configs.Config", "dcpx_configs.Colour") == [1, 2]
    assert "dcpx_configs" not in sys.modules
    made = decode(config, "dcpx_configs.Config", "dcpx_configs.Colour")
    assert sys.modules["dcpx_configs"].Config is type(made)
    assert made.width == 5


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("dcpx_no_module.Config", "cannot be imported: ModuleNotFoundError"),
        ("dcpx_configs.Other", "cannot be imported: AttributeError"),
        ("dcpx_configs.NUMBER", "is no class or function"),
    ],
)
def test_name_of_nothing_is_an_option_error(module: Any, name: str, why: str) -> None:
    module_name, last = name.rsplit(".", 1)
    data = hp.torch_zip(hp.document(hp.call(hp.name(module_name, last))))
    with pytest.raises(OptionError, match=why) as refused:
        decode(data, name)
    assert (refused.value.option, refused.value.value) == ("safe_globals", name)


def test_tensor_of_a_named_class_is_loaded_by_torch(module: Any, tmp_path: Path) -> None:
    tensor = torch.arange(6.0).as_subclass(module.Tagged)
    dcp.save({"w": tensor}, checkpoint_id=tmp_path / "c", no_dist=True)
    for names in ((), ("dcpx_configs.Other",)):
        target = {"w": torch.zeros(6)}
        reader = DcpxReader(tmp_path / "c", options=ReadOptions(safe_globals=names))
        with pytest.raises(dcp.api.CheckpointException) as refused:
            dcp.load(target, storage_reader=reader, no_dist=True)
        error: Any = refused.value.failures[0][0]
        assert type(error) is UnsafePickleError
        assert error.global_name == "dcpx_configs.Tagged"
    for module.Tagged.__module__ in ("dcpx_configs", "somewhere.else"):  # as of one that has moved
        target = {"w": torch.zeros(6)}
        options = ReadOptions(safe_globals=["dcpx_configs.Tagged"])
        dcp.load(target, storage_reader=DcpxReader(tmp_path / "c", options=options), no_dist=True)
        assert target["w"].tolist() == list(range(6))


def test_module_that_fails_as_it_is_imported_is_an_error_of_the_option(
    module: Any, tmp_path: Path
) -> None:
    (tmp_path / "modules/dcpx_broken.py").write_text("raise RuntimeError('no GPU')\n")
    pickled = b"\x80\x02cdcpx_broken\nName\n."
    table = user_globals(["dcpx_broken.Name"], build_user_object)
    unpickler = RestrictedUnpickler(pickled, table, path="f", fqn="k")
    with pytest.raises(OptionError, match="cannot be imported: RuntimeError: no GPU"):
        unpickler.load()


def test_error_of_a_refused_name_has_the_line_to_add(monkeypatch: pytest.MonkeyPatch) -> None:
    data = saved([Own(3), Kind.A])
    monkeypatch.setenv("DCPX_SAFE_GLOBALS", f"{__name__}.Own")
    with pytest.raises(UnsafePickleError) as refused:
        decode(data, *ReadOptions().safe_globals)
    line = str(refused.value).split("DCPX_SAFE_GLOBALS=", 1)[1].split(", or")[0]
    assert line == f"{__name__}.Own,{__name__}.Kind"
    monkeypatch.setenv("DCPX_SAFE_GLOBALS", line)
    assert decode(data, *ReadOptions().safe_globals) == [Own(3), Kind.A]


@pytest.mark.parametrize("entry", ["Name", "", "a..b", "a.b c", "a.b\n", ".a", "a."])
def test_text_that_is_no_dotted_name_is_refused(entry: str) -> None:
    with pytest.raises(OptionError, match="safe_globals"):
        ReadOptions(safe_globals=[entry])


# ---- What frameworks keep -----------------------------------------------------------------------

NAMED = {  # by what it is: the value, and the names that it needs
    "enum": (Kind.A, ["Kind"]),
    "dataclass with an enum in it": (Own(Kind.A), ["Own", "Kind"]),  # type: ignore[arg-type]
    "builtin function": (torch.nn.functional.gelu, ["torch._C._nn.gelu"]),
    "builtin of Python": (len, ["builtins.len"]),
    "function": (torch.nn.init.xavier_normal_, ["torch.nn.init.xavier_normal_"]),
    "partial": (functools.partial(len), ["functools.partial", "builtins.len"]),
    "enum of torch": (
        ShardingStrategy.FULL_SHARD, ["torch.distributed.fsdp.api.ShardingStrategy"],
    ),
    "placement": (Shard(0), ["torch.distributed.tensor.placement_types.Shard"]),
    "enum of the library": (http.HTTPStatus.OK, ["http.HTTPStatus"]),
}  # fmt: skip


def test_refusal_names_all_that_the_item_needs_and_then_it_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("DCPX_SAFE_GLOBALS", raising=False)

    def check(row: tuple[Any, list[str]]) -> None:
        value, names = row
        names = [name if "." in name else f"{__name__}.{name}" for name in names]
        with pytest.raises(UnsafePickleError) as caught:
            decode(saved(value))
        listed = re.search(r"DCPX_SAFE_GLOBALS=(\S+), or if", str(caught.value))
        assert listed is not None
        assert set(listed[1].split(",")) == set(names)
        made = decode(saved(value), *names)
        is_partial = isinstance(value, functools.partial)
        assert made.func is value.func if is_partial else made == value

    check_rows(NAMED, check)


def test_methods_are_refused_by_name() -> None:
    for value, names in ((torch.relu, ["torch._C._VariableFunctionsClass"]), ("a".join, [])):
        with pytest.raises(UnsafePickleError, match="refuse to call getattr"):
            decode(saved(value), *names)


@pytest.mark.parametrize("made", ["Inner()", "Kind.A"])
def test_object_of_a_class_inside_of_another_is_refused_by_name(module: Any, made: str) -> None:
    data = saved(eval(f"Config.{made}", vars(module)))
    with pytest.raises(UnsafePickleError, match="inside of classes: only trusted=True does"):
        decode(data, "dcpx_configs.Config")


def test_names_that_cannot_be_listed_are_not_offered() -> None:
    pickled = b"\x80\x02cnot a\nname=x\n."
    with pytest.raises(UnsafePickleError) as caught:
        RestrictedUnpickler(pickled, {}, path="f", fqn="k").load()
    assert "DCPX_SAFE_GLOBALS" not in str(caught.value)


def test_a_pickle_that_breaks_off_still_names_what_it_named() -> None:
    pickled = b"\x80\x02ca\nb\n)Rcc\nd\n)R)R\x86."  # calls what a call returns
    with pytest.raises(UnsafePickleError, match=r'safe_globals=\["a.b", "c.d"\]'):
        RestrictedUnpickler(pickled, {}, path="f", fqn="k").load()


def test_error_of_a_pickle_of_very_many_names_comes_at_once() -> None:
    same = b"h\x00h\x01\x930" * 300_000
    others = b"".join(b"h\x00\x8c\x06%06d\x930" % i for i in range(100_000))
    start = time.process_time()
    for names in (same, others):
        pickled = b"\x80\x04\x8c\x01a\x94\x8c\x01b\x94\x930" + names + b"N."
        with pytest.raises(UnsafePickleError, match=r"would use 'a\.b'"):
            RestrictedUnpickler(pickled, {}, path="f", fqn="k").load()
    assert time.process_time() - start < 8  # 30 with a class for each
