"""Modules that are changed in place: an instance gets a class that is made of its own and of a mixin.

So the module stays where it is, and what it is: its parameters, hooks and place in ``state_dict``; ``isinstance``, the
name of the class, which sharding plans and saved configurations go by, and the signature of ``forward``. Pickles name
its own class, and the mixin.
"""

from __future__ import annotations

import copyreg
import functools
from typing import Any, ClassVar, cast

from torch import nn


class Mixin:
    """What a module's class gets. It stands before that class, so that ``super()`` is the module as it was."""

    #: The entries of the module's ``__dict__`` that are the mixin's.
    OWN: ClassVar[tuple[str, ...]] = ()
    is_activation = False

    #: The module's own class, and what it was given; set where they are put together.
    original: ClassVar[type[nn.Module]]
    mixin: ClassVar[type[Mixin]]
    forward: Any

    def __init_subclass__(cls) -> None:
        """A class that notes its subclasses hears nothing of these: they are no other models."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(max(2, int(protocol)))
        is_usual = isinstance(reduced, tuple) and reduced[0] is copyreg.__newobj__  # type: ignore[attr-defined]
        if not is_usual or not is_changed(self):
            return reduced  # by a way of its own
        return _new, (self.mixin, self.original), *reduced[2:]


def is_changed(module: object) -> bool:
    """Whether the module has a mixin, and has not been given yet another class since."""
    return "mixin" in vars(type(module))


def change(module: nn.Module, mixin: type[Mixin], **own: Any) -> None:
    """Give a module the mixin, and these entries of its ``__dict__``."""
    module.__class__ = _class(mixin, type(module))
    vars(module).update(own)


def change_back(module: nn.Module) -> None:
    """Take the mixin away, unless the class has been changed once more since."""
    if not is_changed(module):
        return
    changed: Any = module
    for name in changed.OWN:
        vars(module).pop(name, None)
    module.__class__ = changed.original


_classes: dict[tuple[type[Mixin], type[nn.Module]], type[nn.Module]] = {}


def _class(mixin: type[Mixin], original: type[nn.Module]) -> type[nn.Module]:
    if (mixin, original) not in _classes:
        _classes[mixin, original] = _made(mixin, original)
    return _classes[mixin, original]


def _made(mixin: type[Mixin], original: type[nn.Module]) -> type[nn.Module]:
    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Somebody may have held this method since before unfuse.
        kind: Any = mixin if isinstance(self, mixin) else original
        return kind.forward(self, *args, **kwargs)

    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    metaclass: Any = type(original)
    made = metaclass(original.__name__, (mixin, original), {**names, "forward": forward})
    made.mixin, made.original = mixin, original
    return cast(type[nn.Module], made)


def _new(mixin: type[Mixin], original: type[nn.Module]) -> nn.Module:
    made = _class(mixin, original)
    return made.__new__(made)
