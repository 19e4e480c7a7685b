"""The block ids of one sequence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np

Array = np.ndarray[Any, Any]


class BlockTable(Sequence[int]):
    """The blocks of a sequence in the order of its tokens: a list of ints whose items lie in one int32 array.

    A step copies `ids` into its batch: 2,048 of them take a microsecond, and the same list 150. Slices are lists.
    `stamp` is another object after each change: who keeps what was in a table sees by it whether that is still so.
    """

    __slots__ = ("_items", "_size", "stamp")

    def __init__(self, blocks: Iterable[int] | Array = ()) -> None:
        self._items = np.array(blocks if isinstance(blocks, np.ndarray) else list(blocks), dtype=np.int32)
        self._size = len(self._items)
        self.stamp = object()

    @property
    def ids(self) -> Array:
        """All ids, int32 [n]: a view that is valid until the table changes."""
        return self._items[: self._size]

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, key: int) -> int: ...

    @overload
    def __getitem__(self, key: slice) -> list[int]: ...

    def __getitem__(self, key: int | slice) -> int | list[int]:
        if isinstance(key, slice):
            blocks: list[int] = self.ids[key].tolist()
            return blocks
        if not -self._size <= key < self._size:
            raise IndexError(f"block {key} of a table of {self._size}")
        return self._items.item(key if key >= 0 else self._size + key)

    def __setitem__(self, key: int | slice, blocks: int | Sequence[int]) -> None:
        """Replace one block, or a slice by as many."""
        replaced = self.ids[key]
        assert isinstance(blocks, int) or len(blocks) == len(replaced), f"{len(blocks)} blocks for {len(replaced)}"
        self.ids[key] = blocks
        self.stamp = object()

    def __iadd__(self, blocks: Sequence[int] | Array) -> BlockTable:
        size = self._size + len(blocks)
        if size > len(self._items):
            items = np.empty(max(size, 2 * len(self._items)), dtype=np.int32)
            items[: self._size] = self.ids
            self._items = items
        self._items[self._size : size] = blocks
        self._size = size
        self.stamp = object()
        return self

    def truncate(self, size: int) -> None:
        """Forget all blocks from number `size` on."""
        self._size = min(size, self._size)
        self.stamp = object()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.ids, dtype=dtype, copy=copy)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids.tolist())

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, (BlockTable, list)) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"BlockTable({list(self)})"
