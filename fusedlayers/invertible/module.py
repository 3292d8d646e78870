"""Modules that state their inverse, and need not save their inputs (Gomez et al. 2017, "The Reversible Residual
Network").

``inversion.py`` has the mechanism and says what it costs; here are the class that users derive from, its flags, a chain
of such modules, and the function of the same effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn

from .._torch import disable_dynamo, tree_leaves
from ..ops.saved_buffers import is_under_checkpoint
from ..recompute.recompute import can_recompute, recomputed, runs_differently_first
from ..utils.formatting import callable_name
from ..utils.module_state import modules_in
from ..utils.reading import reached_by
from .check import CheckReport, checked
from .inversion import InvertibleCall, InvertibleFunction, current_mode, in_mode


class InvertibleModule(nn.Module):
    """A module whose backward pass computes the inputs from the outputs, instead of saving them (Gomez et al. 2017,
    "The Reversible Residual Network").

    A subclass defines ``function`` and ``inverse`` instead of ``forward``. Both take positional arguments and return a
    tensor or a tuple; ``inverse`` takes what ``function`` returns, and returns what it takes. Where modules follow one
    another, only the last one's output is held until the backward pass.

    Inputs are not destroyed, and can be read by their holders. Inputs that are no floating-point tensors are saved. An
    output must not be edited in place: the backward pass would compute the inputs from it, and raises instead.

    Outputs that ``inverse`` needs, and the caller does not, come last: ``num_outputs`` says how many of them the caller
    sees (None: all; a negative number: all but so many). ``num_inputs`` says the same of what ``inverse`` returns.

    Attributes:
        checkpoint: whether inputs are computed from the outputs; else ``function`` runs as any PyTorch code. Its saved
            input ends the rounding errors that add up from later modules: a cheap layer of a deep chain does.
        invertible: with False the inputs are saved, and ``function`` runs again in the backward pass, as in a
            checkpoint; nothing is inverted, in a container nothing inside of it. The flags may be changed at any time.
        reversed: whether ``forward`` calls ``inverse``, as ``reverse`` sets it; only modules that are ``reversible``
            can be.

    Without gradients, and where neither an input nor a parameter requires some, ``forward`` is ``function``; so it is
    in a checkpoint, which holds nothing of it anyway. PyTorch's random numbers, autocast and buffers are replayed, as
    for ``fl.sublinear``. ``torch.compile`` leaves these modules to PyTorch.

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

    num_outputs: int | None = None
    num_inputs: int | None = None
    #: Whether ``inverse`` can stand for ``function``.
    reversible: bool = False
    checkpoint: bool = True
    invertible: bool = True
    _reversed: bool = False

    def function(self, *inputs: Any) -> Any:
        """The outputs, from the inputs."""
        raise NotImplementedError(f"{type(self).__name__} must define function")

    def inverse(self, *outputs: Any) -> Any:
        """The inputs, from the outputs."""
        raise NotImplementedError(f"{type(self).__name__} must define inverse")

    def forward(self, *inputs: Any) -> Any:
        if self.checkpoint and can_checkpoint():
            if not self.invertible:
                # "plain": modules inside run alike both times.
                return recomputed(in_mode("plain")(self._run_plain), self, inputs, {}, "all")
            if self._can_invert(inputs):
                return self._run_inverted(inputs)
        return self._run_plain(*inputs)

    def _can_invert(self, inputs: tuple[Any, ...]) -> bool:
        """Whether these inputs can be computed from their outputs; else autograd saves what it needs."""
        return True

    def _run_inverted(self, inputs: tuple[Any, ...]) -> Any:
        return run_inverted(self._functions(len(inputs)), inputs)

    def _run_plain(self, *inputs: Any) -> Any:
        """The outputs that the caller sees, left to autograd."""
        return single_or_tuple(as_tuple(self.call_function(*inputs))[: self._visible()])

    def _visible(self, *, of_inverse: bool = False) -> int | None:
        """How many values of ``call_function``, or of ``call_inverse``, the caller sees."""
        return self.num_inputs if self.reversed != of_inverse else self.num_outputs

    def _functions(self, count: int) -> Iterable[InvertibleFunction]:
        """The functions that a call with ``count`` inputs consists of, in order."""
        return [self._as_function()]

    def _as_function(self) -> InvertibleFunction:
        """The module as it is called, as one function."""
        calls = self.call_function, self.call_inverse
        return function_of(type(self).__name__, *calls, self._visible(), modules=modules_in(self))

    def _leaf_modules(self) -> Iterator[tuple[str, InvertibleModule]]:
        """The modules that run one after the other, with names: this one, or, in a container, those inside."""
        yield "", self

    @property
    def call_function(self) -> Callable[..., Any]:
        """The function that ``forward`` calls: ``function``, or ``inverse`` if the module is reversed."""
        return self.inverse if self.reversed else self.function

    @property
    def call_inverse(self) -> Callable[..., Any]:
        """The inverse of ``call_function``."""
        return self.function if self.reversed else self.inverse

    @property
    def reversed(self) -> bool:
        """Whether ``forward`` calls ``inverse``."""
        return self._reversed

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

    def extra_repr(self) -> str:
        usual = {"checkpoint": True, "invertible": True, "reversed": False, "num_inputs": type(self).num_inputs}
        flags = (f"{name}={getattr(self, name)}" for name in usual if getattr(self, name) != usual[name])
        return ", ".join(filter(None, (self.described(), *flags)))

    def described(self) -> str:
        """The part of ``extra_repr`` besides the flags that differ from their defaults."""
        return super().extra_repr()

    def check(self, *inputs: Any, rtol: float = 1e-3, atol: float = 1e-5) -> CheckReport:
        """Compute inputs from outputs, and compare them, and the gradients, with the true ones.

        Warns where the root mean square of a difference is more than ``atol + rtol`` times that of the true tensor; the
        gradients of a module's parameters, and those of its inputs, count as one tensor each, for random gradients of
        the output, of unit variance. In a container each module has a row, and errors add up over all modules that come
        later. Everything is held meanwhile: a few examples will do.
        """
        return checked(self, inputs, rtol, atol)


class InvertibleSequential(InvertibleModule, nn.Sequential):
    """Invertible modules one after the other, of which only the last one's output is held for the backward pass.

    So saved memory does not grow with depth, but by what single modules save besides (two numbers for each channel of a
    batch norm in training). The outputs of a module, one or several, are the next one's inputs.

    It is an ``nn.Sequential``, with its keys in the ``state_dict``, indexing, slicing and extending. With
    ``checkpoint=False`` the modules run plainly, whatever their own flags. Reversing it reverses each module and their
    order.

    Args:
        *modules: ``InvertibleModule``s, or one ``OrderedDict`` of them.

    Raises:
        TypeError: a module that is not invertible.

    Saved for the backward pass: the last output.

    Source: Gomez et al. 2017, "The Reversible Residual Network".

    >>> import torch, fusedlayers as fl
    >>> net = fl.InvertibleSequential(*(fl.InvertibleLinear(8, 8) for _ in range(4)))
    >>> net(torch.randn(2, 8)).sum().backward()
    """

    def add_module(self, name: str, module: nn.Module | None) -> None:
        super().add_module(name, _invertible(self, name, module))

    def __getitem__(self, index: Any) -> Any:
        found: Any = nn.Sequential.__getitem__(self, index)
        if isinstance(index, slice):
            found.checkpoint, found.invertible, found._reversed = self.checkpoint, self.invertible, self.reversed
        return found

    def _chain(self) -> list[InvertibleModule]:
        # Checked here too, because setting items and attributes bypasses add_module.
        return [_invertible(self, name, module) for name, module in self._modules.items()]

    def _in_order(self) -> list[InvertibleModule]:
        return self._chain()[::-1] if self.reversed else self._chain()

    def forward(self, *inputs: Any) -> Any:
        # In a checkpoint a single module saves more than it frees; a chain holds one output instead of all.
        with in_mode(current_mode() or "chain"):
            return super().forward(*inputs)

    def _run_inverted(self, inputs: tuple[Any, ...]) -> Any:
        # The modules, and not their functions, for there may be hooks on them: a user's, or those of FSDP.
        for module in self._in_order():
            inputs = as_tuple(module(*inputs))
        return single_or_tuple(inputs)

    def _run_plain(self, *inputs: Any) -> Any:
        with in_mode("plain"):
            return self._run_inverted(inputs)

    def function(self, *inputs: Any) -> Any:
        return self._run_backwards(inputs) if self.reversed else self._run_plain(*inputs)

    def inverse(self, *outputs: Any) -> Any:
        return self._run_plain(*outputs) if self.reversed else self._run_backwards(outputs)

    def _run_backwards(self, values: tuple[Any, ...]) -> Any:
        """Run the inverses, from what ``forward`` returns to what it takes. Outputs that the caller does not see are
        missing."""
        for module in reversed(self._in_order()):
            values = as_tuple(module.call_inverse(*values))[: module._visible(of_inverse=True)]
        return single_or_tuple(values)

    @property
    def reversible(self) -> bool:  # type: ignore[override]  # of others it is what the class says
        return all(module.reversible for module in self._chain())

    def reverse(self, mode: bool | None = None) -> Self:
        before = self.reversed
        super().reverse(mode)
        if self.reversed != before:
            for module in self._chain():
                module.reverse()
        return self

    def _leaf_modules(self) -> Iterator[tuple[str, InvertibleModule]]:
        names = {module: name for name, module in self._modules.items()}
        for module in self._in_order():
            for name, part in module._leaf_modules():
                yield f"{names[module]}.{name}".rstrip("."), part


def _invertible(container: nn.Module, name: str, module: nn.Module | None) -> InvertibleModule:
    if not isinstance(module, InvertibleModule):
        raise TypeError(
            f"{type(container).__name__}: {name} is a {type(module).__name__}, which is not invertible; use an "
            "InvertibleModule, or put it into a coupling"
        )
    return module


def invertible_checkpoint(
    function: Callable[..., Any], *args: Any, inverse: Callable[..., Any], num_outputs: int | None = None
) -> Any:
    """``function(*args)``, whose backward pass computes the arguments by ``inverse`` from what it returned.

    Args:
        function: from positional arguments to a tensor or a tuple.
        args: its arguments; those that are no floating-point tensors are saved.
        inverse: from what ``function`` returns to ``args``.
        num_outputs: how many outputs the caller sees; the rest is for ``inverse``. None: all.

    Saved for the backward pass: the outputs, unless they go into another call like this one, which computes them then;
    no parameters.

    Source: Gomez et al. 2017, "The Reversible Residual Network".

    >>> import torch, fusedlayers as fl
    >>> x = torch.randn(4, requires_grad=True)
    >>> y = fl.invertible_checkpoint(torch.exp, x, inverse=torch.log)
    """
    if not can_checkpoint():
        return single_or_tuple(as_tuple(function(*args))[:num_outputs])
    others = [leaf for leaf in tree_leaves(args) if not isinstance(leaf, Tensor)]
    modules, tensors = reached_by([function, inverse, *others])
    name = f"invertible_checkpoint of {callable_name(function)}"
    step = function_of(name, function, inverse, num_outputs, modules=modules, tensors=tensors, runs_all=False)
    return run_inverted([step], args)


def function_of(
    name: str, function: Callable[..., Any], inverse: Callable[..., Any], num_outputs: int | None, **options: Any
) -> InvertibleFunction:
    """A module of a function and an inverse that may return single values."""
    calls = (lambda *values: as_tuple(function(*values))), (lambda *values: as_tuple(inverse(*values)))
    return InvertibleFunction(name, *calls, num_outputs, **options)


def as_tuple(values: Any) -> tuple[Any, ...]:
    """The values of a function that returns one or several."""
    return values if isinstance(values, tuple) else (values,)


def single_or_tuple(values: tuple[Any, ...]) -> Any:
    """The inverse of ``as_tuple``."""
    return values[0] if len(values) == 1 else values


@disable_dynamo  # which cannot follow a backward pass that computes inputs
def run_inverted(functions: Iterable[InvertibleFunction], values: tuple[Any, ...]) -> Any:
    """Call functions one after the other, each by a node that computes its inputs from its outputs."""
    for function in functions:
        # Of lazy modules the recomputation would draw the numbers that initialize parameters.
        if runs_differently_first(function.modules):
            values = function.forward(*values)[: function.num_outputs]
        else:
            values = InvertibleCall(function, values).run()
    return single_or_tuple(values)


def can_checkpoint() -> bool:
    """Whether there will be a backward pass, and nothing is active that must see plain operations, as transforms do.

    In a checkpoint a module is left to autograd, unless it is in a chain: nothing of it is held in the first run, and
    in the recomputation its output would be held.
    """
    if current_mode() == "plain" or not torch.is_grad_enabled():
        return False
    if torch.compiler.is_compiling():  # the compiler cannot trace what follows
        return True
    return can_recompute(()) and (current_mode() == "chain" or not is_under_checkpoint())
