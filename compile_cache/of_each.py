"""Values of objects, by identity: a class of the program's may compare its objects in its own way."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, MutableMapping
from typing import Any, TypeVar

T = TypeVar("T")


class OfEach(MutableMapping[Any, T]):
    """A value of each object, for as long as that exists. Objects that are equal have one each."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[weakref.ref[Any], T]] = {}

    def __getitem__(self, one: Any) -> T:
        return self._held[id(one)][1]

    def get(self, one: Any, default: Any = None) -> Any:
        """Its value. It takes less time than that of a mapping in general."""
        return held[1] if (held := self._held.get(id(one))) else default

    def values(self) -> list[T]:  # type: ignore[override]
        """All values. Other threads may change them meanwhile."""
        return [value for _, value in list(self._held.values())]

    def pop(self, one: Any, default: Any = None) -> Any:
        """Forget its value, and return it. Several threads may ask at once."""
        return held[1] if (held := self._held.pop(id(one), None)) else default

    def __setitem__(self, one: Any, value: T) -> None:
        number, mapping = id(one), weakref.ref(self)

        def forget(_: object) -> None:
            if (of_each := mapping()) is not None:
                of_each._held.pop(number, None)

        self._held[number] = weakref.ref(one, forget), value

    def __delitem__(self, one: Any) -> None:
        del self._held[id(one)]

    def __iter__(self) -> Iterator[Any]:
        return iter([one for ref, _ in list(self._held.values()) if (one := ref()) is not None])

    def __len__(self) -> int:
        return len(self._held)
