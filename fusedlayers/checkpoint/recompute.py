"""Run a function, keep its inputs, and run it again for its backward pass (Chen et al. 2016, "Training Deep Nets with
Sublinear Memory Cost").

It is ``torch.utils.checkpoint``, not reentrant, with what that leaves to its users: buffers that the second run must
not update once more, generators of random numbers that it does not know of, and evaluation, where nothing is spared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from .._torch import TreeSpec, parametrizations_are_cached, tree_flatten, tree_leaves, tree_unflatten
from ..plan import followed_by
from .free_state import FreeState
from .selective import SavedResults, products
from .state_snapshot import StateSnapshot

Recompute = Literal["all", "cheap", "nothing"]
RECOMPUTE = ("all", "cheap", "nothing")


def sublinear(function: Callable[..., Any], *args: Any, recompute: Recompute = "all", **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, of which the inputs are kept, and which runs again for its backward pass.

    The second run finds what the first one found: random numbers, autocast, and the buffers and attributes of the
    modules that the function reaches. What it writes there is thrown away, so that the statistics of batch norms
    advance once.
    Modules are looked for in the function itself, in what it is bound to, closes over, has as defaults, or names among
    its globals, and in the arguments. Second derivatives, second backward passes, hooks and gradients of what a
    function closes over are as without.

    Not found again are NumPy's random numbers, what Python modules and objects within objects hold, and parameters
    whose ``data`` was exchanged.

    It runs plainly, and nothing is spared, where gradients are off, the function is a module in evaluation, a module
    has lazy parameters that are not there yet, ``parametrize.cached()`` is on, or ``torch.func``, forward-mode
    differentiation or a tracer (``torch.jit.trace``, ``make_fx``, ``torch.fx``) follows: these do without what a
    checkpoint is made of.

    Args:
        function: any callable of tensors, modules included.
        args, kwargs: its arguments, which need not be tensors; tensors may stand in lists, tuples and dicts.
        recompute: "all", or "cheap": the results of convolutions, matmuls and attention are kept too, and what lies
            between them runs again; or "nothing".

    Raises:
        ValueError: an unknown ``recompute``.

    Saved for the backward pass: the input tensors (and, for "cheap", those results).

    >>> import torch, fusedlayers as fl
    >>> layer = torch.nn.Linear(8, 8)
    >>> fl.sublinear(lambda x: layer(x).relu(), torch.randn(4, 8, requires_grad=True)).shape
    torch.Size([4, 8])
    """
    check_recompute("sublinear", recompute)
    is_evaluated = isinstance(function, nn.Module) and not function.training
    if recompute == "nothing" or is_evaluated or not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if torch.compiler.is_compiling():
        return run_compiled(function, args, kwargs, recompute)
    leaves = tree_leaves((args, kwargs))
    free_state = FreeState.of(function, *leaves)
    if not can_recompute(free_state.modules, leaves):
        return function(*args, **kwargs)
    snapshot = StateSnapshot(free_state, [leaf for leaf in leaves if isinstance(leaf, Tensor)])
    return run_checkpointed(function, args, kwargs, snapshot, recompute)


def can_recompute(modules: Iterable[nn.Module], leaves: Iterable[object]) -> bool:
    """Whether nothing follows that a checkpoint is no part of, and all parameters are there."""
    return not (
        followed_by() is not None
        or parametrizations_are_cached()  # of weights computed in the first run, and not in the second
        or any(isinstance(leaf, Proxy) for leaf in leaves)
        or any(isinstance(module, LazyModuleMixin) and module.has_uninitialized_params() for module in modules)
    )


def run_checkpointed(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    snapshot: StateSnapshot,
    recompute: Recompute = "all",
    *,
    early_stop: bool = True,
) -> Any:
    """Run a function now, and once more under the same circumstances when its backward pass needs it."""
    # One by one, for of tensors within lists, or given by name, torch would see neither the end nor an edit in place.
    leaves, structure = tree_flatten((args, kwargs))
    run = _CheckpointedCall(
        function, (args, kwargs), structure, snapshot, SavedResults() if recompute == "cheap" else None
    )
    return checkpoint(run, *leaves, use_reentrant=False, preserve_rng_state=False, early_stop=early_stop, debug=False)


def run_compiled(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], recompute: Recompute
) -> Any:
    """The same for the compiler, which sees to buffers, random numbers and autocast itself."""
    if recompute == "cheap":
        return checkpoint(function, *args, use_reentrant=False, context_fn=_compiler_contexts, **kwargs)
    return checkpoint(function, *args, use_reentrant=False, **kwargs)


def check_recompute(name: str, recompute: str) -> None:
    if recompute not in RECOMPUTE:
        raise ValueError(f"{name}: recompute must be one of {', '.join(map(repr, RECOMPUTE))}, got {recompute!r}")


class _CheckpointedCall:
    """The first call, with the very arguments that were given, and all later ones."""

    def __init__(
        self,
        function: Callable[..., Any],
        given: tuple[tuple[Any, ...], dict[str, Any]],
        structure: TreeSpec,
        snapshot: StateSnapshot,
        results: SavedResults | None,
    ) -> None:
        self._function, self._snapshot, self._results = function, snapshot, results
        self._given: tuple[tuple[Any, ...], dict[str, Any]] | None = given
        self._structure = structure

    def __call__(self, *leaves: Any) -> Any:
        is_first = self._given is not None
        args, kwargs = self._given or tree_unflatten(leaves, self._structure)
        self._given = None
        with ExitStack() as stack:
            stack.enter_context(self._snapshot.recording() if is_first else self._snapshot.restored())
            if self._results is not None:
                stack.enter_context(self._results.saving() if is_first else self._results.loading())
            return self._function(*args, **kwargs)

    @property
    def saved_for_recomputation(self) -> list[Any]:
        """For who counts what is kept (``utils/autograd_graph.py``)."""
        return [] if self._results is None else self._results.results


def _compiler_contexts() -> Any:
    operators = [
        getattr(packet, name) for packet in products() if hasattr(packet, "overloads") for name in packet.overloads()
    ]
    return create_selective_checkpoint_contexts(operators)
