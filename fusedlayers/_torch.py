"""Every private name of torch that this package uses, under a public name, with what it is for.

All other modules import these names from here. C functions and classes are re-exported as they are: calls cost nothing
more, and torch.compile recognises functions by identity.

A name that this torch lacks, or that works in another way, is replaced by what leaves its mechanism to PyTorch.
``LACKING`` says which, as do ``fusedlayers doctor`` and the log at DEBUG; nothing raises in a forward or backward pass.

Not here are attributes that torch's own Python code reads of each tensor or module, so that no torch lacks them:
``_version``, ``_base``, ``_is_view``, and of sparse tensors ``_indices``, ``_values``; ``_parameters``, ``_buffers``,
``_modules``, ``_forward_hooks``, ``_forward_pre_hooks``, ``_backward_hooks``, ``_backward_pre_hooks``,
``_post_accumulate_grad_hooks``; and of styles of tensor parallelism ``_prepare_input_fn``, ``_prepare_output_fn``.
"""

import functools
import logging
import operator
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils import _python_dispatch, checkpoint
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # of modes that see every operator
from torch.utils._pytree import tree_flatten as tree_flatten  # the leaves of nested containers, and how they nest
from torch.utils._pytree import tree_leaves as tree_leaves  # the leaves alone
from torch.utils._pytree import tree_map_only as tree_map_only  # a function applied to the leaves of one class
from torch.utils._pytree import tree_unflatten as tree_unflatten  # leaves put back into containers

#: The versions that the tests run on.
_OLDEST, _NEWEST = (2, 11), (2, 15)
_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
if _VERSION < _OLDEST:
    raise ImportError(
        f"fusedlayers needs torch {_OLDEST[0]}.{_OLDEST[1]} or newer, and this is torch {torch.__version__}: "
        "pip install --upgrade torch"
    )


@functools.cache
def warn_if_untested() -> None:
    """Warn, once a process, of a torch that is newer than all that the tests have run on."""
    if _VERSION > _NEWEST:
        warnings.warn(
            f"fusedlayers is tested on torch {_OLDEST[0]}.{_OLDEST[1]} to {_NEWEST[0]}.{_NEWEST[1]}, and this is torch "
            f"{torch.__version__}: gradients are the same, but what it does not recognise stays saved; `fusedlayers "
            "doctor` lists that",
            stacklevel=3,
        )


# --- what this torch lacks --------------------------------------------------------------------------------------------

#: Private names that this torch lacks, or has in another way, with what PyTorch does instead.
LACKING: dict[str, str] = {}
_log = logging.getLogger("fusedlayers")

_CALLS = "all layers are computed by PyTorch, and fuse changes nothing"
_RECIPES = "fuse and save_once save nothing less"
_TRACES = "functions that name it are computed by PyTorch"


def lacks(name: str, instead: str, error: BaseException) -> None:
    """Note that this torch lacks a private name, and what PyTorch does instead."""
    if LACKING.setdefault(name, instead) is instead:
        _log.debug("torch %s has no %s as it is used here (%r): %s", torch.__version__, name, error, instead)


def _private(path: str, effect: str, instead: Any, works: Callable[[Any], object] = lambda found: True) -> Any:
    """A private object of torch, or ``instead``, whose effect is this, where there is none or it does not work.

    Args:
        path: "module:name".
        works: calls the object, and says whether it does what it is used for.
    """
    try:
        found = pkgutil.resolve_name(path)
        if not works(found):
            raise TypeError("it works in another way")
    except Exception as error:  # of whatever has taken its place
        lacks(path.replace(":", "."), effect, error)
        return instead
    return found


def _always(*_: Any) -> bool:
    return True


def _never(*_: Any) -> bool:
    return False


def _nothing(*_: Any) -> None:
    return None


def _returns(kind: type, *args: Any) -> Callable[[Any], bool]:
    return lambda function: isinstance(function(*args), kind)


def _is_class(found: Any) -> bool:
    return isinstance(found, type)


def _within_a_mode(function: Callable[[], Any]) -> bool:
    with TorchDispatchMode() as mode:
        return function() is mode


# --- who follows what is computed -------------------------------------------------------------------------------------

#: () -> bool: whether a transform of torch.func (vmap, grad, jvp, functionalize) is running.
functorch_is_active: Callable[[], bool] = _private(
    "torch:_C._are_functorch_transforms_active", _CALLS, _always, _returns(bool)
)
#: A context in which no such transform runs: a backward pass may be under vmap, and what it runs again is not.
outside_of_transforms: Callable[[], AbstractContextManager[Any]] = _private(
    "torch._functorch.pyfunctorch:temporarily_clear_interpreter_stack",
    "vmap of a backward pass raises",
    nullcontext,
    _returns(AbstractContextManager),
)
#: (tensor) -> bool: whether backward runs under the vmap of ``torch.autograd.grad(is_grads_batched=True)``.
is_legacy_batched: Callable[[Tensor], bool] = _private(
    "torch:_C._functorch.is_legacy_batchedtensor", _CALLS, _always, _returns(bool, torch.empty(0))
)
#: (tensor) -> bool: whether it is a wrapper of torch.func's, of an active transform or of one that has ended.
is_of_transform: Callable[[Tensor], bool] = _private(
    "torch:_C._functorch.is_functorch_wrapped_tensor", _CALLS, _always, _returns(bool, torch.empty(0))
)
#: () -> int: the level of forward-mode differentiation; -1 where there is none. The partial enters no Python function.
forward_ad_level: Callable[[], int] = functools.partial(getattr, torch.autograd.forward_ad, "_current_level", 0)
if not isinstance(_private("torch.autograd.forward_ad:_current_level", _CALLS, None), int):
    forward_ad_level = _never
#: () -> the state of TorchScript's tracer, or None where it is not tracing.
torchscript_state: Callable[[], Any] = _private(
    "torch:_C._get_tracing_state", _CALLS, _nothing, lambda found: found() is None
)
#: () -> int: how many dispatch modes are active.
dispatch_mode_count: Callable[[], int] = _private("torch:_C._len_torch_dispatch_stack", _CALLS, _never, _returns(int))
#: (index) -> the active dispatch mode of that index, from the outermost.
dispatch_mode_at: Callable[[int], Any] = _private(
    "torch:_C._get_dispatch_stack_at", _CALLS, _nothing, lambda found: _within_a_mode(lambda: found(0))
)
#: The key of the mode by which ``make_fx`` traces.
PROXY_MODE: Any = _private("torch:_C._TorchDispatchModeKey.PROXY", _CALLS, None)
#: That of the mode in which operators compute shapes alone.
FAKE_MODE: Any = _private("torch:_C._TorchDispatchModeKey.FAKE", _CALLS, None)
#: (key) -> the active dispatch mode of torch's own infrastructure that has this key, or None.
infrastructure_mode: Callable[[Any], Any] = _private(
    "torch:_C._get_dispatch_mode", _CALLS, _nothing, lambda found: (found(PROXY_MODE), found(FAKE_MODE))
)
#: The modes that are active while torch's selective checkpoint saves results, and while it recomputes the others.
SELECTIVE_CHECKPOINT_MODES: tuple[type, ...] = (
    _private("torch.utils.checkpoint:_CachingTorchDispatchMode", _CALLS, TorchDispatchMode, _is_class),
    _private("torch.utils.checkpoint:_CachedTorchDispatchMode", _CALLS, TorchDispatchMode, _is_class),
)
#: (ignore_if_tracing) -> the innermost pair of saved-tensor hooks, or None.
saved_tensors_hooks_on_top: Callable[[bool], Any] = _private(
    "torch:_C._autograd._top_saved_tensors_default_hooks", _CALLS, _nothing, lambda found: (found(True),)
)
#: Why nobody can tell who follows what is computed, so that all of it is PyTorch's; or None.
UNSEEN: str | None = next((f"this torch lacks {name}, which says who follows" for name in LACKING), None)
if UNSEEN is not None:
    functorch_is_active = _always

#: () -> bool: whether autocast is on for any kind of device. Three times faster than to ask for one kind.
autocast_is_active: Callable[[], bool] = _private(
    "torch:_C._is_any_autocast_enabled",
    "autocast is asked for by device",
    lambda: any(map(torch.is_autocast_enabled, ("cpu", "cuda", "xpu", "mps"))),
    _returns(bool),
)
#: () -> int: the depth of ``parametrize.cached()`` contexts.
parametrizations_are_cached: Callable[[], int] = functools.partial(
    getattr, torch.nn.utils.parametrize, "_cache_enabled", 1
)
_private("torch.nn.utils.parametrize:_cache_enabled", "nothing is recomputed", None)


def is_exporting() -> bool:
    """Whether ``torch.export`` traces. The flag, because ``torch.compiler.is_exporting()`` is True in torch 2.11
    whenever anything compiles."""
    flag = getattr(torch.compiler, "_is_exporting_flag", None)
    return torch.compiler.is_exporting() if flag is None else flag


# --- saved tensors ----------------------------------------------------------------------------------------------------

_before = len(LACKING)
#: (pack, unpack) -> None: a pair of saved-tensor hooks, for what is saved from now on.
push_saved_tensors_hooks: Callable[..., None] = _private(
    "torch:_C._autograd._push_saved_tensors_default_hooks", _RECIPES, _nothing
)
#: () -> None: takes that pair away again.
pop_saved_tensors_hooks: Callable[[], None] = _private(
    "torch:_C._autograd._pop_saved_tensors_default_hooks", _RECIPES, _nothing
)
#: () -> int: the number that the next node of the graph made on this thread will get.
sequence_number: Callable[[], int] = _private("torch:autograd._get_sequence_nr", _RECIPES, _never, _returns(int))
#: () -> int: the number of the backward pass that is running on this thread; -1 outside of one.
backward_pass: Callable[[], int] = _private("torch:_C._current_graph_task_id", _RECIPES, lambda: -1, _returns(int))
#: (function) -> None: call it when the backward pass that is running ends.
queue_callback: Callable[[Callable[[], None]], None] = _private(
    "torch:autograd.Variable._execution_engine.queue_callback", _RECIPES, _nothing
)
#: () -> bool: whether there may be saved-tensor hooks.
saved_tensors_hooks_are_enabled: Callable[[], bool] = _private(
    "torch:_C._autograd._saved_tensors_hooks_is_enabled", _RECIPES, _never, _returns(bool)
)
if len(LACKING) > _before:
    saved_tensors_hooks_are_enabled = _never


def own_hook(hooks: Any, function: Callable[..., Any], *arguments: Any) -> functools.partial[Any]:
    """The pack hook ``function(*arguments, tensor)``, which torch's selective checkpoints take for one of their own:
    what they save bypasses it, and goes to ``hooks``, the pair below it. From torch 2.14 on they warn of other hooks.
    A partial calls the function in C."""
    hook: Any = functools.partial(function, *arguments)
    hook._checkpoint_internal, hook._user_hooks = True, hooks
    return hook  # type: ignore[no-any-return]


#: () -> bool: whether the backward pass that is running keeps its graph (``retain_graph``).
graph_is_kept: Callable[[], bool] = _private(
    "torch:_C._autograd._get_current_graph_task_keep_graph", "backward overwrites no buffer", _always, _returns(bool)
)
#: (storage) -> int: a number that no other storage has while it lives.
storage_id: Callable[[Any], int] = operator.attrgetter("_cdata")
if _private("torch:UntypedStorage._cdata", "storages are told apart by their addresses", None) is None:
    storage_id = torch.UntypedStorage.data_ptr
#: (storage_id) -> int: how many C++ owners a storage has. ``saved_buffers.py`` looks whether it counts.
storage_use_count: Callable[[int], int] = _private(
    "torch:_C._storage_Use_Count",
    "backward overwrites no buffer",
    _never,
    _returns(int, torch.UntypedStorage(1)._cdata),
)
#: (tensor, shape) -> Tensor: an alias that autograd takes for no view.
unsafe_view: Callable[..., Tensor] = _private(
    "torch:ops.aten._unsafe_view.default",
    "second derivatives take a copy",
    lambda tensor, shape: tensor.reshape(shape).clone(),
    _returns(Tensor, torch.empty(1), (1,)),
)


class Node(Function):
    """A ``torch.autograd.Function`` that is applied where no transform of torch.func is active. ``apply`` does not look
    for one, nor for tensors that one has left behind, which takes 2.5 us, and 11 with cold caches (Intel Xeon)."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own: Any = cls
        own.apply = getattr(super(Function, cls), "apply", cls.apply)  # the C method below it, bound to the class


# --- nodes of autograd ------------------------------------------------------------------------------------------------

#: The class of a leaf's node.
AccumulateGrad: Any = type(torch.autograd.graph.get_gradient_edge(torch.zeros(0, requires_grad=True)).node)
#: A node's saved tensor, packed as it is.
SavedTensor: Any = _private("torch:_C._autograd.SavedTensor", "reports lack the inputs of checkpoints", (), _is_class)
#: What the names of a node's saved tensors, packed as they are, begin with. A Function's are its "tensors".
RAW_SAVED = "_raw_saved_"
#: The same of its saved tensors and numbers.
SAVED = "_saved_"
#: The class of a Function's node.
FORWARD_CLASS = "_forward_cls"
#: What FSDP's first version gives the parameter that others are views of.
FLAT_PARAMETER = "_is_flat_param"
#: (node) -> int: its number, by which nodes are ordered.
number_of: Callable[[Any], int] = operator.methodcaller("_sequence_nr")
#: (node) -> the shapes, dtypes and devices of its results.
results_of: Callable[[Any], Any] = operator.attrgetter("_input_metadata")


def saved_number(node: Any, name: str) -> Any:
    """A number, text or tuple of these that a node has saved. Nodes tell negative numbers as unsigned.

    Raises:
        AttributeError: this torch saves none of this name.
        TypeError: it is something else.
    """
    value = getattr(node, SAVED + name)
    return [*map(_plain, value)] if type(value) in (tuple, list) else _plain(value)


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind is int:
        return value - (1 << 64) if value >= 1 << 63 else value
    if kind not in (float, str, bool) and value is not None:
        raise TypeError(f"{value!r} is no number")
    return value


# --- operators --------------------------------------------------------------------------------------------------------

#: The class of ``torch.ops.aten.add.Tensor``.
OpOverload: Any = type(torch.ops.aten.add.Tensor)


def batch_norm_with_statistics(x: Tensor, *others: Any) -> tuple[Tensor, ...]:
    """Batch norm with the batch's mean and inverse standard deviation: the operator that ``F.batch_norm`` calls, or
    that of the CPU's; the last argument says whether cuDNN may compute it."""
    return _batch_norm(x, *others)[:3]


_batch_norm: Callable[..., tuple[Tensor, ...]] = _private(
    "torch:_batch_norm_impl_index",
    "cuDNN computes no InvertibleBatchNorm",
    lambda *args: torch.native_batch_norm(*args[:-1]),
    lambda found: len(found(torch.ones(2, 1), None, None, None, None, True, 0.0, 1e-5, False)) > 2,
)


def _aten(name: str, effect: str = _TRACES) -> Any:
    none = type("none", (), {"default": None})
    return _private(f"torch:ops.aten.{name}", effect, none, lambda found: hasattr(found, "default"))


#: A tensor converted to a dtype, in a trace.
TO_COPY: Any = _aten("_to_copy")
#: A tensor turned into a number, in a trace: ``item()``.
LOCAL_SCALAR: Any = _aten("_local_scalar_dense")
#: PReLU, in a trace, and to replay it.
PRELU: Any = _aten("_prelu_kernel")
#: PReLU's gradients, in a trace.
PRELU_BACKWARD: Any = _aten("_prelu_kernel_backward")
#: Autograd's gradients that are zero, in a trace.
EFFICIENT_ZEROS: Any = _aten("_efficientzerotensor")
#: Scaled dot product attention on a GPU, of which ``flop_counter`` counts the arithmetic.
FLASH_ATTENTION: Any = _aten("_scaled_dot_product_flash_attention", "attention costs nothing")
#: The same on a CPU, of which it does not.
CPU_FLASH_ATTENTION: Any = _aten("_scaled_dot_product_flash_attention_for_cpu", "'cheap' recomputes attention")


def packet_of(operator: Any) -> Any:
    """The operator of which this is an overload: ``torch.ops.aten.add`` of ``add.Tensor``."""
    return getattr(operator, "_overloadpacket", None)


#: (overload) -> the arguments and results of an overload of an operator.
signature_of: Callable[[Any], Any] = operator.attrgetter("_schema")


# --- modes, subclasses, containers and modules ------------------------------------------------------------------------

#: (tensor) -> bool: whether it is made of inner tensors, as DTensor is. (By torch's annotation no tensor is.)
is_traceable_wrapper_subclass: Callable[[object], bool] = _python_dispatch.is_traceable_wrapper_subclass
#: A tensor without data, which tracing computes shapes with.
FakeTensor: Any = _private("torch._subclasses.fake_tensor:FakeTensor", "reports serve no fake tensors", (), _is_class)
#: The logger that prints the traceback of errors under fake tensors.
FAKE_TENSOR_LOGGER = "torch._subclasses.fake_tensor"


def check_input_dim(module: Any, x: Tensor) -> None:
    """Let a batch norm of torch's refuse an input of another number of dimensions."""
    getattr(module, "_check_input_dim", _nothing)(x)


# --- devices ----------------------------------------------------------------------------------------------------------

#: () -> None. Without a GPU torch 2.11 makes a stand-in for one when it first traces, and frees it with the thread that
#: traced (pytorch#178950): called before on a thread that lasts, this makes it there.
ensure_cuda_guard: Callable[[], object] = torch._C._ensureCUDADeviceGuardSet if _VERSION < (2, 12) else _nothing

# --- compilers and tracers, some in modules that torch loads late -----------------------------------------------------

#: Decorator: dynamo calls the function and does not trace it. ``torch.compiler.disable`` would import dynamo at once.
disable_dynamo: Callable[..., Any] = _private(
    "torch:_disable_dynamo", "importing fusedlayers imports dynamo", torch.compiler.disable, lambda f: callable(f(f))
)


def inductor(
    module: Any, inputs: Any, *, memory_budget: float, is_compiled: bool = True, mode: Any = None, options: Any = None
) -> Callable[..., Any]:
    """Inductor's code for a graph, where its partitioner has this ``activation_memory_budget``. Without compilation
    the parts run as they were traced: they save what the compiled ones would.

    Raises:
        RuntimeError: this torch keeps its compiler elsewhere.
    """
    try:
        make_boxed: Any = pkgutil.resolve_name("functorch.compile:make_boxed_func")
        config: Any = pkgutil.resolve_name("torch._functorch:config")
        compile_fx: Any = pkgutil.resolve_name("torch._inductor.compile_fx:compile_fx")
        own: dict[str, Any] = pkgutil.resolve_name("torch:_TorchCompileInductorWrapper")(mode, options, None).config
    except (ImportError, AttributeError, TypeError) as error:
        raise RuntimeError(
            f"fit_compiled: torch {torch.__version__} keeps its compiler elsewhere ({error}); call torch.compile, with "
            "torch.autograd.graph.region_activation_memory_budget where that exists"
        ) from error

    other: dict[str, Any] = {} if is_compiled else {"inner_compile": lambda part, *_, **__: make_boxed(part.forward)}
    with config.patch(activation_memory_budget=memory_budget):
        made: Callable[..., Any] = compile_fx(module, inputs, config_patches=own, **other)
    return made


def is_compiled(module: Any) -> bool:
    """Whether ``torch.compile`` has returned this module, or ``module.compile()`` was called."""
    wrappers: Any = getattr(sys.modules.get("torch._dynamo"), "OptimizedModule", ())
    return isinstance(module, wrappers) or getattr(module, "_compiled_call_impl", None) is not None


def dynamo_is_loaded() -> bool:
    """Whether anybody has imported ``torch._dynamo``, which takes a second, so that something may be compiled."""
    return "torch._dynamo" in sys.modules


def never_compile(module: str) -> None:
    """Dynamo, which is loaded, runs the functions of a module as they are."""
    try:
        sys.modules["torch._dynamo"].trace_rules.add(module)
    except (AttributeError, TypeError) as error:
        lacks("torch._dynamo.trace_rules.add", "dynamo reads hooks", error)


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
_KEEPS_INPUTS_WITHIN = _VERSION < (2, 12)


def compiled_checkpoint(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """``checkpoint(function, *args, use_reentrant=False, **options)`` in code that dynamo reads. Where it would keep
    inputs because another one is around it, the function itself, which that one recomputes unless it is selective."""
    if _KEEPS_INPUTS_WITHIN and torch.compiler.is_dynamo_compiling() and _dynamo_is_in_checkpoint():
        options.pop("context_fn", None)
        return function(*args, **options)
    return checkpoint.checkpoint(function, *args, use_reentrant=False, **options)


def make_fx(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A tracer of ``function``, called with examples, to a graph of ATen's operators."""
    make: Callable[..., Callable[..., Any]] = pkgutil.resolve_name("torch.fx.experimental.proxy_tensor:make_fx")
    return make(function, **options)


def core_decompositions() -> dict[Any, Callable[..., Any]]:
    """How operators decompose to core ATen; nothing where this torch does not tell, and traces are refused."""
    return _decompositions("core_aten_decompositions")


def decompositions_of(operators: Iterable[Any]) -> dict[Any, Callable[..., Any]]:
    """How torch decomposes these operators, as above."""
    return _decompositions("get_decompositions", list(operators))


def _decompositions(name: str, *args: Any) -> dict[Any, Callable[..., Any]]:
    try:
        found: Mapping[Any, Callable[..., Any]] = pkgutil.resolve_name(f"torch._decomp:{name}")(*args)
    except (ImportError, AttributeError, TypeError, RuntimeError) as error:
        lacks(f"torch._decomp.{name}", _TRACES, error)
        return {}
    return dict(found)


def elementwise_dtypes(
    *arguments: Any, promotion: Literal["DEFAULT", "INT_TO_FLOAT"]
) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes in which an elementwise operator with these arguments computes, and returns its result."""
    prims: Any = pkgutil.resolve_name("torch:_prims_common")
    kind = prims.ELEMENTWISE_TYPE_PROMOTION_KIND[promotion]
    found: tuple[torch.dtype, torch.dtype] = prims.elementwise_dtypes(*arguments, type_promotion_kind=kind)
    return found
