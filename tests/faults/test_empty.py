"""No rows, no tokens, no batch: right shapes, zeros, zero gradients."""

from __future__ import annotations

import pytest

from tests.faults.common import DIFFERENTIABLE, gradients_of, outputs_of

# Calls whose sizes the harness derives from the length in a way that nothing is left of.
WITHOUT = {"group_norm", "attention:bool_mask", "attention:document_ids", "grouped_linear", "grouped_linear:gelu"}


@pytest.mark.parametrize("operator", [o for o in DIFFERENTIABLE if str(o) not in WITHOUT], ids=str)
def test_no_rows(runner, operator):
    inputs = operator.inputs(runner.device, length=0)
    outputs = outputs_of(operator, inputs)
    full = outputs_of(operator, operator.inputs(runner.device, length=3))
    for empty, whole in zip(outputs, full, strict=True):
        assert empty.dtype == whole.dtype
        assert empty.dim() == whole.dim()
        assert empty.numel() == 0
    for tensor, gradient in zip(
        [t for t in inputs if t.requires_grad], gradients_of(operator, inputs, outputs), strict=True
    ):
        assert gradient is not None, "None instead of zeros"
        assert gradient.shape == tensor.shape
        assert not gradient.any()
