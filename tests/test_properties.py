"""What holds of every kind of layer, with every kind of activation: one test for a property, on pairs of both
(``subjects.py``)."""

import copy
import io
import pickle
import re
from collections.abc import Callable, Collection
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from pairs import covering
from plans import plans_of
from subjects import ACTIVATIONS, FLOOR, SUBJECTS, Twins, assert_as_exact
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fusedlayers.memory import saved_bytes
from fusedlayers.ops import mlp_forward

SAVES = ("auto", "input", "recompute")
#: Those that are one module of the package.
MODULES = [name for name in SUBJECTS if not name.startswith(("bias", "activation"))]


@pytest.fixture(autouse=True)
def small_blocks_are_cut_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp_forward, "LEAST_ROWS", 4)


def _pairs(*others: Collection[Any], where: Callable[..., bool] = lambda *values: True) -> list[tuple[Any, ...]]:
    """Pairs of layers, activations and others; of sums alone there is nothing to be said."""
    return covering(
        list(SUBJECTS),
        list(ACTIVATIONS),
        *others,
        where=lambda name, activation, *rest: (
            where(name, activation) and (activation != "none" or not name.startswith(("bias", "activation")))
        ),
    )


every_layer = pytest.mark.parametrize(("name", "activation", "save"), _pairs(SAVES))
# torch's compiler uses deprecated parts of torch itself, and instantiates autograd Functions that it traces.
compiles = pytest.mark.filterwarnings(r"ignore::DeprecationWarning:torch\..*")


def _dy(twins: Twins, x: Tensor) -> Tensor:
    return torch.randn_like(twins.eager(x.detach()))


def _check(
    twins: Twins, call: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor, floor: float | None = None
) -> list[Tensor]:
    """Values and gradients of ``call`` as exact as eager's."""
    ours, eager = twins.gradients(call, x, dy), twins.gradients(twins.eager, x, dy)
    exact_x = x.detach().double().requires_grad_()
    exact = twins.gradients(twins.exact, exact_x, dy.double())
    assert_as_exact(ours, eager, exact, FLOOR[x.dtype] if floor is None else floor)
    return ours


@pytest.mark.parametrize(
    ("name", "activation", "dtype", "save"),
    _pairs((torch.float32, torch.bfloat16, torch.float16), SAVES),
)
def test_values_and_gradients(name: str, activation: str, dtype: torch.dtype, save: str) -> None:
    twins = Twins.of(name, activation, dtype, save=save)
    x = twins.input()
    before = x.detach().clone()
    _check(twins, twins.own, x, _dy(twins, x))
    assert torch.equal(x, before)


@every_layer
def test_saved_bytes(name: str, activation: str, save: str) -> None:
    """Never more than eager; what was asked for, and what the plan says."""
    twins = Twins.of(name, activation, save=save)
    x = twins.input()
    found = plans_of(twins.own, x)[0]
    exclude = [x, twins.own, *twins.sources]
    kept, eagers = (saved_bytes(call, x, exclude=exclude) for call in (twins.own, twins.eager))
    hidden = twins.subject.hidden(twins.own, x) * x.itemsize
    # Of an activation alone eager saves the input, which is counted elsewhere; so is y where another layer follows.
    assert kept <= eagers + hidden * (name == "activation" and found.saved == "output")
    assert found.path != "fused" or save in ("auto", found.saved)
    if found.path == "fused":
        saved = {"output": hidden, "input": hidden, "recompute": 0}[found.saved]
        if name == "activation" and found.saved != "output":
            saved = 0  # the input itself
        assert kept == saved
    with torch.no_grad():
        assert saved_bytes(twins.own, x, exclude=exclude) == 0


#: Which of x, the first parameter and the others need gradients.
TRAINED = {"all": (True, True, True), "x": (True, False, False), "first": (False, True, False)}
TRAINED |= {"all but x": (False, True, True), "all but first": (True, False, True), "others": (False, False, True)}


#: Of the outputs that carry a branch in their last bit, in each layer.
FOLDED = product(SUBJECTS, ("gelu",), ("auto",), ("all", "all but x"))


@pytest.mark.parametrize(
    ("name", "activation", "save", "trained"),
    list(dict.fromkeys([*_pairs(SAVES, list(TRAINED)), *FOLDED])),
)
def test_second_derivatives(name: str, activation: str, save: str, trained: str) -> None:
    """Of a gradient penalty, by all that needs a gradient."""
    twins = Twins.of(name, activation, save=save)
    x, results = twins.input(), []
    dy = _dy(twins, x)
    doubles = [x.detach().double(), *twins.exact_sources]
    needs = [TRAINED[trained][min(place, 2)] for place in range(len(doubles))]
    if not any(needs):
        return
    for call, tensors in ((twins.own, [x, *twins.sources]), (twins.eager, [x, *twins.sources]), (twins.exact, doubles)):
        for tensor, need in zip(tensors, needs, strict=True):
            tensor.requires_grad_(need)
        needed = [tensor for tensor, need in zip(tensors, needs, strict=True) if need]
        first = torch.autograd.grad(call(tensors[0]), needed, dy.to(tensors[0].dtype), create_graph=True)
        loss = torch.stack([d.square().sum() for d in first]).sum()
        second = [torch.zeros_like(t) for t in needed]
        if loss.requires_grad:
            second = torch.autograd.grad(loss, needed, allow_unused=True, materialize_grads=True)
        results.append([t.detach() for t in (*first, *second)])
    # Where all is trained, z is computed again; of an activation by itself y is all there is.
    is_exact = trained == "all" and not name.startswith(("bias", "activation"))
    assert_as_exact(*results, 3e-6 if is_exact else 1e-4)


@every_layer
def test_backward_twice(name: str, activation: str, save: str) -> None:
    twins = Twins.of(name, activation, save=save)
    x = twins.input()
    dy, y = _dy(twins, x), twins.own(x)
    ways: tuple[dict[str, bool], ...] = ({"retain_graph": True}, {"retain_graph": True}, {})
    first, *others = (torch.autograd.grad(y, [x, *twins.sources], dy, **way) for way in ways)
    assert all(all(map(torch.equal, first, other)) for other in others)
    twins = Twins.of(name, activation, save=save)
    expected = _check(twins, twins.own, x, dy)[1:]
    assert all(map(torch.equal, first, expected))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, x, dy)


@every_layer
def test_several_uses(name: str, activation: str, save: str) -> None:
    """Their gradients add up, to what is there."""
    twins = Twins.of(name, activation, save=save)
    x, results = twins.input(), []
    for call in (twins.own, twins.eager):
        for source in (x, *twins.sources):
            source.grad = torch.ones_like(source)
        y = call(x)
        (y.sum() + (y * call(2 * x)).sum()).backward()
        results.append([source.grad for source in (x, *twins.sources)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


#: What hooks hand back: what they were given, a copy, or another layout.
BACK: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda tensor: tensor,
    "copy": lambda tensor: tensor.detach().clone(),
    "layout": lambda tensor: tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor,
}


@every_layer
@pytest.mark.parametrize("back", BACK)
def test_saved_tensor_hooks(name: str, activation: str, save: str, back: str) -> None:
    """A tensor that they hold is not written over."""
    twins = Twins.of(name, activation, save=save)
    x, packed = twins.input(), []

    def pack(tensor: Tensor) -> Tensor:
        packed.append((tensor, tensor.detach().clone()))
        return tensor

    def hooked(x: Tensor) -> Tensor:
        with saved_tensors_hooks(pack, BACK[back]):
            return twins.own(x)

    _check(twins, hooked, x, _dy(twins, x))
    # Running statistics advance.
    own = {buffer.data_ptr() for buffer in twins.own.buffers()}
    held = [(tensor, copied) for tensor, copied in packed if tensor.data_ptr() not in own]
    assert held and all(torch.equal(tensor, copied) for tensor, copied in held)


#: Of the last one nothing that was kept may have been written over.
CHECKPOINTS: dict[str, Callable[..., Any]] = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "not reentrant": partial(checkpoint, use_reentrant=False),
    "selective": partial(
        checkpoint,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, lambda *args, **kwargs: CheckpointPolicy.MUST_SAVE),
    ),
}


@pytest.mark.parametrize(("name", "activation", "save", "kind"), _pairs(SAVES, list(CHECKPOINTS)))
def test_checkpoints(name: str, activation: str, save: str, kind: str) -> None:
    twins = Twins.of(name, activation, save=save)
    x = twins.input()
    _check(twins, partial(CHECKPOINTS[kind], twins.own), x, _dy(twins, x))
    if kind == "not reentrant":
        assert saved_bytes(partial(CHECKPOINTS[kind], twins.own), x, exclude=[x, twins.own]) == 0


@every_layer
def test_frozen_parts(name: str, activation: str, save: str) -> None:
    """What is trained gets its gradient, whichever parts that are, the others none; never more than eager is saved."""
    twins = Twins.of(name, activation, save=save)
    x = twins.input()
    dy, sources = _dy(twins, x), [x, *twins.sources]
    alone = [(*(part is one for part in twins.sources),) for one in (*twins.sources, None)]
    subsets = dict.fromkeys([*alone, *(tuple(not part for part in parts) for parts in alone)])
    for trains_x, trained in product((True, False), subsets):
        needs = [trains_x, *trained]
        if not any(needs):
            continue
        x.requires_grad_(trains_x)
        for parameter, need in zip(twins.sources, trained, strict=True):
            parameter.requires_grad_(need)
        results = []
        for call in (twins.own, twins.eager):
            y = call(x)
            y.backward(dy)
            assert [part.grad is not None for part in sources] == needs
            results.append([y.detach(), *(part.grad for part in sources if part.grad is not None)])
            for part in sources:
                part.grad = None
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
        exclude = [x, twins.own, *twins.sources]
        kept, eagers = (saved_bytes(call, x, exclude=exclude) for call in (twins.own, twins.eager))
        # As above: of an activation alone eager saves the input.
        assert kept <= eagers + x.nbytes * (name == "activation" and trains_x)


def _is_cast(name: str) -> bool:
    """Whether autocast has what comes before the activation in 16 bits."""
    return name.startswith(("dense", "conv")) or "mlp" in name


@pytest.mark.parametrize(
    ("name", "activation", "save", "dtype"),
    _pairs(
        SAVES,
        (torch.bfloat16, torch.float16),
        # torch casts what PReLU reads to 16 bits; behind what autocast does not cast it stays float32 here.
        where=lambda name, activation: activation != "prelu" or _is_cast(name),
    ),
)
def test_autocast(name: str, activation: str, save: str, dtype: torch.dtype) -> None:
    """The dtypes and values of eager, whose own rounding is the measure of errors; what is spared without autocast is
    spared under it too, a weight that is used twice being cast, and saved, once."""
    twins = Twins.of(name, activation, save=save)
    x, results = twins.input(), []
    made = x * 1  # of a leaf autocast would keep the cast too

    def spared() -> tuple[int, int]:
        """Bytes, of one call and of two."""
        ways = (lambda call: call(made)), (lambda call: (call(made), call(made)))
        calls, exclude = (twins.eager, twins.own), [twins.own, *twins.sources]
        once, twice = ([saved_bytes(way, call, exclude=exclude) for call in calls] for way in ways)
        return once[0] - once[1], twice[0] - twice[1]

    before, without = twins.own(x).detach(), spared()
    with torch.autocast("cpu", dtype):
        dy = torch.randn_like(twins.eager(x.detach()))
        for call in (twins.own, twins.eager):
            results.append(twins.gradients(call, x, dy))
        if activation == "prelu":  # which torch computes here: the dtypes of its arguments differ
            without = 0, 0
        # A packed block that is left to PyTorch casts the input, and halves of the weight, for each half.
        if not name.startswith("packed") or activation not in ("prelu", "softmax"):
            part = 2 if _is_cast(name) else 1
            assert all(here >= there // part for here, there in zip(spared(), without, strict=True))
        if _is_cast(name) or name == "activation":
            assert twins.own(x.to(dtype)).dtype is twins.eager(x.to(dtype)).dtype
            assert copy.deepcopy(twins.own).double()(x.double()).dtype is twins.exact(x.double()).dtype
    exact = twins.gradients(twins.exact, x.detach().double().requires_grad_(), dy.double())
    assert_as_exact(*results, exact, FLOOR[dtype])
    assert torch.equal(twins.own(x), before)


@every_layer
def test_autocast_around_backward(name: str, activation: str, save: str) -> None:
    """Changes nothing of what the package computes."""
    twins = Twins.of(name, activation, save=save)
    x = twins.input()
    if plans_of(twins.own, x)[0].path in ("composite", "by_layer"):
        return
    # Of dense layers and convolutions, gradients of inputs and weights are by nodes of torch's.
    sources = [t for t in (x, *twins.sources) if t.dim() < 2 or not name.startswith(("dense", "conv"))]
    if not sources:
        return
    dy = _dy(twins, x)
    expected = torch.autograd.grad(twins.own(x), sources, dy)
    y = twins.own(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(y, sources, dy)
    torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::DeprecationWarning")
@every_layer
def test_transforms(name: str, activation: str, save: str) -> None:
    twins = Twins.of(name, activation, save=save)
    x = twins.input(trains=False)
    parameters = dict(twins.own.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(twins.own, parameters, (x,))
        return y.square().sum()

    leaf = x.clone().requires_grad_()
    y = twins.eager(leaf)
    expected = torch.autograd.grad(y.square().sum(), [leaf, *twins.sources])
    of_parameters, of_x = torch.func.grad(loss, argnums=(0, 1))(parameters, x)
    torch.testing.assert_close([of_x, *of_parameters.values()], list(expected))
    tangent = torch.ones_like(x)
    torch.testing.assert_close(
        torch.func.jvp(twins.own, (x,), (tangent,)), torch.func.jvp(twins.eager, (x,), (tangent,))
    )
    xs = torch.stack([x, 2 * x, 3 * x])
    torch.testing.assert_close(torch.func.vmap(twins.own)(xs), torch.stack([twins.eager(t) for t in xs]))
    ensemble = {key: torch.stack([p.detach(), p.detach().flip(0)]) for key, p in parameters.items()}
    each = [{key: p[i] for key, p in ensemble.items()} for i in range(2)]
    if ensemble:
        torch.testing.assert_close(
            torch.func.vmap(loss, (0, None))(ensemble, x), torch.stack([loss(p, x) for p in each])
        )


@every_layer
def test_gradients_of_many_outputs(name: str, activation: str, save: str) -> None:
    twins = Twins.of(name, activation, save=save)
    x = twins.input()
    dys = torch.stack([_dy(twins, x) for _ in range(3)])
    sources = [x, *twins.sources]
    batched = torch.autograd.grad(twins.own(x), sources, dys, is_grads_batched=True)
    one_by_one = [torch.autograd.grad(twins.eager(x), sources, dy) for dy in dys]
    expected = [torch.stack(each) for each in zip(*one_by_one, strict=True)]
    torch.testing.assert_close(list(batched), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::DeprecationWarning")
@every_layer
def test_forward_mode(name: str, activation: str, save: str) -> None:
    """Tangents of the input and of all parameters."""
    twins = Twins.of(name, activation, save=save)
    x, results = twins.input(trains=False), []
    for module, call in zip(twins.modules, (twins.own, twins.eager), strict=False):
        torch.manual_seed(1)
        with forward_ad.dual_level():
            for key, parameter in list(module.named_parameters()):
                path, _, last = key.rpartition(".")
                holder = module.get_submodule(path)
                delattr(holder, last)
                setattr(holder, last, forward_ad.make_dual(parameter.detach(), torch.randn_like(parameter)))
            results.append(tuple(forward_ad.unpack_dual(call(forward_ad.make_dual(x, torch.ones_like(x))))))
    torch.testing.assert_close(*results)


@compiles
@pytest.mark.parametrize(("name", "activation", "save"), covering(list(SUBJECTS), ("tanh", "gelu", "sine"), SAVES))
def test_compiled(name: str, activation: str, save: str) -> None:
    torch.compiler.reset()
    twins = Twins.of(name, activation, save=save)
    compiled = torch.compile(twins.own, fullgraph=True, backend="aot_eager")
    x = twins.input()
    _check(twins, compiled, x, _dy(twins, x))


def _settings(module: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if isinstance(value, (bool, int, float, str, tuple))}


@every_layer
def test_copies(name: str, activation: str, save: str) -> None:
    """Deep copies and pickles, made between forward and backward, and state dicts."""
    twins = Twins.of(name, activation, save=save)
    x = twins.input()
    y = twins.own(x)
    buffer = io.BytesIO()
    torch.save(twins.own, buffer)
    buffer.seek(0)
    copies: list[Any] = [
        copy.deepcopy(twins.own),
        pickle.loads(pickle.dumps(twins.own)),
        torch.load(buffer, weights_only=False),
    ]
    y.sum().backward()
    other = Twins.of(name, activation, save=save).own
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other(x)
    other.load_state_dict(twins.own.state_dict())
    expected = twins.own.eval()(x)
    for module in (*copies, other):
        assert torch.equal(module.eval()(x), expected)
        assert repr(module) == repr(twins.own) and _settings(module) == _settings(twins.own)
        with torch.no_grad():
            for tensor in module.state_dict().values():
                tensor.zero_()
        assert torch.equal(twins.own(x), expected)
        assert not twins.sources or not torch.equal(module(x), expected)


@every_layer
def test_bad_input(name: str, activation: str, save: str) -> None:
    """Refused with the name of the function and what it got, before anything is written."""
    twins = Twins.of(name, activation, save=save)
    before = copy.deepcopy(twins.own.state_dict())
    x = twins.input(trains=False)
    with pytest.raises(TypeError, match="must be a tensor, got list"):
        twins.own(x.tolist())
    with pytest.raises(TypeError, match="must have a floating dtype"):
        twins.own(x.int())
    if name != "activation":
        with pytest.raises(ValueError, match=r"dtype.*float64"):
            twins.own(x.double())
        with pytest.raises(ValueError, match="meta"):
            twins.own(x.to("meta"))
        with pytest.raises(ValueError, match=r"\(\d+, "):
            twins.own(x.new_zeros(*x.shape[:1], *(size + 1 for size in x.shape[1:])))
    assert all(torch.equal(tensor, before[key]) for key, tensor in twins.own.state_dict().items())


#: Activation, options, and what is said of them.
REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "name": ("gleu", {}, ValueError, "unknown activation 'gleu'; did you mean 'gelu'? The known ones are: "),
    "number": (3, {}, TypeError, "activation must be a name, a module, a function or None, got int: 3"),
    "class": (nn.GELU, {}, TypeError, "activation must be an instance"),
    "save": ("gelu", {"save": "all"}, ValueError, "save must be one of auto, output, input, recompute, got 'all'"),
    "trains": (nn.PReLU(), {"save": "output"}, ValueError, "save='output' is not possible"),
    "waves": (torch.sin, {"save": "output"}, ValueError, "save='output' is not possible"),
    "folds": (nn.LeakyReLU(-0.1), {"save": "output"}, ValueError, "save='output' is not possible"),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("bad", REFUSED)
def test_bad_arguments(name: str, bad: str) -> None:
    """Refused when a layer is made, with its name."""
    activation, options, error, said = REFUSED[bad]
    ours = type(SUBJECTS[name].make("relu")).__name__
    with pytest.raises(error, match=f"^{ours}: {re.escape(said)}"):
        SUBJECTS[name].make(activation, **options)


@pytest.mark.parametrize("name", MODULES)
def test_a_trainable_activation_is_a_submodule(name: str) -> None:
    layer = SUBJECTS[name].make(nn.PReLU())
    assert [key for key, _ in layer.named_parameters()][-1] == "activation.weight"


@pytest.mark.parametrize("name", [name for name in MODULES if "gated" not in name])
def test_output_refused_after_a_cast(name: str) -> None:
    layer = SUBJECTS[name].make("gelu", save="output").double()
    before = copy.deepcopy(layer.state_dict())
    assert "cannot save the output" in repr(layer)
    with pytest.raises(ValueError, match="save='output' is not possible for"):
        layer(SUBJECTS[name].input(torch.float64))
    assert all(torch.equal(tensor, before[key]) for key, tensor in layer.state_dict().items())
