"""Random calls of every public function: right, within bounds, leaving inputs alone, the same twice, on any device.

``FUSEDOPS_FUZZ=10`` draws ten times as many (what runs at night); the draws of one number are always the same.
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch._subclasses import FakeTensorMode

import fusedops
from tests.fuzz.calls import FUNCTIONS, Call, allowed, calls
from tests.fuzz.guards import Guarded, Unchanged

EXAMPLES = 12 * int(os.environ.get("FUSEDOPS_FUZZ", "1"))
drawn = settings(
    max_examples=EXAMPLES,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
)


def _exact(call: Call):
    """The definition in float64, and torch's operators in the call's own dtypes; with gradients."""
    with fusedops.backend("torch"):
        double = call.mapped(
            lambda t: t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t
        )
        plain = call.mapped(lambda t: t.detach().clone().requires_grad_(t.requires_grad))
        return (double, call.outputs(double)), (plain, call.outputs(plain))


def _gradients(outputs, leaves, incoming):
    pairs = [(o, g) for o, g in zip(outputs, incoming, strict=True) if o.requires_grad]
    wanted = [t for t in leaves if t is not None and t.requires_grad]
    if not pairs or not wanted:
        return []
    found = torch.autograd.grad([o for o, _ in pairs], wanted, [g.to(o.dtype) for o, g in pairs], allow_unused=True)
    return list(found)


def _same(found, exact, plain, what):
    assert (found is None) == (plain is None), f"{what}: {'none' if found is None else 'one'}, unlike torch's"
    if found is None:
        return
    assert (found.shape, found.dtype) == (plain.shape, plain.dtype), f"{what}: {found.shape}, {found.dtype}"
    number = exact.isfinite()
    assert torch.equal(found.isnan(), exact.isnan()), f"{what}: NaN in other places"
    assert torch.equal(found.isinf(), exact.isinf()), f"{what}: infinities in other places"
    error = (found.double() - exact)[number].abs()
    if error.numel():
        limit = allowed(exact[number], plain[number])
        assert float(error.max()) <= limit, f"{what}: wrong by {float(error.max()):.3e}; allowed {limit:.3e}"


@pytest.mark.interpreter
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_random_call(name, kernel_runner):
    if kernel_runner.device.type != "cpu":
        pytest.skip("the calls are drawn on the CPU: of a GPU the operators' own tests are")

    @drawn
    @given(calls(name))
    def holds(call: Call) -> None:
        kept, guarded = Unchanged(call.given()), Guarded()
        with guarded:
            outputs = call.outputs()
        incoming = [torch.randn_like(o) for o in outputs]
        incoming_kept = Unchanged(incoming)
        with guarded:
            gradients = _gradients(outputs, call.tensors.values(), incoming)
        guarded.check()
        kept.check()
        incoming_kept.check()

        (double, exact), (plain, torch_outputs) = _exact(call)
        exact_gradients = _gradients(exact, double, incoming)
        torch_gradients = _gradients(torch_outputs, plain, incoming)
        for i, (f, e, p) in enumerate(zip(outputs, exact, torch_outputs, strict=True)):
            _same(f.detach(), e.detach(), p.detach(), f"output {i}")
        for i, (f, e, p) in enumerate(zip(gradients, exact_gradients, torch_gradients, strict=True)):
            _same(f, e, p, f"gradient {i}")

        again = call.outputs()
        assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(outputs, again, strict=True))
        for a, b in zip(gradients, _gradients(again, call.tensors.values(), incoming), strict=True):
            assert a is None or torch.equal(a, b) or a.isnan().any()

    holds()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_random_call_without_numbers(name):
    """Meta and fake tensors: the same shapes and dtypes, and nothing is computed."""

    @drawn
    @given(calls(name))
    def holds(call: Call) -> None:
        with fusedops.backend("torch"):
            shapes = [(o.shape, o.dtype) for o in call.outputs()]
        if name not in ("grouped_linear", "attention_varlen"):  # whose torch form reads where the groups end
            assert [(o.shape, o.dtype) for o in call.outputs(call.mapped(lambda t: t.detach().to("meta")))] == shapes
            mode = FakeTensorMode()
            fake = call.mapped(lambda t: mode.from_tensor(t.detach()))
            with mode:
                assert [(o.shape, o.dtype) for o in call.outputs(fake)] == shapes

    holds()
