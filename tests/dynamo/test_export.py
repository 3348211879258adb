"""torch.export and AOTInductor: a model made of our modules, with a dynamic length."""

from __future__ import annotations

import pytest
import torch

import fusedops
from fusedops.linear import autograd
from tests.harness.tensors import randn

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")


class Block(torch.nn.Module):
    """One operator of each family."""

    def __init__(self, **options):
        super().__init__()
        self.norm = fusedops.nn.RMSNorm(16, **options)
        self.attention = fusedops.nn.MultiheadAttention(16, 2, batch_first=True, **options)
        self.add_norm = fusedops.nn.AddRMSNorm(16, **options)
        self.mlp = fusedops.nn.GatedMLP(16, 24, **options)
        self.groups = fusedops.nn.GroupNorm(2, 16, **options)
        self.head = fusedops.nn.LayerNormLinear(16, 12, activation="gelu", **options)

    def forward(self, x):
        y = self.norm(x)
        y, _ = self.attention(y, y, y, need_weights=False)
        y, x = self.add_norm(y, x)
        x = x + self.mlp(y)
        return self.head(self.groups(x.transpose(1, 2)).transpose(1, 2))


OPERATORS = ("norm", "linear", "attention", "gated_linear", "group_norm", "norm_linear")


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_export_then_run_and_backward(kernel_runner, strict):
    model = Block(device=kernel_runner.device)
    example = randn(2, 5, 16, device=kernel_runner.device)
    shapes = {"x": {1: torch.export.Dim("length", min=2, max=100)}}
    exported = torch.export.export(model, (example,), dynamic_shapes=shapes, strict=strict)
    targets = {str(node.target) for node in exported.graph.nodes}
    assert {f"fusedops.{name}.default" for name in OPERATORS} <= targets
    module = exported.module()
    for length in (5, 9):
        x = randn(2, length, 16, device=kernel_runner.device, requires_grad=True)
        results = []
        for function in (model, module):
            y = function(x)
            parameters = dict(function.named_parameters())  # in another order where the export was strict
            leaves = [x, *(parameters[name] for name, _ in model.named_parameters())]
            results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
        for ours, eager in zip(*results, strict=True):
            assert torch.equal(ours, eager)


def test_a_saved_program_runs_where_there_are_no_kernels(kernel_runner, tmp_path, monkeypatch):
    """The operators in it compute their definition there."""
    model = fusedops.nn.MLP(16, 32, device=kernel_runner.device)
    x = randn(3, 16, device=kernel_runner.device)
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "model.pt2")
    module = torch.export.load(tmp_path / "model.pt2").module()
    assert torch.equal(module(x), model(x))
    monkeypatch.setattr(autograd, "can_launch", lambda tensor: False)
    with fusedops.backend("torch"):
        torch.testing.assert_close(module(x), model(x))


@pytest.mark.interpreter
def test_aot_inductor(tmp_path):
    """The package's code calls our operators by their names, wherever fusedops is imported."""
    model = torch.nn.Sequential(fusedops.nn.RMSNorm(16), fusedops.nn.Linear(16, 12, activation="gelu")).eval()
    shapes = {"input": {1: torch.export.Dim("length", min=2, max=100)}}
    # Neither is of use for so little code; both take longer than all the rest.
    quick = {"aot_inductor.compile_wrapper_opt_level": "O0", "aot_inductor.precompile_headers": False}
    with torch.no_grad(), fusedops.backend("triton"):
        exported = torch.export.export(model, (torch.randn(2, 5, 16),), dynamic_shapes=shapes)
        path = torch._inductor.aoti_compile_and_package(
            exported, package_path=str(tmp_path / "model.pt2"), inductor_configs=quick
        )
        package = torch._inductor.aoti_load_package(path)
        for length in (5, 9):
            x = torch.randn(2, length, 16)
            assert torch.equal(package(x), model(x))
