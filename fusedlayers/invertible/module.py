"""Modules that state their inverse, and need not save their inputs (Gomez et al. 2017, "The Reversible Residual
Network").

``call.py`` has the mechanism and says what it costs; here are the class that users derive from, its flags, and the
function of the same effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from .._torch import disable_dynamo, parametrizations_are_cached, tree_leaves
from ..call import followed_by
from ..checkpoint.free_state import FreeState
from ..checkpoint.recompute import Arguments, run_checkpointed
from ..checkpoint.state_snapshot import StateSnapshot, in_recomputed_region
from .call import InvertibleCall, InvertibleFunction, in_plain_mode
from .check import CheckReport, checked

FLAGS = ("seed", "checkpoint", "invertible", "reversed")


class InvertibleModule(nn.Module):
    """A module whose backward pass computes the inputs from the outputs, instead of saving them (Gomez et al. 2017,
    "The Reversible Residual Network").

    A subclass defines ``function`` and ``inverse`` instead of ``forward``. Both take positional arguments and return a
    tensor or a tuple; ``inverse`` takes what ``function`` returns, and returns what it takes. Where modules follow one
    another, only the last one's output is held until the backward pass.

    Inputs are not destroyed: whoever holds one can read it. ``module(x, keep=[x])`` saves inputs for the backward pass,
    which then need not compute them. What is no floating-point tensor is always saved. An output must not be edited in
    place: the backward pass would compute the inputs from it, and raises instead.

    Outputs that ``inverse`` needs, and the caller does not, come last: ``num_outputs`` says how many of them the caller
    sees (None: all; a negative number: all but so many), and ``num_inputs`` says the same of what ``inverse`` returns,
    for when it is called in place of ``function``.

    Attributes:
        checkpoint: whether anything is recomputed; else ``function`` runs as any PyTorch code. Setting it to False sets
            ``invertible`` to False.
        invertible: whether inputs are computed from the outputs; else they are saved, and the rest is recomputed.
            Setting it to True sets ``checkpoint`` to True.
        seed: whether a recomputation draws the random numbers of the first run.
        reversed: whether ``forward`` calls ``inverse``; only modules that are ``reversible`` can be.

    The flags are part of the ``state_dict``'s metadata. Without gradients, and where neither an input nor a parameter
    requires some, ``forward`` is ``function``. ``torch.compile`` leaves these modules to PyTorch.

    >>> import torch, fusedlayers as fl
    >>> class Scale(fl.InvertibleModule):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.log_scale = torch.nn.Parameter(torch.zeros(()))
    ...     def function(self, x):
    ...         return x * self.log_scale.exp()
    ...     def inverse(self, y):
    ...         return y / self.log_scale.exp()
    >>> Scale().check(torch.randn(4)).is_within
    True
    """

    num_outputs: ClassVar[int | None] = None
    num_inputs: ClassVar[int | None] = None
    #: Whether ``inverse`` can stand for ``function``.
    reversible: bool = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # of another base, where there is one
        self.seed = True
        self._checkpoint = self._invertible = True
        self._reversed = False

    def function(self, *inputs: Any) -> Any:
        """The outputs, from the inputs."""
        raise NotImplementedError(f"{type(self).__name__} must define function")

    def inverse(self, *outputs: Any) -> Any:
        """The inputs, from the outputs."""
        raise NotImplementedError(f"{type(self).__name__} must define inverse")

    def forward(self, *inputs: Any, keep: Iterable[Tensor] = (), **unknown: Any) -> Any:
        if unknown:
            raise TypeError(
                f"{type(self).__name__}: got the keyword {next(iter(unknown))!r}; inputs are positional, and the only "
                "keyword is keep, the inputs to be saved for the backward pass"
            )
        kept = (keep,) if isinstance(keep, Tensor) else tuple(keep)
        if not all(any(tensor is value for value in inputs) for tensor in kept):
            raise ValueError(f"{type(self).__name__}: keep must be some of the inputs")
        if not self.checkpoint or not can_checkpoint():
            return self._run_plain(*inputs)
        if self._can_invert(inputs):
            return self._run_inverted(inputs, kept)
        free_state = self._free_state()
        if free_state.runs_differently_first:
            return self._run_plain(*inputs)
        arguments = Arguments.of(inputs)
        return run_checkpointed(self._run_plain, arguments, StateSnapshot(free_state, arguments.tensors))

    def _can_invert(self, inputs: tuple[Any, ...]) -> bool:
        """Whether these inputs are computed from their outputs; else they are saved."""
        return self.invertible

    def _run_inverted(self, inputs: tuple[Any, ...], keep: tuple[Tensor, ...]) -> Any:
        return run_inverted((step for _, step in self._steps(len(inputs))), inputs, keep)

    def _run_plain(self, *inputs: Any) -> Any:
        """What the caller sees, left to autograd."""
        return single_or_tuple(self.process(as_tuple(self.call_function(*inputs)), self._num_outputs()))

    def _steps(self, count: int) -> Iterator[tuple[str, InvertibleFunction]]:
        """The functions, with names, that a call with ``count`` inputs consists of, in order."""
        name, free_state = type(self).__name__, self._free_state()
        yield "", function_of(name, self.call_function, self.call_inverse, self._num_outputs(), free_state)

    def _leaf_modules(self) -> Iterator[tuple[str, InvertibleModule]]:
        """The modules that run one after the other, with names: this one, or, in a container, those inside."""
        yield "", self

    def _free_state(self) -> FreeState:
        return FreeState([*self.modules()], replays_rng=self.seed)

    def _num_outputs(self) -> int | None:
        """Of ``call_function``."""
        return self.num_inputs if self.reversed else self.num_outputs

    def process(self, values: tuple[Any, ...], count: int | None) -> tuple[Any, ...]:
        """The first ``count`` outputs, which the caller sees."""
        return values[:count]

    @property
    def call_function(self) -> Callable[..., Any]:
        """What ``forward`` calls: ``function``, or ``inverse`` if the module is reversed."""
        return self.inverse if self.reversed else self.function

    @property
    def call_inverse(self) -> Callable[..., Any]:
        """The inverse of ``call_function``."""
        return self.function if self.reversed else self.inverse

    # --- flags --------------------------------------------------------------------------------------------------------

    @property
    def checkpoint(self) -> bool:
        """Whether anything is recomputed."""
        return self._checkpoint

    @checkpoint.setter
    def checkpoint(self, value: bool) -> None:
        self._checkpoint = bool(value)
        self._invertible = self._invertible and self._checkpoint

    @property
    def invertible(self) -> bool:
        """Whether inputs are computed from the outputs."""
        return self._invertible

    @invertible.setter
    def invertible(self, value: bool) -> None:
        self._invertible = bool(value)
        self._checkpoint = self._checkpoint or self._invertible

    @property
    def reversed(self) -> bool:
        """Whether ``forward`` calls ``inverse``."""
        return self._reversed

    @reversed.setter
    def reversed(self, value: bool) -> None:
        self.reverse(value)

    def reverse(self, mode: bool | None = None) -> Self:
        """Make ``forward`` call ``inverse``, or ``function``; by default the other one than now.

        Raises:
            RuntimeError: the module is not ``reversible``.
        """
        mode = not self.reversed if mode is None else bool(mode)
        if mode and not self.reversible:
            raise RuntimeError(f"{type(self).__name__} is not reversible: its inverse cannot stand for its function")
        self._reversed = mode
        return self

    @contextmanager
    def temp_mode(self, **flags: bool) -> Iterator[Self]:
        """Set flags for as long as the context lasts: ``seed``, ``checkpoint``, ``invertible``, ``reversed``.

        Raises:
            TypeError: an unknown flag.
            ValueError: ``invertible=True`` with ``checkpoint=False``.
        """
        unknown = flags.keys() - set(FLAGS)
        if unknown:
            raise TypeError(f"temp_mode: unknown flag {min(unknown)!r}; the flags are {', '.join(FLAGS)}")
        if flags.get("invertible") and not flags.get("checkpoint", True):
            raise ValueError("temp_mode: invertible=True needs checkpoint=True")
        before = self._flags()
        try:
            for name, value in flags.items():
                setattr(self, name, value)
            yield self
        finally:
            if self.reversed != before["reversed"]:
                self.reverse(before["reversed"])
            self._set_flags(before)

    def _flags(self) -> dict[str, bool]:
        return {name: getattr(self, name) for name in FLAGS}

    def _set_flags(self, flags: dict[str, bool]) -> None:
        self.seed = flags["seed"]
        self._checkpoint, self._invertible, self._reversed = (flags[name] for name in FLAGS[1:])

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):  # beside the version, so that no keys are added
            destination._metadata[prefix[:-1]]["flags"] = self._flags()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        if "flags" in local_metadata:
            self._set_flags(local_metadata["flags"])

    def extra_repr(self) -> str:
        usual = {"seed": True, "checkpoint": True, "invertible": True, "reversed": False}
        flags = (f"{name}={value}" for name, value in self._flags().items() if value != usual[name])
        return ", ".join(part for part in (self.described(), *flags) if part)

    def described(self) -> str:
        """What ``extra_repr`` says besides the flags that differ from their defaults."""
        return super().extra_repr()

    # --- checking -----------------------------------------------------------------------------------------------------

    def check(self, *inputs: Any, rtol: float = 1e-3, atol: float = 1e-5) -> CheckReport:
        """Compute inputs from outputs, and compare them, and the gradients, with the true ones.

        Warns where the root mean square of a difference is more than ``atol + rtol`` times that of the true tensor; the
        gradients of a module's parameters, and those of its inputs, count as one tensor each, for random gradients of
        the output, of unit variance. In a container each module has a row, and errors add up over all modules that come
        later. Everything is held meanwhile: a few examples will do.
        """
        return checked(self, inputs, rtol, atol)


def invertible_checkpoint(
    function: Callable[..., Any],
    *args: Any,
    inverse: Callable[..., Any],
    num_outputs: int | None = None,
    keep: Iterable[Tensor] = (),
    seed: bool = True,
) -> Any:
    """``function(*args)``, whose backward pass computes the arguments by ``inverse`` from what it returned.

    Args:
        function: from positional arguments to a tensor or a tuple.
        args: its arguments; those that are no floating-point tensors are saved.
        inverse: from what ``function`` returns to ``args``.
        num_outputs: how many outputs the caller sees; the rest is for ``inverse``. None: all.
        keep: of the arguments, those to be saved for the backward pass.
        seed: whether a recomputation draws the random numbers of the first run.

    Saved for the backward pass: the outputs, unless they go into another call like this one, which computes them then;
    what ``keep`` names; no parameters.

    Source: Gomez et al. 2017, "The Reversible Residual Network".

    >>> import torch, fusedlayers as fl
    >>> x = torch.randn(4, requires_grad=True)
    >>> y = fl.invertible_checkpoint(torch.exp, x, inverse=torch.log)
    """
    if not can_checkpoint():
        return single_or_tuple(as_tuple(function(*args))[:num_outputs])
    name = f"invertible_checkpoint of {getattr(function, '__qualname__', type(function).__name__)}"
    free_state = FreeState.of([function, inverse], tree_leaves(args))._replace(replays_rng=seed)
    return run_inverted([function_of(name, function, inverse, num_outputs, free_state)], args, tuple(keep))


def function_of(
    name: str,
    function: Callable[..., Any],
    inverse: Callable[..., Any],
    num_outputs: int | None,
    free_state: FreeState,
) -> InvertibleFunction:
    """Of a function and an inverse that may return single values."""
    return InvertibleFunction(
        name,
        lambda *values: as_tuple(function(*values)),
        lambda *values: as_tuple(inverse(*values)),
        num_outputs,
        free_state,
    )


def as_tuple(values: Any) -> tuple[Any, ...]:
    """The values of a function that returns one or several."""
    return values if isinstance(values, tuple) else (values,)


def single_or_tuple(values: tuple[Any, ...]) -> Any:
    """The inverse of ``as_tuple``."""
    return values[0] if len(values) == 1 else values


@disable_dynamo  # which cannot follow a backward pass that computes inputs
def run_inverted(steps: Iterable[InvertibleFunction], values: tuple[Any, ...], keep: tuple[Tensor, ...]) -> Any:
    """Call functions one after the other, each by a node that computes its inputs from its outputs."""
    for step in steps:
        if (
            step.free_state.runs_differently_first
        ):  # the recomputation would draw the numbers that initialize parameters
            values = step.forward(*values)[: step.num_outputs]
        else:
            values = InvertibleCall(step, values, keep).run()
    return single_or_tuple(values)


def can_checkpoint() -> bool:
    """Whether there will be a backward pass, and nothing is active that must see plain operations, as transforms do.

    In a recomputed region a module is left to autograd: nothing of it is held in the first run, and in the
    recomputation its output would be held. Nor would a recomputation compute the weights that ``parametrize.cached()``
    shares between modules.
    """
    if in_plain_mode() or parametrizations_are_cached() or not torch.is_grad_enabled() or in_recomputed_region():
        return False
    return torch.compiler.is_compiling() or followed_by() is None  # the compiler cannot trace followed_by
