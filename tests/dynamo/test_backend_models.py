"""torch.compile(..., backend="fusedops") of whole models that nobody patched."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fusedops
import fusedops.dynamo
from tests.harness.errors import check_error

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"vocab_size": 64, "max_position_embeddings": 32}
LLAMA = SIZES | {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 1}


def llama():
    return transformers.LlamaModel(transformers.LlamaConfig(**LLAMA, num_key_value_heads=2))


def gpt2():
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, n_positions=32)
    return transformers.GPT2Model(config)


def bert():
    return transformers.BertModel(transformers.BertConfig(**LLAMA), add_pooling_layer=False)


# Per layer and model: what a reader of their code expects.
MODELS = {
    "llama": (llama, {"rms_norm": 1, "add_rms_norm": 2, "gated_linear": 1, "scaled_dot_product_attention": 1}),
    "gpt2": (gpt2, {"layer_norm": 1, "add_layer_norm": 2, "linear": 1, "scaled_dot_product_attention": 1}),
    "bert": (bert, {"layer_norm": 1, "add_layer_norm": 2, "linear": 1, "scaled_dot_product_attention": 1}),
}


def results(model, call, tokens):
    """The last hidden state and every parameter's gradient."""
    out = call(input_ids=tokens).last_hidden_state
    return [out, *torch.autograd.grad(out.square().sum(), list(model.parameters()), allow_unused=True)]


def compare(build, tokens, device, **options):
    torch.manual_seed(0)
    model = build().to(device).eval()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="fusedops", **options)
    ours, plain = (results(model, call, tokens) for call in (compiled, model))
    calls = Counter(entry.function.removeprefix("fusedops.") for entry in fusedops.dynamo.last_report().replaced)
    exact = results(model.double(), model, tokens)
    names = ["output", *(name for name, _ in model.named_parameters())]
    for name, a, b, c in zip(names, ours, exact, plain, strict=True):
        if a is not None:
            # Beyond one operator, errors of both are sums of many: the worst elements need not be the same ones.
            assert_near(a, b, c, name)
    return calls


def assert_near(ours, exact, plain, name):
    error, theirs = ((t.double() - exact.double()).norm() for t in (ours, plain))
    assert error <= 2 * theirs + 1e-6 * exact.double().norm(), (name, float(error), float(theirs))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers(kernel_runner, name):
    build, expected = MODELS[name]
    tokens = torch.randint(0, 64, (2, 7), device=kernel_runner.device)
    calls = compare(build, tokens, kernel_runner.device, options={"inner": "aot_eager"}, fullgraph=True)
    assert calls == expected, fusedops.dynamo.last_report()
    assert not fusedops.dynamo.last_report().left


class Mixer(torch.nn.Module):
    """Layers that only their code tells."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.rand(16))
        self.up = torch.nn.Linear(16, 24)
        self.down = torch.nn.Linear(24, 16)

    def forward(self, x):
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale
        z = self.up(y)
        return x + self.down(z * torch.sigmoid(1.702 * z))


def test_handed_on_to_inductor(kernel_runner):
    torch.manual_seed(0)
    model = Mixer().to(kernel_runner.device)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="fusedops", options={"max_autotune": False})
    x = torch.randn(2, 5, 16, device=kernel_runner.device, requires_grad=True)
    out, plain = compiled(x), model(x)
    assert [e.function for e in fusedops.dynamo.last_report().replaced] == ["fusedops.rms_norm", "fusedops.linear"]
    exact = Mixer().to(kernel_runner.device).double()
    exact.load_state_dict(model.state_dict())
    check_error(out, exact(x.double()), plain)
    leaves = [x, *model.parameters()]
    grads = [torch.autograd.grad(y.square().sum(), leaves) for y in (out, plain)]
    wanted = torch.autograd.grad(exact(x.double()).square().sum(), [x, *exact.parameters()])
    for a, b, c in zip(grads[0], wanted, grads[1], strict=True):
        check_error(a, b.double(), c, gradient=True)


def test_an_installed_package_is_found_by_its_entry_point(tmp_path):
    """torch imports the backend when its name is asked for, and not before."""
    project = (ROOT / "pyproject.toml").read_text()
    entry = re.search(r"\[project\.entry-points\.torch_dynamo_backends\]\n(.*)\n", project)[1].replace('"', "")
    installed = tmp_path / "fusedops-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: fusedops\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(f"[torch_dynamo_backends]\n{entry}\n")
    code = """
import sys, torch, fusedops
assert "torch._dynamo" not in sys.modules and "fusedops.dynamo" not in sys.modules
assert torch.compile(torch.relu, backend="fusedops", options={"inner": "eager"})(torch.tensor(-1.0)) == 0
assert fusedops.dynamo.last_report() is not None
"""
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, check=True)


def test_a_graph_break_gives_two_reports(kernel_runner):
    def function(x):
        x = F.layer_norm(x, (16,))
        torch._dynamo.graph_break()
        return F.rms_norm(x, (16,))

    torch._dynamo.reset()
    x = torch.randn(3, 16, device=kernel_runner.device)
    compiled = torch.compile(function, backend="fusedops", options={"inner": "aot_eager"})
    torch.testing.assert_close(compiled(x), function(x))
    assert [e.function for e in fusedops.dynamo.last_report().replaced] == ["fusedops.rms_norm"]
