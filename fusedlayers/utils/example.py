"""A model and its example inputs, as users pass them: refusals, arguments, and errors of the model's own code."""

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._torch import dynamo_is_loaded, is_compiled
from .formatting import described


def check_flag(function: str, name: str, value: object) -> None:
    """Refuse all but True and False: a text such as "no" would count as True."""
    if not isinstance(value, bool):
        raise TypeError(f"{function}: {name} must be True or False, got {value!r}")


def check_instance(function: str, model: object) -> None:
    """Refuse a class of modules in the place of a module."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise TypeError(f"{function}: model must be an instance, {model.__name__}(...), and not the class")


def check_module(function: str, model: object) -> None:
    """Refuse all but modules."""
    if not isinstance(model, nn.Module):
        check_instance(function, model)
        is_tensor = isinstance(model, Tensor)
        given = "a tensor; the model comes first, then its inputs" if is_tensor else described(model)
        raise TypeError(f"{function}: model must be an nn.Module, got {given}")


def check_model(function: str, model: object) -> None:
    """Refuse all but modules, and those of lazy parameters that have no shape."""
    check_module(function, model)
    assert isinstance(model, nn.Module)
    lazy = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise ValueError(f"{function}: {lazy[0]} has no shape yet; call the model once, and then {function}")


def check_uncompiled(function: str, model: nn.Module) -> None:
    """Refuse a model whose code is not what runs."""
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"{function}: the model is of TorchScript, whose code decides what is saved; pass the module that was "
            "traced or scripted, and train that"
        )
    if is_compiled(model):
        raise TypeError(
            f"{function}: the model is compiled, and torch.compile decides what is saved, also of a model that "
            f"{function} has seen before; pass the model as it was and train that, or give torch.compile a budget "
            "(fusedlayers.fit_compiled)"
        )


def arguments_from(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments, from what a user passes as example inputs."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def eagerly() -> Any:
    """A context in which compiled code runs as it was written, so that its operations are seen. Where nothing has been
    compiled yet the compiler, which takes a second to import, is not asked."""
    return torch.compiler.set_stance("force_eager") if dynamo_is_loaded() else contextlib.nullcontext()


def mistake_in(args: tuple[Any, ...], error: Exception) -> str:
    """The mistake that a user has probably made, on whose inputs a model raises, and its remedy; or nothing."""
    if any(type(arg).__module__ == "numpy" for arg in args):
        return "a NumPy array is among the inputs; torch.from_numpy makes a tensor of it"
    if any(type(arg).__module__.startswith("torch.utils.data.") for arg in args):
        return "a data loader or a dataset is among the inputs; pass a batch, such as next(iter(loader))"
    if len(args) > 1 and all(type(arg) is int for arg in args):
        return f"the inputs are numbers; if a tensor of this shape is meant, pass torch.randn{args}"
    said = str(error) if isinstance(error, TypeError) else ""
    if " missing " in said:
        return "pass all that it needs: a tuple of positional arguments, or a dict of keyword arguments"
    if len(args) > 1 and "positional argument" in said:
        return (
            "a tuple or a list holds positional arguments; of a pair from a loader pass batch[0], and for one that is "
            "a list write ([a, b],)"
        )
    if "keyword argument" in said:
        return "a dict holds keyword arguments, by their names; for a model that takes a dict write (batch,)"
    return ""


def evaluation_notes(model: nn.Module) -> list[str]:
    """A note on a model in evaluation that has modules which do something else in training."""
    kinds = (nn.Dropout, nn.Dropout2d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    if model.training or not any(isinstance(module, kinds) for module in model.modules()):
        return []
    return [
        "The model is in evaluation (model.eval()), so that dropouts and batch norms were not seen as they are in "
        "training. Call model.train() first if it is to be trained."
    ]
