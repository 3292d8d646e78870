"""What may be passed: the checks of the functional interface, all made before anything is computed or written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import TypeGuard

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import has_torch_function, is_tensor_like

from . import backends
from ._torch import is_of_transform
from .activations import DTYPES, FLOAT64_IS_TORCHS, Activation
from .backends.operations import Convolution, Matmul, Operation, Pointwise, Weight
from .ops.mlp_forward import BlockOptions, Linear
from .utils.formatting import described, size_from

SAVES = ("auto", "output", "input", "recompute")

_PLAIN_TYPES = frozenset((Tensor, Parameter))


def are_usual(required: Sequence[Tensor], optional: Sequence[Tensor | None] = ()) -> bool:
    """Whether these are torch's own tensors, and no subclasses, which may compute something else; and no compiler
    traces the call."""
    # Every call asks: loops enter no functions, as generators do.
    found = not torch.compiler.is_compiling()
    for tensor in required:
        found &= type(tensor) in _PLAIN_TYPES and not tensor.is_nested
    for other in optional:
        found &= other is None or (type(other) in _PLAIN_TYPES and not other.is_nested)
    return found


def unusual_because(*tensors: Tensor | None) -> str | None:
    """Why kernels cannot read these, or None: they read plain strided tensors on a device that has a backend, and no
    float64."""
    is_compiling = torch.compiler.is_compiling()
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) not in _PLAIN_TYPES:
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
        if not tensor.is_cpu and tensor.device.type not in backends.DEVICES:
            return f"there is no backend for {tensor.device.type}"
    return None


def check_save(function: str, save: str) -> None:
    """Refuse an unknown ``save``."""
    if save not in SAVES:
        raise ValueError(f"{function}: save must be one of {', '.join(SAVES)}, got {save!r}")


def output_refused(function: str, activation: Activation, dtype: torch.dtype, reason: str) -> ValueError:
    """The error for ``save="output"`` where the output does not determine the derivative."""
    return ValueError(
        f"{function}: save='output' is not possible for {activation!r} in {dtype}: {reason}; "
        "use save='auto', 'input' or 'recompute'"
    )


def activated(function: str, activation: Activation, z: Tensor) -> Tensor:
    """``activation(z)`` by PyTorch's own operations. A user's function need not return a tensor."""
    y = activation.plain(z)
    if type(y) is not Tensor and not is_tensor_like(y):  # as the proxies of a trace are
        kind = type(y)
        found = "tuple" if kind.__module__ == "torch.return_types" else kind.__name__  # torch.sort's is named "sort"
        raise TypeError(f"{function}: the activation must return a tensor, {activation.name} returned {found}")
    return y


def check_call(operation: Operation, x: Tensor, w: Weight, b: Tensor | None, residual: Tensor | None) -> None:
    """All checks of a layer's tensors, before anything is computed."""
    function = operation.function
    given: dict[str, object] = {"input": x} if isinstance(operation, Pointwise) else {"input": x, "weight": w}
    check_tensors(function, given, residual=residual, bias=b)
    if any(tensor is not None and tensor.is_nested for tensor in (x, residual)):
        return  # which do not have sizes
    if isinstance(operation, Pointwise):
        check_one_dtype(function, x, bias=b)
        if b is not None:
            check_bias(function, x, b, operation.dim)
    else:
        if isinstance(operation, Matmul):
            check_dense(function, x, w, b)
        else:
            check_conv(x, w, b, operation)
        check_one_dtype(function, x, weight=w, bias=b, residual=residual, autocast_casts=True)
    if residual is not None:
        check_residual(function, residual, operation.shape(x, w))


def check_tensors(function: str, required: dict[str, object], **optional: object) -> None:
    """Refuse what is not a floating tensor, or not on the device of the first."""
    device = None
    for name, tensor in {**required, **optional}.items():
        if tensor is None and name in optional:
            continue
        # While a torch function mode is on, has_torch_function holds for all tensors.
        if type(tensor) not in _PLAIN_TYPES and has_torch_function((tensor,)):
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


def check_dense(
    function: str, input: Tensor, weight: Tensor, bias: Tensor | None, names: tuple[str, str] = ("weight", "bias")
) -> None:
    """``names``: those of the weight and of the bias."""
    if weight.dim() != 2 or input.dim() < 1 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{function}: expected input (..., in) and {names[0]} (out, in), got {dims_of(input)} and {dims_of(weight)}"
            "; the input's last dimension must be the weight's second"
        )
    _check_bias_of_outputs(function, weight, bias, names)


def check_block(options: BlockOptions, x: Tensor, first: Sequence[Linear], last: Linear) -> None:
    """All checks of a block, before anything is computed."""
    check_block_options(options)
    function, is_gated = options.function, options.is_gated
    names = [("weight_gate", "bias_gate"), ("weight_up", "bias_up")] if is_gated else [("weight1", "bias1")]
    last_names = ("weight_down", "bias_down") if is_gated else ("weight2", "bias2")
    named = list(zip([*names[: len(first)], last_names], [*first, last], strict=True))
    weights = {names[0]: layer.w for names, layer in named}
    biases = {names[1]: layer.b for names, layer in named}
    check_tensors(function, {"input": x, **weights}, **biases)
    if x.is_nested:
        return  # which does not tell its sizes
    for layer_names, layer in named[:-1]:
        check_dense(function, x, *layer, layer_names)
    check_last(function, {names[0]: layer.w for names, layer in named[:-1]}, *last, last_names, options.halves(first))
    check_one_dtype(function, x, autocast_casts=True, **weights, **biases)


def check_block_options(options: BlockOptions) -> None:
    """What a block is asked for besides tensors."""
    function, dropout, save, chunks, is_gated = options
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


def check_dropout(function: str, dropout: object) -> None:
    """Refuse what is no probability."""
    if isinstance(dropout, bool) or not isinstance(dropout, Real):
        raise TypeError(f"{function}: dropout must be a number, got {described(dropout)}")
    if not 0 <= float(dropout) <= 1:
        raise ValueError(f"{function}: dropout must lie in [0, 1], got {dropout}")


def check_features(function: str, **features: object) -> None:
    """Refuse sizes that are no whole numbers: where arguments have slipped, ``nn.Linear`` speaks of ``empty()``."""
    for name, value in features.items():
        if not is_whole(value):
            is_name = isinstance(value, str) and value.isidentifier()
            hint = f"; if an activation is meant, write activation={value!r}" if is_name else ""
            raise TypeError(f"{function}: {name} must be an int, got {described(value)}{hint}")
        if value < 0:
            raise ValueError(f"{function}: {name} must not be negative, got {value}")


def check_window(function: str, **sizes: object) -> None:
    """Refuse a convolution's sizes that are neither a whole number nor some: ``nn.Conv2d`` takes a string for three."""
    for name, size in sizes.items():
        parts = size if isinstance(size, Iterable) and not isinstance(size, str) else (size,)
        if not all(map(is_whole, parts)):
            raise TypeError(f"{function}: {name} must be an int, or one for each dimension, got {size!r}")


def check_last(
    function: str,
    weights: dict[str, Tensor],
    last: Tensor,
    bias: Tensor | None,
    names: tuple[str, str],
    packed: int = 1,
) -> None:
    """The weights of a block's first products, and the last one, of these names; ``packed``: how many products the
    first weight holds."""
    (first, w), *others = weights.items()
    for name, other in others:
        if other.shape != w.shape:
            raise ValueError(f"{function}: {first} {dims_of(w)} and {name} {dims_of(other)} must have the same shape")
    if w.shape[0] % packed:
        raise ValueError(f"{function}: without weight_up, {first} must hold both, (2 * hidden, in), got {dims_of(w)}")
    if last.dim() != 2 or last.shape[1] * packed != w.shape[0]:
        rows, part = ("hidden", "") if packed == 1 else (f"{packed} * hidden", "half of ")
        raise ValueError(
            f"{function}: expected {names[0]} (out, hidden) for {first} ({rows}, in), got {dims_of(last)} and "
            f"{dims_of(w)}; {names[0]}.shape[1] must be {part}{first}.shape[0]"
        )
    _check_bias_of_outputs(function, last, bias, names)


def _check_bias_of_outputs(
    function: str, weight: Tensor, bias: Tensor | None, names: tuple[str, str] = ("weight", "bias")
) -> None:
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != weight.shape[0]):
        raise ValueError(
            f"{function}: expected {names[1]} ({weight.shape[0]},) for {names[0]} {dims_of(weight)}, "
            f"got {dims_of(bias)}"
        )


def spatial_dims(weight: Tensor) -> int:
    """One to three, as a convolution's weight has."""
    dims = weight.dim() - 2
    if not 1 <= dims <= 3:
        raise ValueError(
            f"conv_bias_act: expected weight (out, in / groups, ...) with one to three spatial dimensions, "
            f"got {dims_of(weight)}"
        )
    return dims


def sizes(function: str, name: str, value: object, dims: int, least: int = 1) -> tuple[int, ...]:
    """A number for each spatial dimension."""
    # As most are given; a sequence of anything takes ten times as long to see through.
    if type(value) is int and value >= least:
        return (value,) * dims
    if type(value) is tuple and len(value) == dims and {int} == {*map(type, value)} and min(value) >= least:
        return value
    found = (value,) * dims if is_whole(value) else value
    if not isinstance(found, Sequence) or isinstance(found, str) or not all(is_whole(size) for size in found):
        raise TypeError(f"{function}: {name} must be an int or a sequence of them, got {value!r}")
    if len(found) == 1:
        found = (*found,) * dims
    if len(found) != dims or not all(size >= least for size in found):
        raise ValueError(f"{function}: {name} must be {dims} numbers, or one, of at least {least}, got {value!r}")
    return tuple(int(size) if isinstance(size, Integral) else size for size in found)


def budget_from(function: str, memory_budget_bytes: object) -> int:
    """The bytes that a number, or a size such as "8GiB", says.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(memory_budget_bytes, str):
        try:
            return size_from(memory_budget_bytes)
        except ValueError as error:
            raise ValueError(f"{function}: memory_budget_bytes: {error}") from None
    if not is_whole(memory_budget_bytes) or memory_budget_bytes < 0:
        raise ValueError(
            f'{function}: memory_budget_bytes must be a number of bytes, 0 or more, or a size such as "8GiB", got '
            f"{memory_budget_bytes!r}"
        )
    return int(memory_budget_bytes)


def is_whole(value: object) -> TypeGuard[int]:
    """Whether torch takes it for a whole number: NumPy's are, True is none."""
    is_int = type(value) is int  # which needs no look at base classes
    return is_int or (isinstance(value, (int, torch.SymInt, Integral)) and not isinstance(value, bool))


def check_conv(input: Tensor, weight: Tensor, bias: Tensor | None, convolution: Convolution) -> tuple[int, ...]:
    """Returns the shape of the result."""
    dims = len(convolution.stride)
    if input.dim() not in (dims + 1, dims + 2):
        raise ValueError(
            f"conv_bias_act: expected input (batch, in, ...) or (in, ...) with {dims} spatial dimensions for weight "
            f"{dims_of(weight)}, got {dims_of(input)}"
        )
    if 0 in (weight.shape[0], *weight.shape[2:]):
        raise ValueError(f"conv_bias_act: weight {dims_of(weight)} has no output channel, or a kernel of no size")
    channels, groups = input.shape[-dims - 1], convolution.groups
    if not is_whole(groups) or groups < 1 or weight.shape[0] % groups or channels != weight.shape[1] * groups:
        raise ValueError(
            f"conv_bias_act: input {dims_of(input)}, weight {dims_of(weight)} and groups={groups!r} do not fit together"
            ": the input's channels must be groups times the weight's second dimension, "
            "and groups must divide its first"
        )
    _check_bias_of_outputs("conv_bias_act", weight, bias)
    padding = convolution.padding
    if isinstance(padding, str) and padding not in ("same", "valid"):
        raise ValueError(f"conv_bias_act: padding must be numbers, 'same' or 'valid', got {padding!r}")
    if padding == "same" and set(convolution.stride) != {1}:
        raise ValueError(f"conv_bias_act: padding='same' needs stride 1, got {convolution.stride}")
    shape = convolution.shape(input, weight)
    if min(shape[-dims:]) < 1:
        raise ValueError(
            f"conv_bias_act: the kernel of weight {dims_of(weight)}, with dilation {convolution.dilation}, is larger "
            f"than input {dims_of(input)} with padding {padding}"
        )
    return shape


def check_residual(function: str, residual: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse a residual of another shape than the result's."""
    if residual.shape != shape:
        raise ValueError(f"{function}: expected residual {shape}, like the result, got {dims_of(residual)}")


def check_bias(function: str, input: Tensor, bias: Tensor, dim: int) -> None:
    """Refuse a bias that does not run along ``dim`` of the input."""
    if not isinstance(dim, int):
        raise TypeError(f"{function}: dim must be an int, got {described(dim)}")
    if input.dim() == 0:
        raise ValueError(f"{function}: an input of shape () has no dim along which a bias could run; pass None")
    if not -input.dim() <= dim < input.dim():
        raise ValueError(f"{function}: dim must lie in [-{input.dim()}, {input.dim()}) for {dims_of(input)}, got {dim}")
    if bias.dim() != 1 or bias.shape[0] != input.shape[dim]:
        raise ValueError(
            f"{function}: expected bias ({input.shape[dim]},) along dim {dim} of {dims_of(input)}, got {dims_of(bias)}"
        )


def check_one_dtype(function: str, input: Tensor, *, autocast_casts: bool = False, **tensors: Tensor | None) -> None:
    """Refuse mixed dtypes, but for those that autocast, where it is on, makes one dtype of: all but float64."""
    dtype = input.dtype
    if all(tensor is None or tensor.dtype is dtype for tensor in tensors.values()):
        return
    named = {"input": input, **tensors}
    dtypes = {name: tensor.dtype for name, tensor in named.items() if tensor is not None}
    if autocast_casts and torch.float64 not in dtypes.values() and is_autocast(input.device.type):
        return
    got = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
    remedy = "convert them, or use torch.autocast" if autocast_casts else "convert one of them"
    raise ValueError(f"{function}: all tensors must have one dtype, got {got}; {remedy}")


def is_autocast(kind: str) -> bool:
    """Whether autocast is on for a kind of device."""
    return kind != "meta" and torch.is_autocast_enabled(kind)  # torch refuses to say for meta


def check_writable(function: str, tensor: Tensor) -> None:
    """Refuse to write over a leaf that requires grad, or over a view of one."""
    # torch makes these checks after a custom Function has written; they belong before.
    base = tensor._base if tensor._base is not None else tensor
    if torch.is_grad_enabled() and base.is_leaf and base.requires_grad:
        what = "a leaf" if base is tensor else "a view of a leaf"
        raise RuntimeError(
            f"{function}: inplace=True on {what} that requires grad; use inplace=False or detach the input"
        )


def dims_of(tensor: Tensor) -> str:
    """The shape, as people write it."""
    return str(tuple(tensor.shape))
