"""``patch(model, check=...)``: runs before and after, reports the difference, leaves no trace."""

from __future__ import annotations

import dataclasses
from collections import namedtuple

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

import fusedops
from fusedops.patching import check as checking
from fusedops.patching import linears, norms
from tests.patching.models import MLP, block, classes, gpt2, inputs

X = torch.linspace(-2, 2, 16).view(2, 8)


def test_reports_the_largest_difference(monkeypatch):
    monkeypatch.setattr(linears, "linear", lambda x, w, b, a: nn.functional.gelu(nn.functional.linear(x, w, b)) + 0.25)
    model = nn.Sequential(nn.Linear(8, 4), nn.GELU())
    expected = model(X)
    with pytest.warns(UserWarning, match="differ by 0.25 in output"):
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


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
def test_outputs_that_tell_nothing_are_complained_of(value):
    model = Returns(lambda y, patched: torch.full_like(y, value))
    before = classes(model)
    with pytest.warns(UserWarning, match="nothing was compared: every output"):
        report = fusedops.patch(model, check=X)
    assert not report.check.explained
    assert report.check.complaint in str(report)
    fusedops.unpatch(model)
    with pytest.raises(fusedops.PatchError, match="nothing was compared"):
        fusedops.patch(model, check=X, strict=True)
    assert classes(model) == before


def test_one_output_that_tells_is_enough():
    model = Returns(lambda y, patched: (torch.zeros_like(y), y))
    assert fusedops.patch(model, check=X, strict=True).check.complaint is None
    # Zeros that become other numbers are no rounding, though their floor is zero.
    model = Returns(lambda y, patched: torch.full_like(y, float(patched)))
    with pytest.raises(fusedops.PatchError, match="differ by 1 in output, above the noise floor of 0"):
        fusedops.patch(model, check=X, strict=True)


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="notes on exceptions came with Python 3.11")
@pytest.mark.parametrize("state", ["unpatched", "patched"])
def test_a_models_errors_say_when_they_were_raised(state):
    def make(y, patched):
        if patched == (state == "patched"):
            raise RuntimeError("no")
        return y

    with pytest.raises(RuntimeError, match="no") as caught:
        fusedops.patch(Returns(make), check=(X,))
    assert caught.value.__notes__ == [f"raised while patch's check= ran the model, {state}"]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_without_data_cannot_be_checked(device):
    with torch.device("meta"):
        model = block()
    with pytest.raises(fusedops.PatchError, match="shapes and no data"):
        fusedops.patch(model, check=torch.ones(2, 8, device=device))
    assert type(model[2]) is nn.LayerNorm


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


# The noise floor


class Deep(nn.Module):
    """Steps of one dtype, after which their noise is about the root of their number times half a unit in last place."""

    def __init__(self, steps=16):
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(8, 8) for _ in range(steps))
        for step in self.steps:
            nn.init.eye_(step.weight)
            nn.init.zeros_(step.bias)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        for step in self.steps:
            x = step(x)
        return {"plain": x, "normed": self.norm(x)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_floor_is_that_of_the_models_own_dtype(dtype):
    model = Deep().to(dtype)
    observed = checking.observe(model, checking.Inputs.read(X.to(dtype)))
    unit = torch.finfo(dtype).eps * 2  # relative, of the largest value
    assert unit / 2 <= observed.noise["output.plain"] <= 16 * unit
    check = fusedops.patch(model, check=X.to(dtype)).check
    assert check.noise_floor >= torch.finfo(dtype).eps / 2
    assert check.explained


def test_more_steps_have_more_noise():
    short, long = (checking.observe(Deep(n), checking.Inputs.read(X)).noise["output.plain"] for n in (1, 64))
    assert 0 < short < long


def test_the_floor_is_that_of_the_output_with_the_largest_difference(monkeypatch):
    monkeypatch.setattr(norms, "layer_norm", lambda x, *a: nn.functional.layer_norm(x, *a) + 0.25)
    model = Deep()
    noise = checking.observe(model, checking.Inputs.read(X)).noise
    with pytest.warns(UserWarning, match="more than rounding explains"):
        report = fusedops.patch(model, check=X)
    assert report.check.where == "output.normed"
    assert report.check.noise_floor == noise["output.normed"] != noise["output.plain"]
    assert not report.check.explained
    assert "more than rounding explains" in str(report)


def test_a_wrong_result_is_told_from_rounding(monkeypatch):
    # One part in a thousand: no test of a bf16 model by its values would see it.
    monkeypatch.setattr(norms, "layer_norm", lambda x, *a: nn.functional.layer_norm(x, *a) * 1.001)
    with pytest.warns(UserWarning, match="more than rounding explains"):
        report = fusedops.patch(Deep(), check=X)
    with pytest.raises(fusedops.PatchError, match="times the noise floor"):
        fusedops.patch(Deep(), check=X, strict=True)
    assert report.check.max_abs_error > 10 * report.check.noise_floor
    assert not report.check.explained


def test_measuring_noise_leaves_no_trace_and_is_the_same_again():
    model = MLP().train()
    order = []
    handles = [
        model.up.register_forward_pre_hook(lambda *_: order.append("before")),
        model.up.register_forward_hook(lambda *_: order.append("after")),
    ]
    state = torch.get_rng_state()
    inputs = checking.Inputs.read({"x": X})  # by keyword
    first = checking.observe(model, inputs)
    assert torch.equal(torch.get_rng_state(), state)
    assert order == ["before", "after"] * (2 + checking.DRAWS)
    for handle in handles:
        handle.remove()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert model.training
    again = checking.observe(model, inputs)
    assert again.noise == first.noise
    assert torch.equal(again.outputs["output"], first.outputs["output"])


def test_what_rounds_nothing_adds_no_noise():
    model = nn.Sequential(nn.Identity(), nn.Dropout(0.5), nn.Identity())
    assert checking.observe(model, checking.Inputs.read(X)).noise == {"output": 0.0}
    # Then the floor is the output's own rounding.
    check = fusedops.patch(model, check=X).check
    assert check.noise_floor == pytest.approx(2.0 * torch.finfo(torch.float32).eps / 2)


Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Result:
    value: torch.Tensor
    words: str = "words"


class Structured(nn.Module):
    """A leaf that returns every kind of structure."""

    def forward(self, x, *, kind):
        y, n = x * 1.5, torch.arange(3)
        return {
            "tuple": (y, n), "list": [y, None], "namedtuple": Pair(y, n), "dict": {"y": y}, "dataclass": Result(y),
            "output": BaseModelOutput(last_hidden_state=y),
        }[kind]  # fmt: skip


class Calls(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.leaf, self.kind = Structured(), kind

    def forward(self, x):
        return self.leaf(x, kind=self.kind)


@pytest.mark.parametrize("kind", ["tuple", "list", "namedtuple", "dict", "dataclass", "output"])
def test_leaves_that_return_structures(kind):
    noise = checking.observe(Calls(kind), checking.Inputs.read(X)).noise
    assert len(noise) == 1
    assert 0 < max(noise.values()) < 1e-6


def test_attention_that_calls_no_child_is_a_step():
    # nn.MultiheadAttention has a child, out_proj, whose weight it reads without calling it.
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.MultiheadAttention(8, 2)

        def forward(self, x):
            return self.heads(x, x, x)[0]

    assert checking.observe(Attends(), checking.Inputs.read(X)).noise["output"] > 0


def test_masks_stay_finite_and_integers_stay():
    class Masks(nn.Module):
        def forward(self, x):
            return torch.full_like(x, torch.finfo(x.dtype).min), x.long(), torch.full_like(x, -torch.inf)

    observed = checking.observe(nn.Sequential(Masks()), checking.Inputs.read(X))
    assert observed.noise["output[0]"] < torch.finfo(torch.float32).max / 1e6
    assert observed.noise["output[2]"] == 0.0
    assert "output[1]" not in observed.noise


def test_a_model_that_cannot_be_hooked_is_checked_without_a_floor():
    class Fragile(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, x):
            if self.norm._forward_hooks:
                raise RuntimeError("no hooks here")
            return self.norm(x)

    model = Fragile()
    report = fusedops.patch(model, check=X)
    assert report.check.noise_floor is None
    assert report.check.max_abs_error < 1e-6
    assert not model.norm._forward_hooks
    assert "noise floor not measured" in str(report)


def test_outputs_without_floating_point_have_no_floor():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, x):
            return (self.norm(x) > 0).sum()

    assert fusedops.patch(Counts(), check=X).check.noise_floor is None


def test_the_floor_of_a_partly_patched_model(monkeypatch):
    # What was patched before runs unfused while it is hooked: that difference is no noise.
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))
    fusedops.patch(model[:2])
    monkeypatch.setattr(linears, "linear", lambda x, w, b, a: nn.functional.gelu(nn.functional.linear(x, w, b)) + 0.5)
    report = fusedops.patch(model, check=X)
    assert report.check.noise_floor < 1e-5


def test_the_floor_of_a_compiled_model():
    report = fusedops.patch(torch.compile(block(), backend="eager"), check=X)
    assert 0 < report.check.noise_floor < 1e-5
    assert report.check.explained


def test_calls_that_raise_and_are_caught_are_no_steps():
    class Raises(nn.Module):
        def forward(self, x):
            raise ValueError

    class Catches(nn.Module):
        def __init__(self):
            super().__init__()
            self.raises, self.norm = Raises(), nn.LayerNorm(8)

        def forward(self, x):
            try:
                return self.raises(x)
            except ValueError:
                return self.norm(x)

    observed = checking.observe(nn.Sequential(Catches(), nn.Linear(8, 8)), checking.Inputs.read(X))
    assert 0 < observed.noise["output"] < 1e-5


def test_another_path_of_the_original_is_no_noise():
    # In evaluation mode without hooks torch's layer takes a path that computes GELU(tanh) as GELU, 1e-4 away.
    layer = nn.TransformerEncoderLayer(8, 2, 16, activation=nn.GELU("tanh"), batch_first=True)
    with pytest.warns(UserWarning, match="more than rounding explains"):
        check = fusedops.patch(layer, check=X[None]).check
    assert check.noise_floor < 1e-5
    assert check.explained == (check.max_abs_error <= 10 * check.noise_floor)
