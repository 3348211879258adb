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
# # Matmul, bias and activation in one kernel
#
# You see how a product is cut into tiles and in which order they are worked on, write a kernel that adds bias and activation before it stores, see
# what the backward has to keep, and find out when all this is worth less than cuBLAS with a second kernel behind it.
#
# **Needs** half a minute and Triton. Without a GPU kernels run in Triton's interpreter, which executes a kernel's Python step by step on CPU
# tensors; what the compiler makes of them for an H100 needs no GPU at all.

# %%
import json
import os
import subprocess
import sys

import torch

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
import matplotlib.pyplot as plt
import torch.nn.functional as F
import triton
import triton.language as tl

import fusedops
from fusedops.autotune.roofline import PRODUCTS
from fusedops.linear.tuning import LinearProblem, default_config
from fusedops.runtime.device import TARGETS

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#E69F00", "#009E73", "#DDDDDD"
plt.rcParams.update({"figure.dpi": 90, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})

# %% [markdown]
# ## Tiles
#
# $Z = XW^\top + b$, with X of M rows, W of N rows, and a depth of K. A program computes a tile of the result: it walks the depth, loads a piece
# of X and a piece of W at each step, and multiplies them on the matrix units. A tile of $m\times n$ does $2mn$ operations for each
# $m+n$ numbers that it loads: the larger the tile, the fewer bytes for each operation.

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.1), gridspec_kw={"width_ratios": [1, 1.4]})
left.set(xlim=(-4.5, 8.5), ylim=(12.5, -4.5), aspect="equal")
for (x, y, w, h), color, name in (
    ((-4, 0, 3.5, 12), GREY, "X"), ((0, -4, 8, 3.5), GREY, "Wᵀ"), ((0, 0, 8, 12), GREY, "Z"),
    ((-4, 4, 3.5, 4), BLUE, ""), ((4, -4, 4, 3.5), BLUE, ""), ((4, 4, 4, 4), ORANGE, ""),
    ((-2.9, 4, 0.8, 4), "#003A5C", ""), ((4, -2.9, 4, 0.8), "#003A5C", ""),
):  # fmt: skip
    left.add_patch(plt.Rectangle((x, y), w, h, color=color))
    left.text(x + 0.3, y + 1, name)
left.set_title("a program's tile (orange), what it reads (blue),\nand one step of the depth (dark)", fontsize=9)
left.axis("off")

sides = [16, 32, 64, 128, 256]
gpu = PRODUCTS["H100"]
for source, bandwidth, style in (
    ("the level-2 cache (its bandwidth is an estimate)", gpu.cache_bandwidth, "o-"),
    ("memory (data sheet)", gpu.memory_bandwidth, "s--"),
):
    fed = [min(1.0, s / 2 * bandwidth / gpu.half) for s in sides]  # s / 2 operations a byte, 16 bits
    right.plot(sides, [100 * share for share in fed], style, color=BLUE if style == "o-" else ORANGE, label=source)
    print(f"from {source}:", {s: f"{share:.0%}" for s, share in zip(sides, fed, strict=True)})
right.set(xlabel="side of the tile", ylabel="% of the peak that can be fed", xscale="log", ylim=(0, 105))
right.set_xticks(sides, sides)
right.minorticks_off()
right.set_title("an H100's matrix units, fed by one tile a program", fontsize=9)
right.legend(frameon=False, fontsize=8, loc="upper left")
fig.tight_layout()
plt.show()

# %% [markdown]
# No tile that fits into a multiprocessor is large enough for the memory. But neighbouring tiles read the same rows and columns, and whoever comes
# second finds them in the level-2 cache, which feeds about twice as much, if they run at about the same time. (Hopper can do more: multiprocessors
# of a cluster load for one another. Our kernels do not use that; cuBLAS may.) So the *order* of the tiles matters. Programs are
# started in the order of their number; say 12 run at a time. Row by row they need many pieces of W; in groups of rows, fewer in all:

# %%
across, down, at_once = 8, 8, 12


def row_major(program):
    return divmod(program, across)


def grouped(program, group=4):
    band, within = divmod(program, group * across)
    rows = min(down - band * group, group)
    return band * group + within % rows, within // rows


fig, axes = plt.subplots(1, 2, figsize=(7.5, 3.2))
for ax, (name, order) in zip(axes, {"row by row": row_major, "in groups of 4 rows": grouped}.items(), strict=True):
    places = [order(program) for program in range(across * down)]
    assert len(set(places)) == across * down  # each tile once
    running = places[:at_once]
    pieces = len({row for row, _ in running}) + len({column for _, column in running})
    for program, (row, column) in enumerate(places):
        ax.add_patch(plt.Rectangle((column, row), 0.94, 0.94, color=ORANGE if program < at_once else GREY))
        ax.text(column + 0.47, row + 0.5, program, ha="center", va="center", fontsize=7)
    ax.set(xlim=(0, across), ylim=(down, 0), aspect="equal", xticks=[], yticks=[])
    ax.set_title(f"{name}: the first {at_once} read\n{pieces} pieces of X and W", fontsize=9)
    print(f"{name}: {pieces} pieces for {at_once} tiles")
fig.tight_layout()
plt.show()

# %% [markdown]
# ## A kernel with an epilogue
#
# The sums are in registers when the depth is walked. Adding the bias and applying the activation there costs a few instructions and
# no byte. As a second kernel it would read the whole result and write it again.


# %%
@triton.jit
def linear_gelu_kernel(X, W, B, Y, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):
    program, across = tl.program_id(0), tl.cdiv(N, BN)
    band = program // (GROUP * across)
    rows_here = min(tl.cdiv(M, BM) - band * GROUP, GROUP)
    within = program % (GROUP * across)
    rows = (band * GROUP + within % rows_here) * BM + tl.arange(0, BM)
    columns = (within // rows_here) * BN + tl.arange(0, BN)
    sums = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        depth = start + tl.arange(0, BK)
        x = tl.load(X + rows[:, None].to(tl.int64) * K + depth, (rows[:, None] < M) & (depth < K), 0.0)
        w = tl.load(W + columns[:, None].to(tl.int64) * K + depth, (columns[:, None] < N) & (depth < K), 0.0)
        sums = tl.dot(x, tl.trans(w), sums, input_precision="ieee")
    z = sums + tl.load(B + columns, columns < N, 0.0)
    y = 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))  # the epilogue
    at = rows[:, None].to(tl.int64) * N + columns
    tl.store(Y + at, y, (rows[:, None] < M) & (columns < N))


def linear_gelu(x, w, b):
    (m, k), n = x.shape, w.shape[0]
    y = torch.empty(m, n, device=x.device)
    grid = (triton.cdiv(m, 32) * triton.cdiv(n, 32),)
    linear_gelu_kernel[grid](x, w, b, y, m, n, k, BM=32, BN=32, BK=32, GROUP=4)
    return y


x, w, b = torch.randn(70, 50, device=device), torch.randn(90, 50, device=device), torch.randn(90, device=device)
expected = F.gelu(F.linear(x, w, b))
torch.testing.assert_close(linear_gelu(x, w, b), expected, rtol=1e-4, atol=1e-4)
torch.testing.assert_close(fusedops.linear(x, w, b, "gelu"), expected, rtol=1e-4, atol=1e-4)
print("the kernel and fusedops.linear agree with torch, at sizes that no tile divides")

# %% [markdown]
# ## The backward, and what it keeps
#
# With $Y=a(Z)$ and $G=\partial L/\partial Y$:
#
# $$\partial Z = G\circ a'(Z) \qquad \partial X = \partial Z\,W \qquad \partial W=\partial Z^\top X \qquad \partial b=\sum\partial Z$$
#
# $a'$ needs Z (for relu, sigmoid, tanh: Y, which the next layer keeps anyway). fusedops writes Z from the same epilogue, or
# with `recompute=True` keeps nothing and multiplies once more in the backward. $\partial Z$ is made inside the two products or once before
# them, together with $\partial b$. Bytes that autograd keeps for each element of the result, counted:


# %%
def kept_an_element(function, *tensors):
    sizes = {}

    def pack(tensor):
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = function(*tensors)
    mine = {t.untyped_storage().data_ptr() for t in tensors}
    return sum(size for place, size in sizes.items() if place not in mine) / out.numel()


x, w, w2 = (torch.randn(*shape, device=device).half().requires_grad_() for shape in ((32, 64), (96, 64), (96, 64)))
table = {
    "linear, gelu": (
        kept_an_element(lambda x, w: F.gelu(F.linear(x, w)), x, w),
        kept_an_element(lambda x, w: fusedops.linear(x, w, None, "gelu"), x, w),
        kept_an_element(lambda x, w: fusedops.linear(x, w, None, "gelu", recompute=True), x, w),
    ),
    "SwiGLU": (
        kept_an_element(lambda x, w, w2: F.silu(F.linear(x, w)) * F.linear(x, w2), x, w, w2),
        kept_an_element(lambda x, w, w2: fusedops.gated_linear(x, w, w2), x, w, w2),
        kept_an_element(lambda x, w, w2: fusedops.gated_linear(x, w, w2, recompute=True), x, w, w2),
    ),
}
print(f"{'':14} torch  fusedops  recompute   (bytes kept an element, float16)")
for name, (torchs, ours, again) in table.items():
    print(f"{name:14} {torchs:5.0f}  {ours:8.0f}  {again:9.0f}")
assert table["SwiGLU"] == (6, 4, 0)

# %% [markdown]
# ## When cuBLAS wins
#
# Fusing saves a pass over the result; a slower product costs more than that if the depth is large. A pass moves $4MN$ bytes, the
# product takes $2MNK$ operations. If a device does $c$ operations in the time of a byte, the pass takes $2c/K$ of the product's time, and
# fusing it can make the whole faster by at most $1+2c/K$. In training our kernel still writes Z for the backward, so half of that is saved.

# %%
fig, ax = plt.subplots(figsize=(6.5, 3))
depths = torch.logspace(8, 14, 100, base=2)
for name, color in (("A100", ORANGE), ("H100", GREEN), ("H200", BLUE)):
    gpu = PRODUCTS[name]
    ax.semilogx(depths, 1 + 2 * gpu.half / gpu.memory_bandwidth / depths, base=2, color=color, label=name)
ax.axhspan(1.0, 1.1, color=GREY, label="eaten by a product 10 % slower than cuBLAS'")
ax.set(xlabel="depth K", ylabel="at most so many times faster", ylim=(1, 2.6))
ax.legend(frameon=False)
fig.tight_layout()
plt.show()

# %% [markdown]
# So torch's product (cuBLAS, hipBLASLt) with one elementwise kernel is a candidate like any other. A search on your GPU times both and the faster is
# used; before one, an estimate decides, by the formula above and an assumed handicap of our product (5 % on Ampere, 15 % on Hopper: assumed, not
# measured). For 8,192 rows and 8,192 out features with a GELU:

# %%
deepest = {}
for target in ("sm_80", "sm_90"):
    for phase, keeps in (("inference", False), ("training", True)):
        chosen = {}
        for depth in (512, 1024, 2048, 4096, 8192):
            problem = LinearProblem.of("forward", 8192, 8192, depth, activation="gelu", keeps=keeps)
            chosen[depth] = "torch" if default_config(problem, TARGETS[target]).kernel == "torch" else "fused"
        deepest[target, phase] = max(depth for depth, kernel in chosen.items() if kernel == "fused")
        print(f"{target} {phase:9}", chosen)
assert all(deepest[target, "training"] <= deepest[target, "inference"] for target in ("sm_80", "sm_90"))

# %% [markdown]
# `explain` tells the other choice, which comes first: whether our kernels can take a call at all, and if not, every reason.

# %%
print(fusedops.explain(fusedops.linear, x, w, None, "gelu"))
print(fusedops.explain(fusedops.linear, x.double(), w.double(), None, "gelu"))

# %% [markdown]
# ## What the compiler makes of it
#
# For an H100, beside a textbook kernel of the same tile (in a process of its own: this one interprets kernels).

# %%
sizes = ["rows=8192", "in_features=4096", "out_features=4096", "activation=gelu"]
command = [sys.executable, "-m", "fusedops", "inspect", "linear", *sizes, "--only", "forward", "-t", "H100"]
environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
done = subprocess.run(
    [*command, "--compare", "textbook", "--json"], capture_output=True, text=True, env=environment, check=True
)
rows = {}
for kernel in json.loads(done.stdout)["kernels"]:
    figures = kernel["figures"]
    loop = figures["loop"]
    rows[kernel["source"]] = figures["spill_bytes"], loop["memory"] + loop["other"]
    print(
        f"{kernel['source']:9}: {loop['matrix']} matrix instructions and {loop['memory'] + loop['other']} others in the loop,"
        f" {figures['registers']} registers, {figures['spill_bytes']} bytes spilt"
    )
assert rows["fusedops"] <= rows["textbook"]

# %% [markdown]
# ## Gated layers
#
# SwiGLU multiplies one product by the activation of another, $\text{silu}(XW_g^\top)\circ XW_u^\top$ (Shazeer 2020, "GLU Variants Improve
# Transformer"). `gated_linear` reads X once for both, and no product ever reaches memory in inference.

# %%
x, gate, up = (torch.randn(*shape, device=device) for shape in ((32, 64), (96, 64), (96, 64)))
expected = F.silu(F.linear(x, gate)) * F.linear(x, up)
torch.testing.assert_close(fusedops.gated_linear(x, gate, up), expected, rtol=1e-4, atol=1e-4)
print(fusedops.explain(fusedops.gated_linear, x, gate, up))

# %% [markdown]
# ## What to read next
#
# * [The linear family](../docs/linear.md): order and rounding, float32 and TF32, gradients accumulated in float32, experts, float8, int8, int4.
# * [Performance](../docs/performance.md) and [kernels](../docs/kernels.md).
# * Next tutorial: [fused attention](04_fused_attention.ipynb).
