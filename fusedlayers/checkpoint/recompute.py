"""Save the inputs of a function, and recompute it for its backward pass (Chen et al. 2016, "Training Deep Nets with
Sublinear Memory Cost").

This is ``torch.utils.checkpoint`` (not reentrant), and what that leaves to its users: buffers that a recomputation must
not update once more, random number generators that torch does not know of, and evaluation, where nothing is recomputed.

A recomputation costs a second forward pass. A call costs Python time for looking at modules (``state_snapshot.py``), so
that small functions had better be joined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from .._torch import TreeSpec, parametrizations_are_cached, tree_flatten, tree_unflatten
from ..call import followed_by
from ..utils.compiled_checkpoint import compiled_checkpoint
from .free_state import FreeState, holds_nothing
from .selective import SavedResults, SelectiveMode, products
from .state_snapshot import StateSnapshot

Recompute = Literal["all", "cheap", "nothing"]
RECOMPUTE = ("all", "cheap", "nothing")


def sublinear(function: Callable[..., Any], *args: Any, recompute: Recompute = "all", **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, which saves its inputs alone and is recomputed for its backward pass.

    The recomputation finds the state of the first run: random numbers, autocast, and the buffers and attributes of the
    modules that the function reaches. What it writes there is thrown away, so that the statistics of batch norms
    advance once.
    Modules are looked for in the function itself, in what it is bound to, closes over, has as defaults, or names among
    its globals, and in the arguments. Second derivatives, second backward passes, hooks and gradients of what the
    function closes over work as without.

    Not restored are NumPy's random numbers, what Python modules and objects within objects hold, parameters whose
    ``data`` was exchanged, and which modules are in a module.

    The function runs plainly, and saves what eager PyTorch saves, where gradients are off, the function is a module in
    evaluation, a module has uninitialized lazy parameters or is TorchScript, ``parametrize.cached()`` is on, or
    ``torch.func``, forward-mode differentiation or a tracer (``torch.jit.trace``, ``make_fx``, ``torch.fx``) is active.

    Args:
        function: any callable of tensors, modules included.
        args, kwargs: its arguments, which need not be tensors; tensors may be in lists, tuples and dicts.
        recompute: "all"; or "cheap", which saves the results of convolutions, matmuls and attention too, and recomputes
            what lies between them; or "nothing".

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
    return recomputed(function, function, args, kwargs, recompute)


def recomputed(
    function: Callable[..., Any], owner: object, args: tuple[Any, ...], kwargs: dict[str, Any], recompute: Recompute
) -> Any:
    """``sublinear`` for a function that has no state but that of ``owner``, the function or module it belongs to."""
    if torch.compiler.is_compiling():
        return run_compiled(function, args, kwargs, recompute)
    arguments = Arguments.of(args, kwargs)
    free_state = FreeState.of(owner, arguments.leaves)
    if free_state.runs_differently_first or not can_recompute(arguments.leaves):
        return function(*args, **kwargs)
    return run_checkpointed(function, arguments, StateSnapshot(free_state, arguments.tensors), recompute)


def check_recompute(name: str, recompute: str) -> None:
    """Refuse an unknown ``recompute``."""
    if recompute not in RECOMPUTE:
        raise ValueError(f"{name}: recompute must be one of {', '.join(map(repr, RECOMPUTE))}, got {recompute!r}")


class Arguments(NamedTuple):
    """The arguments of a call, and their leaves."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: Sequence[Any]
    #: None where the leaves are the arguments, those by keyword last.
    structure: TreeSpec | None
    keywords: Sequence[str] = ()

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Arguments:
        kwargs = kwargs or {}
        leaves = (*args, *kwargs.values())
        if all(map(holds_nothing, leaves)):  # flattening takes as long as a small linear layer
            return cls(args, kwargs, leaves, None, tuple(kwargs))
        return cls(args, kwargs, *tree_flatten((args, kwargs)))

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def with_leaves(self, leaves: Sequence[Any]) -> Arguments:
        if self.structure is not None:
            args, kwargs = tree_unflatten(leaves, self.structure)
        else:
            count = len(leaves) - len(self.keywords)
            args, kwargs = tuple(leaves[:count]), dict(zip(self.keywords, leaves[count:], strict=True))
        return self._replace(args=args, kwargs=kwargs, leaves=leaves)


def can_recompute(leaves: Iterable[object]) -> bool:
    """Whether nothing is active that a checkpoint cannot take part in."""
    return not (
        followed_by() is not None
        or parametrizations_are_cached()  # the first run computes weights that the recomputation would not
        or any(isinstance(leaf, Proxy) for leaf in leaves)
    )


def run_checkpointed(
    function: Callable[..., Any],
    arguments: Arguments,
    snapshot: StateSnapshot,
    recompute: Recompute = "all",
    *,
    early_stop: bool = True,
) -> Any:
    """Run a function now, and once more in the same state when its backward pass needs it."""
    call = _CheckpointedCall(function, arguments, snapshot, SavedResults() if recompute == "cheap" else None)
    # Leaves one by one: of tensors in lists, or given by name, torch would neither drop nor check the version.
    return checkpoint(
        call, *arguments.leaves, use_reentrant=False, preserve_rng_state=False, early_stop=early_stop, debug=False
    )


def run_compiled(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], recompute: Recompute
) -> Any:
    """The same for the compiler, which takes care of buffers, random numbers and autocast itself."""
    if recompute == "cheap":
        return compiled_checkpoint(function, *args, context_fn=_compiler_contexts, **kwargs)
    return compiled_checkpoint(function, *args, **kwargs)


def _compiler_contexts() -> Any:
    operators = [
        getattr(packet, name) for packet in products() if hasattr(packet, "overloads") for name in packet.overloads()
    ]
    return create_selective_checkpoint_contexts(operators)


class _CheckpointedCall:
    """The first run, with the very arguments that were given (it may write to a list among them), and
    recomputations."""

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Arguments,
        snapshot: StateSnapshot,
        results: SavedResults | None,
    ) -> None:
        self._function, self._snapshot, self._results = function, snapshot, results
        self._arguments = arguments
        self._is_first = True

    def __call__(self, *leaves: Any) -> Any:
        is_first, self._is_first = self._is_first, False
        arguments = self._arguments if is_first else self._arguments.with_leaves(leaves)
        # Torch's checkpoint holds the leaves, which saved-tensor hooks may have moved.
        self._arguments = arguments._replace(args=(), kwargs={}, leaves=())
        with ExitStack() as stack:
            stack.enter_context(self._snapshot.recording() if is_first else self._snapshot.restored())
            if self._results is not None:
                stack.enter_context(SelectiveMode(self._results, loads=not is_first))
            return self._function(*arguments.args, **arguments.kwargs)

    @property
    def saved_for_recomputation(self) -> list[Any]:
        """``utils/autograd_graph.py`` reads it, to count what is saved."""
        return [] if self._results is None else self._results.results
