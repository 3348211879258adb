"""out_dtype, recompute, l2_norm, and heads that are normalised where they lie."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fusedops
from fusedops.norm import kernels_backward, kernels_forward, reference, rows
from tests.harness.errors import check_error
from tests.harness.tensors import randn
from tests.norm.problems import NORMS, gradients

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WIDTHS = pytest.mark.parametrize("width", [24, 20000], ids=["held", "looped"])


def fused(norm, x, weight=None, bias=None, **options):
    if norm.center:
        return fusedops.layer_norm(x, x.shape[-1], weight, bias, **options)
    return fusedops.rms_norm(x, x.shape[-1], weight, 1e-5, **options)


@pytest.mark.parametrize("out_dtype", DTYPES, ids=lambda d: f"to_{str(d)[6:]}")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: f"from_{str(d)[6:]}")
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_out_dtype(runner, norm, dtype, out_dtype):
    x, weight = (randn(*s, dtype=dtype, device=runner.device, requires_grad=True) for s in ((4, 40), (40,)))
    doubles = [t.detach().double().requires_grad_() for t in (x, weight)]
    grad = torch.randn(4, 40, dtype=out_dtype, device=runner.device)
    ours = gradients(lambda x, w: fused(norm, x, w, out_dtype=out_dtype), (x, weight), grad)
    plain = gradients(lambda x, w: norm.plain(x.float(), (40,), w.float(), None).to(out_dtype), (x, weight), grad)
    exact = gradients(lambda x, w: norm.exact(x, (40,), w, None), doubles, grad.double())
    assert ours[0].dtype == out_dtype
    check_error(ours[0], exact[0], plain[0])
    for a, b, c in zip(ours[1], exact[1], plain[1], strict=True):
        assert a.dtype == dtype
        check_error(a, b, c, gradient=True)


@pytest.mark.parametrize("out_dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_float64_on_the_torch_backend(norm, out_dtype):
    x = torch.randn(3, 8, dtype=torch.float64)
    with fusedops.backend("auto"):
        y = fused(norm, x, out_dtype=out_dtype)
    assert y.dtype == out_dtype
    torch.testing.assert_close(y, norm.exact(x, (8,), None, None).to(out_dtype))


# --- recompute -------------------------------------------------------------------------------------------------------


def away_from_zero(*shape, **options):
    """Weights of models lie around one; where one is near zero the output says little about the input."""
    return (torch.rand(*shape, **options) + 0.5).requires_grad_()


@WIDTHS
@pytest.mark.parametrize(
    ("norm", "parameters"),
    [(n, p) for n in NORMS for p in ("none", "weight", "bias", "both") if n.center or p in ("none", "weight")],
    ids=str,
)
def test_recompute_gives_the_same_gradients(kernel_runner, norm, parameters, width):
    x = randn(3, width, device=kernel_runner.device, requires_grad=True)
    weight = away_from_zero(width, device=kernel_runner.device) if parameters in ("weight", "both") else None
    bias = None
    if parameters in ("bias", "both"):
        bias = randn(width, device=kernel_runner.device, requires_grad=True)
    wanted = [t for t in (x, weight, bias) if t is not None]
    plain, again = (fused(norm, x, weight, bias, recompute=r) for r in (False, True))
    assert torch.equal(plain, again)
    grad = torch.randn_like(plain)
    for a, b in zip(*(torch.autograd.grad(y, wanted, grad) for y in (plain, again)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_recompute_with_an_offset_and_a_residual(kernel_runner):
    x, r = (randn(5, 40, device=kernel_runner.device, requires_grad=True) for _ in range(2))
    weight = (0.2 * torch.randn(40, device=kernel_runner.device)).requires_grad_()
    grads = []
    for recompute in (False, True):
        torch.manual_seed(1)
        y, stream = fusedops.add_rms_norm(
            x, r, 40, weight, weight_offset=1.0, dropout_p=0.3, recompute=recompute
        )  # fmt: skip
        grads.append(torch.autograd.grad(y.sin().sum() + stream.cos().sum(), (x, r, weight)))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_recompute_with_a_weight_of_zero_is_loud(kernel_runner):
    """The output does not tell what the input was there: a silent zero would be a wrong gradient."""
    x = randn(3, 8, device=kernel_runner.device, requires_grad=True)
    weight = torch.ones(8, device=kernel_runner.device)
    weight[3] = 0.0
    y = fusedops.layer_norm(x, 8, weight.requires_grad_(), recompute=True)
    dx, dw = torch.autograd.grad(y.sum(), (x, weight))
    assert dx.isnan().all()
    assert dw.isnan().tolist() == [i == 3 for i in range(8)]


def test_recompute_in_bfloat16(kernel_runner):
    """The figures of docs/norm.md: root mean square errors of the gradients, in percent of their own."""
    rows, width = 256, 1024
    x = torch.randn(rows, width, device=kernel_runner.device).bfloat16().requires_grad_()
    weight = (1 + 0.1 * torch.randn(width, device=kernel_runner.device)).bfloat16().requires_grad_()
    bias = (0.1 * torch.randn(width, device=kernel_runner.device)).bfloat16().requires_grad_()
    grad = torch.randn(rows, width, device=kernel_runner.device).bfloat16()
    doubles = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    exact = torch.autograd.grad(NORMS[0].exact(doubles[0], (width,), *doubles[1:]), doubles, grad.double())
    percent = {}
    for recompute in (False, True):
        found = torch.autograd.grad(
            fused(NORMS[0], x, weight, bias, recompute=recompute), (x, weight, bias), grad
        )  # fmt: skip
        percent[recompute] = [
            100 * ((a.double() - b).square().mean().sqrt() / b.square().mean().sqrt()).item()
            for a, b in zip(found, exact, strict=True)
        ]
    assert percent[False] == pytest.approx([0.17, 0.17, 0.17], abs=0.02)
    assert percent[True] == pytest.approx([0.17, 0.24, 0.17], abs=0.03)


def held_for_backward(function):
    """Bytes of distinct memory that autograd keeps while a graph lives."""
    storages = {}

    def keep(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        result = function()
    assert result.requires_grad
    return sum(storages.values())


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_recompute_keeps_nothing_but_a_number_a_row(kernel_runner, norm):
    """Where the next layer keeps the output anyway."""
    rows, width = 64, 256
    x = torch.randn(rows, width, device=kernel_runner.device, requires_grad=True)
    layer = torch.nn.Linear(width, 8, device=kernel_runner.device)
    plain, again = (held_for_backward(lambda r=r: layer(fused(norm, x, recompute=r))) for r in (False, True))
    statistics = 2 if norm.center else 1
    assert plain - again == 4 * rows * width + 4 * rows * (statistics - 1)


# --- l2_norm ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "dim"), [((4, 40), -1), ((3, 5, 64), 1), ((6, 4), 0), ((2, 20000), 1)], ids=str)
def test_l2_norm(runner, dtype, shape, dim):
    x = randn(*shape, dtype=dtype, device=runner.device, requires_grad=True)
    grad = torch.randn_like(x)
    y, (dx,) = gradients(lambda t: fusedops.l2_norm(t, dim), [x], grad)
    plain, (plain_dx,) = gradients(lambda t: F.normalize(t, dim=dim), [x], grad)
    exact, (exact_dx,) = gradients(
        lambda t: F.normalize(t, dim=dim), [x.detach().double().requires_grad_()], grad.double()
    )
    assert (y.dtype, y.shape) == (dtype, x.shape)
    check_error(y, exact, plain)
    check_error(dx, exact_dx, plain_dx, gradient=True)


def test_l2_norm_of_short_vectors(runner):
    """Shorter than eps: divided by eps, and then the length has no gradient. A zero vector stays zero."""
    x = torch.tensor([[0.0, 0.0], [3e-4, 4e-4], [3.0, 4.0]], device=runner.device, requires_grad=True)
    results = [
        gradients(lambda t, f=f: f(t, eps=1e-2), [x], torch.ones_like(x)) for f in (fusedops.l2_norm, F.normalize)
    ]
    torch.testing.assert_close(results[0], results[1])


def test_l2_norm_without_eps(runner):
    x = torch.randn(3, 8, device=runner.device)
    torch.testing.assert_close(fusedops.l2_norm(x, eps=0.0), F.normalize(x, eps=0.0))


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)], ids=str)
def test_l2_norm_of_nothing(runner, shape):
    x = torch.empty(shape, device=runner.device, requires_grad=True)
    y = fusedops.l2_norm(x)
    assert y.shape == shape
    assert torch.autograd.grad(y.sum(), x)[0].shape == shape


def test_l2_norm_out_dtype(runner):
    x = torch.randn(3, 8, dtype=torch.bfloat16, device=runner.device)
    y = fusedops.l2_norm(x, out_dtype=torch.float32)
    torch.testing.assert_close(y, F.normalize(x.float()))


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, "input must be a torch.Tensor", ([1.0],)),
        (TypeError, "dim must be an int", (torch.ones(2, 3), 1.0)),
        (ValueError, r"dim must be a dimension of input \(2, 3\); got 2", (torch.ones(2, 3), 2)),
        (ValueError, "dim must be a dimension of input", (torch.tensor(1.0),)),
        (TypeError, "eps must be a number", (torch.ones(2, 3), 1, "small")),
    ],
)
def test_wrong_argument_of_l2_norm(error, message, arguments):
    for call in (fusedops.l2_norm, lambda *a: fusedops.explain(fusedops.l2_norm, *a)):
        with pytest.raises(error, match=f"^l2_norm: {message}"):
            call(*arguments)


# --- heads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_size", [64, 80])
def test_heads_of_a_packed_projection(kernel_runner, monkeypatch, head_size, dtype):
    """Queries as a (batch, heads, sequence, head size) view of a packed projection: right, and never copied."""
    copies = []

    def count_copies(tensors, dims):
        view = rows.as_rows(tensors, dims)
        copies.extend(a is not b for a, b in zip(view.tensors, tensors, strict=True))
        return view

    for module in (kernels_forward, kernels_backward):
        monkeypatch.setattr(module, "as_rows", count_copies)
    packed = randn(2, 7, 3, 4, head_size, dtype=dtype, device=kernel_runner.device, requires_grad=True)
    weight = randn(head_size, dtype=dtype, device=kernel_runner.device, requires_grad=True)
    grad = randn(2, 7, 4, head_size, dtype=dtype, device=kernel_runner.device).transpose(1, 2)

    def heads(norm):
        return lambda packed, weight: norm(packed[:, :, 0].transpose(1, 2), weight)

    ours = gradients(heads(lambda q, w: fusedops.rms_norm(q, head_size, w, 1e-6)), (packed, weight), grad)
    assert copies
    assert not any(copies)
    plain = gradients(heads(lambda q, w: NORMS[1].plain(q, (head_size,), w, None, 1e-6)), (packed, weight), grad)
    doubles = [t.detach().double().requires_grad_() for t in (packed, weight)]
    exact = gradients(heads(lambda q, w: NORMS[1].exact(q, (head_size,), w, None, 1e-6)), doubles, grad.double())
    check_error(ours[0], exact[0], plain[0])
    for a, b, c in zip(ours[1], exact[1], plain[1], strict=True):
        check_error(a, b, c, gradient=True)


def test_reference_agrees_with_the_kernels_on_what_has_no_peer(kernel_runner):
    """The op's definition, computed where no kernel can run, with every option at once."""
    x, r = (randn(4, 24, device=kernel_runner.device) for _ in range(2))
    weight, bias = (randn(24, device=kernel_runner.device) for _ in range(2))
    seed = torch.tensor([77], device=kernel_runner.device)
    arguments = (x, r, weight, bias, seed, 1, 1e-5, 0.5, "layer", 0.3, torch.float32)
    for a, b in zip(kernels_forward.norm_forward(*arguments), reference.norm(*arguments), strict=True):
        torch.testing.assert_close(a, b)
