"""A cache that forgets its oldest entries."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import TypeVar

V = TypeVar("V")

LIMIT = 512


class BoundedCache(dict[Hashable, V]):
    """A dict of at most ``limit`` entries; any thread may use it. Look-ups are the dict's own: they enter no Python
    function."""

    def __init__(self, limit: int = LIMIT) -> None:
        super().__init__()
        self.limit = limit
        self._lock = threading.Lock()

    def put(self, key: Hashable, value: V) -> V:
        with self._lock:
            self[key] = value
            if len(self) > self.limit:
                del self[next(iter(self))]
        return value
