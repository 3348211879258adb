"""A wrong argument raises an error that names it, on every backend, before any launch."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

import fusedops

X = torch.ones(2, 8)
INTEGERS = torch.ones(8, dtype=torch.int32)
META = torch.ones(8, device="meta")

WRONG = {
    "input is a list": (TypeError, "input must be a torch.Tensor; got", ([1.0], 8), {}),
    "input is integral": (TypeError, "input must be a floating-point tensor .*; got a int64", (X.long(), 8), {}),
    "input is sparse": (TypeError, "input must be a strided tensor", (X.to_sparse(), 8), {}),
    "normalized_shape differs": (ValueError, r"normalized_shape must be the last dimensions of input", (X, 4), {}),
    "normalized_shape is longer": (ValueError, "normalized_shape", (X, (1, 2, 8)), {}),
    "normalized_shape is empty": (ValueError, "normalized_shape must be of at least one dimension", (X, ()), {}),
    "normalized_shape is a float": (TypeError, "normalized_shape must be an int", (X, 8.0), {}),
    "normalized_shape holds a float": (TypeError, "normalized_shape must be an int", (X, (8.5,)), {}),
    "normalized_shape holds an equal float": (TypeError, "normalized_shape must be an int", (X, (8.0,)), {}),
    "normalized_shape is a tensor": (TypeError, "normalized_shape must be an int", (X, torch.tensor([8])), {}),
    "normalized_shape is a bool": (TypeError, "normalized_shape must be an int", (X[:, :1], True), {}),
    "weight is a list": (TypeError, "weight must be a torch.Tensor", (X, 8, [1.0] * 8), {}),
    "weight has another shape": (ValueError, r"weight must be of normalized_shape \(8,\)", (X, 8, torch.ones(4)), {}),
    "weight is integral": (TypeError, "weight must be a floating-point tensor", (X, 8, INTEGERS), {}),
    "weight is elsewhere": (ValueError, r"weight must be on the device of input \(cpu\)", (X, 8, META), {}),
    "eps is a string": (TypeError, "eps must be a number", (X, 8), {"eps": "small"}),
    "eps is a bool": (TypeError, "eps must be a number", (X, 8), {"eps": True}),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("function", [fusedops.layer_norm, fusedops.rms_norm], ids=lambda f: f.__name__)
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_wrong_argument(case, function, backend):
    error, message, args, kwargs = WRONG[case]
    with fusedops.backend(backend):
        for call in (function, lambda *a, **k: fusedops.explain(function, *a, **k)):
            with pytest.raises(error, match=f"^{function.__name__}: {message}"):
                call(*args, **kwargs)


def test_wrong_bias():
    with pytest.raises(ValueError, match=r"^layer_norm: bias must be of normalized_shape \(8,\); got a float32 tensor"):
        fusedops.layer_norm(X, 8, None, torch.ones(2, 8))


def test_wrong_weight_offset():
    with pytest.raises(TypeError, match=r"^rms_norm: weight_offset must be a number; got 'one'"):
        fusedops.rms_norm(X, 8, weight_offset="one")


@pytest.mark.parametrize("function", [fusedops.layer_norm, fusedops.rms_norm], ids=lambda f: f.__name__)
def test_numpys_numbers_are_numbers(runner, function):
    x = torch.randn(2, 8, device=runner.device)
    for eps in (np.float32(0.5), Fraction(1, 2)):
        assert torch.equal(function(x, np.int64(8), eps=eps), function(x, 8, eps=0.5))


def test_any_real_number_is_taken(runner):
    x, weight = torch.randn(2, 8, device=runner.device), torch.randn(8, device=runner.device)
    half = Fraction(1, 2)
    assert torch.equal(
        fusedops.rms_norm(x, 8, weight, weight_offset=half), fusedops.rms_norm(x, 8, weight, None, weight_offset=0.5)
    )
    assert torch.equal(fusedops.l2_norm(x, np.int64(0), half), fusedops.l2_norm(x, 0, 0.5))
    for a, b in zip(*(fusedops.add_rms_norm(x, x, 8, weight, n, weight_offset=n) for n in (half, 0.5)), strict=True):
        assert torch.equal(a, b)
