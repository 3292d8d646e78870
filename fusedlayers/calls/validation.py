"""Checks of arguments, and the messages of the functional interface (names of activations: ``activations/table.py``).

PyTorch refuses most of what does not fit together, but some of it only after a kernel has written over a result, and
some not at all: a bias of one element is broadcast, and a kernel reads beyond it. So all that a kernel reads is checked
before anything is computed. Each check says which function was called, what it expected, what it got, and what to do.
"""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import has_torch_function, is_tensor_like

from .. import kernels
from .._torch import is_of_transform
from ..activations import DTYPES, FLOAT64_IS_TORCHS, Activation
from ..kernels.operations import Convolution, Matmul, Mlp, Operation, Pointwise
from ..utils.formatting import described
from .casts import is_autocast

SAVES = ("auto", "output", "input", "recompute")

#: The types of tensors that kernels read; a subclass may compute something else.
PLAIN_TYPES = frozenset((Tensor, Parameter))


# --- what kernels can read --------------------------------------------------------------------------------------------


def are_usual(*tensors: Tensor | None) -> bool:
    """Whether these are torch's own tensors, not subclasses, which may compute something else; and no compiler traces
    the call."""
    for tensor in tensors:  # a loop enters no functions, as a generator does
        if tensor is not None and (type(tensor) not in PLAIN_TYPES or tensor.is_nested):
            return False
    return not torch.compiler.is_compiling()


def unusual_because(*tensors: Tensor | None) -> str | None:
    """Why kernels cannot read these, or None: they read plain strided tensors on a device that has a backend, and no
    float64."""
    is_compiling = torch.compiler.is_compiling()
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) not in PLAIN_TYPES:
            return f"one of the tensors is a {type(tensor).__name__}"
        if tensor.dtype is torch.float64:
            return FLOAT64_IS_TORCHS
        if tensor.is_nested or tensor.layout is not torch.strided:
            return f"one of the tensors is {'nested' if tensor.is_nested else tensor.layout}"
        if not is_compiling:
            if is_of_transform(tensor):
                return "one of the tensors belongs to a transform of torch.func"
            if tensor.is_neg():
                return "one of the tensors has its negative bit set (Tensor.is_neg)"
        if not tensor.is_cpu and tensor.device.type not in kernels.DEVICES:
            return f"there is no backend for {tensor.device.type}"
    return None


# --- the tensors of a call --------------------------------------------------------------------------------------------


def check_call(operation: Operation, tensors: Sequence[Any], save: str) -> None:
    """Refuse tensors of a layer or a block that do not fit together."""
    if isinstance(operation, Mlp):
        check_block_options(operation, save)
        _check_block(operation, tensors)
        return
    x, w, b, residual = tensors
    function, is_pointwise = operation.function, isinstance(operation, Pointwise)
    required: dict[str, object] = {"input": x} if is_pointwise else {"input": x, "weight": w}
    check_tensors(function, required, bias=b, residual=residual)
    if any(tensor is not None and tensor.is_nested for tensor in (x, residual)):
        return  # which do not have sizes
    if isinstance(operation, Matmul):
        _check_dense(function, x, w, "weight")
    elif isinstance(operation, Convolution):
        dims, channels = len(operation.stride), w.shape[1] * operation.groups
        if x.dim() - dims not in (1, 2) or x.shape[-dims - 1] != channels:
            raise ValueError(
                f"{function}: expected input (batch, in, ...) or (in, ...) with {dims} spatial dimensions for weight "
                f"{dims_of(w)}, in = {channels}, got {dims_of(x)}"
            )
    if isinstance(operation, Pointwise):
        if b is not None:
            _check_dim(function, x, operation.dim)
            _check_shape(function, "bias", b, (x.shape[operation.dim],), f" along dim {operation.dim} of {dims_of(x)}")
    else:
        _check_shape(function, "bias", b, w.shape[:1], f" for weight {dims_of(w)}")
    check_one_dtype(function, {"input": x, "weight": w, "bias": b, "residual": residual}, is_cast=not is_pointwise)
    if residual is not None:
        _check_shape(function, "residual", residual, operation.shape(x, w), ", like the result")


def _check_block(operation: Mlp, tensors: Sequence[Any]) -> None:
    function, halves, x = operation.function, 1 + operation.is_packed, tensors[0]
    names = ["_gate", "_up", "_down"] if operation.is_gated else ["1", "2"]
    names = [names[0], names[-1]] if operation.is_packed else names
    weights = {f"weight{name}": w for name, w in zip(names, tensors[1::2], strict=True)}
    biases = {f"bias{name}": b for name, b in zip(names, tensors[2::2], strict=True)}
    check_tensors(function, {"input": x, **weights}, **biases)
    if x.is_nested:
        return
    (first_name, w), *_, (last_name, last_w) = weights.items()
    pairs = zip(weights.items(), biases.items(), strict=True)
    for (name, weight), (bias_name, bias) in pairs:
        if name != last_name:
            _check_dense(function, x, weight, name)
            _check_shape(function, name, weight, w.shape, f", like {first_name}")
        elif last_w.dim() != 2 or last_w.shape[1] * halves != w.shape[0]:
            rows, part = ("hidden", "") if halves == 1 else ("2 * hidden", "half of ")
            raise ValueError(
                f"{function}: expected {name} (out, hidden) for {first_name} ({rows}, in), got {dims_of(last_w)} and "
                f"{dims_of(w)}; {name}.shape[1] must be {part}{first_name}.shape[0]"
            )
        _check_shape(function, bias_name, bias, weight.shape[:1], f" for {name} {dims_of(weight)}")
    check_one_dtype(function, {"input": x, **weights, **biases}, is_cast=True)


def check_tensors(function: str, required: Mapping[str, object], **optional: object) -> None:
    """Refuse what is not a floating tensor, or not on the device of the first."""
    device = None
    for name, tensor in {**required, **optional}.items():
        if tensor is None and name in optional:
            continue
        # While a torch function mode is on, has_torch_function holds for all tensors.
        if type(tensor) not in PLAIN_TYPES and has_torch_function((tensor,)):
            continue  # which says itself what it is
        if not isinstance(tensor, Tensor):
            hint = f"; pass None for no {name}" if name in optional else ""
            raise TypeError(f"{function}: {name} must be a tensor, got {type(tensor).__name__}{hint}")
        if tensor.dtype not in DTYPES:
            raise TypeError(
                f"{function}: {name} must have a floating dtype ({', '.join(map(str, DTYPES))}), got {tensor.dtype}"
                + ("" if tensor.is_complex() else "; convert it first")
            )
        device = device or tensor.device
        if tensor.device != device:
            first = next(iter(required))
            raise ValueError(f"{function}: {name} is on {tensor.device} but {first} is on {device}; move one of them")


def check_one_dtype(function: str, tensors: Mapping[str, Tensor | None], *, is_cast: bool) -> None:
    """Refuse mixed dtypes, but for those that autocast, where it is on, makes one dtype of: all but float64."""
    dtypes = {name: tensor.dtype for name, tensor in tensors.items() if tensor is not None}
    if len({*dtypes.values()}) == 1:
        return
    if is_cast and torch.float64 not in dtypes.values():
        device = next(tensor for tensor in tensors.values() if tensor is not None).device
        if is_autocast(device.type):
            return
    got = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
    remedy = "convert them, or use torch.autocast" if is_cast else "convert one of them"
    raise ValueError(f"{function}: all tensors must have one dtype, got {got}; {remedy}")


def _check_dense(function: str, x: Tensor, w: Tensor, name: str) -> None:
    if w.dim() != 2 or x.dim() < 1 or x.shape[-1] != w.shape[1]:
        raise ValueError(
            f"{function}: expected input (..., in) and {name} (out, in), got {dims_of(x)} and {dims_of(w)}"
            "; the input's last dimension must be the weight's second"
        )


def _check_shape(function: str, name: str, tensor: Tensor | None, expected: tuple[int, ...], why: str) -> None:
    if tensor is not None and tensor.shape != expected:
        raise ValueError(f"{function}: expected {name} {tuple(expected)}{why}, got {dims_of(tensor)}")


def _check_dim(function: str, x: Tensor, dim: object) -> None:
    """Refuse a ``dim`` along which no bias of x can run."""
    if not isinstance(dim, int):
        raise TypeError(f"{function}: dim must be an int, got {described(dim)}")
    if x.dim() == 0:
        raise ValueError(f"{function}: an input of shape () has no dim along which a bias could run; pass None")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{function}: dim must lie in [-{x.dim()}, {x.dim()}) for {dims_of(x)}, got {dim}")


def dims_of(tensor: Tensor) -> str:
    """The shape, as people write it."""
    return str(tuple(tensor.shape))


# --- options ----------------------------------------------------------------------------------------------------------


def check_save(function: str, save: str) -> None:
    """Refuse an unknown ``save``."""
    if save not in SAVES:
        raise ValueError(f"{function}: save must be one of {', '.join(SAVES)}, got {save!r}")


def check_dropout(function: str, dropout: object) -> None:
    """Refuse a dropout that is not a probability."""
    if isinstance(dropout, bool) or not isinstance(dropout, Real):
        raise TypeError(f"{function}: dropout must be a number, got {described(dropout)}")
    if not 0 <= float(dropout) <= 1:
        raise ValueError(f"{function}: dropout must lie in [0, 1], got {dropout}")


def check_block_options(operation: Mlp, save: str) -> None:
    """Refuse what a block cannot be asked for besides tensors."""
    function, dropout, chunks, is_gated, *_ = operation
    check_save(function, save)
    if save == "output" and is_gated:
        raise ValueError(
            f"{function}: save='output' is not possible: a product does not determine its factors; use save='auto', "
            "'input' or 'recompute'"
        )
    check_dropout(function, dropout)
    if chunks is None:
        return
    if not is_whole(chunks):
        raise TypeError(f"{function}: chunks must be an int, got {described(chunks)}")
    if chunks < 1:
        raise ValueError(f"{function}: chunks must be at least 1, got {chunks}")


def check_inplace(x: Tensor, save: str, dropout: object) -> None:
    """Refuse what ``bias_act`` cannot do over its input."""
    if save == "recompute":
        raise ValueError("bias_act: save='recompute' needs the input, which inplace=True overwrites; drop one of them")
    if dropout:
        raise ValueError("bias_act: dropout and inplace=True; drop one of them")
    # torch refuses leaves after a custom Function has written; that belongs before.
    base = x._base if x._base is not None else x
    if torch.is_grad_enabled() and base.is_leaf and base.requires_grad:
        found = "a leaf" if base is x else "a view of a leaf"
        raise RuntimeError(
            f"bias_act: inplace=True on {found} that requires grad; use inplace=False or detach the input"
        )


def check_features(function: str, **features: object) -> None:
    """Refuse sizes that are not whole numbers: where arguments have slipped, ``nn.Linear`` speaks of ``empty()``."""
    for name, value in features.items():
        if not is_whole(value):
            is_name = isinstance(value, str) and value.isidentifier()
            hint = f"; if an activation is meant, write activation={value!r}" if is_name else ""
            raise TypeError(f"{function}: {name} must be an int, got {described(value)}{hint}")
        if value < 0:
            raise ValueError(f"{function}: {name} must not be negative, got {value}")


def check_window(function: str, **sizes: object) -> None:
    """Refuse a convolution's sizes that are not whole numbers: ``nn.Conv2d`` takes a string for a sequence."""
    for name, size in sizes.items():
        parts = size if isinstance(size, Iterable) and not isinstance(size, str) else (size,)
        if not all(map(is_whole, parts)):
            raise TypeError(f"{function}: {name} must be an int, or one for each dimension, got {size!r}")


def convolution(dims: int, stride: object, padding: object, dilation: object, groups: Any) -> Convolution:
    """The operation of ``conv_bias_act``, with ``dims`` spatial dimensions. PyTorch refuses what remains: it computes
    the convolution before anything is overwritten."""
    if not 1 <= dims <= 3:
        raise ValueError(
            "conv_bias_act: expected weight (out, in / groups, ...) with one to three spatial dimensions, got a weight "
            f"with {dims + 2} dimensions"
        )
    numbers: list[Any] = []
    for name, value, least in (("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1)):
        found: Any = (value,) if is_whole(value) else tuple(value) if isinstance(value, Sequence) else ()
        found = found * dims if len(found) == 1 else found
        if name == "padding" and isinstance(value, str) and value in ("same", "valid"):
            found = value
        elif len(found) != dims or not all(is_whole(size) and size >= least for size in found):
            allowed = "'same', 'valid', " if name == "padding" else ""
            raise ValueError(
                f"conv_bias_act: {name} must be {allowed}{dims} numbers, or one, of at least {least}, got {value!r}"
            )
        else:
            found = tuple(int(size) if isinstance(size, Integral) else size for size in found)
        numbers.append(found)
    return Convolution(numbers[0], numbers[1], numbers[2], groups)


def is_whole(value: object) -> TypeGuard[int]:
    """Whether torch takes a value for a whole number, as it takes NumPy's, but not True."""
    is_int = type(value) is int  # which needs no look at base classes
    return is_int or (isinstance(value, (int, torch.SymInt, Integral)) and not isinstance(value, bool))


# --- errors of what runs later ----------------------------------------------------------------------------------------


def activated(function: str, activation: Activation, z: Tensor) -> Tensor:
    """``activation(z)`` by PyTorch's own operations. A user's function need not return a tensor."""
    y = activation.plain(z)
    if type(y) is not Tensor and not is_tensor_like(y):  # as the proxies of a trace are
        kind = type(y)
        found = "tuple" if kind.__module__ == "torch.return_types" else kind.__name__  # torch.sort's is named "sort"
        raise TypeError(f"{function}: the activation must return a tensor, {activation.name} returned {found}")
    return y
