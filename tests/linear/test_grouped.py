"""grouped_linear and batched_linear: each group's product, its gradients, every edge, and what they compose with."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fusedops
from fusedops.linear import reference_grouped
from fusedops.linear.activations import ACTIVATIONS
from fusedops.linear.functional_grouped import batched_linear, grouped_linear
from fusedops.linear.tuning_grouped import DEFAULTS, SPACE, GroupedConfig, GroupedProblem, default_config, prune
from fusedops.runtime.device import INTERPRETER, TARGETS, DeviceFacts, device_facts, pretend
from tests.harness.errors import check_error
from tests.harness.tensors import randn

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SUBSETS = [s for s in itertools.product((False, True), repeat=3) if any(s)]
BOTH = pytest.mark.parametrize("kind", ["grouped", "batched"])


def activated(z, activation):
    return z if activation is None else ACTIVATIONS[activation].forward(z)


def plain_grouped(x, weights, bias, activation, ends):
    """torch's own product of each group in the dtype of x; rows behind the last group are zero."""
    weights, bias = weights.to(x.dtype), None if bias is None else bias.to(x.dtype)
    parts, first = [], 0
    for g, end in enumerate(min(end, x.shape[0]) for end in ends):
        z = F.linear(x[first:end], weights[g], None if bias is None else bias[g])
        parts.append(activated(z, activation))
        first = end
    return torch.cat((*parts, x.new_zeros(x.shape[0] - first, weights.shape[1])))


def plain_batched(x, weights, bias, activation, ends):
    z = torch.bmm(x, weights.to(x.dtype).transpose(1, 2))
    return activated(z if bias is None else z + bias.to(x.dtype)[:, None], activation)


def tensors(kind, runner, rows, groups, out_features, in_features, dtype=torch.float32, **options):
    """(x, weights, bias), each requiring a gradient, pre-activations of about unit variance.

    ``layouts`` holds memory layouts by those names; ``parameter_dtype`` is the parameters' own.
    """
    layouts, parameter_dtype = options.get("layouts", {}), options.get("parameter_dtype", dtype)
    shape = (rows, in_features) if kind == "grouped" else (groups, rows, in_features)
    sizes = {"x": shape, "weights": (groups, out_features, in_features), "bias": (groups, out_features)}
    made = {
        name: randn(
            *size,
            dtype=dtype if name == "x" else parameter_dtype,
            device=runner.device,
            layout=layouts.get(name, "contiguous"),
        )
        for name, size in sizes.items()
    }
    made["weights"][: 1 if layouts.get("weights") == "expanded" else None].mul_(max(in_features, 1) ** -0.5)
    return tuple(t.requires_grad_() for t in made.values())


def call(kind, x, weights, bias, activation, ends, **options):
    if kind == "batched":
        return batched_linear(x, weights, bias, activation, **options)
    offsets = ends if isinstance(ends, torch.Tensor) else torch.tensor(ends, dtype=torch.int32, device=x.device)
    return grouped_linear(x, weights, offsets, bias, activation, **options)


def results(function, leaves, grad):
    """(output, gradient of each leaf)."""
    output = function(*leaves)
    return output, *torch.autograd.grad(output, leaves, grad.to(output.dtype))


def check(kind, leaves, activation=None, ends=None, grad=None, offsets=None):
    """Output and gradients by the error rule; returns them."""
    plain = plain_grouped if kind == "grouped" else plain_batched
    shape = (*leaves[0].shape[:-1], leaves[1].shape[1])
    dtype, device = leaves[0].dtype, leaves[0].device
    grad = randn(*shape, dtype=dtype, device=device) if grad is None else grad
    given = ends if offsets is None else offsets
    ours = results(lambda *t: call(kind, *t, activation, given), leaves, grad)
    theirs = results(lambda *t: plain(*t, activation, ends), leaves, grad)
    wide = [t.detach().to(dtype if i == 1 else t.dtype).double().requires_grad_() for i, t in enumerate(leaves)]
    right = results(lambda *t: plain(*t, activation, ends), wide, grad)
    names = ("output", "gradient of input", "gradient of weights", "gradient of bias")
    for i, (name, a, b, c) in enumerate(zip(names, ours, right, theirs, strict=True)):
        check_error(a, b.double(), c, gradient=i > 0, what=name)
    return ours


# ---------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", [None, "relu", "gelu"], ids=str)
def test_groups_of_any_size(runner, activation, dtype):
    """One whole tile and a part, an empty group, and rows behind the last group."""
    leaves = tensors("grouped", runner, 47, 3, 67, 70, dtype)
    check("grouped", leaves, activation, [37, 37, 45])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", [None, "relu", "gelu"], ids=str)
def test_batches(runner, activation, dtype):
    check("batched", tensors("batched", runner, 35, 2, 67, 70, dtype), activation)


@pytest.mark.parametrize(
    "ends",
    [
        [10, 20, 40],
        [0, 0, 40],
        [40, 40, 40],
        [0, 0, 0],
        [0, 1, 1],
        [1, 33, 34],
        [32, 33, 40],
        [7, 41, 999],
        [2**31 - 1] * 3,
    ],
    ids=str,
)
def test_any_division_into_groups(runner, ends):
    """An end beyond the rows counts as the last row."""
    check("grouped", tensors("grouped", runner, 40, 3, 5, 9), "silu", ends)


@pytest.mark.parametrize("ends", [[1, 33, 34], [0, 0, 40], [9, 9, 9]], ids=str)
def test_more_groups_than_a_program_reads_at_a_time(kernel_runner, monkeypatch, ends):
    from fusedops.linear import kernels_grouped

    monkeypatch.setattr(kernels_grouped, "BLOCK_G", 2)
    check("grouped", tensors("grouped", kernel_runner, 40, 3, 5, 9), "silu", ends)


def test_one_group_is_linear(runner):
    x, weights, bias = tensors("grouped", runner, 40, 1, 20, 12)
    with torch.no_grad():
        right = fusedops.linear(x, weights[0], bias[0], "gelu")
        torch.testing.assert_close(call("grouped", x, weights, bias, "gelu", [40]), right)
        torch.testing.assert_close(call("batched", x[None], weights, bias, "gelu", None)[0], right)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "strided", "column"])
def test_offsets_of_any_integers_and_strides(runner, dtype, layout):
    offsets = torch.tensor([4, 9, 14], dtype=dtype, device=runner.device)
    if layout == "strided":
        offsets = torch.stack((offsets, torch.full_like(offsets, -7)), 1).flatten()[::2]
    if layout == "column":
        offsets = torch.stack((torch.full_like(offsets, 99), offsets), 1)[:, 1]
    check("grouped", tensors("grouped", runner, 17, 3, 6, 5), None, [4, 9, 14], offsets=offsets)


@pytest.mark.parametrize("ends", [[30, 10, 35], [-5, 20, 3], [40, -(2**31), 2**31 - 1], [1, 0, 40]], ids=str)
def test_offsets_that_do_not_ascend_touch_no_other_memory(runner, ends):
    """Rows are undefined then. The interpreter reports a row that two programs write, and an address out of bounds."""
    layouts = {"x": "sliced", "weights": "sliced"}
    leaves = tensors("grouped", runner, 40, 3, 7, 9, layouts=layouts)
    y, *grads = results(lambda *t: call("grouped", *t, "gelu", ends), leaves, torch.ones(40, 7, device=runner.device))
    assert y.shape == (40, 7)
    assert [g.shape for g in grads] == [t.shape for t in leaves]


@BOTH
@pytest.mark.parametrize("layout", ["transposed", "sliced", "strided", "expanded", "offset"])
@pytest.mark.parametrize(
    ("which", "activation"),
    [("x", None), ("weights", None), ("bias", None), ("grad_output", None), ("grad_output", "gelu")],
)
def test_any_strides_and_neighbours_that_are_nan(runner, kind, which, layout, activation):
    """The layouts but transposed and expanded lie between NaN: a load past an edge would show."""
    leaves = tensors(kind, runner, 13, 2, 19, 20, torch.bfloat16, layouts={which: layout})
    shape = (*leaves[0].shape[:-1], 19)
    grad_layout = layout if which == "grad_output" else "contiguous"
    grad = randn(*shape, dtype=torch.bfloat16, device=runner.device, layout=grad_layout)
    check(kind, leaves, activation, [7, 12], grad)


@BOTH
def test_a_sum_sends_a_gradient_without_strides(runner, kind):
    leaves = tensors(kind, runner, 21, 3, 19, 20)
    grad = torch.ones((), device=runner.device).expand(*leaves[0].shape[:-1], 19)
    check(kind, leaves, "gelu", [9, 9, 18], grad)


@pytest.mark.parametrize("activation", [None, "gelu"], ids=str)
def test_nan_stays_in_its_group(runner, activation):
    check_nan_stays_in_its_group(runner.device, activation)


@pytest.mark.parametrize("activation", [None, "gelu"], ids=str)
def test_nan_stays_in_its_group_in_the_torch_backends_formula_for_tracing(monkeypatch, activation):
    monkeypatch.setattr(reference_grouped, "_readable", lambda offsets: False)
    with fusedops.backend("torch"):
        check_nan_stays_in_its_group(torch.device("cpu"), activation)


def check_nan_stays_in_its_group(device, activation):
    """In the rows and the matrix of group 1, and in the input and the gradient of rows that belong to none."""
    ends = [9, 17, 30]
    leaves = [randn(*s, device=device, requires_grad=True) for s in ((40, 9), (3, 7, 9), (3, 7))]
    grad = torch.randn(40, 7, device=device)
    clean = results(lambda *t: call("grouped", *t, activation, ends), leaves, grad)
    dirty = [t.detach().clone() for t in leaves]
    nan = float("nan")
    dirty[0][9:17], dirty[0][30:], dirty[1][1], grad[30:] = nan, float("inf"), nan, nan
    dirty = [t.requires_grad_() for t in dirty]
    y, dx, dw, db = results(lambda *t: call("grouped", *t, activation, ends), dirty, grad)
    others = [*range(9), *range(17, 40)]
    assert torch.equal(y[others], clean[0][others])
    assert torch.equal(dx[others], clean[1][others])
    assert not dx[30:].any()
    assert not y[30:].any()
    for ours, right in ((dw, clean[2]), (db, clean[3])):
        assert torch.equal(ours[[0, 2]], right[[0, 2]])
    assert y[9:17].isnan().all()
    assert dx[9:17].isnan().all()


EMPTY = [(0, 2, 4, 5), (3, 2, 0, 5), (3, 2, 4, 0), (3, 0, 4, 5), (0, 0, 0, 0)]


@pytest.mark.parametrize(("rows", "groups", "out_features", "in_features"), EMPTY)
@pytest.mark.parametrize("activation", [None, "softplus"], ids=str)
@BOTH
def test_empty(runner, kind, activation, rows, groups, out_features, in_features):
    leaves = tensors(kind, runner, rows, groups, out_features, in_features)
    ends = [rows] * groups
    grad = torch.ones(*leaves[0].shape[:-1], out_features, device=runner.device)
    y, dx, dw, db = results(lambda *t: call(kind, *t, activation, ends), leaves, grad)
    assert y.shape == grad.shape
    assert [g.shape for g in (dx, dw, db)] == [t.shape for t in leaves]
    assert not dx.any()
    assert not dw.any()
    if rows == 0 or groups == 0:
        assert not y.any()
        assert not db.any()
    elif in_features == 0:  # the bias alone; its gradient is that of the activation
        bias = leaves[2]
        right = activated(bias[:1].expand_as(y) if kind == "grouped" else bias[:, None].expand_as(y), activation)
        torch.testing.assert_close(y, right)
        torch.testing.assert_close(db, torch.autograd.grad(right.sum(), bias)[0])


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_float32_parameters_beside_a_16_bit_input(runner, kind, dtype):
    leaves = tensors(kind, runner, 21, 3, 19, 20, dtype, parameter_dtype=torch.float32)
    ours = check(kind, leaves, "silu", [9, 9, 18])
    assert [t.dtype for t in ours] == [dtype, dtype, torch.float32, torch.float32]


@BOTH
def test_without_a_bias(runner, kind):
    x, weights, _ = tensors(kind, runner, 21, 3, 19, 20)
    grad = torch.randn(*x.shape[:-1], 19, device=runner.device)
    plain = plain_grouped if kind == "grouped" else plain_batched
    pair = [
        results(lambda *t, f=f: f(*t, None, "gelu", [9, 9, 18]), (x, weights), grad)
        for f in (lambda *a: call(kind, *a), plain)
    ]
    for ours, theirs in zip(*pair, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@BOTH
def test_float64_on_the_torch_backend(kind):
    leaves = [t.requires_grad_() for t in _double(kind)]
    ends = [2, 2, 4]
    assert call(kind, *leaves, "gelu", ends).dtype == torch.float64
    with fusedops.backend("torch"):
        assert torch.autograd.gradcheck(lambda *t: call(kind, *t, "gelu", ends), leaves)
        assert torch.autograd.gradgradcheck(lambda *t: call(kind, *t, "gelu", ends), leaves)


def _double(kind):
    shape = (5, 4) if kind == "grouped" else (3, 2, 4)
    return [torch.randn(s, dtype=torch.float64) for s in (shape, (3, 2, 4), (3, 2))]


@BOTH
def test_transposed_weights_are_not_copied_and_their_gradient_lies_as_they_do(kernel_runner, monkeypatch, kind):
    """Experts stored (groups, in_features, out_features)."""
    from fusedops.linear import kernels_grouped

    launched = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **flags: launched.append(args) or kernel[grid](*args, **flags)

    kernel = kernels_grouped.grouped_linear_kernel
    monkeypatch.setattr(kernels_grouped, "grouped_linear_kernel", Kernel())
    x, weights, bias = tensors(kind, kernel_runner, 12, 3, 19, 20, layouts={"weights": "transposed"})
    y = call(kind, x, weights, bias, "gelu", [4, 8, 12])
    _, gradient = torch.autograd.grad(y.sum(), (x, weights))
    assert [args[1].data_ptr() for args in launched] == [weights.data_ptr()] * 2
    assert gradient.stride() == weights.stride()


@pytest.mark.parametrize(
    "config",
    [
        {"rows": 16, "cols": 16, "depth": 16, "group": 1},
        {"rows": 16, "cols": 32, "depth": 64, "group": 2},
        {"rows": 128, "cols": 128, "depth": 32, "num_warps": 4},
    ],
    ids=["small_tiles", "patches_of_two", "finished_in_quarters"],
)
@BOTH
def test_any_configuration_gives_the_result(kernel_runner, monkeypatch, kind, config):
    from fusedops.linear import kernels_grouped

    def chosen(operator, problem, device):
        return replace(operator.default(problem, device_facts(device)), **config)

    monkeypatch.setattr(kernels_grouped, "resolve", chosen)
    check(kind, tensors(kind, kernel_runner, 37, 2, 34, 40, torch.bfloat16), "gelu", [20, 35])


@pytest.mark.interpreter
@pytest.mark.parametrize("which", ["rows", "columns"])
@BOTH
def test_matrices_far_apart(kernel_runner, kind, which):
    """Each stride fits in an int32, its product with an index or a step does not; the interpreter reports a wrap."""
    stride = 2**28 + 16

    def far(*shape):
        strides = (stride, 1) if which == "rows" else (1, stride)
        strides = strides if len(shape) == 2 else (16, *strides)
        size = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
        memory = torch.from_numpy(np.empty(size, dtype=np.int16)).view(torch.bfloat16)
        return memory.as_strided(shape, strides).copy_(torch.randn(shape))

    rows = (9, 9) if kind == "grouped" else (2, 9, 9)
    x, weights, grad = far(*rows), far(2, 9, 9), far(*rows)
    outcomes = []
    for operands in ((x, weights, grad), tuple(t.contiguous() for t in (x, weights, grad))):
        leaves = [t.detach().requires_grad_() for t in operands[:2]]
        outcomes.append(results(lambda *t: call(kind, *t, None, "gelu", [4, 9]), leaves, operands[2]))
    for a, b in zip(*outcomes, strict=True):
        assert torch.equal(a, b)


# ------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("subset", SUBSETS, ids=lambda s: "".join(n for n, w in zip("xwb", s, strict=True) if w))
@pytest.mark.parametrize(("kind", "activation"), [("grouped", "gelu"), ("grouped", None), ("batched", "gelu")])
def test_every_subset_of_inputs_that_require_gradients(runner, kind, activation, subset):
    leaves = tensors(kind, runner, 12, 3, 7, 9)
    ends = [4, 4, 11]
    grad = torch.randn(*leaves[0].shape[:-1], 7, device=runner.device)
    _, *full = results(lambda *t: call(kind, *t, activation, ends), leaves, grad)
    some = [t.detach().requires_grad_(wanted) for t, wanted in zip(leaves, subset, strict=True)]
    call(kind, *some, activation, ends).backward(grad)
    for leaf, wanted, right in zip(some, subset, full, strict=True):
        if wanted:
            torch.testing.assert_close(leaf.grad, right, rtol=1e-6, atol=1e-6)
        else:
            assert leaf.grad is None


@BOTH
@pytest.mark.parametrize("activation", [None, "gelu"], ids=str)
def test_backward_is_deterministic_and_leaves_its_inputs_alone(runner, kind, activation):
    leaves = tensors(kind, runner, 40, 2, 7, 9, torch.bfloat16)
    ends = torch.tensor([33, 39], device=runner.device)
    before = [t.detach().clone() for t in (*leaves, ends)]
    y = call(kind, *leaves, activation, ends)
    output, grad = y.detach().clone(), torch.randn_like(y)
    kept = grad.clone()
    first = torch.autograd.grad(y, leaves, grad, retain_graph=True)
    second = torch.autograd.grad(y, leaves, grad)
    again = torch.autograd.grad(call(kind, *leaves, activation, ends), leaves, grad)
    for a, b, c in zip(first, second, again, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    assert torch.equal(grad, kept)
    assert torch.equal(y, output)
    for tensor, value in zip((*leaves, ends), before, strict=True):
        assert torch.equal(tensor, value)
        assert tensor._version == 0 or tensor is leaves[1]  # the helper scales the weights


@pytest.mark.parametrize("activation", [None, "relu", "gelu"], ids=str)
@BOTH
def test_only_what_the_backward_reads_is_kept(kernel_runner, kind, activation):
    values = [t.detach() for t in tensors(kind, kernel_runner, 12, 3, 7, 9)]
    ends = torch.tensor([4, 4, 11], device=kernel_runner.device)
    for needs in SUBSETS:
        leaves = [t.clone().requires_grad_(need) for t, need in zip(values, needs, strict=True)]
        y = call(kind, *leaves, activation, ends)
        kept = {t.data_ptr() for t in y.grad_fn.saved_tensors if t is not None}
        assert (leaves[0].data_ptr() in kept) == needs[1]
        assert (leaves[1].data_ptr() in kept) == needs[0]
        assert (ends.data_ptr() in kept) == (kind == "grouped")
        assert (y.data_ptr() in kept) == (activation == "relu")
        named = {t.data_ptr() for t in (*leaves, ends, y)}
        assert len(kept - named) == (activation == "gelu")


def test_without_a_gradient_nothing_is_kept(kernel_runner, monkeypatch):
    from fusedops.linear import functional_grouped

    outcomes = []
    op = functional_grouped.grouped_linear_op
    monkeypatch.setattr(
        functional_grouped, "grouped_linear_op", lambda *args: outcomes.append(op(*args)) or outcomes[-1]
    )
    leaves = tensors("grouped", kernel_runner, 12, 3, 7, 9)
    with torch.no_grad():
        call("grouped", *leaves, "gelu", [4, 4, 11])
    call("grouped", *(t.detach() for t in leaves), "gelu", [4, 4, 11])
    assert [(output.grad_fn, saved.shape) for output, saved in outcomes] == [(None, (0,))] * 2


@BOTH
def test_what_was_kept_may_come_back_with_other_strides(kernel_runner, kind):
    leaves = tensors(kind, kernel_runner, 12, 3, 7, 9)
    right = torch.autograd.grad(call(kind, *leaves, "gelu", [4, 4, 11]).sum(), leaves)

    def pack(tensor):
        return tensor if tensor.ndim < 2 else tensor.transpose(-1, -2).contiguous()

    def unpack(tensor):
        return tensor if tensor.ndim < 2 else tensor.transpose(-1, -2)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = call(kind, *leaves, "gelu", [4, 4, 11])
    for ours, same in zip(torch.autograd.grad(y.sum(), leaves), right, strict=True):
        torch.testing.assert_close(ours, same, rtol=1e-6, atol=1e-6)


@BOTH
def test_second_derivative_names_the_way_out(kernel_runner, kind):
    leaves = tensors(kind, kernel_runner, 4, 2, 3, 5)
    with pytest.raises(RuntimeError, match=r'GroupedLinear: .*no second derivative.*fusedops\.backend\("torch"\)'):
        torch.autograd.grad(call(kind, *leaves, None, [2, 4]).sum(), leaves[0], create_graph=True)


# ----------------------------------------------------------------------------------------------- composition


class _Never:
    """In the place of a kernel: takes its launch and does nothing."""

    def __getitem__(self, grid):
        return lambda *args, **flags: None


@BOTH
def test_no_launch_waits_for_the_device(monkeypatch, kind):
    """The launchers need no tensor's data: meta tensors have none, and reading one of them raises."""
    kernels = pytest.importorskip("fusedops.linear.kernels_grouped")
    from fusedops.linear import kernels_preactivation

    for module, name in (
        (kernels, "grouped_linear_kernel"),
        (kernels, "grouped_grad_weight_kernel"),
        (kernels_preactivation, "grad_preactivation_kernel"),
    ):
        monkeypatch.setattr(module, name, _Never())
    shape = (12, 9) if kind == "grouped" else (3, 12, 9)
    x, weights, bias = (torch.empty(s, device="meta") for s in (shape, (3, 7, 9), (3, 7)))
    offsets = torch.empty(3, dtype=torch.int64, device="meta") if kind == "grouped" else None
    y, saved = kernels.grouped_linear(x, weights, offsets, bias, "gelu", True, "ieee")
    needs, dtypes = (True, True, True), (torch.float32, torch.float32)
    grads = kernels.grouped_linear_backward(y, x, weights, offsets, saved, "gelu", needs, *dtypes, False, "ieee")
    assert [g.shape for g in grads] == [t.shape for t in (x, weights, bias)]


@pytest.mark.gpu
@BOTH
def test_the_host_does_not_wait_for_the_gpu(kernel_runner, kind):
    leaves = tensors(kind, kernel_runner, 12, 3, 7, 9)
    ends = torch.tensor([4, 4, 11], device=kernel_runner.device)
    for mode in ("default", "error"):  # the first compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            torch.autograd.grad(call(kind, *leaves, "gelu", ends).sum(), leaves)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@BOTH
def test_meta_and_fake_tensors_need_no_data(kernel_runner, kind):
    from torch._subclasses.fake_tensor import FakeTensorMode

    def shapes(device):
        shape = (12, 9) if kind == "grouped" else (3, 12, 9)
        leaves = [
            torch.empty(s, dtype=torch.bfloat16, device=device, requires_grad=True) for s in (shape, (3, 7, 9), (3, 7))
        ]
        ends = torch.empty(3, dtype=torch.int32, device=device)
        y = call(kind, *leaves, "gelu", ends)
        assert (y.shape, y.dtype) == ((*shape[:-1], 7), torch.bfloat16)
        grads = torch.autograd.grad(y.sum(), leaves)
        assert [(g.shape, g.dtype) for g in grads] == [(t.shape, t.dtype) for t in leaves]

    shapes("meta")
    for mode in ("triton", "torch"):
        with FakeTensorMode(), fusedops.backend(mode):
            shapes(kernel_runner.device)


@pytest.mark.parametrize(("kind", "activation"), [("grouped", "gelu"), ("batched", None)])
def test_opcheck(kernel_runner, kind, activation):
    x, weights, bias = tensors(kind, kernel_runner, 12, 3, 7, 9)
    offsets = torch.tensor([4, 4, 11], device=kernel_runner.device) if kind == "grouped" else None
    forward, backward = torch.ops.fusedops.grouped_linear.default, torch.ops.fusedops.grouped_linear_backward.default
    torch.library.opcheck(forward, (x, weights, offsets, bias, activation, False, "ieee"))
    x, weights, bias = (t.detach() for t in (x, weights, bias))
    y, saved = forward(x, weights, offsets, bias, activation, True, "ieee")
    torch.library.opcheck(
        forward, (x, weights, offsets, None, activation, True, "ieee"), test_utils=("test_schema", "test_faketensor")
    )
    read = None if activation is None else saved
    kinds = (torch.float32, torch.float32)
    for operands, needs, transposed in (
        ((x, weights), (True, True, True), True),
        ((x, None), (False, True, False), False),
        ((None, None), (False, False, True), False),
    ):
        arguments = (torch.randn_like(y), *operands, offsets, read, activation, *needs, *kinds, transposed, "ieee")
        torch.library.opcheck(backward, arguments, test_utils=("test_schema", "test_faketensor"))


def compare_compiled_and_eager(runner, kind, dynamic, same):
    def function(x, weights, bias, ends):
        return call(kind, x, weights, bias, "gelu", ends)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (12, 17) if dynamic else (12,):
        leaves = tensors(kind, runner, rows, 3, 7, 9)
        ends = torch.tensor([4, 4, rows - 1], device=runner.device)
        grad = torch.randn(*leaves[0].shape[:-1], 7, device=runner.device)
        pair = [results(lambda *t, f=f, e=ends: f(*t, e), leaves, grad) for f in (function, compiled)]
        for eager, traced in zip(*pair, strict=True):
            same(eager, traced)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@BOTH
def test_compiled_equals_eager(kernel_runner, kind, dynamic):
    def same(eager, traced):
        assert torch.equal(eager, traced)

    compare_compiled_and_eager(kernel_runner, kind, dynamic, same)


def test_the_torch_backend_is_traced_without_a_graph_break():
    """Its traced product takes all rows at once, whose sums may run in another order."""

    def same(eager, traced):
        torch.testing.assert_close(eager, traced, rtol=1e-5, atol=1e-5)

    with fusedops.backend("torch"):
        compare_compiled_and_eager(_CPU, "grouped", True, same)


def test_checkpointing(runner):
    leaves = tensors("grouped", runner, 12, 3, 7, 9)

    def function(x, weights, bias):
        return call("grouped", x.sin(), weights, bias, "gelu", [4, 4, 11]).cos()

    grads = torch.autograd.grad(function(*leaves).sum(), leaves)
    torch.utils.checkpoint.checkpoint(function, *leaves, use_reentrant=False).sum().backward()
    for leaf, grad in zip(leaves, grads, strict=True):
        assert torch.equal(leaf.grad, grad)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@BOTH
def test_autocast_gives_torchs_dtypes(runner, kind, dtype):
    leaves = tensors(kind, runner, 12, 3, 7, 9, dtype)
    grad = torch.randn(*leaves[0].shape[:-1], 7, device=runner.device)
    with torch.autocast(runner.device.type, dtype=torch.bfloat16):
        y = call(kind, *leaves, "gelu", [4, 4, 11])
    assert y.dtype == torch.bfloat16
    plain = plain_grouped if kind == "grouped" else plain_batched
    theirs = results(lambda *t: plain(*t, "gelu", [4, 4, 11]), leaves, grad)
    grads = torch.autograd.grad(y, leaves, grad.bfloat16())
    for leaf, a, b in zip((y, *leaves), (y, *grads), theirs, strict=True):
        assert a.dtype == leaf.dtype
        torch.testing.assert_close(a.float(), b.float(), rtol=0.05, atol=0.08)


def test_autocast_does_not_reach_into_the_backward(kernel_runner):
    leaves = tensors("grouped", kernel_runner, 12, 3, 7, 9)
    y = call("grouped", *leaves, "gelu", [4, 4, 11])
    plain = torch.autograd.grad(y.sum(), leaves, retain_graph=True)
    with torch.autocast(kernel_runner.device.type, dtype=torch.bfloat16):
        inside = torch.autograd.grad(y.sum(), leaves)
    for a, b in zip(plain, inside, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("activation", [None, "tanh", "gelu"], ids=str)
@BOTH
def test_an_op_that_cannot_launch_computes_the_definition(kind, activation):
    """A graph that was made for the kernels and runs where there are none: here because of its float64 tensors."""
    leaves = [t.requires_grad_() for t in _double(kind)]
    offsets = torch.tensor([2, 2, 4]) if kind == "grouped" else None
    op = torch.ops.fusedops.grouped_linear

    def function(x, weights, bias):
        return op(x, weights, offsets, bias, activation, False, "ieee")[0]

    assert torch.autograd.gradcheck(function, leaves)
    with fusedops.backend("torch"):
        torch.testing.assert_close(function(*leaves), call(kind, *leaves, activation, offsets))


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("target", "asked"), [("sm_75", "tf32"), ("sm_80", "ieee"), ("sm_80", "tf32"), ("sm_80", "tf32x3"), ("sm_80", None)]
)
@BOTH
def test_the_precision_reaches_every_product(kind, asked, target):
    """The interpreter rounds operands to TF32 as asked. None: torch's setting, full precision for CPU tensors."""
    x, weights, _ = tensors(kind, _CPU, 12, 2, 7, 40)
    grad = torch.randn(*x.shape[:-1], 7)
    with fusedops.backend("triton"), pretend(TARGETS[target]):
        ours = results(lambda *t: call(kind, *t, None, None, [5, 12], fp32_precision=asked), (x, weights), grad)
    plain = plain_grouped if kind == "grouped" else plain_batched
    wide = [t.detach().double().requires_grad_() for t in (x, weights)]
    exact = results(lambda *t: plain(*t, None, None, [5, 12]), wide, grad.double())
    for a, right in zip(ours, exact, strict=True):
        error = (a - right).abs().max() / right.abs().max()
        assert (error > 2e-5) == (asked == "tf32" and target == "sm_80"), error


class _CPU:
    device = torch.device("cpu")


# ------------------------------------------------------------------------------------------------- arguments

X, W, O, B = torch.ones(6, 8), torch.ones(2, 4, 8), torch.tensor([3, 6]), torch.ones(2, 4)  # noqa: E741
X3 = torch.ones(2, 3, 8)

WRONG = {
    "input is a list": (TypeError, "input must be a torch.Tensor; got", ([1.0], W, O)),
    "input is integral": (TypeError, "input must be a floating-point tensor", (X.long(), W, O)),
    "input is a batch": (ValueError, r"input must be of shape \(rows, in_features\)", (X3, W, O)),
    "weights are None": (TypeError, "weights must be a torch.Tensor; got None", (X, None, O)),
    "weights are one": (ValueError, r"weights must be of shape \(groups, out_features, 8\)", (X, W[0], O)),
    "weights are transposed": (ValueError, r"weights must be of shape .*, 8\)", (X, W.transpose(1, 2), O)),
    "weights are elsewhere": (ValueError, "weights must be on the device of input", (X, W.to("meta"), O)),
    "weights are narrower": (TypeError, "weights must be of input's dtype", (X, W.half(), O)),
    "offsets are a list": (TypeError, "offsets must be a torch.Tensor; got", (X, W, [3, 6])),
    "offsets are floating": (TypeError, "offsets must be a strided int32 or int64 tensor", (X, W, O.float())),
    "offsets are of 16 bits": (TypeError, "offsets must be a strided int32 or int64 tensor", (X, W, O.short())),
    "offsets begin with zero": (ValueError, r"offsets must be of shape \(2,\)", (X, W, torch.tensor([0, 3, 6]))),
    "offsets are a matrix": (ValueError, r"offsets must be of shape \(2,\)", (X, W, O[None])),
    "offsets are elsewhere": (ValueError, "offsets must be on the device of input", (X, W, O.to("meta"))),
    "bias is a number": (TypeError, "bias must be a torch.Tensor; got 1.0", (X, W, O, 1.0)),
    "bias is of one group": (ValueError, r"bias must be of shape \(2, 4\)", (X, W, O, B[0])),
    "bias is narrower": (TypeError, "bias must be of input's dtype", (X, W, O, B.half())),
    "bias is elsewhere": (ValueError, "bias must be on the device of input", (X, W, O, B.to("meta"))),
    "activation is unknown": (ValueError, "activation must be None or .*; got 'swish'", (X, W, O, B, "swish")),
    "activation is a function": (TypeError, "activation must be None or one of", (X, W, O, B, torch.relu)),
    "precision is unknown": (ValueError, "fp32_precision must be", (X, W, O, B, None, {"fp32_precision": "tf33"})),
    "precision is a number": (TypeError, "fp32_precision must be", (X, W, O, B, None, {"fp32_precision": 3})),
}  # fmt: skip

WRONG_BATCHED = {
    "input is a matrix": (ValueError, r"input must be of shape \(batch, rows, in_features\)", (X, W)),
    "weight is one": (ValueError, r"weight must be of shape \(2, out_features, 8\)", (X3, W[0])),
    "weight has another batch": (ValueError, r"weight must be of shape \(2, out_features, 8\)", (X3, W[:1])),
    "weight is transposed": (ValueError, "weight must be of shape", (X3, W.transpose(1, 2))),
    "weight is None": (TypeError, "weight must be a torch.Tensor; got None", (X3, None)),
    "weight is wider": (TypeError, "weight must be of input's dtype", (X3, W.double())),
    "weight is elsewhere": (ValueError, "weight must be on the device of input", (X3, W.to("meta"))),
    "bias is of one batch": (ValueError, r"bias must be of shape \(2, 4\)", (X3, W, B[0])),
    "bias is narrower": (TypeError, "bias must be of input's dtype", (X3, W, B.half())),
    "activation is unknown": (ValueError, "activation must be None or .*; got 'swish'", (X3, W, B, "swish")),
    "precision is unknown": (ValueError, "fp32_precision must be", (X3, W, B, None, {"fp32_precision": ""})),
}  # fmt: skip


@pytest.mark.parametrize(
    ("function", "case"),
    [*((grouped_linear, c) for c in WRONG.items()), *((batched_linear, c) for c in WRONG_BATCHED.items())],
    ids=lambda v: v[0] if isinstance(v, tuple) else v.__name__,
)
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_wrong_argument(function, case, backend):
    error, message, args = case[1]
    options = args[-1] if isinstance(args[-1], dict) else {}
    args = args[:-1] if options else args
    with fusedops.backend(backend):
        for called in (function, lambda *a, **o: fusedops.explain(function, *a, **o)):
            with pytest.raises(error, match=f"^{function.__name__}: {message}"):
                called(*args, **options)


def test_explain_takes_keywords_and_lists_reasons():
    for function, arguments in (
        (grouped_linear, {"input": X.double(), "weights": W.double(), "offsets": O}),
        (batched_linear, {"input": X3.double(), "weight": W.double()}),
    ):
        explanation = fusedops.explain(function, **arguments)
        assert explanation.backend == "torch"
        assert any("float64" in reason for reason in explanation.reasons)


def test_float64_is_refused_where_the_kernels_are_demanded(kernel_runner):
    x, w, o = (t.to(kernel_runner.device) for t in (X.double(), W.double(), O))
    with pytest.raises(fusedops.BackendError, match=r"grouped_linear: .*float64"):
        grouped_linear(x, w, o)
    with pytest.raises(fusedops.BackendError, match=r"batched_linear: .*float64"):
        batched_linear(x.view(2, 3, 8), w)


# ---------------------------------------------------------------------------------------------------- tuning

DEVICES = [
    *TARGETS.values(),
    DeviceFacts("nvidia", "sm_87", "a small board", 16, 166912),
    DeviceFacts("nvidia", "sm_103", "a newer one", 160, 232448),
    DeviceFacts("nvidia", "sm_130", "what comes", 200, 232448),
    DeviceFacts("nvidia", "sm_90", "with little", 132, 49152),
    DeviceFacts("amd", "gfx1201", "a card", 64, 65536, 32),
    INTERPRETER,
]


@pytest.mark.parametrize("facts", DEVICES, ids=lambda f: f"{f.arch}_{f.shared_memory}")
def test_every_problem_has_a_configuration_that_fits(facts):
    for product, groups, rows, cols, depth, (dtype, precision), equal, aligned in itertools.product(
        ("rows", "weights"),
        (1, 8, 256),
        (0, 1, 16, 33, 64, 1024, 65536),
        (1, 64, 100, 4096),
        (1, 14336),
        (("bfloat16", "ieee"), ("float32", "ieee"), ("float32", "tf32"), ("float32", "tf32x3")),
        (True, False),
        (True, False),
    ):
        options = {"dtype": dtype, "precision": precision, "equal": equal, "aligned": aligned}
        problem = GroupedProblem.of(product, groups, rows, cols, depth, **options)
        config = default_config(problem, facts)
        assert config.shared_memory(problem) <= facts.shared_memory, (problem, config)
        assert config.num_warps * facts.warp_size <= 1024
        for size in (config.rows, config.cols, config.depth):
            assert size >= 16
            assert size & (size - 1) == 0
        if problem.rows >= 64 and problem.cols >= 64:
            assert prune(config, problem, facts) is None, (problem, config)


def test_the_space_holds_the_defaults_of_every_gpu():
    for name, defaults in DEFAULTS.items():
        for field in ("half", "half_weights", "tf32", "full", "full_weights") if name != "interpreter" else ():
            for config in getattr(defaults, field):
                assert config in SPACE, (name, field, config)


def test_small_groups_get_thin_tiles_and_large_ones_large():
    facts = TARGETS["sm_90"]

    def tile(rows, **options):
        config = default_config(GroupedProblem.of("rows", 8, rows, 4096, 4096, **options), facts)
        return config.rows, config.cols

    assert [tile(rows)[0] for rows in (1, 16, 64, 128, 4096)] == [16, 16, 32, 64, 128]
    assert tile(4096) == (128, 256)
    assert tile(64, equal=True)[0] == 64  # no group ends inside a tile


def test_near_sizes_are_one_problem():
    a, b, c = (GroupedProblem.of("rows", 8, rows, 768, 3072) for rows in (1025, 1500, 1537))
    assert a == b != c
    assert a != GroupedProblem.of("rows", 8, 1025, 769, 3072)
    assert GroupedProblem.of("weights", 8, 768, 3072, 1025).depth == 1536  # here the rows are summed over


def test_prune_names_what_does_not_fit():
    problem, facts = GroupedProblem.of("rows", 8, 4096, 4096, 4096), TARGETS["sm_90"]
    config = GroupedConfig(128, 256, 64, 3, 8)
    assert prune(config, problem, facts) is None
    assert "shared memory" in prune(config, problem, TARGETS["sm_86"])
    assert "sums a thread" in prune(replace(config, num_warps=4), problem, facts)
    assert "padding" in prune(config, problem._replace(rows=32), facts)
    assert "threads" in prune(replace(config, num_warps=32), problem, TARGETS["gfx950"])


def test_ends_from_bincount_compile(runner):
    """Their number is not known while the graph is traced."""

    def function(x, weights, chosen):
        order = chosen.argsort(stable=True)
        return fusedops.grouped_linear(x[order], weights, torch.bincount(chosen, minlength=3).cumsum(0))

    x, weights = randn(7, 16, device=runner.device), randn(3, 8, 16, device=runner.device)
    chosen = torch.tensor([2, 0, 0, 2, 1, 0, 2], device=runner.device)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, weights, chosen), function(x, weights, chosen), rtol=1e-5, atol=1e-5)
