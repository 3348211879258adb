"""``scaled_dot_product_attention`` is torch's function: same signature, same results."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F

import fusedops
from tests.harness.errors import check_error
from tests.harness.tensors import randn

# name: (query, key, value, options)
CALLS = {
    "four dimensions": ((2, 4, 9, 8), (2, 4, 11, 8), (2, 4, 11, 6), {}),
    "is_causal": ((2, 4, 9, 8), (2, 4, 11, 8), (2, 4, 11, 8), {"is_causal": True}),
    "two dimensions": ((9, 8), (11, 8), (11, 8), {}),
    "three dimensions": ((3, 9, 8), (3, 11, 8), (3, 11, 8), {"is_causal": True}),
    "five dimensions": ((2, 3, 2, 9, 8), (2, 3, 2, 11, 8), (2, 3, 2, 11, 8), {}),
    "batch broadcast": ((2, 2, 9, 8), (1, 2, 11, 8), (2, 2, 11, 8), {}),
    "one key head": ((2, 2, 9, 8), (2, 1, 11, 8), (2, 1, 11, 8), {}),
    "key without batch": ((3, 2, 9, 8), (2, 11, 8), (11, 8), {}),
    "query broadcast": ((9, 8), (2, 3, 11, 8), (2, 3, 11, 8), {}),
    "grouped heads": ((2, 4, 9, 8), (2, 2, 11, 8), (2, 2, 11, 8), {"enable_gqa": True}),
    "grouped heads, three dimensions": ((4, 9, 8), (2, 11, 8), (2, 11, 8), {"enable_gqa": True, "is_causal": True}),
    "grouped heads, five dimensions": ((2, 1, 4, 9, 8), (2, 1, 2, 11, 8), (2, 1, 2, 11, 8), {"enable_gqa": True}),
    "scale": ((2, 4, 9, 8), (2, 4, 11, 8), (2, 4, 11, 8), {"scale": -0.5}),
}
MASKS = {
    "of queries and keys": ((2, 4, 9, 8), (9, 11)),
    "of a head": ((2, 4, 9, 8), (4, 1, 11)),
    "of a batch": ((2, 4, 9, 8), (2, 1, 1, 11)),
    "two dimensions": ((9, 8), (9, 11)),
    "three dimensions": ((3, 9, 8), (3, 9, 11)),
    "three dimensions, broadcast": ((3, 9, 8), (1, 9, 11)),
    "five dimensions, of a head": ((2, 3, 2, 9, 8), (2, 1, 11)),
    "five dimensions, one for all": ((2, 3, 2, 9, 8), (1, 1, 1, 9, 11)),
    "five dimensions, of the last batch": ((2, 3, 2, 9, 8), (1, 3, 1, 1, 11)),
    "five dimensions, of the first batch": ((2, 3, 2, 9, 8), (2, 1, 1, 9, 11)),
}


def test_signature_is_torchs():
    """torch's is a builtin without one; its documentation has it."""
    names = list(inspect.signature(fusedops.scaled_dot_product_attention).parameters.values())
    shown = ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default}" for p in names)
    documented = " ".join(F.scaled_dot_product_attention.__doc__.split())
    assert f"scaled_dot_product_attention({shown}) -> Tensor" in documented


def run(function, leaves, grad, mask=None, **options):
    leaves = [t.detach().requires_grad_() for t in leaves]
    attn_mask = mask
    if mask is not None and mask.is_floating_point():
        leaves.append(attn_mask := mask.detach().requires_grad_())
    out = function(*leaves[:3], attn_mask, **options)
    return out, torch.autograd.grad(out, leaves, grad)


def compare(runner, leaves, mask=None, **options):
    """The same to the bit on the torch backend; within the error rule of the kernels."""
    shape = F.scaled_dot_product_attention(*leaves, mask, **options).shape
    grad = randn(*shape, device=runner.device)
    ours = run(fusedops.scaled_dot_product_attention, leaves, grad, mask, **options)
    torchs = run(F.scaled_dot_product_attention, leaves, grad, mask, **options)
    assert ours[0].shape == torchs[0].shape
    if not runner.kernels:
        assert torch.equal(ours[0], torchs[0])
        assert all(torch.equal(a, b) for a, b in zip(ours[1], torchs[1], strict=True))
        return
    doubled = [t.double() for t in leaves]
    wide = mask.double() if mask is not None and mask.is_floating_point() else mask
    exact = run(F.scaled_dot_product_attention, doubled, grad.double(), wide, **options)
    check_error(ours[0], exact[0], torchs[0], what="out")
    for name, *grads in zip(("query", "key", "value", "attn_mask"), ours[1], exact[1], torchs[1], strict=False):
        check_error(*grads, gradient=True, what=f"gradient of {name}")


@pytest.mark.parametrize("call", CALLS)
def test_is_torchs_function(runner, call):
    *shapes, options = CALLS[call]
    compare(runner, [randn(*shape, device=runner.device) for shape in shapes], **options)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(runner, mask, kind):
    query, shape = MASKS[mask]
    key = (*query[:-2], 11, 8)
    values = randn(*shape, device=runner.device)
    values = values > -1 if kind == "bool" else values
    compare(runner, [randn(*s, device=runner.device) for s in (query, key, key)], values)


def test_dropout_on_the_torch_backend_is_torchs():
    q, k, v = (randn(2, 4, 9, 8) for _ in range(3))
    with fusedops.backend("torch"):
        torch.manual_seed(3)
        ours = fusedops.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(3)
    assert torch.equal(ours, F.scaled_dot_product_attention(q, k, v, dropout_p=0.5))


@pytest.mark.parametrize("causal", [False, True, "top_left", "bottom_right"], ids=str)
@pytest.mark.parametrize("kind", [None, "bool", "float"])
def test_attention_on_the_torch_backend_is_torchs_operator(kind, causal):
    """One call of it, to the bit, where it means the same: no cost beside the plain model's."""
    q, k, v = (torch.randn(2, 4, 9, 8) for _ in range(3))
    mask = None if kind is None else torch.randn(2, 1, 1, 9) if kind == "float" else torch.rand(2, 1, 1, 9) > 0.3
    seen = torch.ones(9, 9, dtype=torch.bool).tril() if causal else torch.ones(9, 9, dtype=torch.bool)
    if kind is None:
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=bool(causal))
    elif kind == "bool":
        expected = F.scaled_dot_product_attention(q, k, v, mask & seen)
    else:
        expected = F.scaled_dot_product_attention(q, k, v, mask.masked_fill(~seen, float("-inf")))
    with fusedops.backend("torch"):
        assert torch.equal(fusedops.attention(q, k, v, attn_mask=mask, causal=causal), expected)


@pytest.mark.parametrize(("queries", "keys"), [(3, 4), (0, 0), (0, 4), (3, 0)])
def test_a_mask_alone_has_a_gradient(runner, queries, keys):
    q = torch.randn(1, 2, queries, 8, device=runner.device)
    k = torch.randn(1, 2, keys, 8, device=runner.device)
    mask = torch.randn(queries, keys, device=runner.device, requires_grad=True)
    (gradient,) = torch.autograd.grad(fusedops.scaled_dot_product_attention(q, k, k, mask).sum(), mask)
    assert gradient.shape == mask.shape
    assert gradient.any() == (mask.numel() > 0)
