"""The table of activations, and the look-up in it: ``resolve`` turns what a user passes into a record.

``builtin.py`` fills the table with rows, and ``activation`` adds the names of users' functions.
"""

import functools
import types
from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn

from ..utils.formatting import callable_name, described
from .free_variables import STATED, find_variables, must_call_reason
from .record import Activation, Definition

F = TypeVar("F", bound=Callable[..., Tensor])
Formula = Callable[[Tensor], Tensor] | None

#: Each row with its default parameters, and users' functions.
by_name: dict[str, Activation] = {}
#: Names by how they are spelled (``spelled``).
by_spelling: dict[str, str] = {}
#: By replaced module or function: the row, and the arguments that select it.
stand_ins: dict[Any, list[tuple[Definition, Mapping[str, object]]]] = {}


def activations() -> tuple[str, ...]:
    """The names of all registered activations."""
    return tuple(by_name)


def definitions() -> tuple[Definition, ...]:
    """The rows of the table, in their order."""
    return tuple(found.definition for found in by_name.values() if found.definition is not None)


def bound(name: str, parameters: Mapping[str, float]) -> Activation:
    """The row of that name with these parameters."""
    definition = by_name[name].definition
    assert definition is not None
    return definition.bind(**parameters)


def spelled(name: str) -> str:
    """A name without what people write in different ways: case, underscores and hyphens. torch's classes are spelled
    like the rows that they stand for: ``LeakyReLU`` like ``leaky_relu``."""
    return name.lower().replace("_", "").replace("-", "")


# --- registering ------------------------------------------------------------------------------------------------------


def register(definition: Definition) -> None:
    """Add a row to the table, so that ``resolve`` finds its name and what it stands for.

    Raises:
        ValueError: the name is taken.
    """
    _add(definition.bind(), *definition.also_called)
    for target, arguments in definition.stands_for:
        register_stand_in(definition.name, target, arguments)


def register_stand_in(name: str, target: Any, arguments: Mapping[str, object] = MappingProxyType({})) -> None:
    """Let ``resolve`` replace ``target`` by the row of that name wherever ``arguments`` match."""
    definition = by_name[name].definition
    assert definition is not None
    stand_ins.setdefault(target, []).append((definition, arguments))


def _add(added: Activation, *also_called: str) -> None:
    names = (added.name, *also_called)
    for name in names:
        taken = by_spelling.get(spelled(name))
        if taken is not None and not _is_again(by_name[taken], added):
            place = "" if taken == name else f" as {taken!r}"
            raise ValueError(f"activation {name!r} is already registered{place}; name= gives this one another name")
    by_spelling.update({spelled(name): added.name for name in names})
    by_name[added.name] = added


def _is_again(old: Activation, new: Activation) -> bool:
    """Whether a user's function is registered once more, as by a notebook's cell that runs twice."""
    places = [(getattr(f, "__module__", None), getattr(f, "__qualname__", None)) for f in (old.function, new.function)]
    return old.definition is None and old.name == new.name and places[0] == places[1]


@overload
def activation(function: F) -> F: ...


@overload
def activation(
    *, name: str | None = None, derivative_given_output: Formula = None, input_given_output: Formula = None
) -> Callable[[F], F]: ...


def activation(
    function: Any = None,
    *,
    name: str | None = None,
    derivative_given_output: Any = None,
    input_given_output: Any = None,
) -> Any:
    """Register a function of tensors as an activation, so that its name can stand for it.

    Args:
        function: ``function(z) -> y``, pointwise, in torch operations; y has z's shape and dtype. Whatever else it
            reads is treated as in functions that are passed to a layer as they are.
        name: the name of the activation; by default the function's.
        derivative_given_output: the derivative as a function of y, which may read the function's tensors. It becomes an
            attribute of the function. A module, which needs no name, has a method of this name, checked at its first
            use.
        input_given_output: z as a function of y, likewise, where the function reads tensors: their gradients follow
            from it. It may be infinite or NaN where y is at a limit of the function.

    Returns:
        the function itself; or a decorator, if called with ``name`` only.

    Raises:
        TypeError: not a function, a function without a name, or ``input_given_output`` alone.
        ValueError: a name that is taken; a formula that is not pointwise, is missing, or gives other gradients than
            autograd, for the function's tensors as they are, or as training may change them.

    Saved: the output where the library finds out that it determines the derivative, or the function states it; else
    the input. From rounded outputs a stated formula is as accurate as it is, which is not measured.

    >>> import torch, fusedlayers as fl
    >>> @fl.activation
    ... def two_sided_decay(z):
    ...     return torch.sign(z) * -torch.expm1(-z.abs())
    >>> fl.bias_act(torch.tensor([0.0, 1.0]), None, "two_sided_decay")
    tensor([0.0000, 0.6321])
    """
    formulas = zip(STATED, (derivative_given_output, input_given_output), strict=True)
    stated = {part: formula for part, formula in formulas if formula is not None}
    if function is None:
        return functools.partial(activation, name=name, **stated)
    if isinstance(function, nn.Module) or not callable(function):
        hint = "; a module needs no name, pass it to a layer as it is" if isinstance(function, nn.Module) else ""
        hint = f"; write @activation(name={function!r})" if isinstance(function, str) else hint
        raise TypeError(f"activation: expected a function, got {type(function).__name__}{hint}")
    name = str(name or getattr(function, "__name__", _LAMBDA))
    if name == _LAMBDA:
        raise TypeError("activation: the function has no name of its own; pass name=")
    if stated:
        if derivative_given_output is None or not isinstance(function, types.FunctionType):
            raise TypeError(
                "activation: derivative_given_output must be stated, of a function that is written with def or lambda, "
                f"whose attribute it becomes; got {', '.join(stated)} of {function!r}"
            )
        from .custom import trace_activation  # which looks functions up here

        vars(function).update(stated)
        shape = torch.broadcast_shapes(*(tensor.shape for tensor in find_variables(function).tensors))
        trace_activation(Activation(name, function, needs_tracing=True), (2, *shape), torch.float32)
    _add(Activation(name, function, needs_tracing=True))
    return function


_LAMBDA = "<lambda>"


# --- looking up -------------------------------------------------------------------------------------------------------


def resolve(activation: object, function: str = "resolve") -> Activation:
    """The record for a name, an ``nn.Module``, a torch function, a ``functools.partial``, any callable, or None.

    Names are found as they are written, or else by their spelling: "ReLU" and "leaky-relu" are names too.

    Errors name ``function`` as the function that was called.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
        TypeError: an object that cannot be called, or the class of a module.
    """
    if isinstance(activation, str):
        name = by_spelling.get(spelled(activation))
        return by_name[name if name is not None else _refuse_name(activation, function)]
    if activation is None:
        return by_name["identity"]
    if isinstance(activation, Activation):
        return activation
    if isinstance(activation, nn.Module):
        return _resolve_module(activation)
    if isinstance(activation, type) and issubclass(activation, nn.Module):
        name = activation.__name__
        raise TypeError(f"{function}: activation must be an instance, {name}(...), and not the class {name}")
    if not callable(activation):
        is_slipped = function.startswith("Fused") and isinstance(activation, int | tuple)
        hint = "; other arguments, such as bias, are keywords" if is_slipped else ""
        raise TypeError(
            f"{function}: activation must be a name, a module, a function or None, got {described(activation)}{hint}"
        )
    return _resolve_function(activation)


def _refuse_name(name: str, function: str) -> str:
    import difflib  # which takes milliseconds, and only an error needs it

    close = difflib.get_close_matches(spelled(name), by_spelling, n=1)
    listed = f"did you mean {by_spelling[close[0]]!r}? The" if close else "the"
    raise ValueError(f"{function}: unknown activation {name!r}; {listed} known ones are: {', '.join(activations())}")


def _resolve_module(module: nn.Module) -> Activation:
    # A subclass may compute something else, and a hook must see the call: neither is replaced by a row.
    reason = must_call_reason(module)
    if reason is not None:
        name = callable_name(module)
        return Activation(name, module, fallback_reason=f"{name} is left to PyTorch because {reason}")
    found = activation_of_module(module, vars(type(module)).get("stands_in_for", type(module)))
    return found if found is not None else Activation(callable_name(module), module, needs_tracing=True)


def activation_of_module(module: nn.Module, kind: type[nn.Module]) -> Activation | None:
    """The record for a module that computes what torch's class ``kind`` computes; None if the table has none."""
    # Each call of a drop-in module asks. Loops enter no functions, as comprehensions and generators do.
    for definition, arguments in stand_ins.get(kind, ()):
        parameters = {}
        for key in definition.parameters:
            value = getattr(module, key)
            if not isinstance(value, (int, float)):
                break
            parameters[key] = value
        else:
            for key, expected in arguments.items():
                if getattr(module, key) != expected:
                    break
            else:
                return definition.bind(**parameters) if parameters else by_name[definition.name]
    return None


def _resolve_function(function: Callable[..., Any]) -> Activation:
    keywords: dict[str, Any] = {}
    target = function
    if isinstance(function, functools.partial) and not function.args:
        target, keywords = function.func, dict(function.keywords)
        keywords.pop("inplace", None)  # the layer decides what is overwritten
    for definition, arguments in stand_ins.get(target, ()) if isinstance(target, Hashable) else ():
        parameters = {key: value for key, value in keywords.items() if key not in arguments}
        selected = all(keywords.get(key) == value for key, value in arguments.items())
        are_numbers = all(isinstance(value, (int, float)) for value in parameters.values())
        if selected and are_numbers and parameters.keys() <= definition.parameters.keys():
            return definition.bind(**parameters)
    return Activation(callable_name(function), function, needs_tracing=True)
