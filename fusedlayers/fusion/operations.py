"""The operations of PyTorch in whose place this package computes, keeping less for the backward pass.

An ``Operation`` is called with what PyTorch's function was called with. It returns what that would return, and leaves
to PyTorch what its plan says: small results, unusual tensors, options that it does not know.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import asking, gates, norms, sizes
from .._torch import grouped_mm
from ..activations import Activation, table
from ..batch_norms import after_batch_norm, batch_norm
from ..call import COPIED_BY_CHECKPOINT, needs_gradient
from ..dropouts import dropout
from ..functional import bias_act
from ..ops.dropout import dropped_product_of
from ..ops.edits import is_under_checkpoint
from ..ops.product import factors_of
from ..plan import plain
from ..utils.bounded_cache import BoundedCache
from ..utils.layout import copies_are_channels_last, copies_are_contiguous

Arguments = tuple[Any, ...]
Options = dict[str, Any]


class Operation(NamedTuple):
    """``run(function, args, kwargs)`` in the place of ``function(*args, **kwargs)``.

    ``kind``: what reports call it; PyTorch's functions that are the same operation share it.
    """

    kind: str
    run: Callable[[Any, Arguments, Options], Any]

    def is_small(self, args: Arguments) -> bool:
        """Whether the first argument is so small that PyTorch computes the result in any case."""
        x = args[0] if args else None
        if self.kind != BATCH_NORM:
            return sizes.is_small(x)
        return isinstance(x, Tensor) and x.numel() * x.itemsize < sizes.batch_norm_limits(x).large


class Given(NamedTuple):
    """What a module is given, of which the sizes of everything that it computes follow."""

    #: Of tensors all but the length of the first dimension; numbers and words as they are.
    outline: tuple[Any, ...]
    #: The lengths of the first dimensions.
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, args: Arguments, kwargs: Options) -> Given | None:
        """None where there is more than tensors, numbers and words."""
        outline: list[Any] = []
        lengths: list[int] = []
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                shape = value.shape
                outline.append((shape[1:], value.dtype, value.device))
                lengths.append(shape[0] if shape else 1)
            elif value is None or isinstance(value, bool | int | float | str):
                outline.append(value)
            else:
                return None
        return cls(tuple(outline), tuple(lengths))

    def is_as_small(self, args: Arguments, kwargs: Options) -> bool:
        """Whether these are like it, and no longer."""
        other = Given.of(args, kwargs)
        if other is None or other.outline != self.outline:
            return False
        return all(length <= least for length, least in zip(other.lengths, self.lengths, strict=True))


def _rms_norm(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``F.rms_norm``. What ``fusedlayers.rms_norm`` makes is contiguous, where PyTorch's result is channels-last if the
    input is: code may view it, and a dropout draws its numbers in the order of memory."""
    return (F.rms_norm if copies_are_channels_last(input) else norms.rms_norm)(input, *args, **kwargs)


def _operations() -> dict[Any, Operation]:
    found = {function: Operation(form.kind, functools.partial(_activated, form)) for function, form in _forms()}
    for ours, functions in _SAME.items():
        for function in functions:
            kind = _KINDS.get(ours) or function.__name__
            found[function] = Operation(kind, functools.partial(_instead, ours))
    for function in _OF_PRODUCTS:
        found[function] = Operation(PRODUCT, _of_product)
    return found


#: What a module that is recomputed as a whole has in the place of an operation.
CHECKPOINT = "mlp"
#: What reports call a matrix product of a product of two tensors: it need not keep that, if it keeps these.
PRODUCT = "product"
#: What they call the product of an activation with another tensor, which keeps the input of both.
GATE = "gate"
BATCH_NORM = "batch_norm"
_KINDS: dict[Any, str] = {gates.multiply: GATE, gates.linear: PRODUCT, batch_norm: BATCH_NORM}
#: Functions of this package that take the arguments of PyTorch's.
_SAME: dict[Any, tuple[Any, ...]] = {
    dropout: (F.dropout,),
    norms.layer_norm: (F.layer_norm,),
    _rms_norm: (F.rms_norm,),
    norms.group_norm: (F.group_norm,),
    batch_norm: (F.batch_norm,),
    gates.linear: (F.linear,),
    gates.multiply: (torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__),
}
#: What else may read a product of two tensors.
_OF_PRODUCTS: tuple[Any, ...] = (
    torch.matmul,
    Tensor.matmul,
    Tensor.__matmul__,
    torch.bmm,
    Tensor.bmm,
    grouped_mm,
    F.conv1d,
    F.conv2d,
    F.conv3d,
)


def _instead(ours: Callable[..., Any], function: Any, args: Arguments, kwargs: Options) -> Any:
    return ours(*args, **kwargs) if "out" not in kwargs else function(*args, **kwargs)


def _of_product(function: Any, args: Arguments, kwargs: Options) -> Any:
    return gates.keeping_factors(function, *args, **kwargs) if args else function(**kwargs)


def in_order(args: Arguments, kwargs: Options) -> tuple[Arguments, Options]:
    """The arguments with the first ones by position: PyTorch's built-in functions take those by name too."""
    for name in ("input", "other")[len(args) :]:
        if name not in kwargs:
            break
        kwargs = dict(kwargs)
        args = (*args, kwargs.pop(name))
    return args, kwargs


def is_gate(args: Arguments) -> bool:
    """Whether a product with these arguments is one of an activation's result."""
    a, b = args[:2] if len(args) >= 2 else (None, None)
    return gates.gate_of(a, b) is not None or gates.gate_of(b, a) is not None


def reads_product(args: Arguments) -> bool:
    """Whether a matrix product with these arguments reads a product of two tensors that are saved."""
    product = dropped_product_of(args[0]) if isinstance(args[0], Tensor) else None
    return product is not None and factors_of(product) is not None


# --- activations ------------------------------------------------------------------------------------------------------


class _Form(NamedTuple):
    """A form of an activation function.

    ``target``: the function that the table lists; ``names``: of its parameters behind the first, in order.
    """

    target: Any
    names: tuple[str, ...]
    is_in_place: bool

    @property
    def kind(self) -> str:
        # nn.ReLU6 calls the one or the other, by the version of torch.
        return "hardtanh" if self.target is F.relu6 else str(self.target.__name__)


def _forms() -> Iterator[tuple[Any, _Form]]:
    """PyTorch's activation functions, in all their forms: ``F.relu``, ``torch.relu``, ``Tensor.relu`` and those that
    write over their input."""
    for target in table.stand_ins:
        name = getattr(target, "__name__", "")
        if isinstance(target, type) or not callable(target) or not name:
            continue
        names = _parameters(target)
        yield target, _Form(target, names, is_in_place=False)
        for space in (torch, F, Tensor):
            for form in (name, f"{name}_"):
                function = getattr(space, form, None)
                if function is not None and function not in table.stand_ins:
                    yield function, _Form(target, names, is_in_place=form != name)


def _parameters(target: Any) -> tuple[str, ...]:
    """The names of a function's parameters behind the first."""
    try:
        return tuple(inspect.signature(target).parameters)[1:]
    except ValueError:  # a built-in function; its row lists them in order
        return tuple(table.stand_ins[target][0][0].parameters)


#: Activations by form, arguments and options.
_records: BoundedCache[Activation] = BoundedCache(1024)


def _activated(form: _Form, function: Any, args: Arguments, kwargs: Options) -> Any:
    activation = _activation_of(form, args, kwargs)
    if activation is None or not isinstance(args[0], Tensor):
        return function(*args, **kwargs)
    x, inplace = args[0], _is_in_place(form, kwargs)
    because = in_place_because(x) if inplace and not torch.compiler.is_compiling() else None
    if because is not None:  # bias_act would write over a copy, and keep more
        asking.answer(plain(because))
        return function(*args, **kwargs)
    if form.target is F.logsigmoid and x.is_cpu and not copies_are_contiguous(x):
        return function(*args, **kwargs)  # whose result is contiguous
    joined = None if torch.compiler.is_compiling() else after_batch_norm(x, activation, inplace)
    return joined if joined is not None else bias_act(x, None, activation, inplace=inplace)


def in_place_because(x: Tensor) -> str | None:
    """Why PyTorch computes what writes over x in place, or None."""
    if is_under_checkpoint():
        return COPIED_BY_CHECKPOINT
    if x._is_view() and needs_gradient(x):
        return "it writes over a view in place, of which autograd makes a copy (with inplace=False there is none)"
    return None


def activation_of(function: Any, args: Arguments, kwargs: Options) -> Activation | None:
    """What ``function(*args, **kwargs)`` is as an activation of its first argument, or None."""
    run: Any = OPERATIONS[function].run
    return _activation_of(run.args[0], args, kwargs)


def writes_over_input(function: Any, kwargs: Options) -> bool:
    """Whether an activation's function does so with these options."""
    run: Any = OPERATIONS[function].run
    return _is_in_place(run.args[0], kwargs)


def _is_in_place(form: _Form, kwargs: Options) -> bool:
    return form.is_in_place or bool(kwargs.get("inplace"))


def _activation_of(form: _Form, args: Arguments, kwargs: Options) -> Activation | None:
    if torch.compiler.is_compiling():  # which guards every cache that it reads
        return _bound(form, args, kwargs)
    key = form, args[1:], tuple(kwargs.items())
    found = _records.get(key)
    if found is None:
        found = _bound(form, args, kwargs)
        if found is not None:
            _records.put(key, found)
    return found


def _bound(form: _Form, args: Arguments, kwargs: Options) -> Activation | None:
    options = args[1:]
    if not args or len(options) > len(form.names) or any(isinstance(v, Tensor) for v in (*options, *kwargs.values())):
        return None
    named = {**kwargs, **dict(zip(form.names, options, strict=False))}
    if named.pop("inplace", False) and not kwargs.get("inplace"):
        return None  # by position, where nobody looks for it
    for row, arguments, required in table.stand_ins[form.target]:
        parameters = {name: value for name, value in named.items() if name not in arguments}
        is_selected = all(named.get(name) == value for name, value in arguments.items())
        is_whole = is_selected and all(name in parameters for name in required)
        if is_whole and all(name in row.parameters and isinstance(v, (int, float)) for name, v in parameters.items()):
            return row.bind(**parameters)
    return None


#: By PyTorch's functions, as a ``TorchFunctionMode`` sees them.
OPERATIONS = _operations()
