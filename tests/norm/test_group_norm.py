"""Group norm gives torch's results, forward and backward, in every layout, and what autograd and torch.compile ask."""

from __future__ import annotations

import importlib.util
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fusedops
from fusedops.norm import reference
from fusedops.norm.tuning import GroupNormConfig
from tests.harness.errors import check_error
from tests.harness.tensors import randn
from tests.norm.problems import gradients

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

# Each way through the launchers, on a few numbers: shape, groups, configuration (None: the default). Looped: one
# program walks a group, where there are enough of them for the interpreter's four multiprocessors; divided: several
# programs share one; wide: they share its channels.
PATHS = {
    "held": ((3, 20, 7, 7), 2, None),
    "looped": ((4, 6, 5, 7), 2, GroupNormConfig(1, 4, 32, True, 4, 1)),
    "divided": ((1, 6, 5, 7), 2, GroupNormConfig(1, 4, 16, True, 4, 4)),
    "wide": ((3, 10, 5, 7), 1, GroupNormConfig(1, 4, 32, True, 4, 1)),
}


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    """(shape, groups), with the launchers held to one way through them."""
    shape, groups, config = PATHS[request.param]
    if config is not None and importlib.util.find_spec("triton") is not None:
        from fusedops.norm import kernels_group, kernels_group_backward

        for module in (kernels_group, kernels_group_backward):
            monkeypatch.setattr(module, "resolve", lambda *_: config)
    return shape, groups


def plain(x, groups, weight, bias, eps=1e-5):
    """torch's own operator in the dtype of x: what rounding alone costs."""
    weight, bias = (p if p is None else p.to(x.dtype) for p in (weight, bias))
    if weight is None and bias is not None:  # torch has no backward for a bias alone
        weight = torch.ones_like(bias)
    return torch.group_norm(x, groups, weight, bias, eps)


def exact(x, groups, weight, bias, eps=1e-5):
    """The definition in float64."""
    x, weight, bias = (t if t is None else t.double() for t in (x, weight, bias))
    return reference.group_norm(x, weight, bias, groups, eps, torch.float64)[0]


def check(x, groups, weight, bias, grad, eps=1e-5):
    tensors = (x, weight, bias)
    output, grads = gradients(lambda *t: fusedops.group_norm(t[0], groups, *t[1:], eps), tensors, grad)
    baseline, plain_grads = gradients(lambda *t: plain(t[0], groups, *t[1:], eps), tensors, grad)
    doubles = [t if t is None else t.double().detach().requires_grad_(t.requires_grad) for t in tensors]
    truth, exact_grads = gradients(lambda *t: exact(t[0], groups, *t[1:], eps), doubles, grad.double())
    assert output.dtype == x.dtype
    check_error(output, truth, baseline, what="output")
    names = ("input", "weight", "bias")
    for name, tensor, *results in zip(names, tensors, grads, plain_grads, exact_grads, strict=True):
        if tensor is not None and tensor.requires_grad:
            ours, theirs, true = results
            assert ours.dtype == tensor.dtype
            check_error(ours, true, theirs.to(tensor.dtype), gradient=True, what=f"gradient of {name}")
    return output, grads


def tensors(runner, shape, dtype=torch.float32, parameter_dtype=None, layout="contiguous"):
    """An input, weight and bias that require gradients."""
    options = {"device": runner.device, "requires_grad": True}
    if layout == "channels_last":
        x = torch.randn(shape).to(dtype).to(runner.device).movedim(1, -1).contiguous().movedim(-1, 1)
        x.requires_grad_()
    else:
        x = randn(*shape, dtype=dtype, layout=layout, **options)
    weight, bias = (randn(shape[1], dtype=parameter_dtype or dtype, **options) for _ in range(2))
    return x, weight, bias


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((40, 12), 4),
        ((70, 6, 5), 3),
        ((3, 20, 7, 7), 2),
        ((2, 8, 4, 4), 1),
        ((2, 8, 4, 4), 8),
        ((2, 6, 3, 4, 5), 2),
        ((1, 1, 1), 1),
    ],
    ids=str,
)
def test_any_shape(runner, shape, groups, dtype):
    check(*_with_groups(tensors(runner, shape, dtype), groups), torch.randn(shape).to(runner.device, dtype))


@pytest.mark.parametrize(
    ("shape", "groups"), [((8, 1, 131, 127), 1), ((1, 4, 120, 100), 2), ((1, 300, 80), 1)], ids=str
)
def test_groups_larger_than_a_program_holds(runner, shape, groups):
    check(*_with_groups(tensors(runner, shape), groups), torch.randn(shape).to(runner.device))


def _with_groups(tensors, groups):
    x, weight, bias = tensors
    return x, groups, weight, bias


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed", "sliced", "expanded", "strided"])
@pytest.mark.parametrize(
    ("shape", "groups"), [((3, 12, 5, 6), 3), ((3, 12, 5), 3), ((6, 12), 3)], ids=["images", "sequences", "vectors"]
)
def test_any_strides(runner, shape, groups, layout):
    x, weight, bias = tensors(runner, shape, layout=layout)
    for grad_layout in ("contiguous", "transposed", "expanded"):
        check(x, groups, weight, bias, randn(*shape, device=runner.device, layout=grad_layout))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_channels_last_is_kept(runner, path, dtype):
    shape, groups = path
    x, weight, bias = tensors(runner, shape, dtype, layout="channels_last")
    grad = torch.randn(shape).to(runner.device, dtype)
    output, (dx, *_) = check(x, groups, weight, bias, grad)
    if runner.kernels:
        assert output.stride() == dx.stride() == x.stride()
    output, (dx, *_) = check(x.detach().contiguous().requires_grad_(), groups, weight, bias, grad)
    assert output.is_contiguous()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_contiguous_and_channels_last_are_not_copied(kernel_runner, memory_format, monkeypatch):
    from fusedops.norm import kernels_group, kernels_group_backward

    x, weight, bias = tensors(kernel_runner, (2, 6, 4, 5))
    x = x.detach().contiguous(memory_format=memory_format).requires_grad_()
    read = []

    def as_channels(tensor, original=kernels_group.as_channels):
        view = original(tensor)
        read.append(view.data_ptr() == tensor.data_ptr() and view._is_view())
        return view

    for module in (kernels_group, kernels_group_backward):
        monkeypatch.setattr(module, "as_channels", as_channels)
    fusedops.group_norm(x, 2, weight, bias).backward(torch.randn_like(x))
    assert len(read) == 5  # input, output; gradient of the output, input, its gradient
    assert all(read)


@pytest.mark.parametrize("parameters", ["none", "weight", "bias"])
def test_missing_parameters(runner, path, parameters):
    shape, groups = path
    x, weight, bias = tensors(runner, shape)
    weight = weight if parameters == "weight" else None
    bias = bias if parameters == "bias" else None
    check(x, groups, weight, bias, torch.randn_like(x))


@pytest.mark.parametrize("parameter_dtype", DTYPES, ids=lambda d: f"parameters_{d}")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: f"input_{d}")
def test_parameters_of_another_dtype(runner, dtype, parameter_dtype):
    x, weight, bias = tensors(runner, (3, 12, 5), dtype, parameter_dtype)
    check(x, 3, weight, bias, torch.randn_like(x))


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
def test_out_dtype(runner, out_dtype):
    x, weight, bias = tensors(runner, (3, 12, 5), torch.bfloat16)
    output = fusedops.group_norm(x, 3, weight, bias, out_dtype=out_dtype)
    truth = exact(x, 3, weight, bias)
    check_error(output, truth, exact(x, 3, weight, bias).to(out_dtype), what="output")
    grads = torch.autograd.grad(output, (x, weight, bias), torch.ones_like(output))
    assert [g.dtype for g in grads] == [torch.bfloat16] * 3


def test_float64_runs_on_torch(runner):
    x, weight, bias = tensors(runner, (3, 12, 5), torch.float64)
    if runner.kernels:
        with pytest.raises(fusedops.BackendError, match=r"group_norm: .*float64"):
            fusedops.group_norm(x, 3, weight, bias)
    else:
        torch.testing.assert_close(fusedops.group_norm(x, 3, weight, bias), F.group_norm(x, 3, weight, bias))


@pytest.mark.parametrize("eps", [1e-12, 1e-3, 1.0])
def test_eps(runner, eps):
    x, weight, bias = tensors(runner, (3, 12, 5))
    check((x * 0.01).detach().requires_grad_(), 3, weight, bias, torch.randn_like(x), eps)


@pytest.mark.parametrize(
    ("mean", "dtype"),
    [(1e4, torch.float32), (100.0, torch.bfloat16)],
    ids=["mean_10000_float32", "mean_100_bfloat16"],
)
def test_a_large_mean_costs_no_accuracy(runner, path, mean, dtype):
    shape, groups = path
    x = (torch.randn(shape) + mean).to(runner.device, dtype).requires_grad_()
    check(x, groups, None, None, torch.randn_like(x))


def test_the_neighbours_of_a_tensor_are_not_read(runner, path):
    """Input and gradient lie inside larger buffers of NaN; a load past an edge would show."""
    shape, groups = path
    x, weight, bias = tensors(runner, shape, layout="sliced")
    n, c, h, w = shape
    channels = torch.full((n, c + 2, h, w), float("nan"), device=runner.device)
    channels[:, 1:-1] = torch.randn(shape)
    check(x, groups, weight, bias, channels[:, 1:-1])  # positions of the gradient are merged, of the input copied
    check(channels[:, 1:-1].detach().requires_grad_(), groups, weight, bias, randn(*shape, layout="sliced"))


def test_infinities_stay_in_their_group(runner):
    x = torch.randn(2, 6, 5, device=runner.device)
    x[0, 1, 2] = float("inf")
    y = fusedops.group_norm(x, 2)
    assert y[0, :3].isnan().any()
    assert y[0, 3:].isfinite().all()
    assert y[1].isfinite().all()


@pytest.mark.parametrize("shape", [(0, 6, 4), (2, 6, 0), (2, 0, 4), (0, 6), (2, 6, 3, 0)], ids=str)
def test_empty(runner, shape):
    x, weight, bias = tensors(runner, shape)
    y = fusedops.group_norm(x, 2, weight, bias)
    assert y.shape == shape
    for tensor, grad in zip((x, weight, bias), torch.autograd.grad(y.sum(), (x, weight, bias)), strict=True):
        assert grad.shape == tensor.shape
        assert not grad.any()


def test_every_subset_of_inputs_that_require_gradients(runner, path):
    shape, groups = path
    values = [t.detach() for t in tensors(runner, shape)]
    grad = torch.randn(shape, device=runner.device)

    def gradients_of(subset):
        leaves = [v.detach().requires_grad_(wanted) for v, wanted in zip(values, subset, strict=True)]
        y = fusedops.group_norm(leaves[0], groups, *leaves[1:])
        return torch.autograd.grad(y, [leaf for leaf in leaves if leaf.requires_grad], grad)

    everything = gradients_of((True, True, True))
    for subset in itertools.product((False, True), repeat=3):
        if any(subset):
            names = [name for name, wanted in zip(("input", "weight", "bias"), subset, strict=True) if wanted]
            same = itertools.compress(everything, subset)
            for name, ours, expected in zip(names, gradients_of(subset), same, strict=True):
                # How many programs share a sum may depend on what else is computed, and with it the sum's last bit.
                torch.testing.assert_close(
                    ours, expected, rtol=1e-5, atol=1e-5, msg=lambda text, n=name, of=names: f"{n} of {of}: {text}"
                )


def test_backward_is_deterministic_and_leaves_its_inputs_alone(runner, path):
    shape, groups = path
    leaves = tensors(runner, shape)
    before = [t.detach().clone() for t in leaves]
    versions = [t._version for t in leaves]
    y = fusedops.group_norm(leaves[0], groups, *leaves[1:])
    grad = torch.randn_like(y)
    kept = grad.clone()
    first = torch.autograd.grad(y, leaves, grad, retain_graph=True)
    second = torch.autograd.grad(y, leaves, grad)
    assert all(map(torch.equal, first, second))
    assert torch.equal(grad, kept)
    assert all(map(torch.equal, leaves, before))
    assert [t._version for t in leaves] == versions


def test_partial_sums_do_not_grow_with_the_batch(kernel_runner, monkeypatch):
    from fusedops.norm import kernels_group_backward as kernels

    counts = []
    monkeypatch.setattr(kernels, "sum_partials", lambda pairs: counts.append(pairs[0][0].shape[0]))
    for batch in (300, 600):
        x, weight, bias = tensors(kernel_runner, (batch, 4, 3))
        fusedops.group_norm(x, 2, weight, bias).sum().backward()
    assert counts[0] == counts[1] < 300 / 32  # members of the batch a step


@pytest.mark.interpreter
def test_members_of_the_batch_far_apart(kernel_runner):
    """The stride fits in an int32, member times stride does not; the interpreter reports an int32 that overflows."""
    shape, stride = (5, 4, 6), 2**29 + 16
    memory = torch.from_numpy(np.empty(4 * stride + 24, dtype=np.int16)).view(torch.bfloat16)
    far = memory.as_strided(shape, (stride, 6, 1)).copy_(torch.randn(shape))
    weight = torch.randn(4, dtype=torch.bfloat16, requires_grad=True)
    results = []
    for x in (far, far.contiguous()):
        leaf = x.detach().requires_grad_()
        y = fusedops.group_norm(leaf, 2, weight)
        results.append((y, *torch.autograd.grad(y, (leaf, weight), x)))
    assert all(map(torch.equal, *results))


def test_second_derivative_names_the_way_out(kernel_runner):
    x, weight, bias = tensors(kernel_runner, (2, 4, 5))
    with pytest.raises(RuntimeError, match=r'GroupNorm.*no second derivative.*fusedops\.backend\("torch"\)'):
        torch.autograd.grad(fusedops.group_norm(x, 2, weight, bias).sum(), x, create_graph=True)


def test_second_derivative_on_the_torch_backend():
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    with fusedops.backend("torch"):
        assert torch.autograd.gradgradcheck(lambda t: fusedops.group_norm(t, 2), (x,))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "sliced"])
def test_the_operators_keep_torchs_rules(kernel_runner, layout):
    x, weight, bias = tensors(kernel_runner, (2, 6, 4, 5), layout=layout)
    torch.library.opcheck(torch.ops.fusedops.group_norm, (x, weight, bias, 2, 1e-5, torch.float32))
    torch.library.opcheck(torch.ops.fusedops.group_norm, (x.detach(), None, None, 2, 1e-5, torch.bfloat16))
    statistics = torch.randn(2, 2, device=kernel_runner.device)
    for input, needs in ((x.detach(), (True, True, True)), (None, (False, False, True))):
        tensors_ = (torch.randn_like(x), input, weight.detach(), statistics, statistics)
        torch.library.opcheck(torch.ops.fusedops.group_norm_backward, (*tensors_, 2, needs, torch.float32))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_compiled_equals_eager(runner, layout):
    leaves = tensors(runner, (2, 6, 4, 5), layout=layout)

    def function(x, weight, bias):
        return fusedops.group_norm(x * 2, 3, weight, bias).relu()

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    grad = torch.randn_like(leaves[0])
    results = []
    for call in (function, compiled):
        y = call(*leaves)
        results.append((y, *torch.autograd.grad(y, leaves, grad)))
    for eager, traced in zip(*results, strict=True):
        assert torch.equal(eager, traced)
        assert eager.stride() == traced.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_gives_torchs_dtype(runner, dtype):
    x, weight, bias = tensors(runner, (3, 12, 5), dtype, torch.float32)
    with torch.autocast(runner.device.type, dtype=torch.bfloat16):
        y = fusedops.group_norm(x, 3, weight, bias)
        assert y.dtype == F.group_norm(x, 3, weight, bias).dtype
        assert fusedops.group_norm(x, 3, weight, bias, out_dtype=torch.float16).dtype == torch.float16
    grads = torch.autograd.grad(y.float().sum(), (x, weight, bias))
    assert [g.dtype for g in grads] == [dtype, torch.float32, torch.float32]


def test_meta_tensors_need_no_data(runner):
    y = fusedops.group_norm(torch.empty(3, 24, 5, dtype=torch.bfloat16, device="meta"), 4)
    assert (y.shape, y.dtype) == ((3, 24, 5), torch.bfloat16)


def test_explain_lists_every_reason():
    x = torch.ones(2, 4, 3, dtype=torch.float64)
    reasons = fusedops.explain(fusedops.group_norm, x, 2, out_dtype=torch.float64).reasons
    assert any("float64" in reason for reason in reasons)
    with pytest.raises(ValueError, match="num_groups"):
        fusedops.explain(fusedops.group_norm, x, 3)


X = torch.ones(2, 8, 3)
WRONG = {
    "input is a list": (TypeError, "input must be a torch.Tensor; got", ([1.0], 2), {}),
    "input is integral": (TypeError, "input must be a floating-point tensor .*; got a int64", (X.long(), 2), {}),
    "input has one dimension": (ValueError, r"input must be of shape \(N, C, \*\)", (torch.ones(8), 2), {}),
    "num_groups is a float": (TypeError, "num_groups must be an int; got 2.0", (X, 2.0), {}),
    "num_groups is a bool": (TypeError, "num_groups must be an int; got True", (X, True), {}),
    "num_groups is zero": (ValueError, "num_groups must be a positive divisor of input's 8 channels", (X, 0), {}),
    "num_groups is negative": (ValueError, "num_groups must be a positive divisor", (X, -2), {}),
    "num_groups divides with a rest": (ValueError, "num_groups must be a positive divisor", (X, 3), {}),
    "weight is a list": (TypeError, "weight must be a torch.Tensor", (X, 2, [1.0] * 8), {}),
    "weight has another shape": (ValueError, r"weight must be of shape \(8,\)", (X, 2, torch.ones(4)), {}),
    "weight has two dimensions": (ValueError, r"weight must be of shape \(8,\)", (X, 2, torch.ones(8, 1)), {}),
    "weight is elsewhere": (ValueError, "weight must be on the device of input", (X, 2, X.new_ones(8).to("meta")), {}),
    "bias is integral": (TypeError, "bias must be a floating-point tensor", (X, 2, None, torch.ones(8).int()), {}),
    "bias has another shape": (ValueError, r"bias must be of shape \(8,\)", (X, 2, None, torch.ones(3)), {}),
    "eps is a string": (TypeError, "eps must be a number", (X, 2), {"eps": "small"}),
    "out_dtype is a string": (TypeError, "out_dtype must be a torch.dtype", (X, 2), {"out_dtype": "float32"}),
    "out_dtype is integral": (ValueError, "out_dtype must be a floating dtype", (X, 2), {"out_dtype": torch.int8}),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named(runner, case):
    error, message, args, options = WRONG[case]
    with pytest.raises(error, match=f"^group_norm: {message}"):
        fusedops.group_norm(*args, **options)


def test_numbers_of_numpy_are_taken(runner):
    x = torch.randn(2, 8, 3, device=runner.device)
    eps = np.float32(1e-5)
    assert torch.equal(fusedops.group_norm(x, np.int64(2), None, None, eps), fusedops.group_norm(x, 2, eps=float(eps)))
