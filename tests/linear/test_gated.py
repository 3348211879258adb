"""gated_linear gives torch's results, forward and backward, for two weights and for packed ones, and composes."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fusedops
from fusedops.linear.functional_gated import gated_linear
from fusedops.linear.tuning_gated import TORCH, tiled_config
from tests.harness.errors import check_error
from tests.harness.tensors import randn
from tests.linear.problems import DTYPES, EVERY_ACTIVATION, TORCHS, gradients
from tests.linear.test_offsets import far_apart

NAMES = ("x", "weight_gate", "weight_up", "bias_gate", "bias_up")
PACKED = pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])


def tensors(
    runner, shape, out_features, dtype=torch.float32, *, packed=False, bias=True, parameter_dtype=None, layouts=None
):
    """The five tensors, each requiring a gradient; None where there is none. ``layouts``: memory layouts by name."""
    layouts = layouts or {}
    N, K = out_features * (2 if packed else 1), shape[-1]
    made = []
    for name, size in zip(NAMES, (shape, (N, K), (N, K), (N,), (N,)), strict=True):
        layout = layouts.get(name, "contiguous")
        t = randn(*size, dtype=dtype if name == "x" else parameter_dtype or dtype, device=runner.device, layout=layout)
        if name.startswith("weight"):  # pre-activations of about unit variance; an expanded weight has one row
            t[: 1 if layout == "expanded" else None].mul_(max(K, 1) ** -0.5)
        made.append(t.requires_grad_())
    x, weight_gate, weight_up, bias_gate, bias_up = made
    if packed:
        return [x, weight_gate, None, bias_gate if bias else None, None]
    return [x, weight_gate, weight_up, *((bias_gate, bias_up) if bias else (None, None))]


def plain(x, weight_gate, weight_up, bias_gate, bias_up, activation="silu"):
    """torch's own operators in the dtype of x: what rounding alone costs."""
    weight_gate, weight_up, bias_gate, bias_up = (
        p if p is None else p.to(x.dtype) for p in (weight_gate, weight_up, bias_gate, bias_up)
    )
    g = F.linear(x, weight_gate, bias_gate)
    g, u = g.chunk(2, -1) if weight_up is None else (g, F.linear(x, weight_up, bias_up))
    return TORCHS[activation](g) * u


def rows_of(leaves):
    return leaves[1].shape[0] // (2 if leaves[2] is None else 1)


def check(leaves, activation="silu", grad=None, *, out_dtype=None, **options):
    """Output and gradients by the error rule; returns them."""
    x = leaves[0]
    shape = (*x.shape[:-1], rows_of(leaves))
    result_dtype = out_dtype or x.dtype
    if grad is None:
        grad = torch.randn(shape, device=x.device).to(result_dtype)
    output, grads = gradients(lambda *t: gated_linear(*t, activation, out_dtype=out_dtype, **options), leaves, grad)
    baseline, plain_grads = gradients(lambda *t: plain(*t, activation).to(result_dtype), leaves, grad)
    # The exact result is that of the operands which are multiplied: weights of the input's dtype.
    wide = [
        t if t is None else (t.detach().to(x.dtype) if t.ndim == 2 else t.detach()).double().requires_grad_()
        for t in leaves
    ]
    for t, leaf in zip(wide, leaves, strict=True):
        if leaf is not None:
            t.requires_grad_(leaf.requires_grad)
    truth, exact_grads = gradients(lambda *t: plain(*t, activation), wide, grad.double())
    assert output.dtype == result_dtype
    assert output.shape == shape
    check_error(output, truth, baseline, what="output")
    for name, leaf, ours, theirs, right in zip(NAMES, leaves, grads, plain_grads, exact_grads, strict=True):
        if leaf is not None and leaf.requires_grad:
            assert ours.dtype == leaf.dtype
            assert ours.shape == leaf.shape
            check_error(ours, right, theirs, gradient=True, what=f"gradient of {name}")
    return output, grads


def use_config(monkeypatch, kernel="tiled", **fields):
    """Let the forward run on a tile, these fields replaced, or on torch's own products; returns the problems it met."""
    from fusedops.linear import kernels_gated

    problems = []

    def chosen(operator, problem, device):
        problems.append(problem)
        if kernel == "torch":
            return TORCH
        return replace(tiled_config(problem, fusedops.runtime.device.device_facts(device)), **fields)

    monkeypatch.setattr(kernels_gated, "resolve", chosen)
    return problems


# Values and gradients


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", [None, "silu"], ids=str)
@PACKED
def test_values_and_gradients(runner, packed, activation, dtype):
    check(tensors(runner, (9, 70), 66, dtype, packed=packed), activation)


@pytest.mark.parametrize("activation", EVERY_ACTIVATION, ids=str)
def test_every_activation(runner, activation):
    check(tensors(runner, (9, 20), 12), activation)


_SIZES = (0, 1, 2, 15, 17, 63, 100, 129)


def _sampled(count):
    """Triples of sizes, each size at least once at each place, the same ones in every run."""
    draw = random.Random(4)
    columns = [[draw.choice(_SIZES) for _ in range(count - len(_SIZES))] + [*_SIZES] for _ in range(3)]
    for column in columns:
        draw.shuffle(column)
    return sorted({*zip(*columns, strict=True)})


@pytest.mark.parametrize(("rows", "out_features", "in_features"), _sampled(12))
@PACKED
def test_any_size(runner, rows, out_features, in_features, packed):
    check(tensors(runner, (rows, in_features), out_features, torch.bfloat16, packed=packed), "gelu_tanh")


@pytest.mark.parametrize("lead", [(), (3,), (2, 1, 3, 2)], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@PACKED
def test_any_leading_dimensions_with_and_without_biases(runner, lead, bias, packed):
    check(tensors(runner, (*lead, 20), 12, bias=bias, packed=packed))


@pytest.mark.parametrize("which", ["gate", "up"])
def test_one_bias_of_two(runner, which):
    leaves = tensors(runner, (5, 20), 12)
    leaves[NAMES.index(f"bias_{which}")] = None
    check(leaves)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "strided", "expanded", "offset"])
@pytest.mark.parametrize("which", ["x", "weight_up", "both_weights", "packed", "bias_up", "grad_output"])
def test_any_strides_and_neighbours_that_are_nan(runner, which, layout):
    """The layouts but transposed and expanded lie between NaN: a load past an edge would show."""
    names = {"both_weights": ("weight_gate", "weight_up"), "packed": ("weight_gate", "bias_gate")}.get(which, (which,))
    leaves = tensors(
        runner, (5, 7, 21), 19, torch.bfloat16, packed=which == "packed", layouts=dict.fromkeys(names, layout)
    )
    grad_layout = layout if which == "grad_output" else "contiguous"
    check(leaves, "silu", randn(5, 7, 19, dtype=torch.bfloat16, device=runner.device, layout=grad_layout))


def test_a_sum_sends_a_gradient_without_strides(runner):
    check(tensors(runner, (5, 21), 19), "gelu", torch.ones((), device=runner.device).expand(5, 19))


@pytest.mark.parametrize("bias_dtype", ["input", "float32"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@PACKED
def test_float32_parameters_beside_a_16_bit_input(runner, packed, dtype, bias_dtype):
    leaves = tensors(runner, (9, 40), 24, dtype, packed=packed, parameter_dtype=torch.float32)
    if bias_dtype == "input":
        leaves[3:] = [b if b is None else b.detach().to(dtype).requires_grad_() for b in leaves[3:]]
    check(leaves)


def test_the_two_weights_may_differ_in_dtype(runner):
    leaves = tensors(runner, (9, 40), 24, torch.bfloat16)
    leaves[2] = leaves[2].detach().float().requires_grad_()
    check(leaves)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_the_output_has_the_dtype_that_is_asked_for(runner, recompute, out_dtype):
    check(tensors(runner, (9, 40), 24, torch.bfloat16), out_dtype=out_dtype, recompute=recompute)
    check(tensors(runner, (9, 40), 24), out_dtype=out_dtype, recompute=recompute)


def test_a_float32_output_of_16_bit_operands_is_not_rounded_between(kernel_runner):
    leaves = [t.detach() for t in tensors(kernel_runner, (9, 40), 24, torch.bfloat16)]
    exact = plain(*(t.double() for t in leaves))
    error = (gated_linear(*leaves, out_dtype=torch.float32) - exact).abs().max()
    assert error < 1e-5 * exact.abs().max()


@pytest.mark.parametrize("activation", [None, "silu", "tanh"], ids=str)
def test_float64_on_the_torch_backend(activation):
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 5), (4, 5), (4, 5), (4,), (4,))]
    leaves[0] = (leaves[0].detach() + 3).requires_grad_()
    assert gated_linear(*leaves, activation).dtype == torch.float64
    with fusedops.backend("torch"):
        assert torch.autograd.gradcheck(lambda *t: gated_linear(*t, activation), leaves)


@pytest.mark.parametrize("activation", [None, "silu", "tanh"], ids=str)
def test_an_op_that_cannot_launch_computes_the_definition(activation):
    """A graph that was made for the kernels and runs where there are none: here because of its float64 tensors."""
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 5), (4, 5), (4, 5), (4,), (4,))]
    op = torch.ops.fusedops.gated_linear
    for recompute in (False, True):
        options = (activation, None, recompute, False, "ieee")
        assert torch.autograd.gradcheck(lambda *t, options=options: op(*t, *options)[0], leaves)
    x, both, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 5), (8, 5), (8,)))
    assert torch.autograd.gradcheck(lambda x, w, b: op(x, w, None, b, None, *options)[0], (x, both, bias))


@pytest.mark.parametrize("activation", EVERY_ACTIVATION, ids=str)
def test_large_and_special_values(runner, activation):
    """NaN passes, and where the gate saturates the output and the gradients are finite."""
    g = torch.tensor([float("nan"), 1e4, 100.0, 0.0, -0.0, -100.0, -1e4], device=runner.device)[:, None]
    x = torch.cat((g, torch.full_like(g, 2.0)), 1)
    weights = [torch.tensor([row], device=runner.device) for row in ([1.0, 0.0], [0.0, 1.0])]
    results = []
    for function in (gated_linear, plain):
        leaf = x.clone().requires_grad_()
        y = function(leaf, *weights, None, None, activation)
        results.append((y, torch.autograd.grad(y.sum(), leaf)[0]))
    (y, dx), (right, right_dx) = results
    assert y[0].isnan()
    torch.testing.assert_close(y[1:], right[1:], rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(dx[1:], right_dx[1:], rtol=2e-6, atol=1e-6)


# Configurations


@pytest.mark.parametrize(
    "config",
    [
        {"rows": 16, "cols": 16, "depth": 16, "group": 2},
        {"rows": 64, "cols": 32, "depth": 32, "num_warps": 2},
        {"rows": 128, "cols": 64, "depth": 64, "num_warps": 4},
    ],
    ids=["small_tiles", "finished_in_halves", "finished_in_quarters"],
)
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_any_tile_gives_the_result(kernel_runner, monkeypatch, config, transposed):
    use_config(monkeypatch, **config)
    layouts = dict.fromkeys(("weight_gate", "weight_up"), "transposed") if transposed else None
    check(tensors(kernel_runner, (35, 40), 50, torch.bfloat16, layouts=layouts), "gelu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@PACKED
def test_torchs_own_products(kernel_runner, monkeypatch, packed, bias, dtype):
    problems = use_config(monkeypatch, "torch")
    for recompute in (False, True):
        check(tensors(kernel_runner, (35, 40), 50, dtype, packed=packed, bias=bias), recompute=recompute)
    assert all(problem.torch_serves for problem in problems)


def test_torchs_own_products_of_float32_biases_and_inside_autocast(kernel_runner, monkeypatch):
    use_config(monkeypatch, "torch")
    check(tensors(kernel_runner, (9, 40), 24, torch.bfloat16, parameter_dtype=torch.float32))
    leaves = tensors(kernel_runner, (9, 40), 24)
    with torch.autocast(kernel_runner.device.type, dtype=torch.bfloat16):
        y = gated_linear(*leaves)
        assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), plain(*leaves), rtol=0.03, atol=0.03)


@pytest.mark.parametrize("splits", [1, 3])
def test_the_biases_gradients_of_many_rows(kernel_runner, monkeypatch, splits):
    """The column sums are shared by programs, each with a partial sum."""
    from fusedops.linear import kernels_gated_backward

    facts = replace(kernels_gated_backward.device_facts(kernel_runner.device), multiprocessor_count=splits)
    monkeypatch.setattr(kernels_gated_backward, "device_facts", lambda device: facts)
    leaves = [
        t.detach().requires_grad_(name.startswith("bias"))
        for name, t in zip(NAMES, tensors(kernel_runner, (900, 8), 5), strict=True)
    ]
    check(leaves)


@pytest.mark.interpreter
@pytest.mark.parametrize("which", ["rows", "columns"])
def test_matrices_far_apart(kernel_runner, which):
    """Each stride fits in an int32, its product with an index or a step does not; the interpreter reports a wrap."""
    stride = 2**28 + 16
    far = [far_apart(9, 9, (stride, 1) if which == "rows" else (1, stride)) for _ in range(4)]
    near = [t.contiguous() if which == "rows" else t.t().contiguous().t() for t in far]
    results = []
    for *operands, grad in (far, near):
        leaves = [t.detach().requires_grad_() for t in operands]
        y = gated_linear(*leaves)
        results.append((y, *torch.autograd.grad(y, leaves, grad)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.interpreter
@pytest.mark.parametrize("precision", ["ieee", "tf32", "tf32x3"])
def test_the_precision_reaches_the_products(precision):
    """The interpreter rounds operands to TF32 as asked; the backward's second products follow the forward."""
    from fusedops.runtime.device import TARGETS, pretend

    x, gate, up = (torch.randn(s, requires_grad=True) for s in ((5, 40), (7, 40), (7, 40)))
    with fusedops.backend("triton"), pretend(TARGETS["sm_80"]):
        y = gated_linear(x, gate, up, None, None, None, fp32_precision=precision)
        results = [y, *torch.autograd.grad(y.sum(), (x, gate, up))]
    wide = [t.detach().double().requires_grad_() for t in (x, gate, up)]
    exact = plain(*wide, None, None, None)
    for ours, right in zip(results, (exact, *torch.autograd.grad(exact.sum(), wide)), strict=True):
        error = (ours - right).abs().max() / right.abs().max()
        assert (error > 2e-5) == (precision == "tf32"), error


# What is read, kept and computed


class Spy:
    """Stands where a kernel does and writes down what it is launched with."""

    def __init__(self, monkeypatch, module, name):
        self.kernel = getattr(module, name)
        self.launches = []
        monkeypatch.setattr(module, name, self)

    def __getitem__(self, grid):
        def launch(*args, **flags):
            self.launches.append(args)
            return self.kernel[grid](*args, **flags)

        return launch


@pytest.mark.parametrize("given", ["packed", "halves"])
def test_a_packed_weight_is_not_copied(kernel_runner, monkeypatch, given):
    from fusedops.linear import kernels_gated

    spy = Spy(monkeypatch, kernels_gated, "gated_linear_kernel")
    x, weight, _, bias, _ = tensors(kernel_runner, (6, 21), 19, packed=True)
    arguments = (x, weight, None, bias, None)
    if given == "halves":
        arguments = (x, weight[:19], weight[19:], bias[:19], bias[19:])
    y = gated_linear(*arguments)
    row = 21 * weight.element_size()
    _, gate, up, bias_gate, bias_up, *_ = spy.launches[0]
    assert (gate.data_ptr(), up.data_ptr()) == (weight.data_ptr(), weight.data_ptr() + 19 * row)
    assert (bias_gate.data_ptr(), bias_up.data_ptr()) == (bias.data_ptr(), bias.data_ptr() + 19 * 4)
    assert torch.equal(y, gated_linear(x, weight, None, bias, None))


def test_a_packed_weights_gradient_is_one_product(kernel_runner, monkeypatch):
    from fusedops.linear import kernels_gated_backward

    written = []
    product = kernels_gated_backward.grad_weight_product
    monkeypatch.setattr(
        kernels_gated_backward,
        "grad_weight_product",
        lambda dz, x, dw, precision: written.append(dw) or product(dz, x, dw, precision),
    )
    leaves = tensors(kernel_runner, (6, 21), 19, packed=True)
    (gradient,) = torch.autograd.grad(gated_linear(*leaves).sum(), leaves[1])
    assert [dw.data_ptr() for dw in written] == [gradient.data_ptr()]
    assert gradient.shape == (38, 21)


def test_the_gradient_of_a_transposed_weight_lies_as_it_does(kernel_runner):
    leaves = tensors(kernel_runner, (6, 21), 19, layouts={"weight_gate": "transposed", "weight_up": "transposed"})
    grads = torch.autograd.grad(gated_linear(*leaves).sum(), leaves[1:3])
    assert [g.stride() for g in grads] == [w.stride() for w in leaves[1:3]]


# Each alone, each left out, and a few between.
SUBSETS = sorted(
    {tuple(i == j for j in range(5)) for i in range(5)}
    | {tuple(i != j for j in range(5)) for i in range(5)}
    | {(False, True, True, False, False), (False, True, False, True, False), (False, False, True, False, True)}
)
SUBSETS_PACKED = sorted({(x, w, False, b, False) for x, w, _, b, _ in SUBSETS if x or w or b})


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@PACKED
def test_every_subset_of_inputs_that_require_gradients(kernel_runner, packed, recompute):
    leaves = tensors(kernel_runner, (9, 20), 12, packed=packed)
    grad = torch.randn(9, 12, device=kernel_runner.device)
    full = gradients(gated_linear, leaves, grad)[1]
    for subset in SUBSETS_PACKED if packed else SUBSETS:
        some = [t if t is None else t.detach().requires_grad_(w) for t, w in zip(leaves, subset, strict=True)]
        gated_linear(*some, recompute=recompute).backward(grad)
        for leaf, wanted, right in zip(some, subset, full, strict=True):
            if wanted:
                assert torch.equal(leaf.grad, right)
            else:
                assert leaf is None or leaf.grad is None


@pytest.mark.parametrize(
    ("wanted", "width"),
    [("bias_gate", 12), ("weight_up", 12), ("x", 24), ("weight_gate weight_up", 24)],
)
def test_only_the_halves_that_are_wanted_are_computed(kernel_runner, monkeypatch, wanted, width):
    from fusedops.linear import kernels_gated_backward

    spy = Spy(monkeypatch, kernels_gated_backward, "grad_gate_kernel")
    leaves = tensors(kernel_runner, (9, 20), 12)
    leaves = [t.detach().requires_grad_(name in wanted.split()) for name, t in zip(NAMES, leaves, strict=True)]
    gated_linear(*leaves).sum().backward()
    _, _, dz, db, *_ = spy.launches[0]
    if wanted.startswith("bias"):
        assert dz is None
        assert db.shape[1] == width
    else:
        assert db is None
        assert dz.shape == (9, width)


@pytest.mark.parametrize("activation", [None, "silu", "relu"], ids=str)
@PACKED
def test_recomputing_gives_the_same_to_the_bit(kernel_runner, packed, activation):
    leaves = tensors(kernel_runner, (9, 20), 12, torch.bfloat16, packed=packed)
    grad = torch.randn(9, 12, device=kernel_runner.device)
    runs = [
        gradients(lambda *t, r=recompute: gated_linear(*t, activation, recompute=r), leaves, grad)
        for recompute in (False, True)
    ]
    assert torch.equal(runs[0][0], runs[1][0])
    for a, b in zip(runs[0][1], runs[1][1], strict=True):
        assert a is b is None or torch.equal(a, b)


def test_recomputing_asks_for_the_configuration_that_keeping_would_have(kernel_runner, monkeypatch):
    problems = use_config(monkeypatch)
    leaves = tensors(kernel_runner, (9, 20), 12, torch.bfloat16)
    for recompute in (False, True):
        gated_linear(*leaves, recompute=recompute, out_dtype=torch.float32).sum().backward()
    kept, forward, again = problems
    assert kept == again
    assert kept.keeps
    assert not forward.keeps


def kept_by(y):
    return {t.data_ptr() for t in y.grad_fn.saved_tensors if t is not None}


@PACKED
def test_only_what_the_backward_reads_is_kept(kernel_runner, packed):
    leaves = tensors(kernel_runner, (9, 20), 12, packed=packed)
    for subset in SUBSETS_PACKED if packed else SUBSETS:
        some = [t if t is None else t.detach().clone().requires_grad_(w) for t, w in zip(leaves, subset, strict=True)]
        named = [0 if t is None else t.data_ptr() for t in some]
        y = gated_linear(*some)
        kept = kept_by(y)
        assert (named[0] in kept) == (subset[1] or subset[2])
        for i in (1, 2):
            assert (named[i] in kept) == (subset[0] and some[i] is not None)
        assert not kept & {*named[3:], y.data_ptr()}
        assert len(kept - {*named}) == 1  # [gate | up]
        y = gated_linear(*some, recompute=True)
        assert kept_by(y) == {*named} - {0}


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_without_a_gradient_nothing_is_kept(kernel_runner, monkeypatch, recompute):
    from fusedops.linear import functional_gated

    results = []
    op = functional_gated.gated_linear_op
    monkeypatch.setattr(functional_gated, "gated_linear_op", lambda *args: results.append(op(*args)) or results[-1])
    leaves = tensors(kernel_runner, (9, 20), 12)
    with torch.no_grad():
        gated_linear(*leaves, recompute=recompute)
    gated_linear(*(t.detach() for t in leaves), recompute=recompute)
    for output, saved in results:
        assert output.grad_fn is None
        assert saved.shape == (0,)


@PACKED
def test_backward_is_deterministic_and_leaves_its_inputs_alone(runner, packed):
    leaves = tensors(runner, (70, 20), 12, torch.bfloat16, packed=packed)
    given = [t for t in leaves if t is not None]
    before = [t.detach().clone() for t in given]
    versions = [t._version for t in given]
    y = gated_linear(*leaves)
    output = y.detach().clone()
    grad = torch.randn_like(y)
    sent = grad.clone()
    first = torch.autograd.grad(y, given, grad, retain_graph=True)
    again = torch.autograd.grad(gated_linear(*leaves), given, grad)
    for a, b, c in zip(first, torch.autograd.grad(y, given, grad), again, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    assert torch.equal(grad, sent)
    assert torch.equal(y, output)
    for tensor, value, version in zip(given, before, versions, strict=True):
        assert torch.equal(tensor, value)
        assert tensor._version == version


def test_what_was_kept_may_come_back_with_other_strides(kernel_runner):
    """As from a saved-tensor hook that packed it in another layout."""
    leaves = tensors(kernel_runner, (9, 20), 12)
    right = torch.autograd.grad(gated_linear(*leaves).sum(), leaves)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.t().contiguous(), lambda t: t.t()):
        y = gated_linear(*leaves)
    for ours, same in zip(torch.autograd.grad(y.sum(), leaves), right, strict=True):
        torch.testing.assert_close(ours, same, rtol=1e-6, atol=1e-6)


def test_second_derivative_names_the_way_out(kernel_runner):
    leaves = tensors(kernel_runner, (4, 20), 12)
    with pytest.raises(RuntimeError, match=r'GatedLinear: .*no second derivative.*fusedops\.backend\("torch"\)'):
        torch.autograd.grad(gated_linear(*leaves).sum(), leaves[0], create_graph=True)
    wide = [t.detach()[:2, :3].double().requires_grad_() for t in leaves[:3]]
    with fusedops.backend("torch"):
        assert torch.autograd.gradgradcheck(gated_linear, wide)


# Composition


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@PACKED
def test_autocast_gives_torchs_dtypes(runner, packed, dtype):
    leaves = tensors(runner, (3, 24), 12, dtype, packed=packed)
    given = [t for t in leaves if t is not None]
    with torch.autocast(runner.device.type, dtype=torch.bfloat16):
        y = gated_linear(*leaves)
        g = F.linear(leaves[0], leaves[1], leaves[3])
        g, u = g.chunk(2, -1) if packed else (g, F.linear(leaves[0], leaves[2], leaves[4]))
        theirs = F.silu(g) * u
        assert gated_linear(*leaves, out_dtype=torch.float32).dtype == torch.float32
    assert y.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(y, theirs, rtol=0.03, atol=0.03)
    grad = torch.randn_like(y)
    pairs = zip(*(torch.autograd.grad(out, given, grad) for out in (y, theirs)), strict=True)
    for leaf, (a, b) in zip(given, pairs, strict=True):
        assert a.dtype == b.dtype == leaf.dtype
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.08)


def test_autocast_does_not_reach_into_the_backward(kernel_runner):
    leaves = tensors(kernel_runner, (3, 24), 12)
    for recompute in (False, True):
        y = gated_linear(*leaves, recompute=recompute)
        outside = torch.autograd.grad(y.sum(), leaves, retain_graph=True)
        with torch.autocast(kernel_runner.device.type, dtype=torch.bfloat16):
            inside = torch.autograd.grad(y.sum(), leaves)
        for a, b in zip(outside, inside, strict=True):
            assert torch.equal(a, b)


@PACKED
def test_opcheck(kernel_runner, packed):
    leaves = tensors(kernel_runner, (2, 3, 8), 4, packed=packed, bias=packed)
    op = torch.ops.fusedops.gated_linear.default
    torch.library.opcheck(op, (*leaves, "silu", None, packed, False, "ieee"))
    leaves = [t if t is None else t.detach() for t in leaves]
    arguments = (*leaves, "silu", torch.bfloat16, False, True, "ieee")
    y, saved = op(*arguments)
    torch.library.opcheck(op, arguments)
    needs = [t is not None for t in leaves]
    backward = torch.ops.fusedops.gated_linear_backward.default
    options = (*(torch.float32,) * 4, [packed, False], "ieee")
    kept = None if packed else saved
    torch.library.opcheck(backward, (torch.randn_like(y), *leaves, kept, packed, "silu", needs, *options))


@pytest.mark.parametrize(
    ("packed", "recompute", "dynamic"),
    [(False, False, True), (True, True, False)],
    ids=["separate_kept_dynamic", "packed_recomputed_static"],
)
def test_compiled_equals_eager(runner, packed, recompute, dynamic):
    def function(*leaves):
        return gated_linear(*leaves, recompute=recompute)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (3, 6):
        leaves = tensors(runner, (2, rows, 24), 12, packed=packed)
        given = [t for t in leaves if t is not None]
        eager, traced = function(*leaves), compiled(*leaves)
        assert torch.equal(eager, traced)
        grad = torch.randn_like(eager)
        for a, b in zip(*(torch.autograd.grad(y, given, grad) for y in (eager, traced)), strict=True):
            assert torch.equal(a, b)
    with torch.no_grad():
        assert torch.equal(function(*leaves), compiled(*leaves))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(runner, use_reentrant):
    leaves = tensors(runner, (3, 24), 12)

    def function(x, *parameters):
        return gated_linear(x.sin(), *parameters).cos()

    grads = torch.autograd.grad(function(*leaves).sum(), leaves)
    checkpoint(function, *leaves, use_reentrant=use_reentrant).sum().backward()
    for leaf, grad in zip(leaves, grads, strict=True):
        assert torch.equal(leaf.grad, grad)


def test_meta_and_fake_tensors_need_no_data(kernel_runner):
    from torch._subclasses.fake_tensor import FakeTensorMode

    def call(device):
        x, weight = (
            torch.empty(s, dtype=torch.bfloat16, device=device, requires_grad=True) for s in ((2, 3, 8), (10, 8))
        )
        y = gated_linear(x, weight)
        assert (y.shape, y.dtype) == ((2, 3, 5), torch.bfloat16)
        assert [g.shape for g in torch.autograd.grad(y.sum(), (x, weight))] == [(2, 3, 8), (10, 8)]

    call("meta")
    with FakeTensorMode():
        call(kernel_runner.device)


# Arguments

X, W, B = torch.ones(2, 8), torch.ones(4, 8), torch.ones(4)
WRONG = {
    "input is a list": (TypeError, "input must be a torch.Tensor; got", ([1.0], W, W), {}),
    "input is a scalar": (ValueError, "input must be of at least one dimension", (torch.tensor(1.0), W, W), {}),
    "weight_gate is None": (TypeError, "weight_gate must be a torch.Tensor; got None", (X, None, W), {}),
    "weight_gate has one dimension": (ValueError, r"weight_gate must be of shape \(out_f.*, 8\)", (X, W[0], W[0]), {}),
    "weight_gate is transposed": (ValueError, r"weight_gate must be of shape .* \(8, 4\)", (X, W.t(), W.t()), {}),
    "weight_gate is integral": (TypeError, "weight_gate must be a floating-point tensor", (X, W.int(), W), {}),
    "weight_gate is wider": (TypeError, r"weight_gate must be of input's dtype", (X, W.double(), W), {}),
    "weight_up is shorter": (ValueError, r"weight_up must be of weight_gate's shape \(4, 8\)", (X, W, W[:3]), {}),
    "weight_up is narrower": (TypeError, "weight_up must be of input's dtype", (X, W, W.half()), {}),
    "weight_up is elsewhere": (ValueError, "weight_up must be on the device of input", (X, W, W.to("meta")), {}),
    "packed rows are odd": (ValueError, "weight_gate must be of an even number of rows", (X, W[:3]), {}),
    "bias_up beside a packed weight": (ValueError, "bias_up must be None where weight_up", (X, W, None, B, B[:2]), {}),
    "a packed bias is too short": (ValueError, r"bias_gate must be of shape \(4,\)", (X, W, None, B[:2]), {}),
    "bias_gate is too short": (ValueError, r"bias_gate must be of shape \(4,\)", (X, W, W, B[:1], B), {}),
    "bias_up is a matrix": (ValueError, r"bias_up must be of shape \(4,\)", (X, W, W, B, B[None]), {}),
    "bias_up is a number": (TypeError, "bias_up must be a torch.Tensor; got 1.0", (X, W, W, B, 1.0), {}),
    "activation is unknown": (ValueError, "activation must be None or .*'swish'", (X, W, W, B, B, "swish"), {}),
    "activation is a function": (TypeError, "activation must be None or one of", (X, W, W, B, B, torch.relu), {}),
    "out_dtype is a name": (TypeError, "out_dtype must be a torch.dtype", (X, W, W), {"out_dtype": "float32"}),
    "out_dtype is integral": (ValueError, "out_dtype must be a floating dtype", (X, W, W), {"out_dtype": torch.int8}),
    "recompute is a number": (TypeError, "recompute must be a bool", (X, W, W), {"recompute": 1}),
    "precision is unknown": (ValueError, "fp32_precision must be None or", (X, W, W), {"fp32_precision": "fp8"}),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_wrong_argument(case, backend):
    error, message, args, options = WRONG[case]
    with fusedops.backend(backend):
        for call in (gated_linear, lambda *a, **k: fusedops.explain(gated_linear, *a, **k)):
            with pytest.raises(error, match=f"^gated_linear: {message}"):
                call(*args, **options)


def test_explain_lists_the_reasons(kernel_runner):
    x, w = X.to(kernel_runner.device), W.to(kernel_runner.device)
    assert fusedops.explain(gated_linear, input=x, weight_gate=w).backend == "triton"
    for arguments in ((x.double(), w.double()), (x, w, None, None, None, "silu")):
        wide = {} if arguments[0] is not x else {"out_dtype": torch.float64}
        assert any("float64" in reason for reason in fusedops.explain(gated_linear, *arguments, **wide).reasons)
        with pytest.raises(fusedops.BackendError, match=r"gated_linear: .*float64"):
            gated_linear(*arguments, **wide)


# Configurations without a kernel


def test_every_problem_has_a_configuration_that_fits():
    from fusedops.linear.tuning_gated import DEFAULTS, SPACE, GatedProblem, default_config, prune
    from fusedops.runtime.device import INTERPRETER, TARGETS, DeviceFacts

    unknown = DeviceFacts("nvidia", "sm_90", "with little", 132, 49152)
    kinds = [("float16", "ieee"), ("float32", "ieee"), ("float32", "tf32"), ("float32", "tf32x3")]
    sizes = (0, 1, 16, 33, 100, 50257)
    for facts in (*TARGETS.values(), unknown, INTERPRETER):
        for (rows, cols), depth, (dtype, precision), aligned, torch_serves in itertools.product(
            itertools.product(sizes, sizes), (0, 64, 4096), kinds, (True, False), (True, False)
        ):
            problem = GatedProblem.of(
                rows, cols, depth, dtype=dtype, precision=precision, aligned=aligned, torch_serves=torch_serves
            )
            config = default_config(problem, facts)
            if config.kernel == "torch":
                assert torch_serves
                continue
            assert config.shared_memory(problem) <= facts.shared_memory, (problem, config)
            assert config.num_warps * facts.warp_size <= 1024
            assert min(config.rows, config.cols, config.depth) >= 16
            if min(problem.rows, problem.cols) >= 64:
                assert prune(config, problem, facts) is None, (problem, config)
    for name, defaults in DEFAULTS.items():
        for tile in (*defaults.half, *defaults.tf32, *defaults.full):
            assert name == "interpreter" or tile in SPACE, (name, tile)


def test_torchs_products_where_the_saving_is_small_beside_the_product():
    from fusedops.linear.tuning_gated import GatedProblem, default_config, prune
    from fusedops.runtime.device import TARGETS

    def kernel(rows, depth, **options):
        return default_config(GatedProblem.of(rows, 8192, depth, **options), TARGETS["sm_90"]).kernel

    assert kernel(8192, 64) == "tiled"
    assert kernel(8192, 16384) == "torch"
    assert kernel(8192, 16384, torch_serves=False) == "tiled"
    assert kernel(1, 16384) == "tiled"  # bound by the reading of the weights
    depths = [2**i for i in range(5, 15)]
    saving = [sum(kernel(8192, depth, keeps=keeps) == "tiled" for depth in depths) for keeps in (False, True)]
    assert saving[0] > saving[1]  # where the backward wants the pre-activations, fusing saves less
    problem = GatedProblem.of(512, 512, 512, dtype="float32", precision="tf32x3", torch_serves=False)
    assert "precision" in prune(TORCH, problem, TARGETS["sm_90"])
