# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Your own fused operator, from fusedops' parts
#
# You put an activation of your own into fusedops' matmul kernels, teach `patch` to recognise a class of yours, write attention rules that run
# inside the kernel, and give a kernel of your own what fusedops' have: problems, configurations, a search, a store.
#
# **Needs** half a minute and Triton. Without a GPU kernels run in Triton's interpreter, which executes a kernel's Python step by step on CPU
# tensors.

# %%
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
FOLDER = Path(tempfile.mkdtemp())  # of this tutorial: nothing of yours is touched
os.environ["FUSEDOPS_CACHE_DIR"] = str(FOLDER / "cache")
import matplotlib.pyplot as plt
import triton
import triton.language as tl
from torch import nn

import fusedops
from fusedops.linear import register_activation
from fusedops.patching import register_rule, unregister_rule

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
BLUE, ORANGE, GREY = "#0072B2", "#E69F00", "#DDDDDD"
plt.rcParams.update({"figure.dpi": 90, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})

# %% [markdown]
# ## An activation
#
# `linear` computes its activation in the product's epilogue, and the derivative in the gradients' prologue. One of your own needs both, twice:
# for torch (the CPU, and what tests compare with) and as Triton functions of float32 blocks. Here is softsign, $a(z)=\frac{z}{1+|z|}$,
# $a'(z)=\frac{1}{(1+|z|)^2}$.


# %%
@triton.jit
def softsign(z):
    return z / (1.0 + tl.abs(z))


@triton.jit
def softsign_backward(dy, z):  # dy · a'(z)
    n = 1.0 + tl.abs(z)
    return dy / (n * n)


register_activation(
    "softsign", nn.functional.softsign, lambda z: (1 + z.abs()) ** -2, softsign, softsign_backward, cost=8
)

x, w, b = (torch.randn(*shape, device=device, requires_grad=True) for shape in ((20, 24), (40, 24), (40,)))
y = fusedops.linear(x, w, b, "softsign")
expected = nn.functional.softsign(nn.functional.linear(x, w, b))
torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
g = torch.randn_like(y)
for ours, theirs in zip(torch.autograd.grad(y, (x, w, b), g), torch.autograd.grad(expected, (x, w, b), g), strict=True):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
print(str(fusedops.explain(fusedops.linear, x, w, b, "softsign")).splitlines()[0])
print("value and gradients of linear(..., 'softsign') agree with torch's")

# %% [markdown]
# Every function with an activation has it now: `gated_linear`, `grouped_linear`, `fusedops.nn.Linear(..., activation="softsign")`. Check
# the derivative itself before you train with it; float64 runs on the torch form:

# %%
with fusedops.backend("torch"):
    leaves = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 4), (5, 4), (5,))]
    assert torch.autograd.gradcheck(lambda x, w, b: fusedops.linear(x, w, b, "softsign"), leaves)
print("gradcheck passed")

# %% [markdown]
# ## A rule for `patch`
#
# `patch` finds torch's norms, and classes that compute one as their own. What it cannot know is what a class *means*. Here a block keeps its
# norm and its projection in one module with one weight that is used in both directions:


# %%
class TiedHead(nn.Module):
    """RMS norm and a product with the transposed embedding, written out."""

    def __init__(self, width, tokens):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.embedding = nn.Parameter(torch.randn(tokens, width) / width**0.5)

    def forward(self, hidden):
        wide = hidden.float()
        normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return (self.scale * normal.to(hidden.dtype)) @ self.embedding.T


def fused_head(self, hidden):  # the same parameters, one fused call: the normalised tensor is not kept
    return fusedops.rms_norm_linear(hidden, self.scale, self.embedding, eps=1e-6)


def reasons(module):  # against replacing one
    return [] if module.embedding.dtype == module.scale.dtype else ["scale and embedding have different dtypes"]


register_rule(
    "tied head",
    TiedHead,
    fused_head,
    calls="fusedops.rms_norm_linear",
    reasons=reasons,
    check=lambda module: (torch.randn(2, 3, module.scale.numel(), device=module.scale.device),),
)

model = nn.Sequential(nn.LayerNorm(32), TiedHead(32, 50)).to(device)
hidden = torch.randn(2, 5, 32, device=device)
before = model(hidden)
print(fusedops.patch(model))
torch.testing.assert_close(model(hidden), before, rtol=1e-4, atol=1e-5)

# %% [markdown]
# `check` gives inputs on which the module is run both ways before it is replaced. A rule that is wrong replaces nothing, and the report
# says why:

# %%
unregister_rule("tied head")
fusedops.unpatch(model)
register_rule(
    "wrong",
    TiedHead,
    lambda self, hidden: fusedops.rms_norm_linear(hidden, self.scale, self.embedding, eps=0.1),  # another eps
    calls="fusedops.rms_norm_linear",
    check=lambda module: (torch.randn(2, 3, module.scale.numel(), device=module.scale.device),),
)
report = fusedops.plan(model)
(left,) = [entry for entry in report.left if entry.original == "TiedHead"]
print(left.reason.split(":")[0])
assert len(report.replaced) == 1  # the LayerNorm
unregister_rule("wrong")

# %% [markdown]
# ## Attention rules
#
# A `MaskMod` says which query sees which key, a `ScoreMod` changes scores. They are Triton functions that the kernel calls on its tiles, forward
# and backward. (`args` are pointers to tensors of your own, given as `args=`: here none.) Here: every second key, except nearby; and a bias that grows with the distance, in each head at another rate.


# %%
@triton.jit
def strided(batch, head, i, j, args):
    return ((i - j) % 2 == 0) | (tl.abs(i - j) < 4)


@triton.jit
def distant(score, batch, head, i, j, args):
    return score - 0.05 * (head + 1) * tl.abs(i - j)


@triton.jit
def distant_gradient(gradient, score, batch, head, i, j, args):  # the gradient of the score that came in
    return gradient


def strided_definition(batch, head, i, j):
    return ((i - j) % 2 == 0) | ((i - j).abs() < 4)


mask_mod = fusedops.MaskMod(strided, definition=strided_definition)
score_mod = fusedops.ScoreMod(
    distant, distant_gradient, definition=lambda s, batch, head, i, j: s - 0.05 * (head + 1) * (i - j).abs()
)
q, k, v = (torch.randn(1, 2, 40, 16, device=device, requires_grad=True) for _ in range(3))
out = fusedops.attention(q, k, v, mask_mod=mask_mod, score_mod=score_mod)

i, j = torch.arange(40, device=device)[:, None], torch.arange(40, device=device)
heads = torch.arange(2, device=device)[:, None, None]
scores = q @ k.mT / 4 - 0.05 * (heads + 1) * (i - j).abs()
seen = strided_definition(0, 0, i, j)
expected = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v
torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
g = torch.randn_like(out)
for ours, theirs in zip(
    torch.autograd.grad(out, (q, k, v), g), torch.autograd.grad(expected, (q, k, v), g), strict=True
):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)

fig, axes = plt.subplots(1, 2, figsize=(6.5, 2.8))
axes[0].imshow(seen.cpu(), cmap="Blues", vmax=1.5)
axes[0].set(title="who sees whom", xlabel="key", ylabel="query")
weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)[0, 0].detach().cpu()
axes[1].imshow(weights, cmap="Blues")
axes[1].set(title="weights of head 0", xlabel="key")
fig.tight_layout()
plt.show()
print("output and gradients agree with the definition")

# %% [markdown]
# ## A tuned kernel
#
# A kernel has numbers that decide its speed and not its result. fusedops' tuner takes any kernel that is described to it, in a module that
# its worker processes can import:
#
# * a **problem**: what the best configuration depends on (a NamedTuple);
# * a **configuration**, the space of them, a default, and a function that says why one cannot serve;
# * what it **costs**, for the roofline model;
# * a **trial**: inputs, a run, and torch's results to compare with: a candidate that is wrong never wins.
#
# Here for a softmax over rows:

# %%
module = FOLDER / "tuned_softmax.py"
module.write_text('''
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fusedops.autotune.buckets import bucket
from fusedops.autotune.operator import Config, Operator, Work
from fusedops.autotune.resolve import resolve
from fusedops.autotune.trial import Numbers, Trial


class SoftmaxProblem(NamedTuple):
    rows: int
    width: int
    dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True)
class SoftmaxConfig(Config):
    rows: int  # that a program owns
    num_warps: int


def default(problem, facts):
    return SoftmaxConfig(1, 4)


def space(problem):
    return [SoftmaxConfig(rows, warps) for rows in (1, 2, 4, 8) for warps in (1, 2, 4, 8, 16)]


def prune(config, problem, facts):
    numbers = config.rows * triton.next_power_of_2(problem.width) // (config.num_warps * facts.warp_size)
    return "more than 64 numbers a thread" if numbers > 64 else "less than a number a thread" if numbers < 1 else None


def work(config, problem, facts):
    elements, size = problem.rows * problem.width, 4 if problem.dtype == "float32" else 2
    programs = -(-problem.rows // config.rows)
    return Work(programs, config.num_warps, scalar=6.0 * elements, special=float(elements),
                memory=2.0 * size * elements, cached=2.0 * size * elements)


@triton.jit
def softmax_kernel(X, Y, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)
    inside = (row < rows) & (column < width)
    at = row.to(tl.int64) * width + column
    x = tl.load(X + at, inside, float("-inf")).to(tl.float32)
    top = tl.max(x, 1)[:, None]
    p = tl.exp(x - tl.where(top == float("-inf"), 0.0, top))
    tl.store(Y + at, p / tl.sum(p, 1)[:, None], inside)


def softmax(x):
    """Over the last dimension of a contiguous (rows, width)."""
    rows, width = x.shape
    problem = SoftmaxProblem(bucket(rows, 65536), width, str(x.dtype).removeprefix("torch."))
    config = resolve(SOFTMAX, problem, x.device)  # looked up: memory, your store, files, default
    y = torch.empty_like(x)
    softmax_kernel[(triton.cdiv(rows, config.rows),)](
        x, y, rows, width, ROWS=config.rows, BLOCK=triton.next_power_of_2(width), num_warps=config.num_warps)
    return y


class SoftmaxTrial(Trial):
    def __init__(self, problem, device, empty):
        self.x = Numbers(device, empty).normal(problem.rows, problem.width, dtype=getattr(torch, problem.dtype))

    def run(self):
        return (softmax(self.x),)

    def plain(self):
        return (self.x.softmax(-1),)

    def exact(self):
        return (self.x.float().softmax(-1),)


def trial_of(problem, device, empty=False):
    return SoftmaxTrial(problem, device, empty)


SOFTMAX = Operator(
    name="softmax", problem=SoftmaxProblem, config=SoftmaxConfig, default=default, space=space, prune=prune, work=work,
    trials=__name__, sources=(__name__,), bucketed=lambda problem: ("rows",),
)
''')
sys.path.insert(0, str(FOLDER))
from tuned_softmax import SOFTMAX, SoftmaxProblem, softmax

x = torch.randn(33, 100, device=device)
torch.testing.assert_close(softmax(x), x.softmax(-1), rtol=1e-5, atol=1e-6)
problem = SoftmaxProblem(8192, 4096)
print(len(SOFTMAX.space(problem)), "configurations of", SOFTMAX.key(problem))

# %% [markdown]
# On a GPU, `fusedops.autotune.tune` compiles the candidates, compares each with float32, times those that are right against each other, and stores the
# winner; every later call of `softmax` finds it. Without one, candidates are ranked for a GPU by what its compiler makes of them (in a
# process of its own: this one interprets kernels).

# %%
if device == "cuda":
    (result,) = fusedops.autotune.tune([(SOFTMAX, problem)], budget_s=30)
    print(result.entry.config, f"{result.entry.median * 1e6:.1f} µs")

program = """
import json
from fusedops.autotune.offline import rank
from fusedops.autotune.record import Recorded
from fusedops.runtime.device import TARGETS
from tuned_softmax import SOFTMAX, SoftmaxProblem

facts = TARGETS["sm_90"]
problem = SoftmaxProblem(8192, 4096)
left_out = {str(c): reason for c in SOFTMAX.space(problem) if (reason := SOFTMAX.unfit(c, problem, facts))}
(result,) = rank([Recorded(SOFTMAX, problem, "")], facts)
print(json.dumps({
    "left_out": left_out,
    "candidates": [[c.config, c.outcome, c.reason] for c in result.entry.candidates],
    "chosen": result.entry.config,
}))
"""
environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
environment["PYTHONPATH"] = os.pathsep.join([str(FOLDER), *filter(None, sys.path)])
done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
ranked = json.loads(done.stdout)

print(len(ranked["left_out"]), "left out, such as", *next(iter(ranked["left_out"].items())), sep="  ")
for config, outcome, reason in ranked["candidates"]:
    mark = "*" if config == ranked["chosen"] else " "
    print(mark, f"rows={config['rows']} num_warps={config['num_warps']:2}", outcome, reason, sep="  ")
assert ranked["candidates"]

# %% [markdown]
# The model ranks, it does not measure. It displaces a default only where it takes a candidate to be a quarter faster.
#
# What is still missing for an operator in the full sense is a backward (an `autograd.Function`), checks of the arguments, and a library op, so
# that torch.compile sees one described call. `fusedops/norm` is the smallest family that has all of them.
#
# ## What to read next
#
# * [The linear family](../docs/linear.md), [patching](../docs/patching.md), [attention's rules](../docs/attention.md#rules-of-your-own).
# * [Autotuning](../docs/autotuning.md): how a search decides, the store.
# * [How fusedops is built](../docs/design.md), and [contributing](../CONTRIBUTING.md).
