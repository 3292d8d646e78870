"""Save the inputs of a function, and recompute it for its backward pass (Chen et al. 2016, "Training Deep Nets with
Sublinear Memory Cost").

This is ``torch.utils.checkpoint`` (not reentrant), which replays PyTorch's random numbers and autocast, and what that
leaves to its users: buffers that a recomputation must not update once more (``snapshot.py``), and evaluation, where
nothing is recomputed.

A recomputation costs a second forward pass. A call costs Python time for looking at modules, so that small functions
had better be joined.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.jit import ScriptModule
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .._torch import (
    CPU_FLASH_ATTENTION,
    compiled_checkpoint,
    packet_of,
    parametrizations_are_cached,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from ..calls.tracers import followed_by
from ..utils.module_state import modules_in
from ..utils.reading import reached_by
from .snapshot import Snapshot

Recompute = Literal["all", "cheap", "nothing"]
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)


def sublinear(function: Callable[..., Any], *args: Any, recompute: Recompute = "all", **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, which saves its inputs alone and is recomputed for its backward pass.

    The recomputation finds PyTorch's random numbers, autocast, and the modules' buffers, parameters and modes as the
    first run did. What it writes to buffers is thrown away, so that the statistics of batch norms advance once.
    Modules are looked for in the function itself, in what it is bound to, closes over, has as defaults, or names among
    its globals, and in the arguments; of others, buffers are updated twice.

    Not replayed are random numbers that are not from PyTorch's default generators (``random``, NumPy), and what a
    function writes to attributes, lists and other objects: it writes there twice, and the second run reads what is
    there then. Parameters of a module that is called must not be trained before the backward pass, which raises; of
    modules that another function reaches this goes unnoticed.

    The function runs plainly, and saves what eager PyTorch saves, where gradients are off, the function is a module in
    evaluation, a module has uninitialized lazy parameters or is TorchScript, ``parametrize.cached()`` is on, or
    ``torch.func``, forward-mode differentiation or a tracer (``torch.jit.trace``, ``make_fx``, ``torch.fx``) is active.

    Args:
        function: any callable of tensors, modules included.
        args, kwargs: its arguments, which need not be tensors; tensors may be in lists, tuples and dicts.
        recompute: "all"; or "cheap", which saves the results of convolutions, matmuls and attention too, and recomputes
            what lies between them; or "nothing". "cheap" is PyTorch's selective checkpoint: backward raises where such
            a result was overwritten (by a ReLU in place), and when it runs again (``retain_graph``, second
            derivatives).

    Raises:
        TypeError: ``function`` cannot be called.
        ValueError: an unknown ``recompute``.

    Saved for the backward pass: the input tensors (and, for "cheap", those results).

    >>> import torch, fusedlayers as fl
    >>> layer = torch.nn.Linear(8, 8)
    >>> fl.sublinear(lambda x: layer(x).relu(), torch.randn(4, 8, requires_grad=True)).shape
    torch.Size([4, 8])
    """
    check_recompute("sublinear", recompute)
    if not callable(function):
        raise TypeError(f"sublinear: function must be a callable of the tensors that follow it, got {function!r}")
    is_evaluated = isinstance(function, nn.Module) and not function.training
    if recompute == "nothing" or is_evaluated or not torch.is_grad_enabled():
        return function(*args, **kwargs)
    return recomputed(function, function, args, kwargs, recompute)


def recomputed(
    function: Callable[..., Any], owner: object, args: tuple[Any, ...], kwargs: dict[str, Any], recompute: Recompute
) -> Any:
    """``sublinear`` for a function that has no state but that of ``owner``: the module, or the list of modules, that it
    belongs to, or itself."""
    if torch.compiler.is_compiling():  # the compiler takes care of buffers, random numbers and autocast itself
        options = {"context_fn": _selective_contexts} if recompute == "cheap" else {}
        return compiled_checkpoint(function, *args, **options, **kwargs)
    others = [leaf for leaf in tree_leaves((args, kwargs)) if not isinstance(leaf, Tensor)]
    roots = [owner] if isinstance(owner, nn.Module) else owner if isinstance(owner, list) else None
    modules, tensors = reached_by(others if roots else [owner, *others])
    modules = [*dict.fromkeys([*(module for root in roots or () for module in modules_in(root)), *modules])]
    if not can_recompute(modules, others):
        return function(*args, **kwargs)
    return run_checkpointed(function, args, kwargs, Snapshot(modules, tensors, runs_all=bool(roots)), recompute)


def check_recompute(name: str, recompute: str) -> None:
    """Refuse an unknown ``recompute``."""
    if recompute not in RECOMPUTE:
        raise ValueError(f"{name}: recompute must be one of {', '.join(map(repr, RECOMPUTE))}, got {recompute!r}")


def can_recompute(modules: Iterable[nn.Module], arguments: Iterable[object] = ()) -> bool:
    """Whether nothing is active that a checkpoint cannot take part in, and the first run saves what a second would."""
    return not (
        followed_by() is not None
        or parametrizations_are_cached()  # the first run computes weights that the recomputation would not
        or any(isinstance(argument, Proxy) for argument in arguments)
        or runs_differently_first(modules)
    )


def runs_differently_first(modules: Iterable[nn.Module]) -> bool:
    """Whether lazy modules will initialize their parameters, or TorchScript compile once more, which saves tensors in
    another order then."""
    return any(
        isinstance(module, ScriptModule) or (isinstance(module, LazyModuleMixin) and module.has_uninitialized_params())
        for module in modules
    )


def run_checkpointed(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    snapshot: Snapshot,
    recompute: Recompute = "all",
    **options: Any,
) -> Any:
    """Run a function now, and once more in the same state when its backward pass needs it. The options are those of
    torch's checkpoint, which gets the leaves one by one: of tensors in lists, or given by name, it would neither drop
    nor check the version."""
    leaves, structure = tree_flatten((args, kwargs))
    given = [(args, kwargs)]  # for the first run, which may write to a list among them

    def run(*leaves: Any) -> Any:
        state = snapshot.recording() if given else snapshot.again()
        args, kwargs = given.pop() if given else tree_unflatten(leaves, structure)
        with state:
            return function(*args, **kwargs)

    if recompute == "cheap":
        options["context_fn"] = _selective_contexts
    return checkpoint(run, *leaves, use_reentrant=False, **options)


@functools.cache
def products() -> frozenset[Any]:
    """The operators whose results "cheap" saves: those that torch counts the FLOPs of, and the CPU's attention."""
    from torch.utils.flop_counter import flop_registry  # here, because it takes a while to import

    forward = {packet for packet in flop_registry if "backward" not in str(packet)}
    return frozenset({*forward, CPU_FLASH_ATTENTION})


def _selective_contexts() -> Any:
    def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_product = packet_of(operator) in products()
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
