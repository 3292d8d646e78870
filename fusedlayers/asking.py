"""Asking for the plan of a call: the call is made, and ends as soon as it is decided."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from .utils.formatting import described
from .utils.refusals import check_instance, takes


class _Answered(BaseException):
    """What ends a call that was made to ask for its plan; no ``except Exception`` of a model catches it."""


class _Question:
    """A call of ``plan_of`` that is waiting for plans."""

    def __init__(self, compiled: bool) -> None:
        self.compiled = compiled
        self.thread = threading.get_ident()
        self.plans: list[Any] = []


#: Who asks, on any thread; as a rule nobody.
questions: list[_Question] = []


def plan_of(function: Callable[..., Any], *args: Any, compiled: bool = False, **kwargs: Any) -> list[Any]:
    """What a call of a layer, a block or a function of this package would do: which path it takes, what it saves for
    backward, and why. Nothing is computed, for the call ends as soon as it is decided: of a model, at the first of its
    layers. (``explain(model)`` lists what ``fuse`` has changed in all of it.)

    Args:
        function: a fused module, or a public function that has an activation, a norm, a gate or an MLP.
        args, kwargs: what it would be called with. Gradient mode, autocast and other contexts count as they are.
        compiled: whether to answer for the call inside ``torch.compile``.

    Returns:
        the plan; of a block that runs layer by layer also that of its first layer. ``str(plan)`` says why.

    Raises:
        TypeError, ValueError: as the call. ValueError also where no plan is asked for.

    >>> import torch, fusedlayers as fl
    >>> (plan,) = fl.plan_of(fl.FusedDenseAct(256, 1024, "gelu"), torch.ones(512, 256))
    >>> plan.path, plan.saved, str(plan)
    ('fused', 'output', 'saves the output (last bit = side of minimum)')
    """
    check_instance("plan_of", function)
    if not callable(function):
        raise TypeError(f"plan_of: expected a layer or a function, got {described(function)}")
    question = _Question(compiled)
    questions.append(question)
    try:
        function(*args, **kwargs)
    except _Answered:
        pass
    except TypeError as error:
        if not (args or kwargs) and not takes(function):
            advice = "pass what it would be called with: plan_of(layer, x)"
            raise TypeError(f"plan_of: no inputs were given; {advice}") from error
        raise
    finally:
        questions.remove(question)
    if not question.plans:
        raise ValueError(
            f"plan_of: {_name(function)} plans nothing with these arguments. Plans are made by layers with an "
            "activation, norms, gates and MLPs of this package (fusedlayers.gelu, and not PyTorch's). Of a model that "
            "fuse changed fusedlayers.explain(model) lists all places"
        )
    return question.plans


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__


def is_asked_for_compiled() -> bool:
    """Whether this thread asks what a call would do inside ``torch.compile``."""
    return any(question.compiled and question.thread == threading.get_ident() for question in questions)


def answer(plan: Any, compiled: Callable[[], Any] | None = None) -> None:
    """Tell who asks, on this thread. ``compiled`` decides for the same call inside ``torch.compile``; a layer has it. A
    block that runs layer by layer goes on to its layers."""
    for question in questions:
        if question.thread != threading.get_ident():
            continue
        question.plans.append(compiled() if question.compiled and compiled is not None else plan)
        if compiled is not None or plan.path != "by_layer":
            raise _Answered
