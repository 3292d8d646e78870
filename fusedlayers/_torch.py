"""Every private name of torch that this package uses, under a public name, with what it is for.

All other modules import these names from here. C functions and classes are re-exported as they are: calls cost nothing
more, and torch.compile recognises functions by identity. What torch keeps in a global variable that changes is read by
``functools.partial(getattr, ...)``, which enters no Python function.

Private attributes of torch's objects are used where the objects are, and nowhere named again:

* tensors: ``_version``, ``_base``, ``_is_view``, ``_post_accumulate_grad_hooks``, and of sparse ones ``_indices``,
  ``_values``; storages: ``_cdata``;
* modules: ``_parameters``, ``_buffers``, ``_modules``, ``_forward_hooks``, ``_forward_pre_hooks``, ``_backward_hooks``,
  ``_backward_pre_hooks``, ``_compiled_call_impl``, ``_reversed_padding_repeated_twice`` (convolutions),
  ``_check_input_dim`` (batch norms); styles of tensor parallelism:
  ``_prepare_input_fn``, ``_prepare_output_fn``;
* nodes of autograd: ``_sequence_nr``, ``_input_metadata``, ``_raw_saved_*``, ``_raw_saved_tensors``, ``_saved_self``,
  ``_forward_cls`` (of a Function's node), and what ``recipes/replays.py`` and ``recipes/norms.py`` read of each;
* selective checkpoints: their modes' ``storage``, and ``val`` of what that holds;
* operators: ``_schema``, ``_overloadpacket``.

Unless a comment says otherwise, torch 2.11 and 2.13 have the same.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch._C._autograd import SavedTensor as SavedTensor
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch.autograd import Function, forward_ad
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import parametrize
from torch.utils import _python_dispatch, checkpoint
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten

# --- who follows what is computed -------------------------------------------------------------------------------------

#: () -> bool: whether a transform of torch.func (vmap, grad, jvp, functionalize) is running.
functorch_is_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
#: () -> bool: whether autocast is on for any kind of device. Three times faster than to ask for one kind.
autocast_is_active: Callable[[], bool] = torch._C._is_any_autocast_enabled
#: (tensor) -> bool: whether backward runs under the vmap of ``torch.autograd.grad(is_grads_batched=True)``.
is_legacy_batched: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
#: (tensor) -> bool: whether it is a wrapper of torch.func's, of an active transform or of one that has ended.
is_of_transform: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
#: () -> int: the level of forward-mode differentiation; -1 where there is none.
forward_ad_level: Callable[[], int] = functools.partial(getattr, forward_ad, "_current_level")
#: () -> the state of TorchScript's tracer, or None where it is not tracing.
torchscript_state: Callable[[], Any] = torch._C._get_tracing_state
#: () -> int: how many dispatch modes are active.
dispatch_mode_count: Callable[[], int] = torch._C._len_torch_dispatch_stack
#: (index) -> the active dispatch mode of that index, from the outermost.
dispatch_mode_at: Callable[[int], Any] = torch._C._get_dispatch_stack_at
#: (key) -> the active dispatch mode of torch's own infrastructure that has this key, or None.
infrastructure_mode: Callable[[Any], Any] = torch._C._get_dispatch_mode
#: The key of the mode by which ``make_fx`` traces.
PROXY_MODE: Any = torch._C._TorchDispatchModeKey.PROXY
#: That of the mode in which operators compute shapes alone.
FAKE_MODE: Any = torch._C._TorchDispatchModeKey.FAKE
#: The modes that are active while torch's selective checkpoint saves results, and while it recomputes the others.
SELECTIVE_CHECKPOINT_MODES: tuple[type, ...] = (
    checkpoint._CachingTorchDispatchMode,
    checkpoint._CachedTorchDispatchMode,
)
#: () -> int: the depth of ``parametrize.cached()`` contexts.
parametrizations_are_cached: Callable[[], int] = functools.partial(getattr, parametrize, "_cache_enabled")


def is_exporting() -> bool:
    """Whether ``torch.export`` traces. The flag, because ``torch.compiler.is_exporting()`` is True in torch 2.11
    whenever anything compiles."""
    return torch.compiler._is_exporting_flag


# --- the autograd graph and its saved tensors -------------------------------------------------------------------------

#: () -> int: how many ``TorchFunctionMode``s are active.
function_mode_count: Callable[[], int] = torch._C._len_torch_function_stack
#: () -> the innermost of them, or None.
current_function_mode: Callable[[], Any] = torch.overrides._get_current_function_mode
#: (ignore_if_tracing) -> the innermost pair of saved-tensor hooks, or None.
saved_tensors_hooks_on_top: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
#: (pack, unpack) -> None: a pair of them, for what is saved from now on.
push_saved_tensors_hooks: Callable[..., None] = torch._C._autograd._push_saved_tensors_default_hooks
#: () -> None: takes that pair away again.
pop_saved_tensors_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks
#: () -> bool: whether there may be any.
saved_tensors_hooks_are_enabled: Callable[[], bool] = torch._C._autograd.__dict__["_saved_tensors_hooks_is_enabled"]
#: () -> bool: whether the backward pass that is running keeps its graph (``retain_graph``).
graph_is_kept: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
#: (tensor, shape) -> Tensor: an alias that autograd takes for no view.
unsafe_view: Callable[..., Tensor] = torch.ops.aten._unsafe_view.default


class Node(Function):
    """A ``torch.autograd.Function`` that is applied where no transform of torch.func is active. ``apply`` does not look
    for one, nor for tensors that one has left behind, which takes 2.5 us, and 11 with cold caches (Intel Xeon)."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # The C method below ``Function.apply``, bound to the class.
        cls.apply = super(Function, cls).apply  # type: ignore[misc, method-assign]


#: () -> int: the number of the backward pass that is running on this thread; -1 outside of one.
backward_pass: Callable[[], int] = torch._C._current_graph_task_id
#: (function) -> None: call it when the backward pass that is running ends.
queue_callback: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
#: (storage._cdata) -> int: how many C++ owners a storage has.
storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count
#: () -> int: the number that the next node of the graph made on this thread will get.
sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]  # no stub has it

# SavedTensor: a node's saved tensor, packed as it is.

# --- modes, subclasses and containers ---------------------------------------------------------------------------------

#: The logger that prints the traceback of errors under fake tensors.
FAKE_TENSOR_LOGGER = "torch._subclasses.fake_tensor"

# FakeTensor: a tensor without data, which tracing computes shapes with.
# OpOverload: the class of ``torch.ops.aten.add.Tensor``.
# TorchDispatchMode: base of modes that see every operator. Its public documentation names this place.
#: (tensor) -> bool: whether it is made of inner tensors, as DTensor is. (By torch's annotation no tensor is.)
is_traceable_wrapper_subclass: Callable[[object], bool] = _python_dispatch.is_traceable_wrapper_subclass
# tree_flatten: the leaves of nested containers, and how they nest, which tree_unflatten takes.
# tree_leaves: the leaves of nested containers.
# tree_map_only: a function applied to the leaves of one class.
# tree_unflatten: leaves put back into nested containers.

#: The class of a leaf's node.
AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]

# --- the base classes of torch's layers -------------------------------------------------------------------------------

#: Of batch norms, and of instance norms, lazy ones too.
NormBase: type[_NormBase] = _NormBase

# --- operators --------------------------------------------------------------------------------------------------------

#: Batch norm with the batch's mean and inverse standard deviation; what ``F.batch_norm`` calls.
batch_norm_with_statistics: Callable[..., tuple[Any, ...]] = torch._batch_norm_impl_index
#: A tensor converted to a dtype, in a trace.
TO_COPY: Any = torch.ops.aten._to_copy
#: A tensor turned into a number, in a trace: ``item()``.
LOCAL_SCALAR: Any = torch.ops.aten._local_scalar_dense
#: PReLU, in a trace.
PRELU: Any = torch.ops.aten._prelu_kernel
#: PReLU's gradients, in a trace.
PRELU_BACKWARD: Any = torch.ops.aten._prelu_kernel_backward
#: Autograd's gradients that are zero, in a trace.
EFFICIENT_ZEROS: Any = torch.ops.aten._efficientzerotensor
#: Scaled dot product attention on a GPU, of which ``flop_counter`` counts the arithmetic.
FLASH_ATTENTION: Any = torch.ops.aten._scaled_dot_product_flash_attention
#: The same on a CPU, of which it does not.
CPU_FLASH_ATTENTION: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

# --- devices ------------------------------------------------------------------------------------------------------

#: () -> None. Without a GPU torch 2.11 makes a stand-in for one when it first traces, and frees it with the thread that
#: traced (pytorch#178950): called before on a thread that lasts, this makes it there.
ensure_cuda_guard: Callable[[], None] = torch._C._ensureCUDADeviceGuardSet

# --- compilers and tracers, some in modules that torch loads late -----------------------------------------------------

#: Decorator: dynamo calls the function and does not trace it. ``torch.compiler.disable`` would import dynamo at once.
disable_dynamo: Callable[..., Any] = torch._disable_dynamo  # type: ignore[attr-defined]  # imported without "as"


def inductor(
    module: Any, inputs: Any, *, memory_budget: float, is_compiled: bool = True, mode: Any = None, options: Any = None
) -> Callable[..., Any]:
    """Inductor's code for a graph, where its partitioner has this ``activation_memory_budget``. Without compilation
    the parts run as they were traced: they save what the compiled ones would."""
    from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    def as_traced(part: Any, inputs: Any, **_: Any) -> Any:
        return make_boxed_func(part.forward)

    own: dict[str, Any] = torch._TorchCompileInductorWrapper(mode, options, None).config
    other: dict[str, Any] = {} if is_compiled else {"inner_compile": as_traced}
    with config.patch(activation_memory_budget=memory_budget):
        made: Any = compile_fx(module, inputs, config_patches=own, **other)
    return made  # type: ignore[no-any-return]


def refuses_hooks(error: BaseException) -> bool:
    """Whether an error says that saved-tensor hooks are on and should not be, as torch.func's transforms do, or that
    they cannot be put on. Its text may be anybody's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    off: Any = torch.autograd.graph.disable_saved_tensors_hooks
    on: Any = torch.autograd.graph.saved_tensors_hooks.__enter__
    return trace is not None and trace.tb_frame.f_code in (off.__wrapped__.__code__, on.__code__)


def is_optimized(module: object) -> bool:
    """Whether ``torch.compile`` has returned it."""
    return dynamo_is_loaded() and isinstance(module, sys.modules["torch._dynamo"].OptimizedModule)


def dynamo_is_loaded() -> bool:
    """Whether anybody has imported ``torch._dynamo``, which takes a second, so that something may be compiled."""
    return "torch._dynamo" in sys.modules


def never_compile(module: str) -> None:
    """Dynamo, which is loaded, runs the functions of a module as they are."""
    sys.modules["torch._dynamo"].trace_rules.add(module)


def _dynamo_is_in_checkpoint() -> bool:
    """Whether code that dynamo reads lies in a ``torch.utils.checkpoint``. Dynamo calls this, and takes the result for
    a constant."""
    tracer = sys.modules["torch._dynamo.symbolic_convert"].InstructionTranslator.current_tx().output.current_tracer
    while tracer is not None and str(tracer.source_target) != "tag_activation_checkpoint":
        tracer = tracer.parent
    return tracer is not None


# As ``torch.compiler.assume_constant_result`` does, which would import dynamo.
_dynamo_is_in_checkpoint._dynamo_marked_constant = True  # type: ignore[attr-defined]
# Of a checkpoint within another one the compiler of torch 2.11 keeps the inputs.
_KEEPS_INPUTS_WITHIN = torch.__version__ < "2.12"


def compiled_checkpoint(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """``checkpoint(function, *args, use_reentrant=False, **options)`` in code that dynamo reads. Where it would keep
    inputs because another one is around it, the function itself, which that one recomputes unless it is selective."""
    if _KEEPS_INPUTS_WITHIN and torch.compiler.is_dynamo_compiling() and _dynamo_is_in_checkpoint():
        options.pop("context_fn", None)
        return function(*args, **options)
    return checkpoint.checkpoint(function, *args, use_reentrant=False, **options)


def make_fx(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A tracer of ``function``, called with examples, to a graph of ATen's operators."""
    from torch.fx.experimental import proxy_tensor

    return proxy_tensor.make_fx(function, **options)


def core_decompositions() -> dict[Any, Callable[..., Any]]:
    """How operators decompose to core ATen."""
    from torch import _decomp

    return dict(_decomp.core_aten_decompositions())


def decompositions_of(operators: Iterable[Any]) -> dict[Any, Callable[..., Any]]:
    """How torch decomposes these operators."""
    from torch import _decomp

    return dict(_decomp.get_decompositions(list(operators)))


def elementwise_dtypes(
    *arguments: Any, promotion: Literal["DEFAULT", "INT_TO_FLOAT"]
) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes in which an elementwise operator with these arguments computes, and returns its result."""
    from torch import _prims_common as prims

    kind = prims.ELEMENTWISE_TYPE_PROMOTION_KIND[promotion]
    return prims.elementwise_dtypes(*arguments, type_promotion_kind=kind)
