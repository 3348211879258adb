"""torch's settings for float32 products and autocast, read when an operator is called."""

from __future__ import annotations

import pytest
import torch

from fusedops.runtime.device import TARGETS, pretend
from fusedops.runtime.precision import autocast_dtype, input_precision, tf32_allowed


class OnCuda:
    """What tf32_allowed reads of a tensor."""

    is_cuda = True

    def __init__(self, dtype):
        self.dtype = dtype


@pytest.fixture(autouse=True)
def _restore():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("setting", ["highest", "high", "medium"])
def test_tf32_follows_the_matmul_precision(setting):
    torch.set_float32_matmul_precision(setting)
    assert tf32_allowed(OnCuda(torch.float32)) == (setting != "highest")
    assert not tf32_allowed(OnCuda(torch.bfloat16))
    assert not tf32_allowed(torch.ones(1))


def test_tf32_follows_the_older_switch():
    for allowed in (True, False):
        torch.backends.cuda.matmul.allow_tf32 = allowed
        assert tf32_allowed(OnCuda(torch.float32)) == allowed


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="this torch has the older switch only")
def test_tf32_follows_the_newer_switch():
    matmul = torch.backends.cuda.matmul
    try:
        for value in ("tf32", "ieee"):
            matmul.fp32_precision = value
            assert tf32_allowed(OnCuda(torch.float32)) == (value == "tf32")
    finally:
        matmul.fp32_precision = "ieee"


@pytest.mark.parametrize("target", TARGETS)
def test_dot_precision_is_tf32_where_it_is_allowed_and_the_device_has_it(target):
    has_tf32 = target.startswith("sm_") and target != "sm_75"
    with pretend(TARGETS[target]):
        assert input_precision(torch.ones(1), True) == ("tf32" if has_tf32 else "ieee")
        assert input_precision(torch.ones(1), False) == "ieee"
        assert input_precision(torch.ones(1)) == "ieee"
    assert input_precision(torch.ones(1), True) == "ieee"


def test_autocast_dtype():
    x = torch.ones(1)
    assert autocast_dtype(x) == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert autocast_dtype(x) == autocast_dtype(x.half()) == torch.bfloat16
        assert autocast_dtype(x.double()) == torch.float64
        assert autocast_dtype(torch.ones(1, device="meta")) == torch.float32
        with torch.autocast("cpu", enabled=False):
            assert autocast_dtype(x) == torch.float32
