"""What is kept for the backward: with real tensors, counted as storages that autograd saves."""

from __future__ import annotations

import pytest
import torch

import fusedops
from benchmarks.norm_memory import kept_bytes, kept_storages
from tests.norm_linear.problems import BOTH, tensors

ROWS, WIDTH, OUT = 32, 256, 48


def held(leaves, call):
    """Bytes kept beside the parameters and what the output takes."""
    parameters = {t.untyped_storage()._cdata for t in leaves[1:] if t is not None}
    return sum(size for storage, size in kept_storages(call).items() if storage not in parameters)


@pytest.mark.parametrize("activation", [None, "gelu"], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", BOTH, ids=str)
def test_the_normalised_tensor_is_not_kept(kernel_runner, function, dtype, activation):
    leaves = tensors(kernel_runner, function, (ROWS, WIDTH), OUT, dtype)
    one = ROWS * WIDTH * dtype.itemsize
    statistics = ROWS * 4 * (2 if function.center else 1)
    preactivation = 0 if activation is None else ROWS * OUT * dtype.itemsize
    assert held(leaves, lambda: function.fused(*leaves, activation)) == one + statistics + preactivation
    assert held(leaves, lambda: function.composed(*leaves, activation)) == 2 * one + statistics + preactivation


@pytest.mark.parametrize("function", BOTH, ids=str)
def test_recompute_shares_the_output_with_the_linear_layer(kernel_runner, function):
    x, norm_weight, norm_bias, weight, _ = leaves = tensors(kernel_runner, function, (ROWS, WIDTH), OUT)
    norm = fusedops.layer_norm if function.center else fusedops.rms_norm
    parameters = (norm_weight, norm_bias) if function.center else (norm_weight,)
    call = lambda: fusedops.linear(norm(x, WIDTH, *parameters, recompute=True), weight)  # noqa: E731
    assert held(leaves, call) == ROWS * WIDTH * 4 + ROWS * 4  # and rstd
    assert x.untyped_storage()._cdata not in kept_storages(call)


def test_two_layers_of_one_input_keep_it_once(kernel_runner):
    """As queries, keys and values read one normalised input."""
    leaves = tensors(kernel_runner, BOTH[0], (ROWS, WIDTH), OUT)
    one = held(leaves, lambda: BOTH[0].fused(*leaves))
    two = held(leaves, lambda: [BOTH[0].fused(*leaves) for _ in range(2)])
    assert two - one == ROWS * 4 * 2


def test_a_block_keeps_the_input_and_what_its_second_layer_reads(kernel_runner):
    mlp = fusedops.nn.LayerNormMLP(WIDTH, 64, device=kernel_runner.device)
    x = torch.randn(ROWS, WIDTH, device=kernel_runner.device, requires_grad=True)
    parameters = sum(
        p.untyped_storage().nbytes() for n, p in mlp.named_parameters() if n not in ("fc1_bias", "fc2_bias")
    )
    # Input, statistics, pre-activation and activation.
    assert kept_bytes(lambda: mlp(x)) - parameters == 4 * ROWS * (WIDTH + 2 + 64 + 64)
