"""``patch(model, check=...)``: runs before and after, reports the difference, leaves no trace."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fusedops
from fusedops.patching import chains
from tests.patching.models import MLP, block, classes, gpt2, inputs

X = torch.linspace(-2, 2, 16).view(2, 8)


def test_reports_the_largest_difference(monkeypatch):
    monkeypatch.setattr(chains, "linear", lambda x, w, b, a: nn.functional.gelu(nn.functional.linear(x, w, b)) + 0.25)
    model = nn.Sequential(nn.Linear(8, 4), nn.GELU())
    expected = model(X)
    check = fusedops.patch(model, check=(X,)).check
    assert check.max_abs_error == pytest.approx(0.25)
    assert check.max_abs_value == pytest.approx(expected.abs().max().item())
    assert check.where == "output"
    assert check.tensors == 1


@pytest.mark.parametrize(
    "form",
    [
        lambda batch: batch,
        lambda batch: ((), batch),
        lambda batch: ((batch["input_ids"],), {"attention_mask": batch["attention_mask"]}),
        lambda batch: (batch["input_ids"],),
        lambda batch: batch["input_ids"],
    ],
    ids=["keywords", "both, empty", "both", "positional", "a tensor"],
)
def test_forms_of_inputs(form):
    model = gpt2()
    report = fusedops.patch(model, check=form(inputs(model)))
    assert report.check.max_abs_error < 1e-5
    assert report.check.where == "output.logits"
    assert "check: largest difference" in str(report)


def test_other_forms_are_refused():
    model = block()
    for wrong in ([X], 3, "x"):
        with pytest.raises(TypeError, match=r"patch: check must be a tuple of arguments, .*; got (list|int|str)"):
            fusedops.patch(model, check=wrong)
    assert type(model[2]) is nn.LayerNorm


def test_no_trace_is_left():
    model = MLP().train()
    model.up.eval()
    flags = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    x = X.clone().requires_grad_()
    report = fusedops.patch(model, check=(x,))
    assert report.check.max_abs_error < 1e-6  # in evaluation mode: no dropout
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == flags
    assert torch.equal(x, X)
    assert x.grad is None
    assert all(p.grad is None for p in model.parameters())


class Returns(nn.Module):
    """Returns what ``make(normed)`` makes of a norm's output."""

    def __init__(self, make):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.make = make

    def forward(self, x):
        return self.make(self.norm(x), type(self.norm) is not nn.LayerNorm)


BROKEN = {
    "NaN": lambda y, patched: y / 0 * 0 if patched else y,
    "infinity": lambda y, patched: y / 0 if patched else y,
    "shape": lambda y, patched: y[:1] if patched else y,
    "dtype": lambda y, patched: y.double() if patched else y,
    "structure": lambda y, patched: (y, y) if patched else y,
    "keys": lambda y, patched: {"b" if patched else "a": y},
    "no tensor": lambda y, patched: None if patched else y,
    "integers": lambda y, patched: {"y": y, "n": torch.tensor(int(patched))},
}


@pytest.mark.parametrize("make", BROKEN.values(), ids=BROKEN)
def test_a_broken_output_puts_everything_back(make):
    model = Returns(make)
    before = classes(model)
    with pytest.raises(fusedops.PatchError, match="check: "):
        fusedops.patch(model, check=(X,))
    assert classes(model) == before


def test_a_model_that_fails_when_patched_is_put_back():
    def make(y, patched):
        if patched:
            raise RuntimeError("no")
        return y

    model = Returns(make).train()
    with pytest.raises(RuntimeError, match="no"):
        fusedops.patch(model, check=(X,))
    assert type(model.norm) is nn.LayerNorm
    assert model.training


def test_a_model_without_tensors_cannot_be_checked():
    with pytest.raises(fusedops.PatchError, match="returned no tensor"):
        fusedops.patch(Returns(lambda y, patched: 3), check=(X,))


def test_equal_infinities_and_nans_are_no_difference():
    def make(y, patched):
        return torch.stack([y, torch.full_like(y, torch.nan), torch.full_like(y, -torch.inf)])

    assert fusedops.patch(Returns(make), check=(X,)).check.max_abs_error < 1e-6


def test_nested_outputs_and_buffers_that_are_reused():
    class Reuses(Returns):
        def __init__(self):
            super().__init__(None)
            self.register_buffer("out", torch.zeros(2, 8))

        def forward(self, x):
            self.out.copy_(self.norm(x))
            return {"a": [self.out, (self.out * 2,)], "n": 3, "empty": x[:0]}

    report = fusedops.patch(Reuses(), check=(X,))
    assert report.check.tensors == 3
    assert report.check.max_abs_error < 1e-5


def test_inputs_that_the_model_changes_are_the_same_in_both_runs():
    model = gpt2()
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    ids = inputs(model)["input_ids"]
    report = fusedops.patch(model, check=((ids,), {"cache": cache, "use_cache": True}))
    assert report.check.max_abs_error < 1e-5
    assert cache.get_seq_length() == 0
