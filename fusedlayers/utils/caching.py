"""Values that are computed once and kept: a cache that forgets, and a thread without the caller's modes."""

import functools
import threading
from collections.abc import Callable, Hashable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
V = TypeVar("V")

LIMIT = 512


class BoundedCache(dict[Hashable, V]):
    """A dict of at most ``limit`` entries, which forgets the oldest ones; any thread may use it. Look-ups are the
    dict's own: they enter no Python function."""

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


def in_clean_state(function: Callable[P, R]) -> Callable[P, R]:
    """Make ``function`` run on a new thread, and wait for it.

    Grad mode, autocast, default device, dispatch and functorch modes are all thread-local in torch, so constants
    computed on a new thread are the same real CPU tensors whether the first use happens under ``no_grad``, ``vmap``, a
    ``FakeTensorMode`` or a ``torch.device("cuda")`` context. Meant for what is computed once and cached.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        outcome: list[R] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                outcome.append(function(*args, **kwargs))
            except BaseException as error:
                errors.append(error)

        # An executor takes no work after the main thread's end, when other threads may still train.
        thread = threading.Thread(target=work, name="fusedlayers-constants")
        thread.start()
        thread.join()
        for error in errors:
            raise error
        return outcome[0]

    return run
