"""What a load asks of each value of a state, asked by C++ where the value is a whole plain tensor.

Nearly all values are. They are compared with the columns of the metadata, so that no entry is made
for them; what is not like that, or not as it is stored, is left to Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch_dcpx.metadata.lazy import StoredEntries
from torch_dcpx.planners.plan_fingerprint import STATE_READER


def flattened_target(
    state: Mapping[str, Any], *, has_flat_shards: bool
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Returns a state as `DefaultLoadPlanner.set_up_planner` flattens it, and the path of each
    name; None where torch itself has to.

    It takes ShardedTensors apart first, which also makes every list anew: elements without a
    value of their own become None then, and of two keys with one text the last one stays.

    Args:
        state: nested or not.
        has_flat_shards: the planner's `flatten_sharded_tensors`.

    Source: torch.distributed.checkpoint._nested_dict.flatten_state_dict, and its caller.
    """
    try:
        flat, paths, has_sharded, is_odd = STATE_READER.flatten(state)
    except ValueError:  # two values of one name
        return None
    return None if has_flat_shards and (has_sharded or is_odd) else (flat, paths)


def unlike_names(
    state: Mapping[str, Any], stored: Mapping[str, Any], *, has_dtypes: bool
) -> Iterable[str]:
    """Returns the names of a flat state's values that are not seen to be as they are stored: whole
    tensors of the same sizes and, with `has_dtypes`, the same dtype.
    """
    if type(state) is not dict or not isinstance(stored, StoredEntries):
        return state
    columns = stored.columns  # once: another thread may fill the entries meanwhile
    return state if columns is None else STATE_READER.unlike(state, stored, columns, has_dtypes)


def whole_rows(
    state: Mapping[str, Any], stored: Mapping[str, Any]
) -> tuple[list[Any], Iterable[tuple[int, str]]]:
    """Returns a row (name, sizes, number in the columns, sizes) for each whole plain tensor of the
    stored sizes in a flat state, None for all else; the place and the name of these others.
    """
    columns = stored.columns if isinstance(stored, StoredEntries) else None
    if type(state) is not dict or columns is None:
        return [None] * len(state), enumerate(state)
    entries: Any = stored
    return STATE_READER.whole_rows(state, entries, columns)
