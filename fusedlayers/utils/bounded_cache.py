"""What has lately been found out, up to a number of things."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

V = TypeVar("V")

LIMIT = 512


class BoundedCache(Generic[V]):
    """A mapping that forgets the oldest; any thread may use it."""

    def __init__(self) -> None:
        self._values: OrderedDict[Hashable, V] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> V | None:
        return self._values.get(key)

    def put(self, key: Hashable, value: V) -> V:
        with self._lock:
            self._values[key] = value
            if len(self._values) > LIMIT:
                self._values.popitem(last=False)
        return value

    def clear(self) -> None:
        with self._lock:
            self._values.clear()

    def __len__(self) -> int:
        return len(self._values)
