"""Random methods, patched and plain: the same results, gradients, calls in the same order, and random numbers."""

from __future__ import annotations

import importlib.util
import random

import pytest
import torch
from torch import nn

import fusedops
from tests.patching.models import twin

HEAD = """
import torch
import torch.nn.functional as F
from tests.patching.test_random_methods import Parts


class Method(Parts):
    def forward(self, x):
"""
NAMES = ("x", "h", "y", "g")
LINEARS = ("self.fc1", "self.fc2", "self.fc3")
ACTIVATIONS = ("self.act", "self.relu", "F.silu", "torch.tanh")
OTHERS = ("self.norm", "self.drop", "self.seen", "self.bn")


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = (nn.Linear(6, 6) for _ in range(3))
        self.both = nn.Linear(6, 12)
        self.act, self.relu = nn.GELU(), nn.ReLU(inplace=True)
        self.norm, self.drop, self.bn, self.seen = nn.LayerNorm(6), nn.Dropout(0.5), nn.BatchNorm1d(6), nn.Identity()
        self.flag = True


def call(pick, inner):
    kind = pick((LINEARS, ACTIVATIONS, OTHERS))
    return f"{pick(kind)}({inner})"


def expression(pick, known, depth=0):
    if depth > 2 or pick((True, False, False)):
        return pick(known)
    inner = expression(pick, known, depth + 1)
    form = pick(("call", "call", "call", "gate", "sum", "scaled", "choice", "method"))
    if form == "call":
        return call(pick, inner)
    if form == "gate":
        name = pick(known)
        factors = [f"{pick(ACTIVATIONS)}({pick(LINEARS)}({name}))", f"{pick(LINEARS)}({name})"]
        return f"({' * '.join(factors if pick((True, False)) else factors[::-1])})"
    if form == "choice":
        return f"({call(pick, inner)} if self.flag else {pick(known)})"
    if form == "method":
        return f"{pick(LINEARS)}({inner}).{pick(('relu', 'sigmoid'))}()"
    return f"({inner} + {pick(known)})" if form == "sum" else f"({inner} * 0.5)"


def block(pick, known, indent, depth=0):
    lines = []
    for _ in range(pick((2, 3, 4, 5))):
        form = pick(
            ("assign",) * 9 + ("halves", "halves", "twice", "if", "loop", "try", "with", "add", "del", "inside")
        )
        target = pick(NAMES)
        if form == "halves":
            lines.append(f"{indent}g, h = self.both({pick(known)}).chunk(2, dim=-1)")
            known += [name for name in ("g", "h") if name not in known]
            lines.append(f"{indent}y = {pick(ACTIVATIONS)}(g) * h")
            target = "y"
        elif form == "twice":
            lines += [f"{indent}{target} = {pick(LINEARS)}({pick(known)})", f"{indent}_ = {pick(OTHERS)}({target})"]
        elif form in ("if", "loop", "try", "with") and depth < 2:
            opening = {
                "if": "if self.flag:",
                "loop": "for _ in range(2):",
                "try": "try:",
                "with": "with torch.enable_grad():",
            }
            lines.append(f"{indent}{opening[form]}")
            lines += block(pick, list(known), indent + "    ", depth + 1)
            if form == "try":
                lines += [f"{indent}finally:", f"{indent}    {pick(known)}.shape"]
            continue
        elif form == "add":
            lines.append(f"{indent}{target} = {expression(pick, known)} + 0")
            lines.append(f"{indent}{target} += 1")
        elif form == "del":
            lines += [f"{indent}z = {pick(LINEARS)}({pick(known)})", f"{indent}{target} = {pick(ACTIVATIONS)}(z)"]
            lines.append(f"{indent}del z")
        elif form == "inside":
            lines += [f"{indent}w = {pick(LINEARS)}({pick(known)})", f"{indent}{target} = (lambda: self.act(w) + w)()"]
        else:
            lines.append(f"{indent}{target} = {expression(pick, known)}")
        if target not in known:
            known.append(target)
    return lines


def written(seed, folder):
    """A module whose forward is random, in a file."""
    pick = random.Random(seed).choice
    known = ["x"]
    lines = block(pick, known, " " * 8)
    lines.append(f"        return {expression(pick, known)} + {known[-1]}")
    path = folder / f"method_{seed}.py"
    path.write_text(HEAD + "\n".join(lines) + "\n")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Method, path


def observed(model, hooked):
    """What a training step shows: results, gradients, random numbers drawn, and the order of the parts' calls."""
    order = []
    if hooked:
        for name, part in model.named_children():
            part.register_forward_hook(lambda *_, name=name: order.append(name))
    torch.manual_seed(1)
    leaf = torch.randn(3, 6, requires_grad=True)
    y = model(leaf * 1)
    y.square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return [y.detach(), leaf.grad, model.bn.running_mean.clone(), gradients, torch.rand(2)], order


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_a_random_method_does_what_it_did(first, tmp_path, calls):
    fused = 0
    for seed in range(first, first + 20):
        kind, path = written(seed, tmp_path)
        torch.manual_seed(seed)
        plain = kind()
        try:
            observed(twin(plain), False)
        except RuntimeError:
            continue  # autograd refuses what it changes in place
        for hooked in (False, True):
            patched, reference = twin(plain), twin(plain)
            fusedops.patch(patched)
            calls.clear()
            (ours, order), (expected, expected_order) = observed(patched, hooked), observed(reference, hooked)
            torch.testing.assert_close(
                ours, expected, rtol=1e-4, atol=1e-4, msg=lambda text, p=path: text + p.read_text()
            )
            assert order == expected_order, path.read_text()
            fused += 0 if hooked else calls["linear"] + calls["gated_linear"]
    assert fused > 10
