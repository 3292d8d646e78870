"""What holds of every kind of layer with every kind of activation: one test a property, over both (``subjects.py``).

Pairs of values of any two parameters run by default, and of all other combinations every 16th with ``-m slow``, of
large products ``SLOW_CASES``.
"""

import copy
import functools
import re
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import Switch
from copies import COPIES
from gpu import DEVICE, INTERPRETER_WARNINGS
from pairs import covering
from plans import plans_of
from reference import assert_near
from settings import compiles
from subjects import ACTIVATIONS, FLOOR, LAYERS, MODULES, SUBJECTS, Twins, assert_as_exact, living_bytes
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fusedlayers.calls import sizes
from fusedlayers.memory import saved_bytes
from fusedlayers.ops import mlp_forward
from fusedlayers.recipes import region
from fusedlayers.recipes.fuse_report import count
from fusedlayers.utils.autograd_graph import nodes_of, saved_by
from fusedlayers.utils.storages import sizes_of, tensors_in

SAVES = ("auto", "input", "recompute")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Cases = list[Any]


@pytest.fixture(autouse=True)
def little_is_cut_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small MLPs are cut into chunks, and small values are replayed."""
    monkeypatch.setattr(mlp_forward, "LEAST_ROWS", 4)
    monkeypatch.setattr(region, "LEAST_BYTES", 1 << 6)


def _exists(name: str, activation: str, *rest: Any) -> bool:
    """Of sums alone there is nothing to be said."""
    return activation != "none" or not name.startswith(("bias", "activation"))


SLOW_CASES = 80


@functools.cache
def _cases(names: tuple[str, ...], others: tuple[Any, ...], where: Callable[..., bool]) -> Cases:
    exists = lambda *case: _exists(*case) and where(*case)
    axes = (names, tuple(ACTIVATIONS), *others)
    pairs = covering(*axes, where=exists)
    rest = [case for case in product(*axes) if exists(*case) and case not in set(pairs)]
    some = rest[:: max(16, len(rest) // SLOW_CASES)]
    return [*pairs, *(pytest.param(*case, marks=pytest.mark.slow) for case in some)]


def _each(
    *others: Collection[Any], names: Collection[str] = tuple(SUBJECTS), where: Callable[..., bool] = lambda *case: True
) -> Cases:
    """Layers, activations and others."""
    return _cases(tuple(names), tuple(map(tuple, others)), where)


def _some(cases: Cases, step: int) -> Cases:
    """Of cases that are slow each ``step``-th by default."""
    return [pytest.param(*case, marks=[pytest.mark.slow] * (i % step > 0)) for i, case in enumerate(cases)]


every = pytest.mark.parametrize(("name", "activation", "save"), _each(SAVES))


def _dy(twins: Twins, x: Tensor) -> Tensor:
    return torch.randn_like(twins.eager(x.detach()))


def _check(twins: Twins, call: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> list[Tensor]:
    """Values and gradients of ``call`` as exact as eager's."""
    ours, eager = twins.gradients(call, x, dy), twins.gradients(twins.eager, x, dy)
    exact_x = x.detach().double().requires_grad_()
    exact = twins.gradients(twins.exact, exact_x, dy.double())
    assert_as_exact(ours, eager, exact, FLOOR[x.dtype])
    return ours


# --- values, gradients, derivatives of second order -------------------------------------------------------------------


@pytest.mark.parametrize(("name", "activation", "dtype", "save"), _each(DTYPES, SAVES))
def test_values_and_gradients(name: str, activation: str, dtype: torch.dtype, save: str) -> None:
    twins = Twins.of(name, activation, dtype, save=save)
    x = twins.input()
    before, dy = x.detach().clone(), _dy(twins, x)
    ours = _check(twins, twins.own, x, dy)
    assert torch.equal(x, before)
    if name == "block, saved once":
        assert all(map(torch.equal, ours, twins.gradients(twins.eager, x, dy)))


#: By name: what makes another input of it. The layouts hold the same numbers, the others fewer.
AWKWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "empty": lambda x: x[:0],
    "one": lambda x: x[:1],
    "transposed": lambda x: x.mT.contiguous().mT,
    "channels last": lambda x: x.transpose(1, -1).contiguous().transpose(1, -1),
    "reversed": lambda x: x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim()))),
    "gaps": lambda x: torch.stack([x, x], -1)[..., 0],
    "offset": lambda x: torch.cat([x, x], -1)[..., x.shape[-1] :],
    "expanded": lambda x: x[:1].expand_as(x),
    "no batch": lambda x: x[0],
    "no dimensions": lambda x: x.flatten()[0],
}


def _can_be(name: str, activation: str, awkward: str) -> bool:
    if awkward == "no dimensions" and name != "activation":
        return False
    # The others have other channels then.
    return not awkward.startswith("no ") or (name != "bias along channels" and activation not in ("softmax", "prelu"))


@pytest.mark.parametrize(("name", "activation", "awkward"), _each(AWKWARD, where=_can_be))
def test_awkward_inputs(name: str, activation: str, awkward: str) -> None:
    twins = Twins.of(name, activation)
    x = AWKWARD[awkward](twins.input().detach()).requires_grad_()
    _check(twins, twins.own, x, _dy(twins, x))
    y, expected = twins.own(x), twins.eager(x)
    with torch.no_grad():
        assert y.stride() == twins.own(x).stride() == expected.stride() or not y.numel()


@every
def test_nan_stays_where_it_is(name: str, activation: str, save: str) -> None:
    twins = Twins.of(name, activation, save=save)
    x = twins.input()
    with torch.no_grad():
        x[1].flatten()[3] = torch.nan
        x.view(-1)[-1] = torch.nan
    y, expected = twins.own(x), twins.eager(x)
    torch.testing.assert_close(y, expected, equal_nan=True)
    assert y.isnan().any() and not y.isnan().all()


@pytest.mark.parametrize(("name", "activation", "save", "mode"), _each(SAVES, (torch.no_grad, torch.inference_mode)))
def test_without_gradients(name: str, activation: str, save: str, mode: Any) -> None:
    """Values that carry no branch, and nothing saved."""
    twins = Twins.of(name, activation, save=save)
    x = twins.input()
    with mode():
        y, eager, exact = twins.own(x), twins.eager(x), twins.exact(x.double())
        assert saved_bytes(twins.own, x, exclude=[x, twins.own]) == 0
    assert y.grad_fn is None and not y.requires_grad
    assert_as_exact([y], [eager], [exact])


#: Which of x, the first parameter and the others need gradients.
TRAINED = {"all": (True, True, True), "x": (True, False, False), "first": (False, True, False)}
TRAINED |= {"all but x": (False, True, True), "all but first": (True, False, True), "others": (False, False, True)}
#: With a hook on the result, that halves its gradient.
TRAINED["hooked"] = TRAINED["all"]


@pytest.mark.parametrize(
    ("name", "activation", "save", "trained", "dtype"),
    # Eager differentiates tanh's result, behind the hook; here the input that follows from it, before the hook.
    _each(SAVES, TRAINED, DTYPES, where=lambda _, act, save, trained, dtype: (act, trained) != ("tanh", "hooked")),
)
def test_second_derivatives(name: str, activation: str, save: str, trained: str, dtype: torch.dtype) -> None:
    """Of a gradient penalty, by all that needs a gradient."""
    twins = Twins.of(name, activation, dtype, save="auto" if trained == "hooked" else save)
    x, results = twins.input(), []
    dy = _dy(twins, x)
    doubles = [x.detach().double(), *twins.exact_sources]
    needs = [TRAINED[trained][min(place, 2)] for place in range(len(doubles))]
    needs[0] |= not any(needs)  # there are no others
    for call, tensors in ((twins.own, [x, *twins.sources]), (twins.eager, [x, *twins.sources]), (twins.exact, doubles)):
        for tensor, need in zip(tensors, needs, strict=True):
            tensor.requires_grad_(need)
        needed = [tensor for tensor, need in zip(tensors, needs, strict=True) if need]
        y = call(tensors[0])
        if trained == "hooked":
            y.register_hook(lambda g: 0.5 * g)
        first = torch.autograd.grad(y, needed, dy.to(y.dtype), create_graph=True)
        loss = torch.stack([d.square().sum() for d in first]).sum()
        second = [torch.zeros_like(t) for t in needed]
        if loss.requires_grad:
            second = torch.autograd.grad(loss, needed, allow_unused=True, materialize_grads=True)
        results.append([t.detach() for t in (*first, *second)])
    # Where all is trained, z is computed again; of an activation by itself y is all there is. Results are rounded.
    is_exact = trained == "all" and not name.startswith(("bias", "activation", "block"))
    assert_as_exact(*results, torch.finfo(dtype).eps + (3e-6 if is_exact else max(1e-4, FLOOR[dtype])))


@every
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


@every
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
    assert_near(*results, 10)


@every
def test_gradients_of_many_outputs(name: str, activation: str, save: str) -> None:
    twins = Twins.of(name, activation, save=save)
    x = twins.input()
    dys = torch.stack([_dy(twins, x) for _ in range(3)])
    batched = torch.autograd.grad(twins.own(x), [x, *twins.sources], dys, is_grads_batched=True)
    results = [list(batched)]
    for call, leaf, sources in (
        (twins.eager, x, twins.sources),
        (twins.exact, x.detach().double().requires_grad_(), twins.exact_sources),
    ):
        each = [torch.autograd.grad(call(leaf), [leaf, *sources], dy.to(leaf.dtype)) for dy in dys]
        results.append([torch.stack(parts) for parts in zip(*each, strict=True)])
    assert_as_exact(*results, FLOOR[x.dtype])


@pytest.mark.parametrize(
    ("name", "activation", "save"),
    _each(
        SAVES, names=[name for name in LAYERS if "residual" not in name], where=lambda _, act, save: act != "softmax"
    ),
)
def test_dropout(name: str, activation: str, save: str) -> None:
    """The numbers that ``F.dropout`` drops behind the activation, and the generator's state behind it."""
    rate, states = 0.3, []
    twins = Twins.of(name, activation, wrap=lambda act: lambda z: F.dropout(act(z), rate), save=save, dropout=rate)

    def seeded(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        torch.manual_seed(7)
        y = call(x)
        states.append(torch.get_rng_state())
        return y

    x = twins.input()
    dy = _dy(twins, x)
    calls = twins.own, twins.eager, twins.exact
    inputs = x, x, x.detach().double().requires_grad_()
    found = []
    for call, given, sources in zip(calls, inputs, (twins.sources, twins.sources, twins.exact_sources), strict=True):
        y = seeded(call, given)
        first = torch.autograd.grad(y, [given, *sources], dy.to(y.dtype), create_graph=True)
        second = torch.autograd.grad(torch.stack([d.square().sum() for d in first]).sum(), [given])
        found.append([t.detach() for t in (y, *first, *second)])
    assert_as_exact(*found, 1e-4)
    assert torch.equal(states[0], states[1])


@pytest.mark.filterwarnings(*INTERPRETER_WARNINGS)
@pytest.mark.usefixtures("interpreter_converts")
@pytest.mark.parametrize(
    ("name", "activation", "dtype", "save"),
    # Without swish: the gradient of its one number is a sum that cancels, of which its own size is no measure.
    _some(covering(LAYERS, [act for act in ACTIVATIONS if act not in ("softmax", "none", "swish")], DTYPES, SAVES), 10),
)
def test_on_triton(
    name: str, activation: str, dtype: torch.dtype, save: str, on_triton: Switch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels, on a GPU or interpreted."""
    triton = pytest.importorskip("fusedlayers.kernels.triton")
    monkeypatch.setattr(triton, "CHUNK_BYTES", 0)
    on_triton(True)
    twins = Twins.of(name, activation, dtype, device=DEVICE, save=save)
    x = twins.input()
    _check(twins, twins.own, x, _dy(twins, x))
    with torch.no_grad():
        assert_as_exact([twins.own(x)], [twins.eager(x)], [twins.exact(x.double())])


# --- bytes ------------------------------------------------------------------------------------------------------------


def _in_graph(twins: Twins, y: Tensor, exclude: list[Tensor]) -> int:
    """The bytes that a graph holds, by what its nodes show."""
    if twins.is_block:
        return count(y, exclude=exclude).kept_bytes
    held = sizes_of(tensor for node in nodes_of([y]) for tensor in saved_by(node))
    return sum(size for key, size in held.items() if key not in sizes_of(exclude))


@every
def test_saved_bytes(name: str, activation: str, save: str) -> None:
    """Never more than eager; what was asked for, and what the plan says; and three counts agree."""
    twins = Twins.of(name, activation, save=save)
    x = twins.input()
    own = [x, *tensors_in([*twins.modules])]
    kept, eagers = (saved_bytes(call, x, exclude=own) for call in (twins.own, twins.eager))
    hidden = twins.subject.hidden * x.itemsize
    found = None if twins.is_block else plans_of(twins.own, x)[0]
    # Of an activation alone eager saves the input, which is counted elsewhere; so is y where another layer follows.
    assert kept <= eagers + hidden * (name == "activation" and found is not None and found.saved == "output")
    if found is not None and found.path == "fused":
        assert save in ("auto", found.saved)
        saved = {"output": hidden, "input": hidden, "recompute": 0}[found.saved]
        if name == "activation" and found.saved != "output":
            saved = 0  # the input itself
        assert kept == saved or "residual" in name
    y = twins.own(x)
    by_graph, is_result_saved = _in_graph(twins, y, own), _in_graph(twins, y, [*own, y]) < _in_graph(twins, y, own)
    # A copy of a norm's weight, which hooks see as the parameter.
    assert by_graph - kept == 12 * 4 * (twins.is_block and by_graph > kept)
    if activation == "gelu":
        of_result = y.untyped_storage().nbytes() if is_result_saved else 0
        assert living_bytes(lambda: twins.own(x), own) + of_result == pytest.approx(kept, rel=0.01, abs=64)


@every
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
        for part, need in zip(sources, needs, strict=True):
            part.requires_grad_(need)
        results = []
        for call in (twins.own, twins.eager):
            y = call(x)
            y.backward(dy)
            assert [part.grad is not None for part in sources] == needs
            results.append([y.detach(), *(part.grad for part in sources if part.grad is not None)])
            for part in sources:
                part.grad = None
        assert_near(*results, 10)
        exclude = [x, twins.own, *twins.sources]
        kept, eagers = (saved_bytes(call, x, exclude=exclude) for call in (twins.own, twins.eager))
        # As above: of an activation alone eager saves the input. A block whose layers are called one by one saves both
        # sides of the activation, if its input is asked for.
        if save != "input" or "mlp" not in name:
            assert kept <= eagers + x.nbytes * (name == "activation" and trains_x)


#: Bytes of the hidden numbers, by the sizes below which results are small, and of medium size. A gated block has twice
#: as many.
HIDDEN: dict[str, Callable[[], float]] = {
    "small": lambda: 0.5 * sizes.SMALL_BYTES,
    "medium": lambda: 2.5 * sizes.SMALL_BYTES,
    "large": lambda: 2.5 * sizes.MEDIUM_BYTES,
}


@pytest.mark.usefixtures("sizes_that_ship")
@pytest.mark.parametrize(
    ("name", "activation", "size"), _some(covering(SUBJECTS, ACTIVATIONS, HIDDEN, where=_exists), 10)
)
def test_below_and_above_the_limits_of_users(name: str, activation: str, size: str) -> None:
    """As exact as eager, never more saved, and less where a block is fused."""
    twins = Twins.of(name, activation)
    x = twins.input(times=int(HIDDEN[size]()) // (4 * twins.subject.hidden))
    _check(twins, twins.own, x, _dy(twins, x))
    made = x * 1  # which eager's activation saves
    kept, eagers = (saved_bytes(call, made, exclude=[*twins.modules]) for call in (twins.own, twins.eager))
    assert kept <= eagers
    if activation == "gelu" and not twins.is_block:
        assert (plans_of(twins.own, x)[0].path == "fused") is (size != "small")
        assert (kept < eagers) is (size != "small" and "mlp" in name)  # elsewhere the next layer saves the output


# --- hooks, checkpoints, edits, threads -------------------------------------------------------------------------------

#: What hooks hand back: what they were given, a copy, or another layout.
BACK: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda tensor: tensor,
    "copy": lambda tensor: tensor.detach().clone(),
    "layout": lambda tensor: tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor,
}


@pytest.mark.parametrize(("name", "activation", "save", "back"), _each(SAVES, BACK))
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
    assert packed and all(torch.equal(tensor, copied) for tensor, copied in packed)


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


@pytest.mark.parametrize(("name", "activation", "save", "kind"), _each(SAVES, CHECKPOINTS))
def test_checkpoints(name: str, activation: str, save: str, kind: str) -> None:
    twins = Twins.of(name, activation, save=save)
    x = twins.input()
    _check(twins, partial(CHECKPOINTS[kind], twins.own), x, _dy(twins, x))
    if kind == "not reentrant":
        assert saved_bytes(partial(CHECKPOINTS[kind], twins.own), x, exclude=[x, twins.own]) == 0


@every
def test_edits_between_the_passes(name: str, activation: str, save: str) -> None:
    """Of the input, a parameter or the result: backward raises, or computes what it would have without; so does one
    whose gradients can be differentiated again."""
    twins = Twins.of(name, activation, save=save)
    x = twins.input()
    dy, sources = _dy(twins, x), [x, *twins.sources]
    expected = torch.autograd.grad(twins.own(x), sources, dy)
    before = [source.detach().clone() for source in sources]
    raised = []
    for place, create_graph in product(range(len(sources) + 1), (False, True)):
        y = twins.own(x)
        with torch.no_grad():
            [*sources, y][place].add_(1)
        try:
            found = torch.autograd.grad(y, sources, dy, create_graph=create_graph)
            assert all((a - b).norm() <= 1e-4 * b.norm() + 1e-6 for a, b in zip(found, expected, strict=True)), place
        except RuntimeError as error:
            if not re.search("modified by an inplace operation|modified inplace|edited in place", str(error)):
                raise
            raised.append(place)
        with torch.no_grad():
            for source, value in zip(sources, before, strict=True):
                source.copy_(value)
    if not twins.is_block and plans_of(twins.own, x)[0].saved == "output" and "mlp" not in name:
        assert raised.count(len(sources)) == 2  # the result, which is saved


@every
def test_threads(name: str, activation: str, save: str) -> None:
    """Several compute at once, and backward runs in another one than forward."""
    twins = Twins.of(name, activation, save=save)
    inputs = [twins.input(seed=seed) for seed in range(2)]
    dy, found = _dy(twins, inputs[0]), dict[int, Any]()
    results = [twins.own(x) for x in inputs]
    expected = [torch.autograd.grad(twins.own(x), [x, *twins.sources], dy) for x in inputs]

    def work(place: int) -> None:
        x = inputs[place]
        of_another = torch.autograd.grad(results[place], [x, *twins.sources], dy)
        found[place] = of_another, torch.autograd.grad(twins.own(x), [x, *twins.sources], dy)

    with ThreadPoolExecutor() as pool:
        list(pool.map(work, range(len(inputs))))
    for place, wanted in enumerate(expected):
        for gradients in found[place]:
            assert_near(gradients, wanted)


# --- autocast, transforms, compilers ----------------------------------------------------------------------------------


def _is_cast(name: str) -> bool:
    """Whether autocast has what comes before the activation in 16 bits."""
    return name.startswith(("dense", "conv", "mlp", "gated", "packed", "block")) and "residual" not in name


@pytest.mark.parametrize(
    ("name", "activation", "save", "dtype"),
    _each(
        SAVES,
        (torch.bfloat16, torch.float16),
        # torch casts what PReLU reads to 16 bits; behind what autocast does not cast it stays float32 here.
        where=lambda name, activation, *rest: activation != "prelu" or _is_cast(name),
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
        if "residual" not in name and (not name.startswith("packed") or activation not in ("prelu", "softmax")):
            part = 2 if _is_cast(name) else 1
            assert all(here >= there // part for here, there in zip(spared(), without, strict=True))
        if _is_cast(name) or name == "activation":
            assert twins.own(x.to(dtype)).dtype is twins.eager(x.to(dtype)).dtype
            assert copy.deepcopy(twins.own).double()(x.double()).dtype is twins.exact(x.double()).dtype
    exact = twins.gradients(twins.exact, x.detach().double().requires_grad_(), dy.double())
    assert_as_exact(*results, exact, FLOOR[dtype])
    assert torch.equal(twins.own(x), before)


@pytest.mark.parametrize(
    ("name", "activation", "save"),
    _each(
        SAVES,
        names=[name for name in LAYERS if "three dimensions" not in name],  # which have but a weight
        # Without what PyTorch computes.
        where=lambda name, activation, save: activation != "softmax" and (activation != "none" or "gated" in name),
    ),
)
def test_autocast_around_backward(name: str, activation: str, save: str) -> None:
    """Changes nothing of what the package computes."""
    twins = Twins.of(name, activation, save=save)
    x = twins.input()
    # Of dense layers and convolutions, gradients of inputs and weights are by nodes of torch's.
    sources = [t for t in (x, *twins.sources) if t.dim() < 2 or not name.startswith(("dense", "conv"))]
    dy = _dy(twins, x)
    expected = torch.autograd.grad(twins.own(x), sources, dy)
    y = twins.own(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(y, sources, dy)
    torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::DeprecationWarning")
@every
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


@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::DeprecationWarning")
@every
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
@pytest.mark.parametrize(
    ("name", "activation", "save"), _some(covering(list(SUBJECTS), ("tanh", "gelu", "sine"), SAVES), 6)
)
def test_compiled(name: str, activation: str, save: str) -> None:
    torch.compiler.reset()
    twins = Twins.of(name, activation, save=save)
    compiled = torch.compile(twins.own, fullgraph=True, backend="aot_eager")
    x = twins.input()
    _check(twins, compiled, x, _dy(twins, x))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(
    ("name", "activation"),
    covering(
        [*MODULES, "block, fused"],
        ("tanh", "gelu", "leaky_relu", "sine"),
        where=lambda name, activation: "mlp" not in name or activation != "sine",  # no argument of torch.fx
    ),
)
def test_traces(name: str, activation: str) -> None:
    twins = Twins.of(name, activation)
    x = twins.input(trains=False)
    for traced in (torch.fx.symbolic_trace(twins.own), torch.jit.trace(twins.own, (x,))):
        torch.testing.assert_close(traced(x), twins.own(x), rtol=1e-5, atol=1e-5)


class Tagged(Tensor):
    """A subclass that travels through torch functions."""


@every
def test_subclasses_and_tensors_without_values(name: str, activation: str, save: str) -> None:
    twins = Twins.of(name, activation, save=save)
    x = twins.input(trains=False)
    y = twins.own(x.as_subclass(Tagged))
    assert type(y) is Tagged
    torch.testing.assert_close(y.as_subclass(Tensor), twins.eager(x))
    meta = copy.deepcopy(twins.own).to("meta")
    x = x.to("meta").requires_grad_()
    y = meta(x)
    assert y.is_meta and y.shape == twins.own(twins.input()).shape
    y.sum().backward()
    assert all(t.grad is not None and t.grad.shape == t.shape for t in (x, *meta.parameters()))


# --- modules ----------------------------------------------------------------------------------------------------------


def _settings(module: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if isinstance(value, (bool, int, float, str, tuple))}


@every
def test_copies(name: str, activation: str, save: str) -> None:
    """Deep copies and pickles, made between forward and backward, and state dicts."""
    twins = Twins.of(name, activation, save=save)
    x = twins.input()
    y = twins.own(x)
    copies = [copied(twins.own) for copied in COPIES.values()]
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


@pytest.mark.parametrize("name", MODULES)
def test_a_trainable_activation_is_a_submodule(name: str) -> None:
    layer = SUBJECTS[name].make(nn.PReLU())
    assert [key for key, _ in layer.named_parameters()][-1] == "activation.weight"
