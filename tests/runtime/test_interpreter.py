"""TRITON_INTERPRET=1 as users set it: Triton's own interpreter, without the repairs that the tests make."""

from __future__ import annotations

import importlib.util

import pytest

from tests.runtime.test_import import run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


PROGRAM = """
import torch, fusedops
x, w = torch.randn(16, 32).bfloat16(), torch.randn(8, 32).bfloat16()
assert torch.equal(fusedops.linear(x, w), torch.nn.functional.linear(x, w))
assert torch.equal(fusedops.layer_norm(x, 32), torch.nn.functional.layer_norm(x, (32,)))
print(*fusedops.explain(fusedops.linear, x, w).reasons)
print(fusedops.explain(fusedops.linear, x.float(), w.float()).backend)
try:
    with fusedops.backend("triton"):
        fusedops.linear(x, w)
except fusedops.BackendError as error:
    print(error)

torch.manual_seed(0)
x, r = (torch.randn(40, 24, requires_grad=True) for _ in range(2))
w, b = torch.randn(24, requires_grad=True), torch.randn(24, requires_grad=True)
m = torch.randn(16, 24, requires_grad=True)
q, k, v = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3))
calls = {
    "layer_norm": lambda: fusedops.layer_norm(x, 24, w, b),
    "rms_norm": lambda: fusedops.rms_norm(x, 24, w),
    "l2_norm": lambda: fusedops.l2_norm(x),
    "group_norm": lambda: fusedops.group_norm(x.view(5, 24, 8), 4, w, b),
    "add_layer_norm": lambda: sum(fusedops.add_layer_norm(x, r, 24, w, b)),
    "linear": lambda: fusedops.linear(x, m, None, "gelu"),
    "layer_norm_linear": lambda: fusedops.layer_norm_linear(x, w, b, m),
    "attention": lambda: fusedops.attention(q, k, v, causal=True),
}
for name, call in calls.items():
    grads = []
    for backend in ("triton", "torch"):
        with fusedops.backend(backend):
            y = call()
            leaves = [t for t in (x, r, w, b, m, q, k, v)]
            grads.append((y, *torch.autograd.grad(y.square().sum(), leaves, allow_unused=True, materialize_grads=True)))
    for ours, theirs in zip(*grads):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3, msg=name)
with fusedops.backend("triton"):
    y, stream = fusedops.add_rms_norm(x, r, 24, w, dropout_p=0.5)
    dropped, _ = torch.autograd.grad(stream.sum(), (x, r))
assert torch.equal(dropped == 0, stream == r)
print("every operator")
"""


@pytest.fixture(scope="module")
def output() -> list[str]:
    return run(PROGRAM, TRITON_INTERPRET="1").splitlines()


def test_bfloat16_goes_to_torch(output):
    first, second, third, *_ = output
    assert first == "bfloat16: Triton's interpreter (TRITON_INTERPRET=1) computes it wrongly"
    assert second == "triton"
    assert first in third


def test_every_operator_forward_and_backward(output):
    """Compared in the program itself."""
    assert output[-1] == "every operator"
