"""torch's own samples of its operators, through fusedops' functions: results, gradients, errors, gradcheck.

``torch.testing._internal.common_methods_invocations.op_db`` holds, for each of torch's operators, the inputs with which
torch tests it: odd shapes, empty ones, broadcasts, expanded and transposed layouts, wrong calls. What is left out, of a
sample or an operator, stands in :data:`EXCEPTIONS` with its reason.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map

import fusedops
from tests.conformance.translations import OURS, addmm_activation
from tests.harness.errors import check_error

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# (operator, what makes a sample one of these, why).
EXCEPTIONS = {
    "nn.functional.normalize": [
        (lambda sample: sample.args_and("p", 2.0) != 2.0, "l2_norm is the norm of p = 2 alone"),
        (lambda sample: sample.input.dim() == 0, "l2_norm takes tensors of one dimension or more"),
    ],
}


class Sample:
    """A call of torch's operator, and what it was made with."""

    def __init__(self, op: Any, made: Any) -> None:
        self.op, self.input, self.args, self.kwargs = op, made.input, tuple(made.args), dict(made.kwargs)

    def args_and(self, name: str, default: Any) -> Any:
        return self.kwargs.get(name, default)

    @property
    def random(self) -> bool:
        """Whether it drops out at random."""
        if self.op.name == "nn.functional.multi_head_attention_forward":
            return self.args[10 - 1] > 0 and self.kwargs.get("training", True)
        return self.kwargs.get("dropout_p", 0.0) > 0

    def __str__(self) -> str:
        def told(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return f"{str(value.dtype)[6:]}{tuple(value.shape)}{tuple(value.stride())}"
            return value

        return f"{self.op.name}({tree_map(told, (self.input, *self.args))}, {tree_map(told, self.kwargs)})"


@functools.cache
def ops() -> dict[str, Any]:
    """torch's operators by name. Imported where a test runs: it takes seconds."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {op.name: op for op in op_db if not op.variant_test_name}


def samples(name: str, dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    op = ops()[name]
    if dtype not in op.dtypes:
        return
    for made in op.sample_inputs(str(device), dtype, requires_grad=True):
        sample = Sample(op, made)
        if not any(belongs(sample) for belongs, _ in EXCEPTIONS.get(name, [])):
            yield sample


def _leaves(call: Any) -> list[torch.Tensor]:
    return [t for t in tree_flatten(call)[0] if isinstance(t, torch.Tensor) and t.requires_grad]


def _as(dtype: torch.dtype, call: Any) -> Any:
    """A copy of a call's arguments, its floating tensors of another dtype and leaves of their own."""

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        return value.detach().to(dtype).requires_grad_(value.requires_grad)

    return tree_map(copy, call)


def _results(function: Any, call: Any, gradients: list[torch.Tensor] | None) -> tuple[list[torch.Tensor], Any]:
    """Outputs, and the gradients of all that requires one."""
    args, kwargs = call
    outputs = [t for t in tree_flatten(function(*args, **kwargs))[0] if isinstance(t, torch.Tensor)]
    if gradients is None:
        return outputs, None
    differentiable = [(o, g.to(o.dtype)) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
    found = torch.autograd.grad(
        [o for o, _ in differentiable], _leaves(call), [g for _, g in differentiable], allow_unused=True
    )
    return [o.detach() for o in outputs], found


# Errors of results of so few elements are a matter of luck (torch's numbers are -9 to 9: most rows of a softmax have
# one weight of 1). So torch's are taken of more calls, with the same numbers in other places.
FEW, MORE = 1000, 16


def _redrawn(call: Any) -> Any:
    """The same call with each tensor's numbers in another order."""

    def drawn(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        order = torch.randperm(value.numel(), device=value.device)
        return value.detach().flatten()[order].reshape(value.shape).requires_grad_(value.requires_grad)

    return tree_map(drawn, call)


def _exact_and_plain(theirs: Any, call: Any) -> tuple[list[torch.Tensor], list[Any], list[Any]]:
    """Gradients of the outputs, drawn; outputs and gradients in float64, and in the call's dtypes."""
    with torch.no_grad():
        outputs, _ = _results(theirs, call, None)
    gradients = [torch.randn_like(o) for o in outputs]
    exact, exact_gradients = _results(theirs, _as(torch.float64, call), gradients)
    plain, plain_gradients = _results(theirs, call, gradients)
    return gradients, [*exact, *exact_gradients], [*plain, *plain_gradients]


def check(ours: Any, theirs: Any, call: Any) -> None:
    """Outputs and gradients by the tests' one rule of error."""
    gradients, exact, plain = _exact_and_plain(theirs, call)
    outputs, found_gradients = _results(ours, call, gradients)
    found = [*outputs, *found_gradients]
    assert len(found) == len(plain)
    others = []
    if any(t is not None and 0 < t.numel() < FEW for t in plain):
        others = [_exact_and_plain(theirs, _redrawn(call))[1:] for _ in range(MORE)]
    for number, (a, e, p) in enumerate(zip(found, exact, plain, strict=True)):
        what = f"output {number}" if number < len(outputs) else f"gradient {number - len(outputs)}"
        assert (a is None) == (p is None), f"{what} is {'missing' if a is None else 'more than torch has'}"
        if a is None:
            continue
        more = [(other[number], others_plain[number]) for other, others_plain in others] if a.numel() < FEW else []
        check_error(a, e, p, gradient=number >= len(outputs), what=what, more=more)


def _composed_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False):
    """The definition in the call's dtype, as the rule has it: on a CPU torch's own computes 16 bits in float32."""
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    if attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(-1) @ value


THEIRS = {"nn.functional.scaled_dot_product_attention": _composed_attention}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name", OURS)
def test_results_and_gradients(runner, name, dtype):
    tried = 0
    for sample in samples(name, dtype, runner.device):
        call = ((sample.input, *sample.args), sample.kwargs)
        if sample.random:
            continue  # test_dropout: other numbers are drawn
        try:
            check(OURS[name], THEIRS.get(name, sample.op.op), call)
        except Exception as error:
            raise AssertionError(f"{sample}: {type(error).__name__}: {error}") from error
        tried += 1
    assert tried or name == "nn.functional.multi_head_attention_forward", "no sample was tried"


def test_multi_head_attention_without_its_dropout(runner):
    """torch's one sample drops half of the weights in training; here in evaluation."""
    name = "nn.functional.multi_head_attention_forward"
    for sample in samples(name, torch.float32, runner.device):
        call = ((sample.input, *sample.args), {**sample.kwargs, "training": False})
        check(OURS[name], sample.op.op, call)


@pytest.mark.parametrize("use_gelu", [False, True], ids=["relu", "gelu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_addmm_with_an_activation(runner, dtype, use_gelu):
    """torch._addmm_activation, of the samples of addmm whose first argument is a bias."""
    tried = 0
    for sample in samples("addmm", dtype, runner.device):
        bias = sample.input
        if bias.dim() != 1 or bias.shape[0] != sample.args[1].shape[1]:
            bias = torch.randn(sample.args[1].shape[1], dtype=dtype, device=runner.device, requires_grad=True)
        call = ((bias, *sample.args), {"use_gelu": use_gelu})

        def composed(bias, mat1, mat2, use_gelu):
            z = torch.addmm(bias, mat1, mat2)
            return torch.nn.functional.gelu(z, approximate="tanh") if use_gelu else z.relu()

        check(addmm_activation, composed, call)
        tried += 1
    assert tried


@pytest.mark.parametrize(
    "name", ["nn.functional.scaled_dot_product_attention", "nn.functional.multi_head_attention_forward"]
)
def test_dropout(runner, name):
    """Shapes, dtypes, the same draw from the same seed, another from the next, gradients that are finite."""
    tried = 0
    for sample in samples(name, torch.float32, runner.device):
        if not sample.random:
            continue
        call = ((sample.input, *sample.args), sample.kwargs)
        drawn = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            outputs, _ = _results(OURS[name], call, None)
            drawn.append(outputs[0].detach())
        plain, _ = _results(sample.op.op, call, None)
        assert [(o.shape, o.dtype) for o in outputs] == [(p.shape, p.dtype) for p in plain]
        assert torch.equal(drawn[0], drawn[1])
        assert not torch.equal(drawn[0], drawn[2])
        _, gradients = _results(OURS[name], call, [torch.ones_like(o) for o in outputs])
        assert all(g is None or g.isfinite().all() for g in gradients)
        tried += 1
    assert tried


# Of the others torch has no wrong calls.
WITH_ERRORS = ("nn.functional.rms_norm", "nn.functional.group_norm", "nn.functional.gelu")


def test_all_wrong_calls_are_tried():
    assert {name for name in OURS if ops()[name].error_inputs_func is not None} == {*WITH_ERRORS}


@pytest.mark.parametrize("name", WITH_ERRORS)
def test_errors(runner, name):
    """What torch refuses is refused, before anything is launched, by an error that tells the argument."""
    for wrong in ops()[name].error_inputs(str(runner.device)):
        sample = wrong.sample_input
        with pytest.raises((TypeError, ValueError), match=r"must|takes|unexpected"):
            OURS[name](sample.input, *sample.args, **sample.kwargs)


@pytest.mark.parametrize("name", OURS)
def test_gradcheck(name):
    """The reference path's gradients in float64, against finite differences."""
    tried = 0
    with fusedops.backend("torch"):
        for sample in samples(name, torch.float64, torch.device("cpu")):
            leaves, structure = tree_flatten(((sample.input, *sample.args), sample.kwargs))
            if sample.random:
                if "training" not in sample.kwargs:
                    continue
                leaves, structure = tree_flatten(((sample.input, *sample.args), {**sample.kwargs, "training": False}))
            wanted = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]

            def function(*tensors, leaves=leaves, structure=structure, wanted=wanted):
                put = list(leaves)
                for index, tensor in zip(wanted, tensors, strict=True):
                    put[index] = tensor
                args, kwargs = torch.utils._pytree.tree_unflatten(put, structure)
                return OURS[name](*args, **kwargs)

            inputs = [leaves[index].detach().double().requires_grad_() for index in wanted]
            assert torch.autograd.gradcheck(function, inputs, fast_mode=True, atol=1e-5)
            tried += 1
    assert tried
