"""A wrong argument raises an error that names it, on every backend, before any launch."""

from __future__ import annotations

import pytest
import torch

import fusedops

X = torch.ones(2, 8)
N = torch.ones(8)
W = torch.ones(4, 8)
B = torch.ones(4)

# Keywords that replace right ones.
WRONG = {
    "input is a list": (TypeError, "input must be a torch.Tensor; got", {"input": [1.0]}),
    "input is integral": (TypeError, "input must be a floating-point tensor .*; got a int64", {"input": X.long()}),
    "input is a scalar": (ValueError, "input must be of at least one dimension", {"input": torch.tensor(1.0)}),
    "norm_weight is a number": (TypeError, "norm_weight must be a torch.Tensor; got 1.0", {"norm_weight": 1.0}),
    "norm_weight is integral": (TypeError, "norm_weight must be a floating-point", {"norm_weight": N.int()}),
    "norm_weight is too short": (ValueError, r"norm_weight must be of shape \(8,\), 8 being", {"norm_weight": B}),
    "norm_weight is a matrix": (ValueError, r"norm_weight must be of shape \(8,\)", {"norm_weight": X}),
    "norm_weight is elsewhere": (ValueError, r"norm_weight must be on the device", {"norm_weight": N.to("meta")}),
    "weight is None": (TypeError, "weight must be a torch.Tensor; got None", {"weight": None}),
    "weight is transposed": (ValueError, r"weight must be of shape \(out_features, 8\)", {"weight": W.t()}),
    "weight is narrower": (TypeError, r"weight must be of input's dtype \(torch.float32\)", {"weight": W.half()}),
    "weight is elsewhere": (ValueError, "weight must be on the device of input", {"weight": W.to("meta")}),
    "bias is too long": (ValueError, r"bias must be of shape \(4,\)", {"bias": N}),
    "bias is narrower": (TypeError, "bias must be of input's dtype", {"bias": B.half()}),
    "activation is unknown": (ValueError, "activation must be None or .*; got 'swish'", {"activation": "swish"}),
    "activation is a function": (TypeError, "activation must be None or one of", {"activation": torch.relu}),
    "eps is a string": (TypeError, "eps must be a number", {"eps": "small"}),
    "eps is a bool": (TypeError, "eps must be a number", {"eps": True}),
}  # fmt: skip
OF_LAYER_NORM = {
    "norm_bias is a list": (TypeError, "norm_bias must be a torch.Tensor", {"norm_bias": [1]}),
    "norm_bias is too short": (ValueError, r"norm_bias must be of shape \(8,\)", {"norm_bias": B}),
    "eps is None": (TypeError, "eps must be a number", {"eps": None}),
}
OF_RMS_NORM = {
    "weight_offset is a string": (TypeError, "weight_offset must be a number", {"weight_offset": "1"}),
}
CASES = [
    pytest.param(function, *case, id=f"{function.__name__}-{name}")
    for function, of_one in ((fusedops.layer_norm_linear, OF_LAYER_NORM), (fusedops.rms_norm_linear, OF_RMS_NORM))
    for name, case in {**WRONG, **of_one}.items()
]


def right(function):
    arguments = {"input": X, "norm_weight": N, "weight": W, "bias": B}
    return {**arguments, "norm_bias": N} if function is fusedops.layer_norm_linear else arguments


@pytest.mark.parametrize(("function", "error", "message", "wrong"), CASES)
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_wrong_argument(function, error, message, wrong, backend):
    arguments = {**right(function), **wrong}
    with fusedops.backend(backend):
        for call in (function, lambda **k: fusedops.explain(function, **k)):
            with pytest.raises(error, match=f"^{function.__name__}: {message}"):
                call(**arguments)


@pytest.mark.parametrize("function", [fusedops.layer_norm_linear, fusedops.rms_norm_linear], ids=lambda f: f.__name__)
def test_explain_lists_every_reason(function):
    arguments = {**right(function), "input": X.double(), "weight": W.double(), "bias": None}
    reasons = fusedops.explain(function, **arguments).reasons
    assert any("float64" in reason for reason in reasons)
    arguments = {**right(function), "norm_weight": N.double()}
    assert any("float64" in reason for reason in fusedops.explain(function, **arguments).reasons)


def test_explain_names_the_kernels(kernel_runner):
    arguments = {name: t.to(kernel_runner.device) for name, t in right(fusedops.layer_norm_linear).items()}
    assert fusedops.explain(fusedops.layer_norm_linear, **arguments).backend == "triton"


def test_float64_is_refused_where_the_kernels_are_demanded(kernel_runner):
    x = torch.ones(2, 8, dtype=torch.float64, device=kernel_runner.device)
    with pytest.raises(fusedops.BackendError, match=r"layer_norm_linear: .*float64"):
        fusedops.layer_norm_linear(x, None, None, x)
