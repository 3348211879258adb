"""torch.compile(..., backend="fusedops"): what it finds, that it is the same, and what it must leave alone."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fusedops
import fusedops.dynamo
from fusedops.linear.activations import ACTIVATIONS
from tests.harness.errors import check_error
from tests.harness.tensors import randn, randn_like

X, W, B = (2, 6, 32), (32,), (32,)
M, MB = (24, 32), (24,)
Q, K = (2, 4, 6, 8), (2, 2, 6, 8)


@dataclass(frozen=True)
class Pattern:
    """A function that no rule knows, shapes for its arguments, and the calls that stand in its graph afterwards."""

    name: str
    function: Callable
    shapes: tuple[tuple[int, ...], ...]
    calls: tuple[str, ...]

    def __str__(self) -> str:
        return self.name


def wide(x):
    """float32; float64 where the exact result is computed."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def llama_norm(x, weight):
    dtype = x.dtype
    x = wide(x)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + 1e-6)
    return weight * x.to(dtype)


def gemma_norm(x, weight):
    out = wide(x) * torch.rsqrt(wide(x).pow(2).mean(-1, keepdim=True) + 1e-6)
    return (out * (1.0 + wide(weight))).type_as(x)


def t5_norm(x, weight):
    return weight * (x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + 1e-6))


def bare_norm(x):
    return torch.mul(torch.pow(torch.mean(torch.square(x), -1, True) + 1e-5, -0.5), x)


def layer_norm_twice_centred(x, weight, bias):
    u = x.mean(-1, keepdim=True)
    s = (x - u).pow(2).mean(-1, keepdim=True)
    return weight * ((x - u) / torch.sqrt(s + 1e-6)) + bias


def layer_norm_by_variance(x, weight, bias):
    x = wide(x)
    centred = x - x.mean(dim=-1, keepdim=True)
    return (centred * torch.rsqrt(x.var(dim=-1, keepdim=True, unbiased=False) + 1e-5) * weight + bias).to(weight.dtype)


def pre_norm_block(x, update, weight):
    total = x + update
    return total + llama_norm(total, weight).sin()


def post_norm_block(x, update, weight, bias):
    return F.layer_norm(update + F.dropout(x, 0.3, training=False), (32,), weight, bias)


def gelu_tanh(z):
    return 0.5 * z * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (z + 0.044715 * torch.pow(z, 3.0))))


def gelu_erf(z):
    return z * 0.5 * (1.0 + torch.erf(z / math.sqrt(2.0)))


def gpt2_layer(x, weight, bias):
    size = (*x.shape[:-1], weight.shape[-1])
    return gelu_tanh(torch.addmm(bias, x.view(-1, x.shape[-1]), weight).view(size))


def packed_gated(x, weight, bias):
    gate, up = F.linear(x, weight, bias).chunk(2, dim=-1)
    return F.silu(gate) * up


def gate_of_another_input(x, weight, gate):
    z = F.linear(x, weight)
    return z * torch.sigmoid(F.linear(x + 1, gate))


def repeat_heads(t, times):
    batch, heads, length, size = t.shape
    return t[:, :, None, :, :].expand(batch, heads, times, length, size).reshape(batch, heads * times, length, size)


def grouped_queries(q, k, v, repeat):
    return F.scaled_dot_product_attention(q, repeat(k), repeat(v), is_causal=True)


def softmax_attention(q, k, v):
    return (torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), dim=-1)) @ v


def causal_attention(q, k, v):
    scores = torch.matmul(q, k.mT) * 0.3
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    return torch.matmul(F.softmax(scores.masked_fill(hidden, -math.inf), dim=-1), v)


def two_calls(x, weight):
    return llama_norm(F.silu(F.linear(x, weight)), torch.ones(24, dtype=x.dtype, device=x.device))


def checkpointed(x, weight):
    return checkpoint(llama_norm, x, weight, use_reentrant=False).sin()


def under_autocast(x, weight, bias):
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        return F.relu(F.linear(x, weight, bias))


PATTERNS = [
    Pattern("layer_norm", lambda x, w, b: F.layer_norm(x, (32,), w, b), (X, W, B), ("layer_norm",)),
    Pattern("rms_norm", lambda x, w: F.rms_norm(x, (32,), w), (X, W), ("rms_norm",)),
    Pattern("group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), ((2, 4, 9), (4,), (4,)), ("group_norm",)),
    Pattern("llama_norm", llama_norm, (X, W), ("rms_norm",)),
    Pattern("gemma_norm", gemma_norm, (X, W), ("rms_norm",)),
    Pattern("t5_norm", t5_norm, (X, W), ("rms_norm",)),
    Pattern("bare_norm", bare_norm, (X,), ("rms_norm",)),
    Pattern("norm_of_heads", lambda x, w: llama_norm(x.transpose(1, 2), w), ((2, 6, 4, 8), (8,)), ("rms_norm",)),
    Pattern("layer_norm_twice_centred", layer_norm_twice_centred, (X, W, B), ("layer_norm",)),
    Pattern("layer_norm_by_variance", layer_norm_by_variance, (X, W, B), ("layer_norm",)),
    Pattern("pre_norm_block", pre_norm_block, (X, X, W), ("add_rms_norm",)),
    Pattern("post_norm_block", post_norm_block, (X, X, W, B), ("add_layer_norm",)),
    Pattern("addmm", lambda x, w, b: F.silu(torch.addmm(b, x, w)), ((6, 32), (32, 24), MB), ("linear",)),
    Pattern("matmul", lambda x, w, b: torch.relu(b + x @ w.t()), (X, M, MB), ("linear",)),
    Pattern("in_place", lambda x, w, b: F.relu(F.linear(x, w, b), inplace=True), (X, M, MB), ("linear",)),
    Pattern("conv1d", gpt2_layer, (X, (32, 24), MB), ("linear",)),
    Pattern("gelu_erf", lambda x, w, b: gelu_erf(F.linear(x, w, b)), (X, M, MB), ("linear",)),
    Pattern("gated", lambda x, g, u: F.linear(x, u) * F.silu(F.linear(x, g)), (X, M, M), ("gated_linear",)),
    Pattern(
        "gated_with_biases",
        lambda x, g, u, a, b: gelu_tanh(x @ g.t() + a) * (x @ u.t() + b),
        (X, M, M, MB, MB),
        ("gated_linear",),
    ),
    Pattern("packed_gated", packed_gated, (X, (48, 32), (48,)), ("gated_linear",)),
    Pattern("gate_of_another_input", gate_of_another_input, (X, M, M), ("linear",)),
    Pattern("attention", partial(F.scaled_dot_product_attention, scale=0.4), (Q, Q, Q), ("attention",)),
    Pattern("repeated_heads", partial(grouped_queries, repeat=lambda t: repeat_heads(t, 2)), (Q, K, K), ("attention",)),
    Pattern(
        "interleaved_heads",
        partial(grouped_queries, repeat=lambda t: t.repeat_interleave(2, dim=1)),
        (Q, K, K),
        ("attention",),
    ),
    Pattern("softmax_attention", softmax_attention, (Q, Q, Q), ("attention",)),
    Pattern("causal_attention", causal_attention, (Q, Q, Q), ("attention",)),
    Pattern("two_calls", two_calls, (X, M), ("rms_norm", "linear")),
    Pattern("checkpointed", checkpointed, (X, W), ("rms_norm",)),
    Pattern("in_an_autocast_region", under_autocast, (X, M, MB), ("linear",)),
]


def compiled(function, inner="eager", **options):
    """The function, compiled; graphs run as they are once the backend has rewritten them."""
    torch._dynamo.reset()
    backend = partial(fusedops.dynamo.backend, inner=inner)
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def replaced():
    report = fusedops.dynamo.last_report()
    assert not [e for e in report.left if "Error" in e.reason], report
    names = [e.function.removeprefix("fusedops.") for e in report.replaced]
    return tuple("attention" if name == "scaled_dot_product_attention" else name for name in names)


def with_gradients(function, tensors, grad=None):
    """The result and the gradient of every tensor."""
    tensors = [t.detach().requires_grad_() for t in tensors]
    out = function(*tensors)
    grad = torch.ones_like(out) if grad is None else grad.to(out.dtype)
    return [out, *torch.autograd.grad(out, tensors, grad)]


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_what_is_found_is_the_same(kernel_runner, pattern):
    tensors = [randn(*shape, device=kernel_runner.device) for shape in pattern.shapes]
    # What AOTAutograd takes apart before it traces: checkpoints; and one of the others.
    fast = compiled(pattern.function, inner="aot_eager" if pattern.name in ("checkpointed", "conv1d") else "eager")
    grad = randn_like(pattern.function(*tensors))
    ours = with_gradients(fast, tensors, grad)
    assert replaced() == pattern.calls, fusedops.dynamo.last_report()
    exact = with_gradients(pattern.function, [t.double() for t in tensors], grad)
    plain = with_gradients(pattern.function, tensors, grad)
    for i, (a, b, c) in enumerate(zip(ours, exact, plain, strict=True)):
        assert i > 0 or a.stride() == c.stride()
        check_error(a, b.double(), c, gradient=i > 0, what=f"tensor {i}")


@pytest.mark.parametrize("name", ["llama_norm", "gemma_norm", "pre_norm_block", "conv1d", "gated", "softmax_attention"])
def test_what_is_found_in_16_bits(kernel_runner, name):
    (pattern,) = [p for p in PATTERNS if p.name == name]
    tensors = [randn(*shape, dtype=torch.float16, device=kernel_runner.device) for shape in pattern.shapes]
    ours = with_gradients(compiled(pattern.function), tensors)
    assert replaced() == pattern.calls, fusedops.dynamo.last_report()
    exact = with_gradients(pattern.function, [t.double() for t in tensors])
    plain = with_gradients(pattern.function, tensors)
    for i, (a, b, c) in enumerate(zip(ours, exact, plain, strict=True)):
        check_error(a, b.double(), c, gradient=i > 0, what=f"tensor {i}")


@pytest.mark.parametrize("name", ["llama_norm", "pre_norm_block", "gated", "repeated_heads"])
def test_dynamic_shapes(kernel_runner, name):
    """One graph for all lengths, in which the patterns are still found."""
    (pattern,) = [p for p in PATTERNS if p.name == name]
    dim = 2 if "heads" in name else 1
    fast = compiled(pattern.function, inner="aot_eager", dynamic=True)
    for length in (6, 9):
        tensors = [
            randn(*(length if i == dim and len(shape) > 2 else n for i, n in enumerate(shape)))
            for shape in pattern.shapes
        ]
        with torch._dynamo.config.patch(error_on_recompile=length != 6):
            out = fast(*(t.to(kernel_runner.device) for t in tensors))
        torch.testing.assert_close(out, pattern.function(*(t.to(kernel_runner.device) for t in tensors)))
    assert replaced() == pattern.calls, fusedops.dynamo.last_report()


class RMSNorm(torch.nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


@pytest.mark.parametrize(
    ("module", "name"),
    [(RMSNorm(1e-5), "rms_norm"), (torch.nn.LayerNorm(32), "layer_norm"), (torch.nn.GroupNorm(2, 6), "group_norm")],
)
def test_an_eps_that_dynamo_makes_an_input(kernel_runner, module, name):
    """With dynamic=True each number that a module holds is one; a changed one must be seen."""
    x, module = randn(*X, device=kernel_runner.device), module.to(kernel_runner.device)
    fast = compiled(module, dynamic=True)
    for eps in (1e-5, 0.5):
        module.eps = eps
        torch.testing.assert_close(fast(x), module(x))
        assert replaced() == (name,), fusedops.dynamo.last_report()


def test_an_eps_that_is_an_argument_is_left(kernel_runner):
    """It may be another in each call: one graph for all."""
    fast = compiled(lambda x, eps: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps), dynamic=True)
    x = randn(*X, device=kernel_runner.device)
    fast(x, 0.1)
    assert "eps is no constant" in str(fusedops.dynamo.last_report())
    with torch._dynamo.config.patch(error_on_recompile=True):
        torch.testing.assert_close(fast(x, 0.7), x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.7))


# --- What must stay ---------------------------------------------------------------------------------------------------


def square_used_twice(x, weight):
    square = x.pow(2)
    return weight * (x * torch.rsqrt(square.mean(-1, keepdim=True) + 1e-6)) + square


def factor_used_twice(x, weight):
    factor = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * (x * factor) + factor


def written_between(x, weight):
    x = x * 1.0
    factor = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    x.add_(1.0)
    return weight * (x * factor)


def weight_written_between(x, weight):
    weight = weight * 1.0
    view = weight.view(4, 8)
    out = x.pow(2).mean(-1, keepdim=True)
    view.mul_(2.0)
    return x * torch.rsqrt(out + 1e-6) * weight


def cast_before_a_write(x, weight):
    half = x.half()
    x = half.float()
    half.zero_()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def tensor_eps(x, weight):
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + weight.abs().max()))


def detached(x, weight):
    return weight * (x * torch.rsqrt(x.detach().pow(2).mean(-1, keepdim=True) + 1e-6))


def without_gradient(x, weight):
    with torch.no_grad():
        factor = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * (x * factor)


def other_tensor(x, weight):
    return weight * ((x + 1.0) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def sample_variance(x, weight):
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-5) * weight


def eps_after_the_root(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-5) * weight


def half_centred(x, weight):
    return x * torch.rsqrt((x - x.mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def centred_elsewhere(x, weight):
    return (
        (x - x.mean(1, keepdim=True))
        * torch.rsqrt((x - x.mean(1, keepdim=True)).pow(2).mean(1, keepdim=True) + 1e-5)
        * weight
    )


def preactivation_used(x, weight):
    z = F.linear(x, weight)
    return F.gelu(z) + z


def half_the_gelu(x, weight):
    z = F.linear(x, weight)
    return 0.5 * z * (1.0 + torch.tanh(0.79 * (z + 0.044715 * z.pow(3))))


def written_preactivation(x, weight):
    z = F.linear(x, weight)
    z.add_(1.0)
    return F.relu(z)


def written_for_another(x, weight):
    z = F.linear(x, weight) * 1.0
    F.relu(z, inplace=True)
    return F.silu(z)


def autocast_between(x, weight):
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        z = F.linear(x, weight)
    return F.relu(z)


def halves_exchanged(x, weight):
    up, gate = F.linear(x, weight).chunk(2, dim=-1)
    return F.silu(gate) * up


def heads_in_the_other_order(q, k, v):
    k, v = (t.repeat(1, 2, 1, 1) for t in (k, v))
    return torch.softmax(q @ k.transpose(-2, -1), dim=-2) @ v


SQUARE = (32, 32)
LEFT = {
    "square_used_twice": (square_used_twice, (X, W), "is used elsewhere"),
    "factor_used_twice": (factor_used_twice, (X, W), "is used elsewhere"),
    "written_between": (written_between, (X, W), "stands in between"),
    "weight_written_between": (weight_written_between, (X, W), "stands in between"),
    "cast_before_a_write": (cast_before_a_write, (X, W), "stands in between"),
    "tensor_eps": (tensor_eps, (X, W), "eps is no constant"),
    "detached": (detached, (X, W), ""),
    "without_gradient": (without_gradient, (X, W), "stands in between"),
    "other_tensor": (other_tensor, (X, W), ""),
    "other_dimension": (
        lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)), (X, W), "other dimensions",
    ),
    "two_dimensions": (
        lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean((-1, -2), keepdim=True) + 1e-6)), (X, W), "other dimensions",
    ),
    "no_kept_dimension": (
        lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1) + 1e-6)), (SQUARE, W), "keepdim",
    ),
    "cubes": (lambda x, w: w * (x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-6)), (X, W), ""),
    "sample_variance": (sample_variance, (X, W), "unbiased"),
    "eps_after_the_root": (eps_after_the_root, (X, W), ""),
    "half_centred": (half_centred, (X, W), ""),
    "centred_elsewhere": (centred_elsewhere, (X, W), ""),
    "float64": (lambda x, w: t5_norm(x.double(), w.double()), (X, W), "float64"),
    "linear_of_float64": (lambda x, w: F.silu(F.linear(x.double(), w.double())), (X, M), "float64"),
    "attention_of_float64": (lambda *t: softmax_attention(*(x.double() for x in t)), (Q, Q, Q), "float64"),
    "layer_norm_of_float64": (lambda x, w: F.layer_norm(x.double(), (32,)) * w, (X, W), "float64"),
    "preactivation_used": (preactivation_used, (X, M), ""),
    "half_the_gelu": (half_the_gelu, (X, M), ""),
    "written_preactivation": (written_preactivation, (X, M), ""),
    "written_for_another": (written_for_another, (X, M), ""),
    "autocast_between": (autocast_between, (X, M), "stands in between"),
    "halves_exchanged": (halves_exchanged, (X, (48, 32)), ""),
    "steeper_leaky_relu": (lambda x, w: F.leaky_relu(F.linear(x, w), 0.2), (X, M), ""),
    "three_terms": (lambda x, w, b: F.relu(torch.addmm(b, x, w, alpha=2)), ((6, 32), (32, 24), MB), ""),
    "linear_alone": (F.linear, (X, M, MB), ""),
    "heads_in_the_other_order": (heads_in_the_other_order, (Q, K, K), ""),
    "softmax_over_queries": (lambda q, k, v: torch.softmax(q @ k.mT, -2) @ v, (Q, Q, Q), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_alone(kernel_runner, name):
    function, shapes, reason = LEFT[name]
    tensors = [randn(*shape, device=kernel_runner.device) for shape in shapes]
    ours = compiled(function)(*tensors)
    calls = replaced()
    report = fusedops.dynamo.last_report()
    assert calls == (), report
    assert reason in str(report)
    assert bool(report.left) >= bool(reason)
    torch.testing.assert_close(ours, function(*tensors))


def test_dropout_in_training_is_left(kernel_runner):
    q = randn(*Q, device=kernel_runner.device)
    compiled(lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5))(q)
    assert replaced() == ()
    assert "other random numbers" in str(fusedops.dynamo.last_report())


def test_a_sum_that_is_used_before_the_norm(kernel_runner):
    """The sum cannot move, the norm can."""

    def function(x, update, weight, bias):
        total = x + update
        weight = weight * total.mean()
        return F.layer_norm(total, (32,), weight, bias) + total

    tensors = [randn(*shape, device=kernel_runner.device) for shape in (X, X, W, B)]
    ours = with_gradients(compiled(function), tensors)
    assert replaced() == ("layer_norm",)
    for a, b in zip(ours, with_gradients(function, tensors), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cast", [lambda x, y: x.type_as(y), lambda x, y: x.double().to(y)])
def test_what_is_cast_to_the_dtype_of_a_norm_is_no_norm(kernel_runner, cast):
    """The norm is computed for its dtype alone, and the cast of another tensor is its only user."""

    def function(x, weight):
        return cast(x.sin(), llama_norm(x, weight)) * weight

    tensors = [randn(*shape, device=kernel_runner.device) for shape in (X, W)]
    torch.testing.assert_close(compiled(function)(*tensors), function(*tensors))


def test_torch_funcs_transforms_are_left(kernel_runner):
    def function(x):
        return torch.func.grad(lambda x: F.layer_norm(x, (32,)).square().sum())(x)

    x = randn(*X, device=kernel_runner.device)
    torch.testing.assert_close(compiled(function)(x), function(x))
    assert replaced() == ()
    assert "torch.func" in str(fusedops.dynamo.last_report())


def test_without_kernels_nothing_is_replaced():
    with fusedops.backend("torch"):
        x = torch.randn(*X)
        assert torch.equal(compiled(lambda x: F.layer_norm(x, (32,)))(x), F.layer_norm(x, (32,)))
    report = fusedops.dynamo.last_report()
    assert not report.replaced
    assert "torch backend is asked for" in report.left[0].reason


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_by_its_values(activation):
    from fusedops.dynamo.linears import _activation

    captured = []

    def keep(graph, _):
        captured.append(graph)
        return graph

    torch._dynamo.reset()
    forward = ACTIVATIONS[activation].forward
    layer = torch.compile(lambda x, w: forward(F.linear(x, w)), backend=keep, fullgraph=True)
    layer(torch.ones(2, 4), torch.ones(3, 4))
    (start,) = [node for node in captured[0].graph.nodes if node.target is F.linear]
    name, root, _ = _activation(start)
    assert name == activation
    assert [user.op for user in root.users] == ["output"]


# --- The backend itself -----------------------------------------------------------------------------------------------


def test_by_its_name_with_an_inner_backend_and_inductors_options(kernel_runner):
    seen = []

    def inner(graph, inputs):
        seen.extend(node.target for node in graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    fast = torch.compile(lambda x: F.layer_norm(x, (32,)), backend="fusedops", options={"inner": inner})
    x = randn(*X, device=kernel_runner.device)
    assert torch.equal(fast(x), fusedops.layer_norm(x, 32))
    assert fusedops.layer_norm in seen
    with pytest.raises(ValueError, match="mode and options are Inductor's"):
        fusedops.dynamo.backend(torch.fx.symbolic_trace(F.relu), (), mode="max-autotune", inner="eager")


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_an_error_in_the_pass_leaves_the_graph_as_it_was(kernel_runner, monkeypatch, inner):
    def fails(rewriter):
        raise KeyError("unheard of")

    # The package's attribute of this name is the function.
    module = sys.modules["fusedops.dynamo.backend"]
    monkeypatch.setattr(module, "replace_attentions", fails)  # after norms were replaced
    tensors = [randn(*shape, device=kernel_runner.device) for shape in (X, W)]
    ours = with_gradients(compiled(llama_norm, inner=inner), tensors)
    for a, b in zip(ours, with_gradients(llama_norm, tensors), strict=True):
        torch.testing.assert_close(a, b)
    report = fusedops.dynamo.last_report()
    assert not report.replaced
    assert [entry.reason for entry in report.left] == ["KeyError: 'unheard of'"]


def test_sizes_that_depend_on_values(kernel_runner):
    """The strides of a result have no known order then; the pass must not stumble over that."""

    def function(x):
        x = x[x.sum((-1, -2)) > -1e9]
        return F.layer_norm(x, (32,)), llama_norm(x.transpose(0, 1), torch.ones(32, device=x.device))

    x = randn(*X, device=kernel_runner.device)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        ours = compiled(function, inner="aot_eager")(x)
    for a, b in zip(ours, function(x), strict=True):
        torch.testing.assert_close(a, b)
    assert replaced() == ("layer_norm",)
    assert "is not known" in str(fusedops.dynamo.last_report())


def test_the_report_names_places_and_reasons(kernel_runner, caplog):
    with caplog.at_level("INFO", logger="fusedops.dynamo"):
        compiled(llama_norm)(*(randn(*shape, device=kernel_runner.device) for shape in (X, W)))
    (entry,) = fusedops.dynamo.last_report().replaced
    assert (entry.what, entry.function, entry.reason) == ("RMS norm, written out", "fusedops.rms_norm", "")
    assert entry.place.rpartition(":")[0] == __file__
    assert "replaced: RMS norm, written out -> fusedops.rms_norm" in caplog.text
