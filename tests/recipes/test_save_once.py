"""``save_once``: PyTorch's gradients to the last bit, and no value saved twice."""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import io
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import recipe_cases as cases
import torch
import torch.nn.functional as F
from entering import entered
from reference import are_equal
from subjects import living_bytes
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers.memory import saved_bytes
from fusedlayers.recipes import recipe, region, replays
from fusedlayers.recipes.fuse_report import count
from fusedlayers.recipes.recipe import Recipe, Stored
from fusedlayers.recipes.save_once import current_region
from fusedlayers.utils.autograd_graph import nodes_of, saved_by
from fusedlayers.utils.storages import sizes_of, tensors_in

pytestmark = pytest.mark.usefixtures("small_values_are_replayed")


# --- the same bits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "context"), [*product(cases.MODELS, cases.CONTEXTS)])
def test_the_same_bits(model: str, context: str) -> None:
    """Each model within ``save_once`` in every second context, and by ``fuse`` alone in the others."""
    pair = [*cases.MODELS].index(model), [*cases.CONTEXTS].index(context)
    enter = cases.fused if sum(pair) % 2 else cases.recipes
    theirs = cases.trained(model, context, cases.eager)
    ours = cases.trained(model, context, enter)
    assert len(ours) == len(theirs) and all(map(are_equal, ours, theirs))


class Sines(nn.Module):
    """A node of this package behind a norm, which saves its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Conv2d(cases.CHANNELS, cases.CHANNELS, 3, padding=1) for _ in range(2))
        self.norm = nn.BatchNorm2d(cases.CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(fl.bias_act(self.norm(self.first(x)), None, torch.sin))  # type: ignore[no-any-return]


def test_an_own_activation_behind_a_norm_takes_one_buffer() -> None:
    x = torch.randn(4, cases.CHANNELS, 16, 16)
    found = []
    for enter in (cases.eager, cases.recipes):
        torch.manual_seed(0)
        model = Sines()
        with enter(model):
            y = model(x)
        kept = count(y, exclude=[model, x])
        y.square().mean().backward()
        found.append([y, *(p.grad for p in model.parameters())])
    assert all(map(are_equal, *found))
    assert x.nbytes <= kept.kept_bytes < 1.1 * x.nbytes
    assert {spared.made_by for spared in kept.spared} == {"NativeBatchNormBackward0", "BiasActBackward"}


# --- bytes ------------------------------------------------------------------------------------------------------------


#: Of eager's bytes, at most.
SHARES = {
    "mlp": 0.60, "gated": 0.60, "relu": 0.55, "silu in place": 0.55, "diffusion": 0.35, "residual": 0.75,
    "encoder with dropouts": 0.85, "trained activations": 0.13, "spelled out": 0.6,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SHARES)
def test_three_counts_agree(name: str, dtype: torch.dtype) -> None:
    make, inputs = cases.MODELS[name]
    model, x = make().to(dtype), torch.cat([inputs()] * 4).to(dtype)
    own = [*tensors_in(model), x]
    theirs = saved_bytes(model, x, exclude=own)
    fl.fuse(model)
    run = partial(model, x)
    y = run()
    found, of_result = count(y, exclude=own), y.untyped_storage().nbytes()
    is_result_saved = count(y, exclude=[*own, y]).kept_bytes < found.kept_bytes
    by_hooks = saved_bytes(run, exclude=own)
    assert found.kept_bytes == pytest.approx(by_hooks, rel=0.01)
    assert found.kept_bytes == pytest.approx(living_bytes(run, own) + is_result_saved * of_result, rel=0.01)
    assert by_hooks <= SHARES[name] * theirs
    # A value that a recipe spares may be one that eager does not save: another recipe reads it.
    assert sum(spared.nbytes for spared in found.spared) >= theirs - by_hooks > 0
    rows = {"mask of bits", *replays.REPLAYS, *replays.RESULTS}
    leaves = ("Trained", "NewGELU", "SpelledNorm", "OwnFunction", "GateOfTwo")
    assert all(s.made_by in rows or s.made_by.startswith(leaves) for s in found.spared)


# --- selective checkpoints --------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Blocks that a selective checkpoint runs, one by one."""

    def __init__(self, name: str, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.blocks, self.run = nn.ModuleList(cases.MODELS[name][0]() for _ in range(3)), run

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.run(block, x)
        return x


_OPTION = "respect_saved_tensors_hooks"
#: Ways to keep the results of products alone: PyTorch's as it is, as it is announced from torch 2.14 on, and ours.
SELECTIVE: dict[str, Callable[..., Tensor]] = {
    "torch": partial(checkpoint, use_reentrant=False, **cases.SELECTIVE),
    "cheap": partial(fl.sublinear, recompute="cheap"),
}
if _OPTION in inspect.signature(checkpoint).parameters:
    SELECTIVE |= {f"torch, {is_so}": partial(SELECTIVE["torch"], **{_OPTION: is_so}) for is_so in (True, False)}


@pytest.mark.parametrize("run", SELECTIVE)
@pytest.mark.parametrize("way", ["fuse", "save_once"])
@pytest.mark.parametrize("name", ["mlp", "residual"])
def test_selective_checkpoints_are_pytorchs(name: str, way: str, run: str) -> None:
    """The same bits, no byte more by three counts, and no warning."""
    found = []
    for is_ours in (False, True):
        torch.manual_seed(0)
        model, x = Checkpointed(name, SELECTIVE[run]), torch.cat([cases.MODELS[name][1]()] * 4).requires_grad_()
        if is_ours and way != "save_once":
            fl.fuse(model)
        enter = fl.save_once if is_ours and way == "save_once" else contextlib.nullcontext

        def forward(model: nn.Module = model, x: Tensor = x, enter: Any = enter) -> Tensor:
            with enter():
                return model(x)  # type: ignore[no-any-return]

        own = [*tensors_in(model), x]
        by_hooks, by_storages = saved_bytes(forward, exclude=own), living_bytes(forward, own)
        listed = fl.memory_report(forward).saved_bytes
        y = forward()
        y.square().mean().backward()
        found.append([y.detach(), x.grad, *(p.grad for p in model.parameters()), by_hooks, by_storages, listed])
    *theirs, hooks, storages, report = found[0]
    *ours, our_hooks, our_storages, our_report = found[1]
    assert all(map(torch.equal, ours, theirs)) and len(ours) > 10
    assert 0 < our_hooks <= hooks and our_storages <= storages and 0 < our_report <= report


@pytest.mark.parametrize("run", SELECTIVE)
def test_hooks_around_get_what_selective_checkpoints_keep_as_without_us(run: str) -> None:
    found = []
    for is_fused in (False, True):
        model, x = Checkpointed("mlp", SELECTIVE[run]), torch.randn(64, 32, requires_grad=True)
        made, packed = list[Tensor](), list[Tensor]()
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(lambda module, args, y, made=made: made.append(y.detach()))
        if is_fused:
            fl.fuse(model)

        def pack(t: Tensor, packed: list[Tensor] = packed) -> Tensor:
            packed.append(t.detach())
            return t

        with warnings.catch_warnings(record=True, action="always") as warned, saved_tensors_hooks(pack, lambda t: t):
            model(x)
        products = sizes_of(made).keys()
        assert len(products) == 18
        found.append((len(products & sizes_of(packed).keys()), {str(each.message) for each in warned}))
    assert found[0] == found[1]
    assert found[0][0] == (18 if run.endswith("True") else 2)  # the inputs of blocks


def test_measuring_selective_checkpoints_warns_of_nothing() -> None:
    inner = Checkpointed("mlp", SELECTIVE["cheap"])
    outer = fl.SublinearSequential(inner, nn.Tanh(), nn.Linear(32, 32), memory_budget_bytes=1 << 20)
    x = torch.randn(256, 32, requires_grad=True)
    outer(x).sum().backward()
    assert outer.plan is not None and saved_bytes(inner, x, exclude=x) > x.nbytes


# --- hooks that were there before -------------------------------------------------------------------------------------


def test_hooks_that_copy_get_each_value_once() -> None:
    """Three readers of a norm's output, and three of a sum."""
    norm, readers = nn.LayerNorm(64), nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
    model = nn.ModuleList([norm, readers])
    x = torch.randn(32, 64)
    for source in (norm, lambda x: x + norm.weight):
        copied = []
        for enter in (cases.eager, cases.recipes):
            held: list[Tensor] = []

            def copy(tensor: Tensor, held: list[Tensor] = held) -> Tensor:
                held.append(tensor.clone())
                return held[-1]

            with saved_tensors_hooks(copy, lambda t: t), enter(model):
                h = source(x)
                y = sum((reader(h) for reader in readers), torch.zeros(()))
            y.sum().backward()
            copied.append([tensor.shape for tensor in held].count(x.shape))
        theirs, ours = copied
        assert ours == 1 < theirs


def test_nothing_is_left_behind_a_backward_pass() -> None:
    model = cases.MODELS["relu"][0]()
    x = torch.randn(4, cases.CHANNELS, 16, 16)
    with cases.recipes(model):
        loss = model(x).square().mean()
    loss.backward()
    assert count(loss).kept_bytes == 0  # the loss, which holds the graph, is alive


# --- edits ------------------------------------------------------------------------------------------------------------

EDITED = "modified by an inplace operation"


@pytest.mark.parametrize("which", ["norm's input", "norm's weight", "linear's weight", "relu's result"])
def test_edits_raise_as_in_eager(which: str) -> None:
    norm, linear, model, x = _norm_and_linear()
    x.requires_grad_()
    for enter in (cases.eager, cases.recipes):
        with enter(model):
            before = x * 1
            h = norm(before)
            r = torch.relu(linear(h))
            y = linear(r)
        edited = {
            "norm's input": before, "norm's weight": norm.weight, "linear's weight": linear.weight, "relu's result": r,
        }[which]  # fmt: skip
        with torch.no_grad():
            edited.mul_(2)
        with pytest.raises(RuntimeError, match=EDITED):
            y.sum().backward()


ACTS: list[Callable[[Tensor], Tensor]] = [
    F.gelu, torch.relu, torch.tanh,
    lambda z: z * torch.sigmoid(z), lambda z: F.silu(z.clone()), lambda z: z.clone() * z,
]  # fmt: skip


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("how", ["in place", "without gradients"])
def test_a_result_that_is_edited_before_it_is_read_is_saved_as_it_is(act: Any, how: str) -> None:
    norm, linear, model, x = _norm_and_linear()
    found = []
    for enter in (cases.eager, cases.recipes):
        with enter(model):
            h = act(norm(x))
            with torch.set_grad_enabled(how == "in place"):
                h.add_(1)
            y = linear(h)
        found.append([*torch.autograd.grad(y.sum(), [linear.weight, linear.bias])])
    assert all(map(are_equal, *found))


def test_a_weight_that_autocast_has_copied_may_not_be_edited() -> None:
    linear, x = nn.Linear(64, 64), torch.randn(32, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), cases.recipes(linear):
        y = linear(x)
    with torch.no_grad():
        linear.weight.add_(1)
    with pytest.raises(RuntimeError, match=EDITED):
        y.float().sum().backward()


def test_results_can_be_copied_and_stored() -> None:
    model, inputs = cases.MODELS["mlp"]
    module, x = model(), inputs()
    with cases.recipes(module):
        y = module(x)
    file = io.BytesIO()
    torch.save(y, file)
    assert file.tell() < 2 * y.nbytes + 4096
    file.seek(0)
    assert torch.equal(torch.load(file), y)


# --- corners ----------------------------------------------------------------------------------------------------------


class PlusOne(nn.Module):
    def forward(self, b: Tensor) -> Tensor:
        return b + 1


def _norm_and_linear() -> tuple[nn.LayerNorm, nn.Linear, nn.ModuleList, Tensor]:
    norm, linear = nn.LayerNorm(32), nn.Linear(32, 32)
    return norm, linear, nn.ModuleList([norm, linear]), torch.randn(8, 32)


def _biases_of_other_kinds(enter: cases.Enter) -> list[Tensor]:
    found = []
    for kind in (partial(nn.LayerNorm, 32), partial(nn.GroupNorm, 4, 32)):
        for is_parametrized in (False, True):
            norm, linear = kind(), nn.Linear(32, 32)
            if is_parametrized:
                nn.utils.parametrize.register_parametrization(norm, "bias", PlusOne())
            else:
                del norm.bias
                norm.bias = torch.ones(32)
            with enter(nn.ModuleList([norm, linear])):
                y = linear(norm(torch.randn(8, 32)))
            found += torch.autograd.grad(y.sum(), [linear.weight])
    return found


def _long_chains(enter: cases.Enter) -> list[Tensor]:
    factors, h = torch.rand(1500, 64, requires_grad=True), torch.rand(64, requires_grad=True)
    y = h
    with enter(nn.Identity()):
        for factor in factors:
            y = y * factor
        for _ in range(1500):
            y = -y.clone()
        z = F.silu(y)
    return [*torch.autograd.grad(z.sum(), [factors, h])]


def _replayed_result_is_edited(enter: cases.Enter) -> list[Tensor]:
    """Where eager raises, for it saves the result."""
    linear, x = nn.Linear(64, 64), torch.randn(32, 64)
    with enter(linear):
        h = F.gelu(linear(x))
        y = linear(h)
    if enter is cases.recipes:
        with torch.no_grad():
            h.zero_()
    return [*torch.autograd.grad(y.sum(), [*linear.parameters()])]


def _norms_are_written_to_before_the_result_is_read(enter: cases.Enter) -> list[Tensor]:
    """A replay without it would be another norm; the norm's own backward pass, which would complain, does not run."""
    found, conv = [], nn.Conv2d(4, 4, 1)
    for norm in (nn.BatchNorm2d(4), nn.GroupNorm(2, 4).requires_grad_(False)):
        for parameter in norm.parameters():
            nn.init.normal_(parameter)
            with enter(nn.Sequential(norm, conv)):
                y = norm(torch.randn(2, 4, 16, 16, requires_grad=True))
                with torch.no_grad():
                    parameter.mul_(3.0)
                z = conv(y)
            found += torch.autograd.grad(z.square().sum(), [conv.weight])
    return found


def _conjugates(enter: cases.Enter) -> list[Tensor]:
    a, w = (torch.randn(8, 8, dtype=torch.complex64, requires_grad=True) for _ in range(2))
    with enter(nn.Identity()):
        h = a * w
        y = (h * h.conj()).real.sum()
    with torch.autograd.graph.save_on_cpu(), enter(nn.Identity()):
        z = (a @ w + a.conj() @ w).abs().sum()
    return [torch.view_as_real(g) for g in torch.autograd.grad(y + z, [a, w])]


class EditedWeight(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        k = -self.weight
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return F.linear(x, k)


def _edited_parameter(enter: cases.Enter) -> list[Tensor]:
    model, x = EditedWeight(32, 32), torch.randn(8, 32, requires_grad=True)
    with enter(model):
        y = model(x)
    return [*torch.autograd.grad(y.square().sum(), [x])]


def _casts_from_before_a_step(enter: cases.Enter) -> list[Tensor]:
    """Autocast's cache over an optimizer's step."""
    linear, x = nn.Linear(32, 32), torch.randn(8, 32)
    optimizer = torch.optim.SGD(linear.parameters(), 1.0)
    with torch.autocast("cpu", torch.bfloat16):
        with enter(linear):
            y = linear(x)
        y.float().square().sum().backward()
        optimizer.step()
        leaf = x.clone().requires_grad_()
        with enter(linear):
            y = linear(leaf)
    y.float().square().sum().backward()
    assert leaf.grad is not None
    return [leaf.grad]


def _promotion_in_place(enter: cases.Enter) -> list[Tensor]:
    norm, linear, model, x = _norm_and_linear()
    model.bfloat16()
    scale, w = torch.rand(32, requires_grad=True), torch.rand(32, 32, requires_grad=True)
    with enter(model):
        y = norm(x.bfloat16()).mul_(scale).float() @ w
        z = linear(norm(x.bfloat16()).mul_(scale)).float()
    return [*torch.autograd.grad(y.sum() + z.sum(), [w, linear.weight])]


def _plain_batch_norm_in_16_bits(enter: cases.Enter) -> list[Tensor]:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, affine=False), nn.Conv2d(4, 4, 1))
    with torch.autocast("cpu", torch.bfloat16), enter(model):
        y = model(torch.randn(3, 4, 9, 9))
    return [*torch.autograd.grad(y.float().square().sum(), [model[2].weight])]


def _hooks_on_norms(enter: cases.Enter) -> list[Tensor]:
    _, linear, model, x = _norm_and_linear()
    other, pair = nn.LayerNorm(32), nn.LayerNorm(32)
    other.register_forward_hook(lambda m, i, o: F.layer_norm(i[0], (32,), eps=1.0))
    pair.register_forward_hook(lambda m, i, o: (o, 1))
    with enter(nn.ModuleList([model, other, pair])):
        y = linear(other(linear(x))) + linear(pair(x)[0])
    return [*torch.autograd.grad(y.sum(), [linear.weight])]


def _another_threads_edit(enter: cases.Enter) -> list[Tensor]:
    norm, linear, model, x = _norm_and_linear()
    with enter(model):
        for _ in range(50):
            copied = norm(x).clone()
        linear(copied)

        def work() -> Tensor:
            h = F.silu(copied)
            with torch.no_grad():
                return h.mul_(3)

        with ThreadPoolExecutor(1) as pool:
            y = linear(pool.submit(work).result())
    return [*torch.autograd.grad(y.square().sum(), [linear.weight])]


def _cropped(enter: cases.Enter) -> list[Tensor]:
    conv = nn.Conv2d(4, 4, 3)
    with enter(conv):
        y = conv(F.pad(F.silu(conv(torch.randn(2, 4, 8, 8))), (-1, -1, -1, -1)))
    return [*torch.autograd.grad(y.sum(), [conv.weight])]


def _nested(enter: cases.Enter) -> list[Tensor]:
    linear = nn.Linear(32, 32)
    rows = torch.nested.nested_tensor([torch.randn(5, 32), torch.randn(7, 32)])
    with enter(linear):
        y = linear(F.gelu(linear(rows)))
    return [*torch.autograd.grad(y.to_padded_tensor(0.0).sum(), [linear.weight])]


def _sparse(enter: cases.Enter) -> list[Tensor]:
    w = torch.randn(32, 32, requires_grad=True)
    found: list[Tensor] = []
    for hooks in (torch.autograd.graph.save_on_cpu(), contextlib.nullcontext()):
        for sparse in (torch.eye(32).to_sparse_csr(), torch.eye(32).to_sparse()):
            with hooks, enter(nn.Identity()):
                y = torch.sparse.mm(sparse, w * 2)
            found += torch.autograd.grad(y.sum(), [w])
    return found


class Replaying(torch.autograd.Function):
    """Of a user's, with an attribute of the name that ours have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]

    def replay(self) -> None:
        raise AssertionError


def _function_of_a_user(enter: cases.Enter) -> list[Tensor]:
    linear = nn.Linear(32, 32)
    with enter(linear):
        y = linear(Replaying.apply(linear(torch.randn(8, 32))))
    return [*torch.autograd.grad(y.sum(), [linear.weight])]


def _frozen_encoder(enter: cases.Enter) -> list[Tensor]:
    """Its layers take PyTorch's fast path, whose bits are others."""
    layer = nn.TransformerEncoderLayer(32, 2, 128, batch_first=True, dropout=0, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval().requires_grad_(False)
    mask = torch.zeros(4, 8, dtype=torch.bool)
    mask[:, 5:] = True
    with enter(encoder):
        return [encoder(torch.randn(4, 8, 32), src_key_padding_mask=mask)]


def _tied(enter: cases.Enter) -> list[Tensor]:
    """A weight of three readers, one of them transposed."""
    norm, linear, model, x = _norm_and_linear()
    with torch.autocast("cpu", torch.bfloat16), enter(model):
        y = F.linear(linear(F.gelu(linear(norm(x)))), linear.weight.t())
    return [*torch.autograd.grad(y.float().square().sum(), [*model.parameters()])]


def _compiled_part(enter: cases.Enter) -> list[Tensor]:
    model = cases.MODELS["mlp"][0]()
    part = torch.compile(nn.Sequential(nn.Linear(cases.WIDTH, 64), nn.GELU(), nn.Linear(64, 8)), backend="eager")
    with enter(model):
        y = part(F.silu(model(torch.randn(4, cases.WIDTH))))
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [*model.parameters()])]


def _forward_of_an_instance(enter: cases.Enter) -> list[Tensor]:
    norm, _, model, x = _norm_and_linear()
    norm.forward = lambda x: F.layer_norm(x, (32,), 1 + norm.weight, norm.bias, 1e-1)  # type: ignore[method-assign]
    with enter(model):
        y = model[1](F.gelu(norm(x)))
    return [*torch.autograd.grad(y.sum(), [*model.parameters()])]


def _relu_of_a_view(enter: cases.Enter) -> list[Tensor]:
    """What is viewed is saved by another reader, and must not be written over."""
    first, second = nn.Linear(32, 32), nn.Linear(64, 32)
    with enter(nn.ModuleList([first, second])):
        h = first(torch.randn(8, 32))
        y = F.gelu(h).sum() + second(torch.relu(h.reshape(4, 64))).square().sum()
    return [*torch.autograd.grad(y, [*first.parameters(), *second.parameters()])]


class OtherEps(nn.LayerNorm):
    """It computes with an eps that it does not hold afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        own, self.eps = self.eps, 1.0
        y = super().forward(x)
        self.eps = own
        return y


def _norm_that_changes_what_it_reads(enter: cases.Enter) -> list[Tensor]:
    model = nn.Sequential(OtherEps(64), nn.Linear(64, 64))
    with enter(model):
        y = model(torch.randn(64, 64))
    return [*torch.autograd.grad(y.square().sum(), [*model.parameters()])]


CORNERS: list[Callable[[cases.Enter], list[Tensor]]] = [
    _biases_of_other_kinds, _long_chains, _replayed_result_is_edited, _norms_are_written_to_before_the_result_is_read,
    _conjugates, _edited_parameter, _casts_from_before_a_step, _promotion_in_place, _plain_batch_norm_in_16_bits,
    _hooks_on_norms, _another_threads_edit, _tied, _cropped, _nested, _sparse, _function_of_a_user,
    _frozen_encoder, _compiled_part, _forward_of_an_instance, _norm_that_changes_what_it_reads, _relu_of_a_view,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("corner", CORNERS, ids=lambda corner: corner.__name__.strip("_"))
def test_corners(corner: Callable[[cases.Enter], list[Tensor]]) -> None:
    found = []
    for enter in (cases.eager, cases.recipes):
        torch.manual_seed(0)
        found.append(corner(enter))
    assert all(map(are_equal, *found))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_frozen_norm_is_replayed(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bias is in no node. GPUs' autocast computes norms in float32, also those of 16-bit parameters."""
    group_norm = F.group_norm
    monkeypatch.setattr(F, "group_norm", lambda x, g, w, b, eps: group_norm(x.float(), g, w.float(), b.float(), eps))
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8).to(dtype), nn.SiLU(), nn.Conv2d(8, 4, 1))
    nn.init.normal_(model[1].requires_grad_(False).bias)
    x, found = torch.randn(2, 3, 16, 16), []
    for enter in (cases.eager, cases.recipes):
        with enter(model):
            y = model(x)
        spared = {each.made_by for each in count(y).spared}
        found.append([*torch.autograd.grad(y.square().sum(), [model[0].weight, model[3].weight])])
    assert all(map(are_equal, *found)) and spared == {"NativeGroupNormBackward0", "SiluBackward0"}


def test_a_bias_that_is_trained_before_backward() -> None:
    """Batch norms do not save it, so that PyTorch would allow that."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1))
    with cases.recipes(model):
        y = model(torch.randn(2, 3, 64, 64))
    with torch.no_grad():
        model[1].bias.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: a tensor of shape \(4,\)"):
        y.sum().backward()


@pytest.mark.filterwarnings("ignore")
def test_hooks_are_not_compiled_where_a_graph_breaks() -> None:
    counters = importlib.import_module("torch._dynamo.utils").counters
    linear, x = nn.Linear(64, 64), torch.randn(64, 64)

    def block(x: Tensor) -> Tensor:
        h = F.silu(linear(x))
        h = h[h > 0]  # of a size that the compiler does not know
        return h * h

    def frames(enter: Callable[[], Any]) -> int:
        torch.compiler.reset()
        counters.clear()
        with enter():
            torch.compile(block, backend="eager")(x)
        return int(counters["frames"]["total"])

    assert frames(fl.save_once) == frames(contextlib.nullcontext)


def test_what_nobody_reads_holds_nothing() -> None:
    """A recipe that was looked at and left reads nothing: replays are dropped behind their last reader."""
    layers, x = nn.ModuleList(nn.Linear(64, 64) for _ in range(4)), torch.randn(64, 64)
    with cases.recipes(layers):
        z = layers[0](x)
        for layer in layers:
            h = F.silu(F.gelu(z))  # which two nodes read
            z = layer(-h + layer(h) * h)
    loss, held = z.sum(), list[int]()
    values = [v for v in gc.get_objects() if type(v) in (Stored, Recipe) and v._tensor is None]  # others' may be alive
    first = min(nodes_of([loss]), key=lambda node: node._sequence_nr())
    first.register_prehook(lambda gradients: held.append(sum(value._tensor is not None for value in values)))
    loss.backward()
    assert len(values) > 9 and held == [0]


@pytest.mark.parametrize("cast", [False, True], ids=["sum", "cast"])
def test_no_more_than_eager_where_a_branch_is_dropped(cast: bool) -> None:
    first, second, last = (nn.Linear(32, 32) for _ in range(3))
    x = torch.randn(64, 32)
    kept = []
    for enter in (cases.eager, cases.recipes):
        with enter(nn.ModuleList([first, second, last])):
            a, b = first(x), second(x)
            dropped = a.square().mean() + b.square().mean()
            y = a.bfloat16() @ torch.ones(32, 1, dtype=torch.bfloat16, requires_grad=True) if cast else last(a + b)
        del dropped, a, b
        kept.append(
            count(y).kept_bytes
            if enter is cases.recipes
            else sum(sizes_of(t for node in nodes_of([y]) for t in saved_by(node)).values())
        )
    assert kept[1] <= kept[0]


# --- where it steps aside ---------------------------------------------------------------------------------------------


def _is_active() -> bool:
    x = torch.randn(32, 64, requires_grad=True)
    y = F.gelu(x * 1).square()
    return bool(count(y).spared)


def test_it_steps_aside() -> None:
    with fl.save_once():
        assert _is_active()
        with torch.no_grad(), fl.save_once():
            pass
        assert _is_active()
    assert not _is_active()
    with disable_saved_tensors_hooks("none here"), fl.save_once():
        F.gelu(torch.ones(32, 64, requires_grad=True)).sum().backward()

    @fl.save_once()
    def squared(x: Tensor) -> Tensor:
        return F.gelu(x).square().sum()

    x = torch.randn(32, 64)
    expected = torch.func.grad(lambda x: F.gelu(x).square().sum())(x)
    assert torch.equal(torch.func.grad(squared)(x), expected)
    with fl.save_once(), pytest.raises(RuntimeError, match="saved tensor hooks"):
        torch.func.grad(squared)(x)


def test_it_is_left_by_an_exception() -> None:
    @fl.save_once()
    def leave() -> None:
        h = F.gelu(torch.randn(32, 64, requires_grad=True) * 1)
        with fl.save_once():  # which is nothing there
            y = h.square()
        assert count(y).spared and _is_active()
        raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            leave()
        assert not _is_active()


@pytest.mark.parametrize("form", ["block", "decorator"])
def test_compilers_see_nothing_of_it(form: str) -> None:
    @fl.save_once()
    def decorated(x: Tensor) -> Tensor:
        return F.gelu(x).square()

    def block(x: Tensor) -> Tensor:
        with fl.save_once():
            return F.gelu(x).square()

    function = {"block": block, "decorator": decorated}[form]
    x = torch.randn(32, 64, requires_grad=True)
    assert torch.equal(torch.compile(function, backend="eager", fullgraph=True)(x), function(x))

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    exported = torch.export.export(Model(), (x.detach(),))
    called = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert len(called) == 2 and called[0] == "aten.gelu.default"


# --- the table --------------------------------------------------------------------------------------------------------


W = nn.Parameter(torch.rand(4))
#: Row -> what makes such a node, and what it saves.
NODES: dict[str, tuple[Callable[[Tensor], Tensor], set[str]]] = {
    "GeluBackward0": (lambda x: F.gelu(x, approximate="tanh"), {"self"}),
    "SiluBackward0": (lambda x: F.silu(x), {"self"}),
    "MishBackward0": (lambda x: F.mish(x), {"self"}),
    "HardswishBackward0": (lambda x: F.hardswish(x), {"self"}),
    "HardsigmoidBackward0": (lambda x: F.hardsigmoid(x), {"self"}),
    "HardtanhBackward0": (lambda x: F.relu6(x), {"self"}),
    "LeakyReluBackward0": (lambda x: F.leaky_relu(x, 0.2), {"self"}),
    "LeakyReluBackward1": (lambda x: F.leaky_relu_(x * 1, 0.2), {"result"}),
    "EluBackward0": (lambda x: F.selu(x), {"self"}),
    "EluBackward1": (lambda x: F.elu_(x * 1, 0.5), {"result"}),
    "CeluBackward0": (lambda x: F.celu(x, 0.5), {"self"}),
    "CeluBackward1": (lambda x: F.celu_(x * 1, 0.5), {"result"}),
    "SoftplusBackward0": (lambda x: F.softplus(x, 2.0, 1.0), {"self"}),
    "LogSigmoidBackward0": (lambda x: F.logsigmoid(x), {"self", "buffer"}),
    "SoftshrinkBackward0": (lambda x: F.softshrink(x, 0.2), {"self"}),
    "HardshrinkBackward0": (lambda x: F.hardshrink(x, 0.2), {"self"}),
    "PreluKernelBackward0": (lambda x: F.prelu(x, W), {"self", "weight"}),
    "PowBackward0": (lambda x: x.pow(3), {"self"}),
    "MaxPool2DWithIndicesBackward0": (lambda x: F.max_pool2d(x, 2, 3, 1, 2, ceil_mode=True), {"self", "result1"}),
    "GluBackward0": (lambda x: F.glu(x, -3), {"self"}),
    "MulBackward0": (lambda x: x * x.exp(), {"self", "other"}),
    "DivBackward0": (lambda x: x / x.exp(), {"self", "other"}),
    "NegBackward0": (lambda x: -x, set()),
    "AddBackward0": (lambda x: torch.add(x, x.exp(), alpha=2), set()),
    "SubBackward0": (lambda x: torch.sub(x, x.exp(), alpha=2), set()),
    "ToCopyBackward0": (lambda x: x.bfloat16(), set()),
    "CloneBackward0": (lambda x: x.clone(), set()),
    "IndexBackward0": (lambda x: x[torch.tensor([[1], [0], [1]]), torch.arange(4)], {"indices"}),
    "ExpandBackward0": (lambda x: x[None].expand(2, 2, 4, 6, 6), set()),
    "UnsqueezeBackward0": (lambda x: x.unsqueeze(1), set()),
    "SelectBackward0": (lambda x: x.select(-1, 1), set()),
    "SliceBackward0": (lambda x: x[:, 1:3], set()),
    "RepeatBackward0": (lambda x: W.repeat(2), set()),
    "CatBackward0": (lambda x: torch.cat([x, x], -1), set()),
    "ConstantPadNdBackward0": (lambda x: F.pad(x, (1, 0, 0, 2), value=0.5), set()),
    "UpsampleNearest2DBackward0": (lambda x: F.interpolate(x, scale_factor=2.0), set()),
    "ViewBackward0": (lambda x: x.view(-1), set()),
    "UnsafeViewBackward0": (lambda x: torch.ops.aten._unsafe_view(x, [2, -1]), set()),
    "PermuteBackward0": (lambda x: x.permute(0, 2, 3, 1), set()),
    "TransposeBackward0": (lambda x: x.transpose(1, -1), set()),
    "NativeLayerNormBackward0": (
        lambda x: F.layer_norm(x, (6,)), {"input", "weight", "bias", "result1", "result2"}
    ),
    "NativeGroupNormBackward0": (nn.GroupNorm(2, 4), {"input", "weight", "result1", "result2"}),
    "NativeBatchNormBackward0": (
        lambda x: F.batch_norm(x, None, None, W, W, training=True),
        {"input", "weight", "running_mean", "running_var", "result1", "result2"},
    ),
    "ReluBackward0": (lambda x: torch.relu(x), {"result"}),
    "TanhBackward0": (lambda x: torch.tanh(x), {"result"}),
    "SigmoidBackward0": (lambda x: torch.sigmoid(x), {"result"}),
    "ExpBackward0": (lambda x: x.exp(), {"result"}),
}  # fmt: skip
#: Nodes of GPUs alone.
ON_GPUS = {
    "NativeDropoutBackward0", "FusedRmsNormBackward0", "CudnnBatchNormBackward0", "MiopenBatchNormBackward0",
}  # fmt: skip


def test_each_row_has_a_node() -> None:
    assert NODES.keys() | ON_GPUS | {"BiasActBackward"} == replays.REPLAYS.keys() | replays.RESULTS.keys()


@pytest.mark.parametrize("name", NODES)
def test_nodes_of_this_torch(name: str) -> None:
    """A new version of PyTorch that names a node in another way, or has it save something else, shows here."""
    make, saves = NODES[name]
    node: Any = make(torch.randn(2, 4, 6, 6, requires_grad=True)).grad_fn
    found = {name.removeprefix("_raw_saved_") for name in dir(node) if name.startswith("_raw_saved_")}
    assert node.name() == name and found == saves


class ReadBehindANorm(nn.Module):
    """A norm, a function of its result, and products that read the function's."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.w, self.make = nn.LayerNorm(6), W, make

    def forward(self, x: Tensor) -> Tensor:
        y = self.make(self.norm(x))
        return (y.float() * y.float().detach().requires_grad_()).sum() + (y.square().float()).sum()


#: Views, which autograd packs with the tensor that they are views of.
VIEWS = {"ViewBackward0", "PermuteBackward0", "TransposeBackward0", "ExpandBackward0", "UnsqueezeBackward0"} | {
    "SelectBackward0", "SliceBackward0",
}  # fmt: skip


# Without what is made of a weight, and of a product.
@pytest.mark.parametrize("name", [name for name in NODES if name not in ("RepeatBackward0", "UnsafeViewBackward0")])
def test_rows_replay(name: str) -> None:
    found = []
    model, x = ReadBehindANorm(NODES[name][0]), torch.randn(2, 4, 6, 6)
    for enter in (cases.eager, cases.recipes):
        with enter(model):
            loss = model(x)
        names = {spared.made_by for spared in count(loss).spared}
        found.append([loss.detach(), *torch.autograd.grad(loss, [*model.norm.parameters()])])
    assert all(map(are_equal, *found))
    assert name in names or name in VIEWS  # of the norm's result


def test_a_functional_group_norm_is_replayed_where_its_node_has_eps() -> None:
    """The README's table of versions names this row."""
    model = ReadBehindANorm(lambda x: F.group_norm(x, 2, W, W))
    with cases.recipes(model):
        loss = model(torch.randn(2, 4, 6, 6))
    is_replayed = "NativeGroupNormBackward0" in {spared.made_by for spared in count(loss).spared}
    assert is_replayed == (torch.__version__ < "2.14")


def test_a_faked_graph_of_cudas_autocast() -> None:
    """There a norm casts its 16-bit input, and saves the copy: it is replayed where its source is saved."""
    linear = nn.Linear(64, 64)
    x = torch.randn(32, 64)
    found = []
    for enter in (cases.eager, cases.recipes):
        with enter(linear):
            h = linear(x).bfloat16() * 1.5
            y = F.silu(h).float() + h.float().square()  # silu saves h, and square its copy
        kept = count(y).spared
        found.append([*torch.autograd.grad(y.sum(), [*linear.parameters()])])
    assert all(map(are_equal, *found))
    assert ("ToCopyBackward0", ("PowBackward0",)) in {(spared.made_by, spared.read_by) for spared in kept}


def test_a_dropout_of_cudas_is_scaled_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel divides in float32; what is called is seen on a CPU."""
    norm, x = nn.LayerNorm(64), torch.randn(32, 64)
    results_of = replays.results_of
    for kind, scale in (("cuda", 1.1764705181121826), ("cpu", 1 / 0.85)):
        place = SimpleNamespace(device=torch.device(kind), dtype=torch.float32, shape=(32, 64))
        monkeypatch.setattr(replays, "results_of", lambda node, place=place: [place])
        with cases.recipes(norm):
            y, mask = torch.native_dropout(norm(x), 0.15, True)
            node: Any = y.grad_fn
            current: Any = current_region()
            assert mask.dtype is torch.bool
            function, _ = replays.REPLAYS["NativeDropoutBackward0"](current, node, y)  # type: ignore[misc]
        assert function.keywords["scale"] == scale  # type: ignore[attr-defined]
    monkeypatch.setattr(replays, "results_of", results_of)


def test_on_gpus_small_values_are_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region, "LEAST_BYTES", 1 << 14)
    monkeypatch.setattr(region, "PLAIN_TYPES", {SimpleNamespace})
    for is_cuda, nbytes, is_replayed in ((False, 1 << 15, True), (True, 1 << 15, False), (True, 1 << 18, True)):
        like = SimpleNamespace(layout=torch.strided, is_nested=False, _base=None, nbytes=nbytes, is_cuda=is_cuda)
        assert region.Region.is_worth_a_replay(like) is is_replayed  # type: ignore[arg-type]


def test_a_value_is_made_anew_for_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    for streams, runs in (([0, 0, 0], 1), ([0, 7, 0], 2)):
        made: list[int] = []
        found = iter(streams)
        monkeypatch.setattr(recipe, "stream_of", lambda tensor, found=found: next(found, 0))
        value = Recipe.__new__(Recipe)
        value._make = lambda made=made: made.append(1) or torch.ones(2)  # type: ignore[method-assign, func-returns-value]
        value.readers = 3
        x = torch.ones(2, requires_grad=True)
        y = x * 1
        y.register_hook(lambda dy, value=value: (value.get(), value.get(), value.get())[0])
        y.sum().backward()
        assert len(made) == runs


# --- host ------------------------------------------------------------------------------------------------------------


def test_a_linear_layer_enters_few_functions() -> None:
    """Of its two packs and two unpacks."""
    linear, results = nn.Linear(64, 64), []
    x = torch.randn(32, 64, requires_grad=True)
    with fl.save_once():
        h = linear(x)
        packs = entered(lambda: results.append(linear(h)))
    unpacks = entered(lambda: results[0].sum().backward())
    assert 0 < len(packs) <= 18 and len(unpacks) <= 8, (packs, unpacks)


def test_checkpoints_read_nothing_across_their_border() -> None:
    """What a checkpoint recomputes reads no recipe of the region around it."""
    norm, linear, model, x = _norm_and_linear()
    with cases.recipes(model):
        h = norm(x)

        def run(h: Tensor) -> Tensor:
            with cases.recipes(model):
                return F.gelu(linear(h))

        y = checkpoint(run, h, use_reentrant=False)
    assert all("LayerNorm" not in spared.made_by for spared in count(y).spared)
    y.sum().backward()
