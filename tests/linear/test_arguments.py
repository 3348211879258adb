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

WRONG_OPTION = {
    "residual is a number": (TypeError, "residual must be a torch.Tensor; got 1.0", {"residual": 1.0}),
    "residual is of another shape": (ValueError, r"residual must be of the output's shape \(2, 4\)", {"residual": B}),
    "residual is elsewhere": (
        ValueError, "residual must be on the device of input", {"residual": X[:, :4].to("meta")}),
    "residual is integral": (TypeError, "residual must be a floating-point", {"residual": torch.ones(2, 4).int()}),
    "dropout_p is above 1": (ValueError, "dropout_p must be a probability", {"dropout_p": 1.5}),
    "dropout_p is NaN": (ValueError, "dropout_p must be a probability", {"dropout_p": float("nan")}),
    "dropout_p is text": (TypeError, "dropout_p must be a number", {"dropout_p": "0.1"}),
    "dropout_p is a bool": (TypeError, "dropout_p must be a number", {"dropout_p": False}),
    "dropout_p is a tensor": (TypeError, "dropout_p must be a number", {"dropout_p": torch.zeros(())}),
    "recompute is None": (TypeError, "recompute must be a bool", {"recompute": None}),
    "out_dtype is text": (TypeError, "out_dtype must be a torch.dtype", {"out_dtype": "float32"}),
    "out_dtype is integral": (ValueError, "out_dtype must be a floating dtype", {"out_dtype": torch.int8}),
    "recompute is a number": (TypeError, "recompute must be a bool; got 1", {"recompute": 1}),
    "fp32_precision is unknown": (ValueError, "fp32_precision must be None or .*'tf32x3'", {"fp32_precision": "fast"}),
    "fp32_precision is a bool": (TypeError, "fp32_precision must be None or", {"fp32_precision": True}),
    "fuse_wgrad_accumulation is text": (
        TypeError, "fuse_wgrad_accumulation must be a bool", {"fuse_wgrad_accumulation": "yes"}),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_OPTION)
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_wrong_option(case, backend):
    error, message, options = WRONG_OPTION[case]
    with fusedops.backend(backend):
        for call in (fusedops.linear, lambda *a, **k: fusedops.explain(fusedops.linear, *a, **k)):
            with pytest.raises(error, match=f"^linear: {message}"):
                call(X, W, B, "gelu", **options)


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


def test_explain_looks_at_the_residual_and_the_result_too(kernel_runner):
    double = torch.ones(2, 4, dtype=torch.float64)
    for options in ({"residual": double}, {"out_dtype": torch.float64}):
        assert any("float64" in r for r in fusedops.explain(fusedops.linear, X, W, **options).reasons)
