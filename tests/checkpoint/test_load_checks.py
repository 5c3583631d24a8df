"""What `dcpx.load` compares before it reads, and the one error that it makes of it."""

from __future__ import annotations

import pickle
from typing import Any

import hypothesis
import hypothesis.strategies as strategies
import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from torch_dcpx.checkpoint.load_checks import (
    Differences,
    LoadRules,
    NearNames,
    compare,
    mismatch_error,
)
from torch_dcpx.errors import MismatchError, OptionError

STRICT = LoadRules.of(True, (), "error")
CASTING = LoadRules.of(True, (), "allow")


def stored_tensor(*sizes: int, dtype: torch.dtype = torch.float32) -> TensorStorageMetadata:
    size = torch.Size(sizes)
    chunk = ChunkStorageMetadata(torch.Size([0] * len(sizes)), size)
    return TensorStorageMetadata(TensorProperties(dtype), size, [chunk])


STORED: dict[str, Any] = {
    "w": stored_tensor(2, 3),
    "b": stored_tensor(3, dtype=torch.bfloat16),
    "step": BytesStorageMetadata(),
    "scalar": stored_tensor(),
}


def fitting() -> dict[str, Any]:
    b = torch.zeros(3, dtype=torch.bfloat16)
    return {"w": torch.zeros(2, 3), "b": b, "step": 4, "scalar": torch.zeros(())}


# ---- Comparison ---------------------------------------------------------------------------------


def test_a_state_that_fits_has_no_differences() -> None:
    assert compare(fitting(), STORED, STRICT) == Differences(found=4)
    assert mismatch_error("/c", [Differences(), Differences()], STRICT) is None
    assert not Differences().is_refused(STRICT)


def test_all_differences_are_found_at_once() -> None:
    state = fitting() | {
        "w": torch.zeros(3, 2),
        "b": torch.zeros(3, dtype=torch.float64),
        "step": torch.zeros(1),
        "scalar": 3.5,
        "new": torch.zeros(1),
        "lr": 0.1,
    }
    found = compare(state, STORED, STRICT)
    assert found.missing == found.refused == ("new", "lr")
    assert found.shapes == (("w", (2, 3), (3, 2)),)
    assert found.dtypes == (("b", "bfloat16", "float64"),)
    assert found.kinds == (
        ("step", "object", "tensor"),
        ("scalar", "tensor", "object (float)"),
    )
    assert found.is_refused(STRICT)


@pytest.mark.parametrize(
    ("strict", "allow_missing", "refused"),
    [
        (True, (), ("head.w", "Head.b", "tail")),
        (False, (), ()),
        (True, ["head.*"], ("Head.b", "tail")),
        (True, ["[hH]ead.?", "ta*"], ()),
        (True, ["ea"], ("head.w", "Head.b", "tail")),  # a glob is of the whole name
        (True, iter(["*"]), ()),
    ],
)
def test_missing_names_are_forgiven_by_rule(
    strict: bool, allow_missing: Any, refused: tuple[str, ...]
) -> None:
    state = {"head.w": 1, "Head.b": 2, "tail": 3, "step": 4}
    rules = LoadRules.of(strict, allow_missing, "error")
    found = compare(state, STORED, rules)
    assert found.missing == ("head.w", "Head.b", "tail")
    assert found.refused == refused
    assert found.is_refused(rules) is bool(refused)


def test_casts_are_listed_whether_forgiven_or_not() -> None:
    state = fitting() | {"w": torch.zeros(2, 3, dtype=torch.float16)}
    found = compare(state, STORED, CASTING)
    assert found.dtypes == (("w", "float32", "float16"),)
    assert found.is_refused(STRICT)
    assert not found.is_refused(CASTING)
    assert mismatch_error("/c", [found], CASTING) is None


def test_shapes_and_kinds_are_never_forgiven() -> None:
    rules = LoadRules.of(False, ["*"], "allow")
    assert compare({"w": torch.zeros(7)}, STORED, rules).is_refused(rules)
    assert compare({"w": "text"}, STORED, rules).is_refused(rules)


def test_a_planner_of_its_own_is_believed_on_shapes_but_not_on_names_and_dtypes() -> None:
    state = {"fused": torch.zeros(9, dtype=torch.float16), "w": torch.zeros(1), "gone": 0}
    sources = {"fused": ["w", "b"]}
    found = compare(state, STORED, STRICT, sources=sources)
    assert found.missing == ("gone",)
    assert found.shapes == found.kinds == ()
    assert found.dtypes == (("fused", "float32", "float16"), ("fused", "bfloat16", "float16"))
    unknown = compare(state, STORED, STRICT, sources=sources, is_dtype_known=False)
    assert unknown.dtypes == ()


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ((1, (), "error"), "strict"),
        ((True, "head.*", "error"), "allow_missing"),
        ((True, [b"head"], "error"), "allow_missing"),
        ((True, None, "error"), "allow_missing"),
        ((True, (), "never"), "cast"),
        ((True, (), True), "cast"),
    ],
)
def test_rules_that_cannot_work_are_named(arguments: Any, option: str) -> None:
    with pytest.raises(OptionError, match=option) as caught:
        LoadRules.of(*arguments)
    assert caught.value.option == option


# ---- The error ----------------------------------------------------------------------------------


def test_the_error_holds_what_any_rank_found_and_survives_pickling() -> None:
    first = compare({"a": 1, "w": torch.zeros(7)}, STORED, STRICT)
    third = compare({"z": 1, "a": 1, "b": torch.zeros(3)}, STORED, STRICT)
    error = mismatch_error("/c", [first, Differences(), third], STRICT)
    assert error is not None
    assert error.missing == ("a", "z")
    assert error.shapes == (("w", (2, 3), (7,)),)
    assert error.dtypes == (("b", "bfloat16", "float32"),)
    assert error.kinds == ()
    assert (error.ranks, error.fqn, error.path) == ((0, 2), "a", "/c")
    assert "ranks 0, 2 of 3" in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), vars(again)) == (str(error), vars(error))


def test_the_text_is_bounded_and_the_fields_are_whole() -> None:
    long = "x" * 100_000
    state: dict[str, Any] = {f"layer.{i}": i for i in range(50_000)} | {long: 1}
    found = compare(state, STORED, STRICT)
    error = mismatch_error("/c", [found], STRICT)
    assert error is not None
    assert error.missing == tuple(state)
    assert len(str(error)) < 5000
    assert "50000 of `layer.*`" in str(error)
    one = compare({long: 1}, STORED, STRICT)
    many = mismatch_error("/c", [found, *[one] * 999, Differences()], STRICT)
    assert isinstance(many, MismatchError)
    assert len(many.ranks or ()) == 1000
    assert len(str(many)) < 5000


def test_nothing_found_on_any_rank_is_an_error_where_something_must_be() -> None:
    rules = LoadRules.of(False, (), "error")._replace(must_find=True)
    nothing = compare({"x": 1, "y": 2}, STORED, rules)
    assert (nothing.found, nothing.refused, nothing.missing) == (0, (), ("x", "y"))
    error = mismatch_error("/c", [Differences(found=0), nothing], rules)
    assert error is not None and (error.missing, error.ranks) == (("x", "y"), (1,))
    assert "'/c' holds nothing of what is asked for: 2 names are missing" in str(error)
    assert mismatch_error("/c", [nothing, Differences()], rules) is None
    assert mismatch_error("/c", [Differences(found=0)] * 2, rules) is None
    assert mismatch_error("/c", [nothing], rules._replace(must_find=False)) is None


def test_allowed_casts_are_no_part_of_an_error_for_other_reasons() -> None:
    state = {"w": torch.zeros(2, 3, dtype=torch.float16), "gone": 1}
    error = mismatch_error("/c", [compare(state, STORED, CASTING)], CASTING)
    assert error is not None
    assert (error.missing, error.dtypes) == (("gone",), ())


# ---- Near names ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "missing"),
    [
        ("layers.0.weight", "_orig_mod.layers.0.weight"),
        ("_orig_mod.layers.0.weight", "layers.0.weight"),
        ("layers.0.weight", "layers.0._checkpoint_wrapped_module.weight"),
        ("module.layers.0.weight", "model.layers.0.weight"),
        ("layers.0.weight", "model.module._fsdp_wrapped_module.layers.0.weight"),
        ("app.trainer.layers.0.weight", "layers.0.weight"),
        ("layers.0.weight", "app.trainer.layers.0.weight"),
        ("layers.0.wieght", "layers.0.weight"),
    ],
)
def test_names_with_other_wrappers_levels_or_letters_are_near(stored: str, missing: str) -> None:
    near = NearNames(["bias", stored, "layers.1.bias", "step"])
    assert near.nearest(missing)[0] == stored


@pytest.mark.parametrize("name", ["", "model", "module", ".", "model.", "x" * 100_000, "é.\ud800"])
def test_odd_names_have_no_neighbours_and_no_error(name: str) -> None:
    assert NearNames(["layers.0.weight", "step"]).nearest(name) == ()
    assert name in NearNames([name, "step"]).nearest(name)


@hypothesis.given(strategies.lists(strategies.text("m.odel_", max_size=12)), strategies.text())
def test_what_is_near_is_stored(stored: list[str], name: str) -> None:
    assert set(NearNames(stored).nearest(name)) <= set(stored)


def test_only_names_that_are_not_asked_for_are_suggested() -> None:
    stored = {"w": stored_tensor(1), "module.v": stored_tensor(1)}
    found = compare({"w": torch.zeros(1), "module.w": torch.zeros(1), "v": 1}, stored, STRICT)
    assert found.nearest == {"module.w": ("module.v",), "v": ("module.v",)}
    assert found.wrapped == 1
