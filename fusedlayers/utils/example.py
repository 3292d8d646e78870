"""A model and its example inputs, as users pass them: what is refused, and how the model is run on them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._torch import NormBase, dynamo_is_loaded, is_optimized
from .formatting import described, first_line
from .refusals import check_instance


def check_module(function: str, model: object) -> None:
    """Raise where this is no module."""
    if not isinstance(model, nn.Module):
        check_instance(function, model)
        is_tensor = isinstance(model, Tensor)
        given = "a tensor; the model comes first, then its inputs" if is_tensor else described(model)
        raise TypeError(f"{function}: model must be an nn.Module, got {given}")


def check_model(function: str, model: object) -> None:
    """Raise where this is no module, or one of lazy parameters that have no shape."""
    check_module(function, model)
    assert isinstance(model, nn.Module)
    lazy = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise ValueError(f"{function}: {lazy[0]} has no shape yet; call the model once, and then {function}")


def arguments_from(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments, from what a user passes as example inputs."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def eagerly() -> Any:
    """What is compiled runs as it was written, so that its operations are seen. Where nothing has been compiled yet the
    compiler, which takes a second to import, is not asked."""
    return torch.compiler.set_stance("force_eager") if dynamo_is_loaded() else contextlib.nullcontext()


def check_uncompiled(function: str, model: nn.Module) -> None:
    """Raise where the model's code is not what runs."""
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(f"{function}: the model is of TorchScript; {function} it before you trace or script it")
    if is_optimized(model) or model._compiled_call_impl is not None:
        raise TypeError(
            f"{function}: the model is compiled, and torch.compile decides itself what to save; {function} what is not "
            f"compiled, or call {function} before torch.compile, which then leaves it as it is"
        )


def does_not_run(function: str, error: Exception, args: tuple[Any, ...] = ()) -> ValueError:
    """The error for inputs that the model raises on."""
    if type(error).__name__ in ("BackendCompilerFailed", "InductorError"):
        return ValueError(
            f"{function}: torch.compile failed on the model. See whether torch.compile(model) works by itself; if not, "
            f"its C++ compiler or its cache (TORCHINDUCTOR_CACHE_DIR) may be broken: {first_line(error)}"
        )
    hint = what_was_meant(args)
    if hint:
        hint = f" ({hint})"
    elif isinstance(error, TypeError) and " missing " in str(error):
        hint = " (pass all that it needs: a tuple of positional arguments, or a dict of keyword arguments)"
    elif len(args) > 1 and isinstance(error, TypeError) and "positional argument" in str(error):
        hint = (
            " (a tuple or a list holds positional arguments; of a pair from a loader pass batch[0], and for one that "
            "is a list write ([a, b],))"
        )
    elif isinstance(error, TypeError) and "keyword argument" in str(error):
        hint = " (a dict holds keyword arguments, by their names; for a model that takes a dict write (batch,))"
    return ValueError(
        f"{function}: the model does not run on these inputs{hint}: {type(error).__name__}: {first_line(error)}"
    )


def what_was_meant(args: tuple[Any, ...]) -> str:
    """A hint where a model's arguments are not what models take; else nothing."""
    if any(type(arg).__module__ == "numpy" for arg in args):
        return "a NumPy array is among the inputs; torch.from_numpy makes a tensor of it"
    if any(type(arg).__module__.startswith("torch.utils.data.") for arg in args):
        return "a data loader or a dataset is among the inputs; pass a batch, such as next(iter(loader))"
    if len(args) > 1 and all(type(arg) is int for arg in args):
        return f"the inputs are numbers; if a tensor of this shape is meant, pass torch.randn{args}"
    return ""


def evaluation_notes(model: nn.Module) -> list[str]:
    """For a model in evaluation, if it has modules that do something else in training."""
    kinds = (nn.Dropout, nn.Dropout2d, NormBase)
    if model.training or not any(isinstance(module, kinds) for module in model.modules()):
        return []
    return [
        "The model is in evaluation (model.eval()), so that dropouts and batch norms were not seen as they are in "
        "training. Call model.train() first if it is to be trained."
    ]
