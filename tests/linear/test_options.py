"""What follows the activation and what the backward may do: dropout, residual, out_dtype, recompute, main_grad."""

from __future__ import annotations

import pickle

import pytest
import torch

import fusedops
from fusedops.linear.activations import ACTIVATIONS
from fusedops.runtime.device import TARGETS, pretend
from fusedops.runtime.dropout import keep_scale
from tests.harness.errors import check_error
from tests.harness.tensors import randn
from tests.linear.problems import DTYPES, gradients, plain, tensors, use_config

ENDS = [None, "relu", "sigmoid", "gelu"]  # no derivative; one of the output, kept or not; one of the pre-activation


@pytest.fixture(params=["tiled", "torch"])
def kernel(request, monkeypatch):
    """Our own product, or torch's with an elementwise kernel behind it."""
    use_config(monkeypatch, request.param)
    return request.param


def mask_of(monkeypatch, runner, shape, p):
    """Fix the seed that the next calls draw, and the mask that it gives."""
    from fusedops.linear import functional

    seed = torch.tensor([123456789], device=runner.device)
    monkeypatch.setattr(functional, "draw_seed", lambda *_: seed)
    rows = int(torch.Size(shape[:-1]).numel())
    return keep_scale(seed, rows, shape[-1], p).view(shape)


def check_options(leaves, residual, activation, keep=None, out_dtype=None, **options):
    """Output and all gradients by the error rule, against the plain composition with the same dropout mask."""
    x = leaves[0]
    dtype = out_dtype or x.dtype
    every = (*leaves, residual)

    def composed(x, weight, bias, residual):
        y = plain(x, weight, bias, activation)
        y = y if keep is None else y * keep.to(y.dtype)
        return (y if residual is None else y + residual).to(dtype if x.dtype != torch.float64 else torch.float64)

    grad = torch.randn(*x.shape[:-1], leaves[1].shape[0], device=x.device).to(dtype)
    p = 0.0 if keep is None else 0.3
    options.update(dropout_p=p, out_dtype=out_dtype)
    ours, grads = gradients(lambda x, w, b, r: fusedops.linear(x, w, b, activation, residual=r, **options), every, grad)
    baseline, plain_grads = gradients(composed, every, grad)
    wide = [t if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in every]
    wide[1] = leaves[1].detach().to(x.dtype).double().requires_grad_()
    truth, exact_grads = gradients(composed, wide, grad.double())
    assert ours.dtype == dtype
    check_error(ours, truth, baseline, what="output")
    for name, leaf, a, b, right in zip(
        ("input", "weight", "bias", "residual"), every, grads, plain_grads, exact_grads, strict=True
    ):
        if leaf is not None:
            assert a.dtype == leaf.dtype
            check_error(a, right, b, gradient=True, what=f"gradient of {name}")


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ENDS, ids=str)
def test_dropout_and_residual(kernel_runner, monkeypatch, activation, dtype):
    leaves = tensors(kernel_runner, (5, 7, 20), 19, dtype)
    residual = randn(5, 7, 19, dtype=dtype, device=kernel_runner.device, layout="sliced", requires_grad=True)
    keep = mask_of(monkeypatch, kernel_runner, (5, 7, 19), 0.3)
    check_options(leaves, residual, activation, keep)


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded", "offset"])
def test_residual_of_any_strides(runner, layout):
    leaves = tensors(runner, (5, 7, 20), 19)
    check_options(leaves, randn(5, 7, 19, device=runner.device, layout=layout, requires_grad=True), "silu")


@pytest.mark.parametrize("residual_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["sigmoid", "gelu"])
def test_a_residual_of_another_dtype(kernel_runner, activation, residual_dtype):
    """The result's dtype is torch's promotion of the two; its gradient has its own dtype."""
    leaves = tensors(kernel_runner, (9, 20), 12, torch.bfloat16)
    residual = randn(9, 12, dtype=residual_dtype, device=kernel_runner.device, requires_grad=True)
    y = fusedops.linear(*leaves, activation, residual=residual)
    assert y.dtype == torch.promote_types(torch.bfloat16, residual_dtype)
    alone = fusedops.linear(*leaves, activation, out_dtype=torch.float32)
    torch.testing.assert_close(y.float(), alone + residual.float(), rtol=2**-8, atol=0)
    (gradient,) = torch.autograd.grad(y, residual, torch.ones_like(y))
    assert torch.equal(gradient, torch.ones_like(residual))


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("activation", ENDS, ids=str)
@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, torch.bfloat16)],
    ids=str,
)
def test_output_dtype(runner, activation, dtype, out_dtype):
    """A wider result is that of the float32 sum, which has not been rounded to the input's dtype."""
    leaves = tensors(runner, (9, 40), 12, dtype)
    check_options(leaves, None, activation, out_dtype=out_dtype)
    if runner.kernels and out_dtype == torch.float32:
        y = fusedops.linear(*leaves, activation, out_dtype=out_dtype)
        exact = plain(*(t.double() for t in leaves), activation)
        assert (y - exact).abs().max() < 1e-5


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS], ids=str)
def test_recomputing_gives_the_same_bits_and_keeps_nothing_of_its_own(kernel_runner, monkeypatch, activation):
    leaves = tensors(kernel_runner, (9, 20), 12, torch.bfloat16)
    residual = randn(9, 12, dtype=torch.bfloat16, device=kernel_runner.device, requires_grad=True)
    mask_of(monkeypatch, kernel_runner, (9, 12), 0.3)
    for options in ({}, {"residual": residual, "dropout_p": 0.3}):
        inputs = [*leaves, *([residual] if options else [])]
        results = []
        for recompute in (False, True):
            y = fusedops.linear(*leaves, activation, recompute=recompute, **options)
            kept = {t.data_ptr() for t in y.grad_fn.saved_tensors if t is not None and t.dtype != torch.int64}
            own = kept - {t.data_ptr() for t in (*leaves, y)}
            if recompute or activation is None:
                assert not own
            results.append((y, *torch.autograd.grad(y, inputs, torch.ones_like(y))))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("activation", ["sigmoid", "gelu"])
def test_recomputing_asks_for_the_configuration_of_the_forward(kernel_runner, monkeypatch, activation):
    """The choice depends on what follows the product: another choice would give other bits."""
    from fusedops.linear import kernels_common

    problems = []
    resolve = kernels_common.resolve
    monkeypatch.setattr(
        kernels_common,
        "resolve",
        lambda operator, problem, device: problems.append(problem) or resolve(operator, problem, device),
    )
    leaves = tensors(kernel_runner, (9, 20), 12)
    residual = torch.randn(9, 12, device=kernel_runner.device)
    for recompute in (False, True):
        y = fusedops.linear(*leaves, activation, residual=residual, dropout_p=0.1, recompute=recompute)
        y.sum().backward()
    forwards = [problem for problem in problems if problem.product == "forward"]
    assert len(forwards) == 3
    assert len(set(forwards)) == 1


def test_recompute_for_every_subset_of_gradients(kernel_runner):
    leaves = tensors(kernel_runner, (9, 20), 12)
    full = torch.autograd.grad(fusedops.linear(*leaves, "gelu").sum(), leaves)
    for wanted in range(3):
        some = [t.detach().requires_grad_(i == wanted) for i, t in enumerate(leaves)]
        y = fusedops.linear(*some, "gelu", recompute=True)
        (gradient,) = torch.autograd.grad(y.sum(), some[wanted])
        torch.testing.assert_close(gradient, full[wanted], rtol=1e-6, atol=2e-6)


def test_only_the_residual_wants_a_gradient(kernel_runner):
    x, weight, bias = (t.detach() for t in tensors(kernel_runner, (9, 20), 12))
    residual = torch.randn(9, 12, device=kernel_runner.device, requires_grad=True)
    for recompute in (False, True):
        y = fusedops.linear(x, weight, bias, "gelu", residual=residual, dropout_p=0.5, recompute=recompute)
        assert not [t for t in y.grad_fn.saved_tensors if t is not None and t.dtype != torch.int64]
        grad = torch.randn_like(y)
        assert torch.equal(torch.autograd.grad(y, residual, grad)[0], grad)


# Dropout


def test_dropout_is_a_function_of_torchs_generator(runner):
    leaves = tensors(runner, (40, 20), 50)

    def run(number):
        torch.manual_seed(number)
        y = fusedops.linear(*leaves, "silu", dropout_p=0.25)
        return y, *torch.autograd.grad(y.sum(), leaves)

    first, again, other = run(1), run(1), run(2)
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first[0], other[0])
    dropped = (first[0] == 0).float().mean()
    assert 0.2 < dropped < 0.3
    kept = first[0] != 0
    torch.testing.assert_close(first[0][kept], (fusedops.linear(*leaves, "silu") / 0.75)[kept], rtol=1e-6, atol=1e-6)


def test_dropping_everything_and_nothing(runner):
    leaves = tensors(runner, (5, 20), 12)
    residual = randn(5, 12, device=runner.device)
    y = fusedops.linear(*leaves, "gelu", residual=residual, dropout_p=1.0)
    assert torch.equal(y, residual)
    assert not torch.autograd.grad(y.sum(), leaves[0])[0].any()
    assert torch.equal(fusedops.linear(*leaves, "gelu", dropout_p=0.0), fusedops.linear(*leaves, "gelu"))


def test_the_mask_does_not_depend_on_the_tiles(kernel_runner, monkeypatch):
    leaves = tensors(kernel_runner, (70, 20), 70, torch.bfloat16)
    dropped = []
    for config in ({"rows": 16, "cols": 32}, {"rows": 128, "cols": 128, "num_warps": 4}, {"splits": 2, "depth": 16}):
        use_config(monkeypatch, **config)
        torch.manual_seed(5)
        dropped.append(fusedops.linear(*leaves, None, dropout_p=0.5) == 0)
    use_config(monkeypatch, "torch")
    torch.manual_seed(5)
    dropped.append(fusedops.linear(*leaves, None, dropout_p=0.5) == 0)
    for other in dropped[1:]:
        assert torch.equal(dropped[0], other)


# Configurations


@pytest.mark.parametrize("activation", ["relu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("splits", [2, 16])
def test_several_programs_a_tile(kernel_runner, monkeypatch, activation, dtype, splits):
    """Sixteen are more than the depth has blocks: some have nothing to sum."""
    use_config(monkeypatch, splits=splits, depth=16)
    check_options(tensors(kernel_runner, (20, 70), 24, dtype), None, activation)


def test_several_programs_a_tile_are_deterministic(kernel_runner, monkeypatch):
    use_config(monkeypatch, splits=4, depth=16, prologue=True)
    leaves = tensors(kernel_runner, (70, 90), 40, torch.bfloat16)
    runs = []
    for _ in range(2):
        y = fusedops.linear(*leaves, "gelu")
        runs.append((y, *torch.autograd.grad(y.sum(), leaves)))
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("activation", [None, "relu", "gelu_tanh", "gelu"], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torchs_own_product(kernel_runner, monkeypatch, activation, dtype, bias, layout):
    use_config(monkeypatch, "torch")
    launched = spy_on_products(monkeypatch)
    leaves = tensors(kernel_runner, (9, 40), 24, dtype, bias=bias, layouts={"weight": layout})
    check_options(leaves, None, activation)
    assert not launched
    with torch.no_grad():
        inference = fusedops.linear(*leaves, activation)
    torch.testing.assert_close(inference, fusedops.linear(*leaves, activation), rtol=2**-7, atol=2**-7)


def spy_on_products(monkeypatch):
    """The names of our kernels of products that are launched from here on."""
    from fusedops.linear import kernels_backward, kernels_forward

    launched = []
    for module, name in (
        (kernels_forward, "linear_forward_kernel"),
        (kernels_backward, "grad_input_kernel"),
        (kernels_backward, "grad_weight_kernel"),
    ):
        kernel = getattr(module, name)

        class Spy:
            def __init__(self, kernel, name):
                self.kernel, self.name = kernel, name

            def __getitem__(self, grid):
                launched.append(self.name)
                return self.kernel[grid]

        monkeypatch.setattr(module, name, Spy(kernel, name))
    return launched


def test_torchs_product_is_not_taken_where_it_would_round_otherwise(kernel_runner, monkeypatch):
    """A float32 gradient of a float32 weight beside 16-bit operands; a float32 result of 16-bit operands."""
    use_config(monkeypatch, "torch")
    launched = spy_on_products(monkeypatch)
    x, weight, bias = tensors(kernel_runner, (9, 40), 24, torch.bfloat16, parameter_dtype=torch.float32)
    y = fusedops.linear(x, weight, bias, out_dtype=torch.float32)
    assert launched == ["linear_forward_kernel"]
    y.sum().backward()
    assert launched[1:] == ["grad_weight_kernel"]
    launched.clear()
    fusedops.linear(x.detach().float(), weight.detach(), fp32_precision="tf32x3")
    assert launched == ["linear_forward_kernel"]


@pytest.mark.parametrize("activation", ["relu", "sigmoid", "gelu"])
@pytest.mark.parametrize(("kernel", "rows"), [("skinny", 11), ("persistent", 72)])
def test_the_other_kernels_of_the_forward(kernel_runner, monkeypatch, kernel, rows, activation):
    taken = use_config(monkeypatch, kernel)
    leaves = tensors(kernel_runner, (rows, 40), 24, torch.bfloat16)
    residual = randn(rows, 24, dtype=torch.bfloat16, device=kernel_runner.device, requires_grad=True)
    check_options(leaves, residual, activation, mask_of(monkeypatch, kernel_runner, (rows, 24), 0.3))
    assert kernel in taken
    check_options(leaves, None, activation)


def test_a_matrix_without_a_descriptor_is_not_given_to_the_persistent_kernel(kernel_runner, monkeypatch):
    taken = use_config(monkeypatch, "persistent")
    leaves = tensors(kernel_runner, (72, 41), 24, torch.bfloat16)
    fusedops.linear(*leaves, "gelu")
    assert not taken
    leaves = tensors(kernel_runner, (72, 40), 24, torch.bfloat16, layouts={"x": "offset"})
    fusedops.linear(*leaves, "gelu")
    assert not taken


# float32 precision


@pytest.mark.interpreter
@pytest.mark.parametrize("asked", ["ieee", "tf32", "tf32x3"])
def test_the_precision_asked_for_reaches_every_product(monkeypatch, asked):
    use_config(monkeypatch)
    x, weight, grad = torch.randn(5, 40, requires_grad=True), torch.randn(7, 40, requires_grad=True), torch.randn(5, 7)
    with fusedops.backend("triton"), pretend(TARGETS["sm_80"]):
        y = fusedops.linear(x, weight, fp32_precision=asked)
        results = [y, *torch.autograd.grad(y, (x, weight), grad)]
    exact = [x.double() @ weight.double().t(), grad.double() @ weight.double(), grad.double().t() @ x.double()]
    for ours, right in zip(results, exact, strict=True):
        error = (ours - right).abs().max() / right.abs().max()
        assert (error > 2e-5) == (asked == "tf32"), error


# main_grad


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("activation", [None, "gelu"], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("splits", [1, 3])
def test_the_weight_gradient_is_added_to_main_grad(kernel_runner, monkeypatch, kernel, activation, dtype, splits):
    if kernel == "tiled":
        use_config(monkeypatch, splits=splits, depth=16, rows=32, cols=64)
    x, weight, bias = tensors(kernel_runner, (50, 40), 24, dtype)
    grad = randn(50, 24, dtype=dtype, device=x.device)
    exact, baseline = (
        torch.autograd.grad(plain(*t, activation), t[1], grad.to(t[0].dtype))[0]
        for t in ([t.detach().to(d).requires_grad_() for t in (x, weight, bias)] for d in (torch.float64, dtype))
    )
    weight.main_grad = torch.full_like(weight, 3.0, dtype=torch.float32)
    for times in (1, 2):
        y = fusedops.linear(x, weight, bias, activation, fuse_wgrad_accumulation=True)
        y.backward(grad)
        assert weight.grad is None
        check_error(weight.main_grad, 3.0 + times * exact, 3.0 + times * baseline.float(), gradient=True)
        assert bias.grad is not None
        assert x.grad is not None
        bias.grad = x.grad = None


def test_main_grad_on_the_torch_backend_and_without_gradients():
    x, weight = torch.randn(3, 5), torch.randn(4, 5, requires_grad=True)
    weight.main_grad = torch.ones(4, 5)
    weight.grad_added_to_main_grad = False
    with fusedops.backend("torch"):
        with torch.no_grad():
            fusedops.linear(x, weight, fuse_wgrad_accumulation=True)
        assert weight.grad_added_to_main_grad is False
        fusedops.linear(x, weight, fuse_wgrad_accumulation=True).sum().backward()
    assert weight.grad_added_to_main_grad is True
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad, 1 + x.sum(0).expand(4, 5))


def test_the_module_adds_to_main_grad(runner):
    module = fusedops.nn.Linear(5, 4, activation="gelu", fuse_wgrad_accumulation=True, device=runner.device)
    plainly = fusedops.nn.Linear(5, 4, activation="gelu", device=runner.device)
    plainly.load_state_dict(module.state_dict())
    module.weight.main_grad = torch.zeros(4, 5, device=runner.device)
    x = torch.randn(3, 5, device=runner.device)
    for layer in (module, plainly):
        layer(x).sum().backward()
    torch.testing.assert_close(module.weight.main_grad, plainly.weight.grad)
    assert module.weight.grad is None
    assert "fuse_wgrad_accumulation" in repr(module)
    assert pickle.loads(pickle.dumps(module)).fuse_wgrad_accumulation


def test_main_grad_of_a_missing_or_wrong_tensor():
    x, weight = torch.randn(3, 5), torch.randn(4, 5, requires_grad=True)
    name = r"linear: weight.main_grad \(fuse_wgrad_accumulation=True\) must be"
    wrong = {
        "missing": (None, TypeError, "a torch.Tensor"),
        "shape": (torch.zeros(5, 4), ValueError, r"of weight's shape \(4, 5\)"),
        "dtype": (torch.zeros(4, 5, dtype=torch.float64), TypeError, "of float32 or weight's dtype"),
        "expanded": (torch.zeros(1, 5).expand(4, 5), ValueError, "a tensor whose elements do not share memory"),
    }
    for main_grad, error, message in wrong.values():
        weight.main_grad = main_grad
        with pytest.raises(error, match=f"{name} {message}"):
            fusedops.linear(x, weight, fuse_wgrad_accumulation=True)
        with torch.no_grad():  # no gradient will come
            fusedops.linear(x, weight, fuse_wgrad_accumulation=True)


@pytest.mark.usefixtures("kernel")
def test_main_grad_of_the_weights_own_dtype_and_its_version(kernel_runner):
    x, weight, _ = tensors(kernel_runner, (40, 16), 8, torch.bfloat16)
    weight.main_grad = torch.zeros_like(weight).t().contiguous().t()
    weight.grad_added_to_main_grad = False
    y = fusedops.linear(x, weight, None, "silu", fuse_wgrad_accumulation=True)
    assert weight.grad_added_to_main_grad is False
    version = weight.main_grad._version
    y.sum().backward()
    assert weight.grad_added_to_main_grad is True
    assert weight.main_grad._version > version
    plainly = weight.detach().requires_grad_()
    fusedops.linear(x, plainly, None, "silu").sum().backward()
    torch.testing.assert_close(weight.main_grad, plainly.grad, rtol=0.02, atol=0.02)


def test_main_grad_beside_a_second_derivative_on_the_torch_backend():
    x, weight = torch.randn(3, 5, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    weight.main_grad = torch.zeros(4, 5)
    with fusedops.backend("torch"):
        y = fusedops.linear(x, weight, None, "silu", fuse_wgrad_accumulation=True)
        y.sum().backward(create_graph=True)
    torch.testing.assert_close(
        weight.main_grad, torch.autograd.grad((x @ weight.t()).sigmoid().mul(x @ weight.t()).sum(), weight)[0]
    )


def test_main_grad_inside_torch_compile_is_refused(kernel_runner):
    x, weight, _ = tensors(kernel_runner, (3, 24), 12)
    weight.main_grad = torch.zeros_like(weight)
    compiled = torch.compile(lambda: fusedops.linear(x, weight, fuse_wgrad_accumulation=True), fullgraph=True)
    with pytest.raises(Exception, match=r"torch\.compile.* cannot trace"):
        compiled()


# torch.compile


def test_compiled_equals_eager_with_everything(runner):
    def function(x, weight, bias, residual):
        return fusedops.linear(x, weight, bias, "sigmoid", residual=residual, dropout_p=0.5, recompute=True)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    leaves = [*tensors(runner, (2, 3, 24), 12), randn(2, 3, 12, device=runner.device, requires_grad=True)]
    results = []
    for call in (function, compiled):
        torch.manual_seed(3)
        y = call(*leaves)
        results.append((y, *torch.autograd.grad(y.sum(), leaves)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_checkpointing_draws_the_same_mask(runner):
    leaves = tensors(runner, (3, 24), 12)

    def function(x, weight, bias):
        return fusedops.linear(x.sin(), weight, bias, "gelu", dropout_p=0.5).cos()

    torch.manual_seed(11)
    grads = torch.autograd.grad(function(*leaves).sum(), leaves)
    torch.manual_seed(11)
    torch.utils.checkpoint.checkpoint(function, *leaves, use_reentrant=False).sum().backward()
    for leaf, grad in zip(leaves, grads, strict=True):
        assert torch.equal(leaf.grad, grad)
