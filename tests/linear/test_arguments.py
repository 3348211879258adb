"""A wrong argument raises an error that names it, on every backend, before any launch."""

from __future__ import annotations

import pytest
import torch

import fusedops

X = torch.ones(2, 8)
W = torch.ones(4, 8)
B = torch.ones(4)
HALF = torch.ones(4, 8, dtype=torch.bfloat16)
DOUBLE = torch.ones(4, 8, dtype=torch.float64)

WRONG = {
    "input is a list": (TypeError, "input must be a torch.Tensor; got", ([1.0], W)),
    "input is integral": (TypeError, "input must be a floating-point tensor .*; got a int64", (X.long(), W)),
    "input is sparse": (TypeError, "input must be a strided tensor", (X.to_sparse(), W)),
    "input is a scalar": (ValueError, "input must be of at least one dimension", (torch.tensor(1.0), W)),
    "weight is None": (TypeError, "weight must be a torch.Tensor; got None", (X, None)),
    "weight is integral": (TypeError, "weight must be a floating-point tensor", (X, W.int())),
    "weight has one dimension": (ValueError, r"weight must be of shape \(out_features, 8\)", (X, W[0])),
    "weight has three dimensions": (ValueError, r"weight must be of shape \(out_features, 8\)", (X, W[None])),
    "weight is transposed": (ValueError, r"weight must be of shape .*; got a float32 .* \(8, 4\)", (X, W.t())),
    "weight is elsewhere": (ValueError, r"weight must be on the device of input \(cpu\)", (X, W.to("meta"))),
    "weight is narrower": (TypeError, r"weight must be of input's dtype \(torch.float32\)", (X, HALF)),
    "weight is wider": (TypeError, r"weight must be of input's dtype \(torch.float32\)", (X, DOUBLE)),
    "weight is of the other 16 bits": (TypeError, "weight must be of input's dtype", (X.half(), HALF)),
    "bias is a number": (TypeError, r"bias must be a torch.Tensor; got 1.0", (X, W, 1.0)),
    "bias is a matrix": (ValueError, r"bias must be of shape \(4,\)", (X, W, B[None])),
    "bias is too short": (ValueError, r"bias must be of shape \(4,\)", (X, W, B[:1])),
    "bias is narrower": (TypeError, "bias must be of input's dtype", (X, W, B.half())),
    "bias is elsewhere": (ValueError, "bias must be on the device of input", (X, W, B.to("meta"))),
    "activation is unknown": (ValueError, "activation must be None or .*; got 'swish'", (X, W, B, "swish")),
    "activation is a function": (TypeError, "activation must be None or one of", (X, W, B, torch.relu)),
    "activation is unhashable": (TypeError, "activation must be None or one of", (X, W, B, ["relu"])),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_wrong_argument(case, backend):
    error, message, args = WRONG[case]
    with fusedops.backend(backend):
        for call in (fusedops.linear, lambda *a: fusedops.explain(fusedops.linear, *a)):
            with pytest.raises(error, match=f"^linear: {message}"):
                call(*args)


def test_explain_takes_keywords():
    assert fusedops.explain(fusedops.linear, input=X.double(), weight=W.double()).backend == "torch"
    reasons = fusedops.explain(fusedops.linear, input=X.double(), weight=W.double()).reasons
    assert any("float64" in reason for reason in reasons)


def test_float64_is_refused_where_the_kernels_are_demanded(kernel_runner):
    x = torch.ones(2, 8, dtype=torch.float64, device=kernel_runner.device)
    with pytest.raises(fusedops.BackendError, match=r"linear: .*float64"):
        fusedops.linear(x, x)
