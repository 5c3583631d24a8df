"""A place in a store as one listing has found it."""

from __future__ import annotations

from functools import cached_property

from torch_dcpx.storage.object_listing import ListedObject
from torch_dcpx.storage.object_place import ObjectPlace


class ListedPlace(ObjectPlace):
    """A place that lists its objects once, and knows their names, sizes and tags from there."""

    @cached_property
    def _entries(self) -> dict[str, ListedObject]:
        return super().entries()

    def entries(self) -> dict[str, ListedObject]:
        return self._entries

    def state(self, name: str) -> tuple[str]:
        found = self._entries.get(name)
        return ("" if found is None else found.tag,)

    def is_regular(self, name: str) -> bool:
        return name in self._entries
