"""autocast: the dtypes, forward and backward, that the replaced torch operators have there; GradScaler."""

from __future__ import annotations

import copy
from contextlib import ExitStack

import pytest
import torch

import fusedops
from fusedops.runtime.device import TARGETS, pretend
from tests.harness.errors import check_error
from tests.harness.operators import OPERATORS

# The composition for groups adds their biases outside of the product, as torch's own product of groups does not.
REPLACING = [o for o in OPERATORS if o.replaces is not None and not o.name.startswith("grouped_linear")]
HALVES = (torch.bfloat16, torch.float16)

# Entered one in the other: (enabled, dtype).
CONTEXTS = {
    "bfloat16": [(True, torch.bfloat16)],
    "float16": [(True, torch.float16)],
    "disabled inside": [(True, torch.bfloat16), (False, None)],
    "another inside": [(True, torch.bfloat16), (True, torch.float16)],
    "enabled again": [(True, torch.float16), (False, None), (True, torch.bfloat16)],
}


def autocast(stack, kind, contexts):
    for enabled, dtype in contexts:
        stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))


def floating(results):
    results = results if isinstance(results, tuple) else (results,)
    return [result for result in results if result.is_floating_point()]


def dtypes_of(function, operator, tensors, kind, contexts):
    """(of the results, of the gradients), the backward outside of the contexts; None: an error."""
    leaves = [tensors[place] for place in operator.differentiable]
    with ExitStack() as stack:
        autocast(stack, kind, contexts)
        results = floating(function(*tensors))
    if not leaves:
        return [result.dtype for result in results], []
    total = sum(result.float().sum() for result in results)
    gradients = torch.autograd.grad(total, leaves)
    return [result.dtype for result in results], [gradient.dtype for gradient in gradients]


@pytest.mark.parametrize("contexts", CONTEXTS.values(), ids=CONTEXTS)
@pytest.mark.parametrize("operator", REPLACING, ids=str)
def test_dtypes_are_those_of_what_is_replaced(runner, operator, contexts):
    for dtype in (torch.float32, contexts[-1][1] or torch.bfloat16):
        torch.manual_seed(0)
        tensors = operator.inputs(runner.device, dtype, 3)
        expected = dtypes_of(operator.replaces, operator, tensors, runner.device.type, contexts)
        assert dtypes_of(operator.function, operator, tensors, runner.device.type, contexts) == expected


# To index a tensor of a device that is not there asks for its driver.
_INDEXING = ("gated_linear:packed", "batched_linear", "attention:document_ids", "scaled_dot_product_attention:mask")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operator", [o for o in REPLACING if o.name not in _INDEXING], ids=str)
def test_dtypes_on_a_gpu(monkeypatch, operator, dtype):
    """With fake tensors: torch decides by the device that a tensor says it is on. On both of our ways."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    import fusedops.runtime.backend as backend

    enabled, half = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.float16)
    real = operator.make("cpu", dtype, 3)
    try:
        with FakeTensorMode(), ExitStack() as stack:
            tensors = [torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in real]
            stack.enter_context(pretend(TARGETS["sm_90"]))
            if "attention" in operator.name:
                # torch's own operator asks a driver which of its kernels to take: autocast's list says 16 bits.
                expected = [torch.float16]
            else:
                expected = [result.dtype for result in floating(operator.replaces(*tensors))]
                with fusedops.backend("torch"):
                    assert [result.dtype for result in floating(operator.function(*tensors))] == expected
            monkeypatch.setattr(backend, "_all_device_reasons", lambda *_: [])
            monkeypatch.setattr(backend, "_running", {})
            with fusedops.backend("triton"):
                assert [result.dtype for result in floating(operator.function(*tensors))] == expected
    finally:
        torch.set_autocast_enabled("cuda", enabled)
        torch.set_autocast_dtype("cuda", half)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    "operator",
    [o for o in REPLACING if o.name in ("linear:gelu", "gated_linear", "attention", "rms_norm_linear")],
    ids=str,
)
def test_values_are_as_near_as_torchs(runner, operator, dtype):
    tensors = operator.make(runner.device, torch.float32, 9)
    exact = operator.replaces(*(t.double() for t in tensors))
    with torch.autocast(runner.device.type, dtype=dtype):
        check_error(operator.function(*tensors), exact, operator.replaces(*tensors))


def test_weights_are_cast_once_or_not_at_all(runner):
    """autocast's cache of cast weights: on or off, the gradient reaches the float32 parameter."""
    weight = torch.randn(12, 16, device=runner.device, requires_grad=True)
    x = torch.randn(3, 16, device=runner.device)
    grads = []
    for cached in (True, False):
        with torch.autocast(runner.device.type, dtype=torch.bfloat16, cache_enabled=cached):
            y = fusedops.linear(x, weight) + fusedops.linear(x, weight, None, "relu")
        grads.append(torch.autograd.grad(y.float().sum(), weight)[0])
    assert grads[0].dtype == torch.float32
    torch.testing.assert_close(*grads, rtol=2e-2, atol=2e-2)  # torch's cache adds the two gradients up in 16 bits


@pytest.mark.parametrize(
    "operator", [o for o in REPLACING if o.name in ("linear:gelu", "layer_norm", "attention")], ids=str
)
def test_compiled_under_autocast(runner, operator):
    torch._dynamo.reset()
    tensors = operator.inputs(runner.device, torch.float32, 3)
    compiled = torch.compile(operator.function, fullgraph=True, backend="aot_eager")
    for contexts in (CONTEXTS["bfloat16"], CONTEXTS["disabled inside"]):
        with ExitStack() as stack:
            autocast(stack, runner.device.type, contexts)
            expected, found = operator.function(*tensors), compiled(*tensors)
        assert torch.equal(found, expected)
        assert found.dtype == expected.dtype
        leaves = [tensors[place] for place in operator.differentiable]
        for a, b in zip(*(torch.autograd.grad(y.float().sum(), leaves) for y in (found, expected)), strict=True):
            assert torch.equal(a, b)


# ---- GradScaler -----------------------------------------------------------------------------------------------------


def build(device):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        fusedops.nn.LayerNorm(16), fusedops.nn.MLP(16, 32), fusedops.nn.RMSNorm(16), fusedops.nn.Linear(16, 4)
    ).to(device)


def plain_of(model):
    """The same of torch's modules."""
    norm, mlp, rms, last = copy.deepcopy(model)
    torchs = torch.nn.Sequential(
        torch.nn.LayerNorm(16), torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16), torch.nn.RMSNorm(16),
        torch.nn.Linear(16, 4),
    ).to(next(model.parameters()).device)  # fmt: skip
    states = norm.state_dict(), mlp.fc1.state_dict(), {}, mlp.fc2.state_dict(), rms.state_dict(), last.state_dict()
    for module, state in zip(torchs, states, strict=True):
        module.load_state_dict(state)
    return torchs


def train(model, x, scaler, poisoned=()):
    """The parameters after each step, and the scale."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast(x.device.type, dtype=torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        if step in poisoned:
            next(model.parameters()).grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        seen.append(([p.detach().clone() for p in model.parameters()], scaler.get_scale()))
    return seen


def test_grad_scaler(runner):
    """Steps with infinite gradients are skipped and lower the scale, the others raise it, as with torch's modules."""
    model = build(runner.device)
    plain = plain_of(model)
    x = torch.randn(8, 16, device=runner.device)
    start = [p.detach().clone() for p in model.parameters()]
    made = {"init_scale": 1024.0, "growth_interval": 1}
    found, expected = (
        train(m, x, torch.amp.GradScaler(runner.device.type, **made), poisoned=(1,)) for m in (model, plain)
    )
    assert [scale for _, scale in found] == [scale for _, scale in expected] == [2048.0, 1024.0, 2048.0, 4096.0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][0], found[1][0], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(start, found[-1][0], strict=True))
    for a, b in zip(found[-1][0], expected[-1][0], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)


def test_a_scale_that_overflows_is_seen(runner):
    """float16 gradients that grow past 65,504 come out infinite, not as another number."""
    model = build(runner.device)
    x = torch.randn(8, 16, device=runner.device)
    seen = train(model, x, torch.amp.GradScaler(runner.device.type, init_scale=2.0**40, growth_interval=100))
    assert seen[0][1] < 2.0**40
    assert all(p.isfinite().all() for p in seen[-1][0])
