"""add_layer_norm and add_rms_norm: the sum and its norm, their gradients, and dropout before them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fusedops
from fusedops.norm import reference
from fusedops.runtime.dropout import draw_seed, keep_scale
from tests.harness.errors import check_error
from tests.harness.tensors import randn
from tests.norm.problems import NORMS

HALF = [torch.float16, torch.bfloat16]
# input, residual
STREAMS = [(torch.float32, torch.float32), *((t, t) for t in HALF), *((t, torch.float32) for t in HALF)]
STREAMS += [(torch.float32, torch.bfloat16), (torch.float16, torch.bfloat16)]
WIDTHS = pytest.mark.parametrize("width", [24, 20000], ids=["held", "looped"])


def fused(norm, x, r, width, weight=None, bias=None, **options):
    if norm.center:
        return fusedops.add_layer_norm(x, r, width, weight, bias, **options)
    return fusedops.add_rms_norm(x, r, width, weight, 1e-5, **options)


def plain(norm, x, r, width, weight, bias, out_dtype, keep=None):
    """torch's own operators: what rounding costs. The norm is torch's in the stream's dtype."""
    stream = (x if keep is None else (x.float() * keep).to(x.dtype)) + r
    return norm.plain(stream, (width,), weight, bias).to(out_dtype), stream


def exact(norm, x, r, width, weight, bias, dtype, keep=None):
    """The definition in float64, of the sum as it is returned: rounded to the stream's dtype."""
    total = (x if keep is None else x * keep.double()) + r
    stream = total + (total.to(dtype).double() - total).detach()
    return norm.exact(stream, (width,), weight, bias), stream


def compare(norm, x, r, weight, bias, keep=None, p=0.0, **options):
    """Results and gradients by the error rule; gradients arrive at both results."""
    width = x.shape[-1]
    out_dtype = options.get("out_dtype") or x.dtype
    leaves = [t for t in (x, r, weight, bias) if t is not None]
    ours = fused(norm, x, r, width, weight, bias, dropout_p=p, **options)
    theirs = plain(norm, x, r, width, weight, bias, out_dtype, keep)
    doubles = [t if t is None else t.detach().double().requires_grad_() for t in (x, r, weight, bias)]
    truth = exact(norm, *doubles[:2], width, *doubles[2:], reference.residual_dtype(x, r), keep)
    assert ours[0].dtype == out_dtype
    assert ours[1].dtype == theirs[1].dtype
    for name, a, b, c in zip(("output", "residual_out"), ours, truth, theirs, strict=True):
        assert a.shape == x.shape
        check_error(a, b, c, what=name)
    grads = [torch.randn_like(t) for t in ours]
    found = [
        torch.autograd.grad(outputs, inputs, [g.to(o.dtype) for g, o in zip(grads, outputs, strict=True)])
        for outputs, inputs in ((ours, leaves), (truth, [t for t in doubles if t is not None]), (theirs, leaves))
    ]
    for leaf, a, b, c in zip(leaves, *found, strict=True):
        assert a.dtype == leaf.dtype
        check_error(a, b, c, gradient=True, what=f"gradient of shape {tuple(leaf.shape)}")


def tensors(runner, width, dtypes, rows=None, parameter_dtype=None, layout="contiguous"):
    rows = rows or ((2, 3) if width < 100 else (1, 3))  # a looped backward's programs take two at once
    x, r = (randn(*rows, width, dtype=t, device=runner.device, layout=layout, requires_grad=True) for t in dtypes)
    weight, bias = (
        randn(width, dtype=parameter_dtype or dtypes[0], device=runner.device, requires_grad=True) for _ in range(2)
    )
    return x, r, weight, bias


@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.bfloat16, torch.float32)], ids=["float32", "mixed"])
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_gradient_of_the_sum_alone_does_not_depend_on_the_norm(runner, norm, dtypes, p):
    x, r, weight, _ = tensors(runner, 24, dtypes)
    with torch.no_grad():
        r[0, 0, 0] = float("inf")
    _, stream = fused(norm, x, r, 24, weight, dropout_p=p)
    grad = randn(*stream.shape, dtype=stream.dtype, device=runner.device, layout="transposed")
    dx, dr, dw = torch.autograd.grad(stream, (x, r, weight), grad, allow_unused=True)
    assert dw is None
    assert torch.equal(dr, grad)
    kept = dx != 0
    assert torch.equal(dx, torch.where(kept, grad / (1 - p), 0.0).to(x.dtype))
    assert kept.all() if p == 0 else torch.equal(kept[1:], (stream != r)[1:])


@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_the_sum_has_a_gradient_only_if_a_term_has(runner, norm, p):
    for wanted in itertools.product((True, False), repeat=2):
        x, r, weight, _ = tensors(runner, 24, (torch.float32,) * 2)
        x, r = (t.detach().requires_grad_(want) for t, want in zip((x, r), wanted, strict=True))
        output, stream = fused(norm, x, r, 24, weight, dropout_p=p)
        assert output.requires_grad
        assert stream.requires_grad == any(wanted)
        (output.sum() + stream.sum()).backward()
        assert weight.grad is not None


@pytest.mark.parametrize(
    ("dtypes", "width"),
    [(d, 24) for d in STREAMS] + [(d, 20000) for d in (STREAMS[0], STREAMS[4])],
    ids=lambda v: str(v) if isinstance(v, int) else "input_{}_residual_{}".format(*(str(t)[6:] for t in v)),
)
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_sum_and_norm(runner, norm, dtypes, width):
    x, r, weight, bias = tensors(runner, width, dtypes)
    compare(norm, x, r, weight, bias if norm.center else None)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded"])
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_any_strides(runner, norm, layout):
    x, r, weight, _ = tensors(runner, 24, (torch.float32,) * 2, rows=(4, 6), layout=layout)
    compare(norm, x, r.detach().contiguous().requires_grad_(), weight, None)
    compare(norm, x.detach().contiguous().requires_grad_(), r, None, None)


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_the_output_is_the_norm_of_the_sum_that_is_returned(runner, norm):
    x, r, weight, bias = tensors(runner, 40, (torch.bfloat16,) * 2)
    output, stream = fused(norm, x, r, 40, weight, bias if norm.center else None)
    assert torch.equal(stream, x + r)
    assert torch.equal(output, norm.fused(stream, (40,), weight, bias if norm.center else None))


@WIDTHS
def test_weight_offset(runner, width):
    x, r, weight, _ = tensors(runner, width, (torch.float32,) * 2)
    output, stream = fusedops.add_rms_norm(x, r, width, weight, 1e-5, weight_offset=1.0)
    assert torch.equal(output, fusedops.rms_norm(stream, width, weight, 1e-5, weight_offset=1.0))
    plain = torch.nn.functional.rms_norm(x + r, (width,), None, 1e-5) * (weight + 1.0)
    for a, b in zip(*(torch.autograd.grad(y.sin().sum(), (x, r, weight)) for y in (output, plain)), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_a_float32_stream_through_many_layers(runner, norm):
    """What the float32 residual is for: in bfloat16 small terms vanish in a large sum."""
    x = torch.full((4, 32), 2.0**-9, dtype=torch.bfloat16, device=runner.device)
    stream = torch.ones(4, 32, device=runner.device)
    for _ in range(20):
        output, stream = fused(norm, x, stream, 32)
        assert (output.dtype, stream.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(stream, torch.full_like(stream, 1 + 20 * 2.0**-9))


@pytest.mark.parametrize("used", [0, 1], ids=["output", "residual_out"])
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_only_one_of_the_results_is_used(runner, norm, used):
    x, r, weight, _ = tensors(runner, 24, (torch.float32,) * 2)
    ours, theirs = (
        torch.autograd.grad(results[used].square().sum(), (x, r, weight), materialize_grads=True)
        for results in (fused(norm, x, r, 24, weight), plain(norm, x, r, 24, weight, None, x.dtype))
    )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


SUBSETS = [s for s in itertools.product((False, True), repeat=4) if any(s)]


@pytest.mark.parametrize("p", [0.0, 0.4], ids=["plain", "dropout"])
@pytest.mark.parametrize("subset", SUBSETS, ids=lambda s: "".join(n for n, w in zip("xrwb", s, strict=True) if w))
def test_every_subset_of_inputs_that_require_gradients(kernel_runner, subset, p):
    everything = tensors(kernel_runner, 24, (torch.float32,) * 2)
    some = [t.detach().requires_grad_(wanted) for t, wanted in zip(everything, subset, strict=True)]
    grad = torch.randn_like(everything[0])
    found = []
    for x, r, weight, bias in (everything, some):
        torch.manual_seed(3)
        output, _ = fusedops.add_layer_norm(x, r, 24, weight, bias, dropout_p=p)
        wanted = [t for t in (x, r, weight, bias) if t.requires_grad]
        found.append(dict(zip("xrwb", torch.autograd.grad(output, wanted, grad), strict=False)))
    names = [name for name, wanted in zip("xrwb", subset, strict=True) if wanted]
    for name, ours in zip(names, found[1].values(), strict=True):
        assert torch.equal(ours, found[0][name])


@WIDTHS
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_backward_is_deterministic_and_leaves_its_inputs_alone(runner, norm, width):
    x, r, weight, _ = tensors(runner, width, (torch.bfloat16, torch.float32))
    before = [t.detach().clone() for t in (x, r, weight)]
    results = fused(norm, x, r, width, weight, dropout_p=0.3)
    grads = [torch.randn_like(t) for t in results]
    kept = [g.clone() for g in grads]
    first = torch.autograd.grad(results, (x, r, weight), grads, retain_graph=True)
    second = torch.autograd.grad(results, (x, r, weight), grads)
    for a, b in zip((*first, *grads, x, r, weight), (*second, *kept, *before), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("dtypes", "width"),
    [(d, 24) for d in STREAMS[:3]] + [(d, 20000) for d in (STREAMS[0], STREAMS[2])],
    ids=lambda v: str(v) if isinstance(v, int) else str(v[0])[6:],
)
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_dropout(kernel_runner, norm, dtypes, width):
    """The mask is the definition's; forward and backward use the same one."""
    x, r, weight, bias = tensors(kernel_runner, width, dtypes)
    torch.manual_seed(11)
    keep = keep_scale(draw_seed(x), x[..., 0].numel(), width, 0.4).view(x.shape)
    torch.manual_seed(11)
    compare(norm, x, r, weight, bias if norm.center else None, keep, 0.4)


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_dropout_on_every_backend(runner, norm):
    """Reproducible under manual_seed, different without; as many are dropped as asked, the others scaled up."""
    x, r = torch.ones(40, 500, device=runner.device), torch.zeros(40, 500, device=runner.device)
    streams = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        streams.append(fused(norm, x, r, 500, dropout_p=0.25)[1])
    assert torch.equal(streams[0], streams[1])
    assert not torch.equal(streams[0], streams[2])
    assert streams[0].unique().tolist() == [0.0, pytest.approx(1 / 0.75)]
    # 20,000 draws: the standard deviation of the mean is 0.4 %.
    assert abs((streams[0] == 0).float().mean().item() - 0.25) < 0.02
    torch.manual_seed(5)
    assert not torch.equal(fused(norm, x, r, 500, dropout_p=0.25)[1], fused(norm, x, r, 500, dropout_p=0.25)[1])


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_everything_is_dropped_with_probability_one(runner, norm):
    x, r, weight, _ = tensors(runner, 24, (torch.float32,) * 2)
    _, stream = fused(norm, x, r, 24, weight, dropout_p=1.0)
    assert torch.equal(stream, r)
    assert not torch.autograd.grad(stream.sum(), x)[0].any()


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_dropout_under_checkpointing(runner, norm, use_reentrant):
    x, r, weight, _ = tensors(runner, 24, (torch.float32,) * 2)

    def function(x, r, weight):
        output, stream = fused(norm, x.sin(), r, 24, weight, dropout_p=0.5)
        return output + stream.cos()

    torch.manual_seed(0)
    grads = torch.autograd.grad(function(x, r, weight).sum(), (x, r, weight))
    torch.manual_seed(0)
    checkpoint(function, x, r, weight, use_reentrant=use_reentrant).sum().backward()
    for tensor, expected in zip((x, r, weight), grads, strict=True):
        assert torch.equal(tensor.grad, expected)


@pytest.mark.parametrize("p", [0.0, 0.5], ids=["plain", "dropout"])
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_compiled_equals_eager(kernel_runner, norm, p):
    def function(x, r, weight):
        return fused(norm, x, r, 24, weight, dropout_p=p)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    x, r, weight, _ = tensors(kernel_runner, 24, (torch.bfloat16, torch.float32))
    results = []
    for call in (function, compiled):
        torch.manual_seed(2)
        outputs = call(x, r, weight)
        results.append((*outputs, *torch.autograd.grad([y.float().sin().sum() for y in outputs], (x, r, weight))))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("p", [0.0, 0.5], ids=["plain", "dropout"])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_opcheck(kernel_runner, kind, p):
    x, r, weight, bias = tensors(kernel_runner, 24, (torch.bfloat16, torch.float32))
    bias = bias if kind == "layer" else None
    seed = draw_seed(x) if p else None
    arguments = (1, 1e-5, 0.0, kind, p)
    op = torch.ops.fusedops.norm.default
    torch.library.opcheck(op, (x, r, weight, bias, seed, *arguments, torch.bfloat16, False))
    x, r, weight, bias = (t if t is None else t.detach() for t in (x, r, weight, bias))
    y, stream, mean, rstd = op(x, r, weight, bias, seed, *arguments, torch.bfloat16, False)
    dtypes = (torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16)
    for from_output, saved in ((False, stream), (True, y)):
        torch.library.opcheck(
            torch.ops.fusedops.norm_backward.default,
            (
                y, stream, saved, weight, bias, mean, rstd, seed, *arguments, from_output,
                [True, True, True, bias is not None], *dtypes,
            ),
        )  # fmt: skip


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0)], ids=str)
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_empty(runner, norm, shape):
    x, r = (torch.empty(shape, device=runner.device, requires_grad=True) for _ in range(2))
    weight = torch.ones(shape[-1], device=runner.device, requires_grad=True)
    output, stream = fused(norm, x, r, shape[-1], weight, dropout_p=0.5)
    assert output.shape == stream.shape == shape
    for tensor, grad in zip((x, r, weight), torch.autograd.grad((output + stream).sum(), (x, r, weight)), strict=True):
        assert grad.shape == tensor.shape
        assert not grad.any()


def test_philox_gives_the_published_numbers():
    """Known answers of philox4x32-10, as Random123 ships them: counter and key of zeros, of ones, of digits of π."""
    from fusedops.runtime.dropout import _philox

    ones = 0xFFFFFFFF
    for counter, key, expected in (
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 4, (ones,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ):
        words = _philox([torch.tensor([c]) for c in counter], *(torch.tensor([k]) for k in key))
        assert tuple(int(w) for w in words) == expected


X8, META = torch.ones(8), torch.ones(2, 8, device="meta")

WRONG = {
    "residual is a list": (TypeError, "residual must be a torch.Tensor", {"residual": [1.0]}),
    "residual has another shape": (ValueError, r"residual must be of input's shape \(2, 8\)", {"residual": X8}),
    "residual is elsewhere": (ValueError, "residual must be on the device of", {"residual": META}),
    "dropout_p is above one": (ValueError, "dropout_p must be a probability from 0 to 1; got 1.5", {"dropout_p": 1.5}),
    "dropout_p is negative": (ValueError, "dropout_p must be a probability", {"dropout_p": -0.1}),
    "dropout_p is NaN": (ValueError, "dropout_p must be a probability", {"dropout_p": float("nan")}),
    "dropout_p is a string": (TypeError, "dropout_p must be a number", {"dropout_p": "half"}),
    "out_dtype is a string": (TypeError, "out_dtype must be a torch.dtype; got 'half'", {"out_dtype": "half"}),
    "out_dtype is integral": (ValueError, "out_dtype must be a floating dtype", {"out_dtype": torch.int32}),
    "recompute is a string": (TypeError, "recompute must be a bool", {"recompute": "output"}),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("function", [fusedops.add_layer_norm, fusedops.add_rms_norm], ids=lambda f: f.__name__)
def test_wrong_argument(case, function):
    error, message, wrong = WRONG[case]
    arguments = {"input": torch.ones(2, 8), "residual": torch.ones(2, 8), "normalized_shape": 8, **wrong}
    for call in (function, lambda **k: fusedops.explain(function, **k)):
        with pytest.raises(error, match=f"^{function.__name__}: {message}"):
            call(**arguments)
