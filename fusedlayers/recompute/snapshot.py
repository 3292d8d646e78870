"""The buffers and parameters that the first run of a function finds, for its recomputation.

A recomputation must not count once more. It starts from the buffers that the first run found (statistics of batch
norms, vectors of spectral norms, moving averages, ranges of quantisers), and its writes are thrown away: the modules
hold copies meanwhile, so that no tensor changes which others have saved. Parameters, their ``requires_grad``, and the
modules' modes are those of the first run too: ``torch.func.functional_call`` lends parameters for that run alone.

Parameters and buffers that were edited in place since (by an optimizer's step) raise, as in plain autograd.

Cost: a copy of each buffer, dropped behind the first run where the buffer's version is the same.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from .._torch import is_traceable_wrapper_subclass


class _Place(NamedTuple):
    """A parameter or a buffer in its module's dict, as it was."""

    module: nn.Module
    tensors: dict[str, Any]
    name: str
    tensor: Tensor
    version: int
    needs_grad: bool

    @property
    def is_written(self) -> bool:
        """Whether a run has written to it. ``F.batch_norm`` counts no version up, so that vectors of floating-point
        numbers, which may be its statistics, count as written."""
        is_statistic = self.tensor.dim() == 1 and self.tensor.is_floating_point()
        return is_statistic or self.is_edited or self.tensors.get(self.name) is not self.tensor

    @property
    def is_edited(self) -> bool:
        return self.tensor._version != self.version

    def put(self, tensor: Tensor, stack: ExitStack) -> None:
        """Let the module have this tensor until the stack is closed."""
        current = self.tensors.get(self.name)
        if current is tensor:
            if tensor.requires_grad != self.needs_grad and tensor.is_leaf:
                stack.callback(tensor.requires_grad_, tensor.requires_grad)
                tensor.requires_grad_(self.needs_grad)
        # Sharded parameters are left to the engine's hooks, which run in the recomputation too.
        elif current is not None and not any(map(is_traceable_wrapper_subclass, (current, tensor))):
            stack.callback(self._assign, current)
            self._assign(tensor)

    def _assign(self, tensor: Tensor) -> None:
        if isinstance(tensor, nn.Parameter):
            setattr(self.module, self.name, tensor)  # recurrent layers have lists of them too
        else:
            self.tensors[self.name] = tensor


class Snapshot:
    """The state of modules for one call: the first run is inside ``recording``, each recomputation inside ``again``.

    Args:
        modules: those that the function runs, or may run.
        tensors: others that it reads, and that are not among its arguments.
        runs_all: whether it surely runs all modules; of others parameters may be trained meanwhile.
    """

    def __init__(self, modules: Sequence[nn.Module], tensors: Iterable[Tensor] = (), *, runs_all: bool = True) -> None:
        self._modules, self._runs_all = modules, runs_all
        self._read = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]
        self._modes: Sequence[tuple[nn.Module, bool]] = ()
        self._places: Sequence[_Place] = ()
        #: Of buffers that the first run has written to, by id: what they were.
        self._copies: dict[int, Tensor] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note what is there, and which buffers are written to."""
        self._modes = [(module, module.training) for module in self._modules]
        buffers = _places(self._modules, "_buffers")
        copies = {id(place.tensor): place.tensor.detach().clone() for place in buffers}
        try:
            yield
        finally:
            written = {id(place.tensor) for place in buffers if place.is_written}
            self._copies = {key: copy for key, copy in copies.items() if key in written}
            self._places = [*buffers, *_places(self._modules, "_parameters")]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Let the modules be as they were.

        Raises:
            RuntimeError: a tensor that is read was edited in place since.
        """
        self._check()
        copies = {key: copy.clone() for key, copy in self._copies.items()}  # one for each tensor: some are shared
        with ExitStack() as stack:
            for module, training in self._modes:
                if module.training != training:
                    stack.callback(setattr, module, "training", module.training)
                    module.training = training
            for place in self._places:
                place.put(copies.get(id(place.tensor), place.tensor), stack)
            yield

    def _check(self) -> None:
        for place in self._places if self._runs_all else ():
            if place.is_edited and id(place.tensor) not in self._copies:
                kind = "buffer" if place.tensors is place.module._buffers else "parameter"
                raise RuntimeError(
                    f"{type(place.module).__name__}: the {kind} {place.name} was modified by an in-place operation "
                    "after the forward pass, and the backward pass recomputes the module; take the optimizer's step "
                    "afterwards"
                )
        for tensor, version in self._read:
            if tensor._version != version:
                raise RuntimeError(
                    f"a tensor of shape {tuple(tensor.shape)}, which a recomputed function closes over, was modified "
                    "by an in-place operation after the forward pass; edit it after the backward pass"
                )


def _places(modules: Iterable[nn.Module], kind: str) -> list[_Place]:
    return [
        _Place(module, own, name, tensor, tensor._version, tensor.requires_grad)
        for module in modules
        if (own := getattr(module, kind))
        for name, tensor in own.items()
        if tensor is not None and not tensor.is_inference()
    ]
