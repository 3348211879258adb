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
# # Fused attention, from softmax to backward
#
# You compute attention without ever holding its scores: block by block, with a softmax that mends itself as it goes. Then the same for
# the backward, from one number a query. At the end you know what `fusedops.attention` and every FlashAttention do, and have checked it.
#
# **Needs** half a minute, and Triton for the last part. Without a GPU kernels run in Triton's interpreter, which executes a kernel's Python
# step by step on CPU tensors.

# %%
import math
import os

import torch

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
import matplotlib.pyplot as plt
from matplotlib.colors import ListedColormap

import fusedops

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#E69F00", "#009E73", "#DDDDDD"
plt.rcParams.update({"figure.dpi": 90, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})

# %% [markdown]
# ## Attention as it is written
#
# For queries, keys and values of one head (Vaswani et al. 2017):
#
# $$s_{ij} = \frac{q_i\cdot k_j}{\sqrt D} \qquad p_{ij} = \frac{e^{s_{ij}}}{\sum_j e^{s_{ij}}} \qquad o_i = \sum_j p_{ij} v_j$$


# %%
def plain(q, k, v):
    scores = q @ k.T / math.sqrt(q.shape[-1])
    return scores.softmax(-1) @ v


length, size = 64, 16
q, k, v = (torch.randn(length, size, device=device, dtype=torch.float64) for _ in range(3))

# %% [markdown]
# For 32 heads and 32,768 tokens the scores are $32\cdot 32768^2$ numbers: 64 GiB in 16 bits, written, read for the softmax, written, read
# for the product, and kept for the backward. q, k, v and o together are 1 GiB at a head size of 128.
#
# ## A softmax that sees its numbers one block at a time
#
# The sum needs all scores, and to be safe from overflow it needs the largest first: $e^{s-m}$. So it seems one must see all of them before
# the first weight. One need not (Milakov and Gimelshein 2018). Keep, of what was seen so far, the largest score $m$ and the sum
# $\ell=\sum e^{s-m}$. When a block with a larger maximum $m'$ comes, all that was summed is too large by a known factor:
#
# $$m_\text{new} = \max(m, m') \qquad \ell_\text{new} = \ell\, e^{m-m_\text{new}} + \sum_{\text{block}} e^{s-m_\text{new}}$$
#
# Here it is for one query and sixteen keys in four blocks. Bars: what each key counts for so far.

# %%
scores = torch.tensor([0.5, 1.2, -0.3, 0.8, 2.5, 0.1, 1.9, -1.0, 0.2, 1.0, 3.4, 0.6, 1.5, -0.5, 0.9, 2.0])
fig, axes = plt.subplots(1, 4, figsize=(9.5, 2.3), sharey=True)
m, total = torch.tensor(-math.inf), torch.tensor(0.0)
weights = torch.zeros_like(scores)
for step, ax in enumerate(axes):
    block = slice(4 * step, 4 * step + 4)
    new = torch.maximum(m, scores[block].max())
    factor = torch.exp(m - new)  # exp(-inf) = 0: there was nothing before
    total = total * factor + torch.exp(scores[block] - new).sum()
    weights *= factor
    weights[block] = torch.exp(scores[block] - new)
    m = new
    colors = [BLUE if key < 4 * step else ORANGE if key < 4 * step + 4 else GREY for key in range(16)]
    ax.bar(range(16), weights, color=colors)
    ax.set_title(f"block {step}: m = {m:.1f}, sum = {total:.2f}\nearlier ones times {factor:.2f}", fontsize=9)
    ax.set_xlabel("key")
axes[0].set_ylabel("exp(s - m)")
fig.tight_layout()
plt.show()
torch.testing.assert_close(weights / total, scores.softmax(0))
print("after the last block: the softmax")

# %% [markdown]
# ## Attention block by block
#
# The output is a sum over keys with these weights, so it can be mended by the same factor. Nothing of the size of the scores exists: a block
# of queries meets a block of keys, and what is kept is $m$, $\ell$ and the output so far (Dao et al. 2022, "FlashAttention"; 2023,
# "FlashAttention-2", which divides by $\ell$ once, at the end).


# %%
def blocked(q, k, v, block=16):
    outputs, sums = [], []
    for queries in q.split(block):
        m = torch.full((len(queries), 1), -math.inf, dtype=q.dtype, device=q.device)
        total, out = torch.zeros_like(m), torch.zeros(len(queries), v.shape[-1], dtype=v.dtype, device=v.device)
        for keys, values in zip(k.split(block), v.split(block), strict=True):
            s = queries @ keys.T / math.sqrt(q.shape[-1])
            new = torch.maximum(m, s.amax(-1, keepdim=True))
            p, factor = torch.exp(s - new), torch.exp(m - new)
            total = total * factor + p.sum(-1, keepdim=True)
            out = out * factor + p @ values
            m = new
        outputs.append(out / total)
        sums.append((m + torch.log(total)).squeeze(-1))  # the log of the sum of exp(s)
    return torch.cat(outputs), torch.cat(sums)


out, lse = blocked(q, k, v)
torch.testing.assert_close(out, plain(q, k, v))
torch.testing.assert_close(lse, (q @ k.T / math.sqrt(size)).logsumexp(-1))
print("the same as written out; lse is the log of each query's sum")

# %% [markdown]
# **Merging.** Two parts of the keys, attended to apart, are put together from their outputs and lse alone: that is how decoding divides a
# long cache among programs, and how a ring of GPUs shares a sequence.

# %%
(a, lse_a), (b, lse_b) = blocked(q, k[:24], v[:24], 8), blocked(q, k[24:], v[24:], 8)
both = torch.logaddexp(lse_a, lse_b)
merged = torch.exp(lse_a - both)[:, None] * a + torch.exp(lse_b - both)[:, None] * b
torch.testing.assert_close(merged, out)
print("two parts merge to the whole")

# %% [markdown]
# ## The backward
#
# With $g_i=\partial L/\partial o_i$. From $o_i=\sum_j p_{ij}v_j$:
#
# $$\frac{\partial L}{\partial v_j}=\sum_i p_{ij}\,g_i \qquad \frac{\partial L}{\partial p_{ij}}=g_i\cdot v_j$$
#
# The softmax's derivative subtracts what all weights of a row have in common:
#
# $$\frac{\partial L}{\partial s_{ij}} = p_{ij}\Big(g_i\cdot v_j - \sum_l p_{il}\,(g_i\cdot v_l)\Big) = p_{ij}\,\big(g_i\cdot v_j-\delta_i\big),
# \qquad \delta_i = \sum_l p_{il}\,(g_i\cdot v_l) = g_i\cdot o_i$$
#
# The last step is the trick: the sum over all keys is the product of two vectors that are there. And with the lse each weight can be
# computed anew, $p_{ij}=e^{s_{ij}-\text{lse}_i}$: beside the output, one number a query is all that the forward has to keep. Then
# $\partial L/\partial q_i=\sum_j \partial s_{ij}k_j/\sqrt D$, and likewise for $k$.
#
# fusedops has programs that own keys and walk the queries (for dk and dv), and programs that own queries and walk the keys (for dq): two
# kernels, or one launch where both are small. Each gradient has one owner, so nothing is added atomically, and the same call gives the
# same bits.


# %%
def blocked_backward(q, k, v, out, lse, g, block=16):
    scale = 1 / math.sqrt(q.shape[-1])
    delta = (g * out).sum(-1)
    parts = list(zip(q.split(block), g.split(block), lse.split(block), delta.split(block), strict=True))

    def score_gradient(queries, gradient, log_sum, common, keys, values):
        p = torch.exp(queries @ keys.T * scale - log_sum[:, None])
        return p, p * (gradient @ values.T - common[:, None])

    dk, dv, dq = [], [], []
    for keys, values in zip(k.split(block), v.split(block), strict=True):  # a program of the first kernel
        key_gradient, value_gradient = torch.zeros_like(keys), torch.zeros_like(values)
        for part in parts:
            p, ds = score_gradient(*part, keys, values)
            value_gradient += p.T @ part[1]
            key_gradient += ds.T @ part[0] * scale
        dk.append(key_gradient)
        dv.append(value_gradient)
    for part in parts:  # a program of the second
        query_gradient = torch.zeros_like(part[0])
        for keys, values in zip(k.split(block), v.split(block), strict=True):
            _, ds = score_gradient(*part, keys, values)
            query_gradient += ds @ keys * scale
        dq.append(query_gradient)
    return torch.cat(dq), torch.cat(dk), torch.cat(dv)


g = torch.randn_like(out)
leaves = [t.clone().requires_grad_() for t in (q, k, v)]
expected = torch.autograd.grad(plain(*leaves), leaves, g)
for ours, theirs in zip(blocked_backward(q, k, v, out, lse, g), expected, strict=True):
    torch.testing.assert_close(ours, theirs)
print("dq, dk and dv are autograd's")

# %% [markdown]
# One number a query, or two: where scores are large, the sum's logarithm is lost in rounding when it is added to the maximum. fusedops' kernels
# keep $m$ and $\ell$ apart for the backward, and give lse to those who ask for it.

# %%
large = torch.tensor([20_000.0, 19_999.5, 19_999.0])  # float32: numbers near 20,000 are 0.002 apart
exact = large.double().softmax(0)
from_lse = torch.exp(large - large.logsumexp(0))
from_two = torch.exp(large - large.max()) / torch.exp(large - large.max()).sum()
errors = {name: float((p - exact).abs().max()) for name, p in (("lse", from_lse), ("m and sum", from_two))}
print("error of the weights, from", {name: f"{error:.0e}" for name, error in errors.items()})
assert errors["m and sum"] < 1e-6 < 1e-4 < errors["lse"]

# %% [markdown]
# ## Masks, and the tiles that they spare
#
# A causal query sees no later key. Where a whole tile is hidden it need not be visited; where all of it is seen, nothing need be compared.
# Only tiles on the edge are masked. fusedops' kernels have a loop for the tiles seen whole and another for the edges.
#
# With unequal lengths "causal" has two meanings, and libraries differ: `causal=True` aligns the first query with the first key (torch's
# rule), `"bottom_right"` the last with the last (flash-attn's, and what decoding wants). `window=(left, right)` limits both sides.


# %%
def weights_of(queries, keys, **options):
    """Attention whose values are the unit vectors returns its weights; here all scores are 0 before the options."""
    zeros = torch.zeros(1, 1, max(queries, keys), 8)
    with fusedops.backend("torch"):
        values = torch.eye(keys)[None, None]
        return fusedops.attention(zeros[:, :, :queries], zeros[:, :, :keys], values, **options)[0, 0]


def seen(queries, keys, **options):
    return weights_of(queries, keys, **options) > 0


kinds = {
    "causal=True": (12, 16, {"causal": True}),
    'causal="bottom_right"': (12, 16, {"causal": "bottom_right"}),
    "window=(3, 2)": (16, 16, {"window": (3, 2)}),
    "causal=True,\nwindow=(5, 0)": (16, 16, {"causal": True, "window": (5, 0)}),
    "document_ids": (16, 16, {"document_ids": torch.tensor([0] * 5 + [1] * 7 + [2] * 4)}),
}
fig, axes = plt.subplots(1, len(kinds), figsize=(10, 2.5))
for ax, (title, (queries, keys, options)) in zip(axes, kinds.items(), strict=True):
    ax.imshow(seen(queries, keys, **options), cmap=ListedColormap([GREY, BLUE]), vmin=0, vmax=1)
    ax.set_xticks(torch.arange(-0.5, keys), minor=True)
    ax.set_yticks(torch.arange(-0.5, queries), minor=True)
    ax.grid(which="minor", color="white", lw=0.8)
    ax.tick_params(which="both", length=0, labelbottom=False, labelleft=False)
    ax.set_title(title, fontsize=9)
axes[0].set(xlabel="key", ylabel="query")
fig.tight_layout()
plt.show()

causal = torch.ones(16, 16, dtype=torch.bool).tril()
tiles = causal.view(4, 4, 4, 4).float().mean((1, 3))  # of each 4 x 4 tile, the share that is seen
print(
    f"causal, 4 x 4 tiles: {int((tiles == 1).sum())} seen whole, {int(((tiles > 0) & (tiles < 1)).sum())} on the edge,"
    f" {int((tiles == 0).sum())} never visited"
)
assert torch.equal(seen(16, 16, causal=True), causal)

# %% [markdown]
# **Biases, and blocks.** ALiBi (Press et al. 2022) hides nothing: it takes a slope times the distance from each score, before the softmax. A
# `BlockMask` is a rule with a note, for each tile of 128 by 128, of whether it is hidden, seen in part or seen whole; hidden tiles are
# never visited, forward or backward. [Long sequences](07_long_sequences.ipynb) counts them.

# %%
alibi = weights_of(16, 16, causal=True, alibi_slopes=torch.tensor([0.5]))
distance = (torch.arange(16)[:, None] - torch.arange(16)).abs()
torch.testing.assert_close(alibi, (-0.5 * distance).masked_fill(~causal, -math.inf).softmax(-1))

documents = torch.repeat_interleave(torch.arange(3), torch.tensor([300, 400, 324]))
blocks = fusedops.BlockMask.from_document_ids(documents)
tiles = (documents[:, None] == documents).view(8, 128, 8, 128).float().mean((1, 3))
assert torch.equal(blocks.kinds[0, 0] > 0, tiles > 0)  # visited: all tiles that somebody sees, and no other

fig, (left, right) = plt.subplots(1, 2, figsize=(6.5, 2.7))
shown = left.imshow(alibi, cmap="cividis", vmin=0)
fig.colorbar(shown, ax=left, label="weight")
left.set_title("causal=True, alibi_slopes=[0.5]", fontsize=9)
right.pcolormesh(blocks.kinds[0, 0], cmap=ListedColormap([GREY, ORANGE, BLUE]), vmin=0, vmax=2, edgecolors="white")
right.invert_yaxis()
right.set_aspect("equal")
visited = int((blocks.kinds > 0).sum())
right.set_title(f"BlockMask of 3 documents, 1,024 tokens:\n{visited} of 64 tiles visited (orange: in part)", fontsize=9)
for ax in (left, right):
    ax.set(xticks=[], yticks=[], xlabel="key", ylabel="query")
fig.tight_layout()
plt.show()

# %% [markdown]
# **A query that sees no key** has no softmax: written out it is 0/0. In fusedops its output and all its gradients are zero, and its lse is
# $-\infty$.

# %%
x = torch.randn(1, 1, 4, 8, device=device)
hidden = torch.tensor([True, True, False, True], device=device)[:, None].expand(4, 4)
out, lse = fusedops.attention(x, x, x, attn_mask=hidden, return_lse=True)
print("row 2:", out[0, 0, 2].abs().max().item(), lse[0, 0, 2].item())
assert not out.isnan().any()

# %% [markdown]
# ## fusedops' own
#
# The same mathematics, in one kernel for all options. Grouped heads (here 4 query heads read 2 key heads) are not expanded, and lse is a
# result with a gradient of its own.

# %%
q, k, v = torch.randn(1, 4, 48, 32, device=device), *torch.randn(2, 1, 2, 48, 32, device=device)
out, lse = fusedops.attention(q, k, v, causal=True, return_lse=True)
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)

leaves = [t.clone().requires_grad_() for t in (q, k, v)]
out, lse = fusedops.attention(*leaves, causal=True, return_lse=True)
gradients = torch.autograd.grad((out.square().sum(), lse.square().sum()), leaves)  # a loss of both
print("with lse's gradient:", [tuple(t.shape) for t in gradients])
print(fusedops.explain(fusedops.attention, q, k, v, causal=True))

# %% [markdown]
# ## What is kept for the backward
#
# Besides q, k and v: counted from the tensors that autograd really saves, for one head of 32, and what the formulas say beyond that:


# %%
def kept(function, length):
    leaves = [torch.randn(1, 1, length, 32, device=device, requires_grad=True) for _ in range(3)]
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = function(*leaves)
    for tensor in leaves:
        storages.pop(tensor.untyped_storage().data_ptr(), None)  # q, k, v are there anyway
    del out
    return sum(storages.values())


def written_out(q, k, v):
    return (q @ k.transpose(-1, -2) / math.sqrt(32)).softmax(-1) @ v


lengths = [64, 128, 256]
measured = {
    name: [kept(f, n) for n in lengths] for name, f in (("written out", written_out), ("fused", fusedops.attention))
}
assert measured["fused"] == [4 * n * 32 + 8 * n for n in lengths]  # the output, m and sum
assert all(size >= 4 * n * n for size, n in zip(measured["written out"], lengths, strict=True))

fig, ax = plt.subplots(figsize=(5.5, 2.8))
grid = [2**e for e in range(6, 16)]
ax.loglog(grid, [4 * n * n / 2**20 for n in grid], color=ORANGE, label="4 S² bytes: the weights")
ax.loglog(grid, [(4 * 32 + 8) * n / 2**20 for n in grid], color=BLUE, label="(4 D + 8) S bytes: output, m and sum")
ax.loglog(lengths, [size / 2**20 for size in measured["written out"]], "o", color=ORANGE, label="written out, measured")
ax.loglog(lengths, [size / 2**20 for size in measured["fused"]], "o", color=BLUE, label="fused, measured")
ax.set(xlabel="tokens S", ylabel="MiB a head, float32")
ax.legend(frameon=False, fontsize=8)
fig.tight_layout()
plt.show()

# %% [markdown]
# ## What to read next
#
# * [Attention](../docs/attention.md): every option by formula and picture, block masks, rules of your own.
# * [Which option is which elsewhere](../docs/which-option.md), for who comes from SDPA, flash-attn, FlexAttention or xformers.
# * [Kernels](../docs/kernels.md): how tiles are chosen by what the compiler makes of them.
# * Next tutorial: [autotuning](05_autotuning.ipynb).
