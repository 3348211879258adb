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
# # How a fused layer norm works
#
# You count what PyTorch moves for a layer norm written out in its operators, write a Triton kernel that moves a fifteenth of it, derive and write
# its backward, and see what fusedops' own kernel compiles to on an H100, without having one.
#
# **Needs** half a minute and Triton (it comes with torch's CUDA builds; `pip install triton` beside a CPU build on Linux). Without a GPU the
# kernels run in Triton's interpreter, which executes a kernel's Python step by step on CPU tensors: slow, but the same kernels.

# %%
import json
import os
import subprocess
import sys

import torch

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
import matplotlib.pyplot as plt
import triton
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fusedops
from fusedops.autotune.roofline import PRODUCTS

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
plt.rcParams.update({"figure.dpi": 90, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})

# %% [markdown]
# ## The formula, and what it costs written out
#
# For a row $x$ of width $N$ (Ba, Kiros and Hinton 2016, [Layer Normalization](https://arxiv.org/abs/1607.06450)):
#
# $$\mu = \frac1N\sum_j x_j \qquad \sigma^2 = \frac1N\sum_j (x_j-\mu)^2 \qquad
# \hat x_j = \frac{x_j-\mu}{\sqrt{\sigma^2+\varepsilon}} \qquad y_j = w_j\,\hat x_j + b_j$$
#
# It takes about eight operations an element. An H100 does 67 trillion of those a second, and moves 3.35 trillion bytes: what a norm costs is
# not arithmetic, it is the trips to memory. PyTorch runs one kernel for each operator, and each reads its inputs from memory and writes
# its output there. Let us count.


# %%
class Traffic(TorchDispatchMode):
    """Counts the bytes of the large tensors that torch's operators read and write."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view and not func._schema.name.endswith(("detach", "empty_like")):
            read, written = (
                sum(
                    t.numel() * t.element_size()
                    for t in tree_leaves(side)
                    if isinstance(t, torch.Tensor) and t.numel() >= 4096
                )
                for side in ((args, kwargs), out)
            )
            self.steps.append((func._schema.name.removeprefix("aten::"), read, written))
        return out


def composed(x, w, b, eps=1e-5):
    x = x.float()
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return (centred * torch.rsqrt(variance + eps) * w + b).bfloat16()


rows, width = 64, 1024
x = torch.randn(rows, width, device=device).bfloat16()
w, b = torch.randn(width, device=device), torch.randn(width, device=device)
with Traffic() as traffic:
    y = composed(x, w, b)

print(f"{'operator':10} read  written   (bytes an element)")
for name, read, written in traffic.steps:
    if read + written:
        print(f"{name:10} {read / x.numel():4.0f}  {written / x.numel():7.0f}")
total = sum(read + written for _, read, written in traffic.steps) / x.numel()
print(f"in all {total:.0f} bytes an element; the formula needs 2 + 2")
assert total > 40

# %% [markdown]
# ## One kernel
#
# A row of a transformer fits into the registers of one program (a thread block). So: one program a row, read it once, compute everything
# there in float32, write it once.


# %%
@triton.jit
def layer_norm_kernel(X, W, B, Y, Mean, Rstd, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # row * width may pass 2**31
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(X + row * width + columns, inside, 0.0).to(tl.float32)
    mean = tl.sum(x) / width
    centred = tl.where(inside, x - mean, 0.0)  # the padding must not count
    rstd = tl.rsqrt(tl.sum(centred * centred) / width + eps)
    w, b = tl.load(W + columns, inside, 0.0), tl.load(B + columns, inside, 0.0)
    tl.store(Y + row * width + columns, centred * rstd * w + b, inside)
    tl.store(Mean + row, mean)  # two numbers a row, for the backward
    tl.store(Rstd + row, rstd)


def forward(x, w, b, eps=1e-5):
    rows, width = x.shape
    y, mean, rstd = torch.empty_like(x), *torch.empty(2, rows, dtype=torch.float32, device=x.device)
    layer_norm_kernel[(rows,)](x, w, b, y, mean, rstd, width, eps, BLOCK=triton.next_power_of_2(width))
    return y, mean, rstd


x = torch.randn(rows, 1000, device=device)  # a width that is no power of two, so that the mask matters
w, b = torch.randn(1000, device=device), torch.randn(1000, device=device)
y, mean, rstd = forward(x, w, b)
torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (1000,), w, b), rtol=1e-4, atol=1e-5)
print("the kernel agrees with torch")

# %% [markdown]
# **Centre before squaring.** $\sigma^2 = \overline{x^2} - \mu^2$ needs one pass less over the registers, and is wrong where the mean is
# large: it subtracts two large numbers that agree in nearly all digits.

# %%
far = torch.randn(4, 1024) + 10_000
naive = far.square().mean(-1) - far.mean(-1).square()
print("deviation 1 around 10,000; variance by the shortcut:", [round(float(v), 1) for v in naive])
assert (naive - 1).abs().min() > 0.5
assert (fusedops.layer_norm(far.to(device), 1024).std(-1) - 1).abs().max() < 0.01

# %% [markdown]
# ## The backward
#
# Given $g = \partial L/\partial y$, the loss sees $\hat x_j$ through $y_j$ alone: $\partial L/\partial\hat x_j = w_j g_j = h_j$. But each $x_k$ moves
# every $\hat x_j$, through $\mu$ and $\sigma$ as well. With $r = 1/\sqrt{\sigma^2+\varepsilon}$,
#
# $$\frac{\partial\mu}{\partial x_k}=\frac1N \qquad \frac{\partial r}{\partial x_k} = -\frac{r^3}{2}\cdot\frac{\partial\sigma^2}{\partial x_k}
# = -\frac{r^2\,\hat x_k}{N} \qquad \frac{\partial\hat x_j}{\partial x_k} = r\Big([j=k] - \frac1N - \frac{\hat x_j\hat x_k}{N}\Big)$$
#
# since $\hat x_j = (x_j-\mu)\,r$ and $\partial\sigma^2/\partial x_k = 2\,(x_k-\mu)/N$. Multiply by $h_j$ and sum over $j$; a bar is a row's mean:
#
# $$\frac{\partial L}{\partial x_k} = r\,\Big(h_k - \overline{h} - \hat x_k\,\overline{h\hat x}\Big)
# \qquad \frac{\partial L}{\partial w_j} = \sum_{\text{rows}} g_j\hat x_j \qquad \frac{\partial L}{\partial b_j} = \sum_{\text{rows}} g_j$$
#
# The input's gradient is a row's own affair. The parameters' gradients are sums over all rows, and rows belong to different programs. Adding
# with atomics would work, in an order that changes from run to run, and so would the last bits. Instead each of a few programs walks
# many rows and keeps a partial sum in its registers; a second step adds the partial sums in a fixed order.


# %%
@triton.jit
def layer_norm_backward_kernel(X, W, G, Mean, Rstd, DX, DW, DB, rows, width, BLOCK: tl.constexpr):
    program, programs = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    w, stride = tl.load(W + columns, inside, 0.0), width.to(tl.int64)
    dw, db = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for row in range(program, rows, programs):
        at = row * stride + columns
        g = tl.load(G + at, inside, 0.0).to(tl.float32)
        x = tl.load(X + at, inside, 0.0).to(tl.float32)
        rstd = tl.load(Rstd + row)
        normal = tl.where(inside, (x - tl.load(Mean + row)) * rstd, 0.0)
        h = g * w
        dx = (h - tl.sum(h) / width - normal * (tl.sum(h * normal) / width)) * rstd
        tl.store(DX + at, dx, inside)
        dw += g * normal
        db += g
    tl.store(DW + program * width + columns, dw, inside)
    tl.store(DB + program * width + columns, db, inside)


def backward(x, w, g, mean, rstd, programs=8):
    rows, width = x.shape
    dx, partial = torch.empty_like(x), torch.empty(2, programs, width, device=x.device)
    block = triton.next_power_of_2(width)
    layer_norm_backward_kernel[(programs,)](x, w, g, mean, rstd, dx, *partial, rows, width, BLOCK=block)
    dw, db = partial.sum(1)  # always in the same order
    return dx, dw, db


g = torch.randn_like(x)
leaves = [t.clone().requires_grad_() for t in (x, w, b)]
expected = torch.autograd.grad(torch.nn.functional.layer_norm(leaves[0], (1000,), *leaves[1:]), leaves, g)
found = backward(x, w, g, mean, rstd)
for ours, theirs in zip(found, expected, strict=True):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
assert all(torch.equal(a, c) for a, c in zip(found, backward(x, w, g, mean, rstd), strict=True))
print("gradients agree with torch's, and the same call gives the same bits")

# %% [markdown]
# Eight partial sums, however many rows: that is what the second step reads. As many as the rows would be another pass over memory.
#
# ## fusedops' own
#
# `fusedops.layer_norm` is this, and what a library needs besides: any strides (this one reads `row * width`), any width (rows longer than
# registers are walked in blocks), parameters of another dtype, no parameters, a residual summed in the same pass, configurations for each
# GPU.

# %%
leaves = [t.clone().requires_grad_() for t in (x, w, b)]
y = fusedops.layer_norm(leaves[0], 1000, *leaves[1:])
for ours, theirs in zip(torch.autograd.grad(y, leaves, g), expected, strict=True):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
print(fusedops.explain(fusedops.layer_norm, *leaves[:1], 1000, *leaves[1:]))

# %% [markdown]
# What does the compiler make of it for an H100? `fusedops inspect` compiles it here and reads the machine code. (In a process of its own:
# this one interprets kernels.)

# %%
command = [sys.executable, "-m", "fusedops", "inspect", "norm", "rows=8192", "width=4096", "-t", "H100", "--json"]
environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
for kernel in json.loads(done.stdout)["kernels"]:
    if kernel["kernel"] == "sum_partials_kernel":
        continue
    figures, moved = kernel["figures"], kernel["bytes_an_element"]
    print(
        f"{kernel['kernel']}: {moved['loaded']:.0f} bytes an element loaded, {moved['stored']:.0f} stored,"
        f" {max(figures['widths'])} bits an access, {figures['registers']} registers, {figures['spill_bytes']} spilt;"
        f" at most {figures['bound']['share']:.0%} of the peak of the {figures['bound']['peak']}"
    )
    assert (moved["loaded"], moved["stored"]) == ((2, 2) if "forward" in kernel["kernel"] else (4, 2))

# %% [markdown]
# Each tensor once: no kernel can move less. Whether it moves that at the full rate only a GPU can say; `python -m benchmarks norm` there
# reports it in percent of a copy.
#
# ## The roofline
#
# A kernel that does $I$ operations for each byte it moves can do at most $\min(\text{peak}, I\cdot\text{bandwidth})$ operations a second
# (Williams, Waterman and Patterson 2009). The roofs are those of NVIDIA's data sheets: [A100](https://www.nvidia.com/en-us/data-center/a100/)
# (80 GB, SXM) 312 TFLOP/s and 2.04 TB/s, [H100](https://www.nvidia.com/en-us/data-center/h100/) (SXM) 989 TFLOP/s and 3.35 TB/s, dense
# bfloat16. The points are counted, not measured: each tensor read or written once, except for the norm written out.

# %%
points = {
    "norm, written out": 8 / total,
    "norm, fused": 8 / 4,
    "decoding, groups of 4": 4,
    "linear, 16 rows": 16,
    "linear, 8,192 rows\n4,096 to 4,096": 2 * 8192 * 4096**2 / (2 * (2 * 8192 * 4096 + 4096**2)),
    "attention, 8,192\ntokens, D 128": 4 * 8192**2 * 128 / (8 * 8192 * 128),
}
fig, ax = plt.subplots(figsize=(7.5, 3.8))
intensity = torch.logspace(-1.2, 4, 200)
for name, color in (("A100", "#E69F00"), ("H100", "#0072B2")):
    gpu = PRODUCTS[name]
    ax.loglog(intensity, (intensity * gpu.memory_bandwidth).clamp(max=gpu.half) / 1e12, color=color, label=name)
h100 = PRODUCTS["H100"]
for name, at in points.items():
    roof = min(at * h100.memory_bandwidth, h100.half) / 1e12
    ax.plot([at, at], [0.08, roof], color="#BBBBBB", lw=1, ls=":")
    ax.plot(at, roof, "o", color="#0072B2", ms=5)
    place = {"xytext": (6, -14)} if at < 1000 else {"xytext": (-6, -40) if "linear" in name else (0, 7), "ha": "center"}
    ax.annotate(name, (at, roof), textcoords="offset points", fontsize=8, **place)
ax.set(xlabel="operations for each byte moved", ylabel="at most, TFLOP/s of bfloat16", ylim=(0.08, 9000))
ax.legend(frameon=False, loc="upper left")
fig.tight_layout()
plt.show()

# %% [markdown]
# Under the slope a kernel is as fast as it leaves bytes unmoved: fusing the norm moves it to the right, and so up. Under the flat part it is as
# fast as it keeps the matrix units fed: that is the [next tutorial](03_matmul_bias_activation.ipynb).
#
# ## What to read next
#
# * [Norms](../docs/norm.md): numerics, widths, `recompute`, what is kept.
# * [Performance](../docs/performance.md) and [inspection](../docs/inspection.md): the same figures for every kernel.
# * Next tutorial: [matmul, bias and activation](03_matmul_bias_activation.ipynb).
