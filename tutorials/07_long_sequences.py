# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Long sequences: packing, windows, documents, several GPUs
#
# Afterwards you can train on texts of unequal lengths without paying for padding, limit attention to a window or to
# documents and predict what that saves, and cut one sequence over several GPUs. Each claim is checked as it is made.
#
# **Needs** half a minute and Triton, but no GPU. Without a GPU the kernels run in Triton's interpreter, which executes a kernel's
# Python step by step on CPU tensors: slow, but the same kernels. On a GPU the same cells run compiled.

# %%
import functools
import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import ListedColormap

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
import fusedops

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
sdpa = torch.nn.functional.scaled_dot_product_attention  # torch's, to compare with
BLUE, ORANGE, GREEN, PINK, GREY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#DDDDDD"  # told apart by everyone
plt.rcParams.update({"figure.dpi": 80, "font.size": 9, "figure.constrained_layout.use": True})
plt.rcParams.update(
    {"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "legend.fontsize": 8}
)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


# %% [markdown]
# ## What padding costs
#
# Texts differ in length; a rectangular batch is as long as its longest text. Here are 48 texts whose lengths have a
# long tail, in batches of 8.

# %%
lengths = (torch.randn(48) * 0.8 + 4.6).exp().long().clamp(8, 512).tolist()
batches = [lengths[i : i + 8] for i in range(0, 48, 8)]
tokens, padded = sum(lengths), sum(len(b) * max(b) for b in batches)
scores, padded_scores = sum(n * n for n in lengths), sum(len(b) * max(b) ** 2 for b in batches)
print(f"tokens: {tokens} real, {padded} in the padded batches: {1 - tokens / padded:.0%} is padding")
print(f"scores of attention: {scores} needed, {padded_scores} padded: {padded_scores / scores:.1f} times as many")

# %% [markdown]
# `fusedops.data.pack_sequences` puts texts one after the other instead, up to `max_tokens` in a batch. With `lookahead`
# it may take a later text that fits better.

# %%
texts = [{"input_ids": torch.randint(100, (n,))} for n in lengths]
packs = list(fusedops.data.pack_sequences(texts, max_tokens=1024, lookahead=16))
assert sorted(i for pack in packs for i in pack.indices) == list(range(48))  # every text once
assert sum(len(pack.data["input_ids"]) for pack in packs) == tokens  # and nothing else

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), sharex=True)
left.invert_yaxis(), right.invert_yaxis()
for number, batch in enumerate(batches):
    rows = range(9 * number, 9 * number + 8)
    left.barh(rows, max(batch), 1, color=GREY)
    left.barh(rows, batch, 1, color=BLUE, edgecolor="white", linewidth=0.4)
for row, pack in enumerate(packs):
    for number, (begin, end) in enumerate(itertools.pairwise(pack.cu_seqlens.tolist())):
        right.barh(row, end - begin, 0.8, left=begin, color=(BLUE, ORANGE)[number % 2])
left.set(title=f"padded: {padded} tokens (grey: padding)", xlabel="position", ylabel="texts, 8 a batch", yticks=[])
right.set(title=f"packed: {tokens} tokens", xlabel="position", ylabel="batch", yticks=range(len(packs)))
plt.show()

# %% [markdown]
# ## Attention over packed texts
#
# `attention_varlen` takes (tokens, heads, size) and `cu_seqlens`: 0, then where each text ends. No text sees another.
# The kernels find the boundaries on the device, visit only tiles inside a text, and never wait for the host to read a
# length. The padded batch, its padding hidden by a mask, gives the same, gradients included:

# %%
pack = next(fusedops.data.pack_sequences(texts[:4], max_tokens=1024)).to(device)
q, k, v = (torch.randn(len(pack.position_ids), 4, 32, device=device, requires_grad=True) for _ in range(3))
out = fusedops.attention_varlen(q, k, v, **pack.attention_arguments(), causal=True)
weight = torch.randn_like(out)  # of a loss that looks at every number
gradients = torch.autograd.grad((out * weight).sum(), (q, k, v))

pad = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
q_pad, k_pad, v_pad, weight_pad = (pad(pack.unpack(t)).transpose(1, 2) for t in (q, k, v, weight))
real = pad(pack.unpack(torch.ones_like(pack.position_ids))).bool()
causal = torch.ones(real.shape[1], real.shape[1], dtype=torch.bool, device=device).tril()
out_pad = sdpa(q_pad, k_pad, v_pad, attn_mask=real[:, None, None] & causal)
close(out, out_pad.transpose(1, 2)[real])
for ours, theirs in zip(gradients, torch.autograd.grad((out_pad * weight_pad).sum(), (q, k, v)), strict=True):
    close(ours, theirs)
print(f"{real.numel()} padded positions, {len(pack.position_ids)} packed ones: the same output and gradients")

# %% [markdown]
# **Position ids.** All layers but attention work on each token alone, so packing does not concern them; only positions
# have to begin anew in each text. A pack has them, for learned or rotary embeddings:

# %%
embedding, position = torch.nn.Embedding(100, 64).to(device), torch.nn.Embedding(512, 64).to(device)
norm, project = fusedops.nn.LayerNorm(64).to(device), torch.nn.Linear(64, 3 * 64).to(device)


def layer(ids, positions, **arguments):
    """Causal self-attention of packed tokens, 4 heads of 16."""
    hidden = norm(embedding(ids) + position(positions))
    q, k, v = project(hidden).view(-1, 3, 4, 16).unbind(1)
    return fusedops.attention_varlen(q, k, v, **arguments, causal=True)


with torch.no_grad():
    together = layer(pack.data["input_ids"], pack.position_ids, **pack.attention_arguments())
    for mine, ids in zip(pack.unpack(together), pack.unpack(pack.data["input_ids"]), strict=True):
        ends = torch.tensor([0, len(ids)], dtype=torch.int32, device=device)  # each text alone gives the same
        close(mine, layer(ids, torch.arange(len(ids), device=device), cu_seqlens_q=ends, cu_seqlens_k=ends))
print("positions around the first boundary:", pack.position_ids[lengths[0] - 2 : lengths[0] + 2].tolist())

# %% [markdown]
# ## Sliding windows
#
# `window=(left, right)` lets a query see `left` keys before its place and `right` after it. With `causal`, a window of
# $w$ keys, the query's own among them, is `window=(w - 1, 0)`: work grows as $n \cdot w$, no longer as $n^2$ (Beltagy
# et al. 2020, *Longformer*). Kernels work on tiles, so what you pay is the tiles that the band touches.
# `BlockMask.lists` tells which blocks of 128 by 128 are visited, and in which of them pairs have to be compared:


# %%
def visited(mask, low, high):
    """(query blocks, key blocks): 0 never visited, 1 visited and masked, 2 visited and seen whole."""
    index, count, _, _ = mask.lists(low, high)  # bounds: i + low <= j <= i + high
    grid = torch.zeros(mask.kinds.shape[2:], dtype=torch.int64)
    for row, (blocks, (some, whole)) in enumerate(zip(index[0, 0].tolist(), count[0, 0].tolist(), strict=True)):
        grid[row, blocks[:some]], grid[row, blocks[some : some + whole]] = 1, 2
    return grid


def draw(axes, grid, title):
    axes.pcolormesh(grid, cmap=ListedColormap([GREY, ORANGE, BLUE]), vmin=0, vmax=2, edgecolors="white", linewidth=0.5)
    axes.set(title=f"{title}\n{int((grid > 0).sum())} of {grid.numel()} visited", xticks=[], yticks=[], aspect="equal")
    axes.set(xlabel="block of keys", ylabel="block of queries")
    axes.invert_yaxis()


sizes = [1024 * 2**i for i in range(8)]
masks = {n: fusedops.BlockMask.from_document_ids(torch.zeros(n, dtype=torch.int32)) for n in (640, *sizes)}
bounds = {"all keys": (None, None), "causal": (None, 0), "causal, window of 512": (-511, 0)}
figure, axes = plt.subplots(1, 4, figsize=(11, 3), width_ratios=[1, 1, 1, 1.3])
for panel, (name, (low, high)), colour in zip(axes, bounds.items(), (BLUE, ORANGE, GREEN), strict=False):
    draw(panel, visited(masks[2048], low, high), name)
    counts = [int(masks[n].lists(low, high)[1].sum()) for n in sizes]
    axes[3].loglog(sizes, counts, "o-", base=2, color=colour, markersize=4, label=name)
axes[3].set(xlabel="tokens", ylabel="blocks visited a head", title="Work against length")
axes[3].legend()
figure.suptitle("2,048 tokens. Blue: seen whole, no comparison. Orange: masked. Grey: never visited")
plt.show()
assert counts[-1] < 2 * sizes[-1] * 512 / 128**2  # linear: n * w, and the edges of the band

# %% [markdown]
# Are they really not visited? Put NaN where no query looks. A kernel that multiplied those values by a weight of zero
# would return NaN, since $0 \cdot \text{NaN} = \text{NaN}$.

# %%
q = torch.randn(1, 2, 128, 32, device=device)  # the last 128 queries of 640 tokens
k, v = torch.randn(2, 1, 2, 640, 32, device=device)
band = {"causal": "bottom_right", "window": (199, 0)}  # bottom_right: the last query sees the last key
expected = fusedops.attention(q, k, v, **band)
unseen = visited(masks[640], -199, 0)[-1] == 0
rows = unseen.repeat_interleave(128).to(device)
poisoned = (t.masked_fill(rows[:, None], float("nan")) for t in (k, v))
with fusedops.backend("triton"):  # the kernels, or an error
    torch.testing.assert_close(fusedops.attention(q, *poisoned, **band), expected, rtol=0, atol=0)
print("key blocks of NaN:", unseen.nonzero().flatten().tolist(), "- the same bits")

# %% [markdown]
# ## Documents in rows of a fixed length
#
# Where a batch has to stay (batch, length), say for static shapes, `document_ids` hides documents from one another. A
# `BlockMask` is the same made once: build it for each batch, hand it to all layers, forward and backward.

# %%
documents = torch.repeat_interleave(torch.arange(6), torch.tensor([500, 130, 700, 60, 400, 258]))  # 2,048 tokens
mask = fusedops.BlockMask.from_document_ids(documents)
figure, axes = plt.subplots(1, 2, figsize=(6, 3.2))
axes[0].imshow(mask.materialize()[0, 0].tril()[::8, ::8], cmap=ListedColormap([GREY, BLUE]))
axes[0].set(title="who sees whom\n6 documents, causal", xlabel="key", ylabel="query", xticks=[], yticks=[])
draw(axes[1], visited(mask, None, 0), "blocks")
plt.show()

q, k, v = torch.randn(3, 1, 1, 384, 32, device=device)
ids = documents[300:684].to(device)  # parts of three of them
out = fusedops.attention(q, k, v, causal=True, block_mask=fusedops.BlockMask.from_document_ids(ids))
close(out, sdpa(q, k, v, attn_mask=(ids[:, None] == ids).tril()))
close(out, fusedops.attention(q, k, v, causal=True, document_ids=ids))

# %% [markdown]
# ## Memory against length
#
# A textbook's attention keeps the softmax for the backward, $H n^2$ numbers. FlashAttention (Dao et al. 2022) keeps the
# output and two statistics a row, and computes the weights again. What autograd keeps can be seen: we sum the storages
# it saves, and compare with the formulas. In float32, with $H$ heads of $D$, besides q, k and v:
#
# $$\text{textbook: } 4Hn^2 + n^2 \text{ (the mask)} \qquad\qquad \text{fused: } 4HnD + 8Hn \quad \text{bytes}$$


# %%
def textbook(q, k, v):
    later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    return (q @ k.mT * q.shape[3] ** -0.5).masked_fill(later, float("-inf")).softmax(-1) @ v


def kept_bytes(function, *given):
    """What the call keeps for its backward, besides q, k and v, which are one storage here."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda nothing: nothing):
        function(*given)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    return sum(storages.values()) - storages[given[0].untyped_storage().data_ptr()]


H, D, line, points = 2, 32, [128 * 2**i for i in range(11)], (128, 256, 512, 1024)
kinds = {
    "textbook": (textbook, lambda n: 4 * H * n * n + n * n),
    "fused": (functools.partial(fusedops.attention, causal=True), lambda n: 4 * H * n * D + 8 * H * n),
}
figure, axes = plt.subplots(figsize=(6, 3))
for (name, (function, formula)), colour in zip(kinds.items(), (ORANGE, BLUE), strict=True):
    measured = [kept_bytes(function, *torch.randn(3, 1, H, n, D, device=device).requires_grad_()) for n in points]
    assert measured == [formula(n) for n in points]
    axes.loglog(line, [formula(n) / 2**20 for n in line], base=2, color=colour, label=f"{name}, computed")
    axes.plot(points, [n / 2**20 for n in measured], "o", color=colour, label=f"{name}, measured")
    print(f"{name}, 131,072 tokens: {formula(2**17) / 2**20:,.0f} MiB (computed)")
axes.set(xlabel="tokens", ylabel="MiB", title=f"Kept for the backward, {H} heads of {D}, float32")
axes.legend()
plt.show()

# %% [markdown]
# That is what the kernels keep. The torch backend, which serves what kernels cannot (`fusedops.explain` says when), may
# hold scores; [attention.md](../docs/attention.md#memory) has the whole table.
#
# ## One sequence on several GPUs
#
# Where one GPU cannot hold a sequence's activations, cut its positions over $P$ ranks. Only attention needs the others'
# keys. Ring attention (Liu et al. 2023) passes them on: in step $t$ rank $r$ holds the keys of rank $r - t$, computes,
# and merges the parts by their softmax statistics. Under a causal mask contiguous chunks load the last rank most; in
# zig-zag order rank $r$ has the chunks $r$ and $2P - 1 - r$ of $2P$, and every step is as much work for each.

# %%
P = 4
owners = {"contiguous": [c // 2 for c in range(2 * P)], "zigzag": [min(c, 2 * P - 1 - c) for c in range(2 * P)]}
colours, lasts = ["#56B4E9", ORANGE, GREEN, PINK], {}
figure, axes = plt.subplots(2, 2, figsize=(8, 6), height_ratios=[1.7, 1])
for (order, owner), grid, bars in zip(owners.items(), *axes, strict=True):
    work = torch.zeros(P, P)  # of each rank in each step, in pairs of chunks
    for i, j in itertools.product(range(2 * P), repeat=2):
        if j <= i:
            step = (owner[i] - owner[j]) % P
            work[owner[i], step] += 1 if j < i else 0.5  # of a chunk on the diagonal half is seen
            grid.add_patch(plt.Rectangle((j, i), 1, 1, color=colours[owner[i]], ec="white"))
            grid.text(j + 0.5, i + 0.5, step, ha="center", va="center")
    grid.set(xlim=(0, 2 * P), ylim=(2 * P, 0), aspect="equal", title=f'order="{order}"', xticks=[], yticks=[])
    grid.set(xlabel="chunk of keys", ylabel="chunk of queries")
    for rank in range(P):
        bars.bar(torch.arange(P) + 0.2 * (rank - 1.5), work[rank], 0.2, color=colours[rank], label=f"rank {rank}")
    lasts[order] = float(work.amax(0).sum())  # a step lasts as long as its busiest rank
    bars.set(xlabel="step", ylabel="pairs of chunks", xticks=range(P), ylim=(0, 4.9))
    bars.set_title(f"busiest rank, summed: {lasts[order]:g}")
bars.legend(ncols=2)
figure.suptitle("Who computes which scores (colour), and in which step (number) the keys are there; below, the work")
plt.show()
assert lasts == {"contiguous": 14, "zigzag": 8}  # 8: a fourth of all 32 pairs, so nobody ever waits

# %%
figure, axes = plt.subplots(figsize=(5, 2))  # whose keys are where: they move one rank on in each step
for step, rank in itertools.product(range(P), repeat=2):
    source = (rank - step) % P
    axes.add_patch(plt.Rectangle((rank - 0.45, step - 0.4), 0.9, 0.8, color=colours[source]))
    axes.text(rank, step, f"chunks {source}, {2 * P - 1 - source}", ha="center", va="center", size=8)
axes.set(xlim=(-0.5, P - 0.5), ylim=(P - 0.5, -0.5), title="Keys and values held, zig-zag (colour: whose they are)")
axes.set(xlabel="rank", ylabel="step", xticks=range(P), yticks=range(P))
plt.show()

# %% [markdown]
# ### A real run in two processes
#
# `context_parallel_attention` is all that a model calls; `shard_sequence`, `unshard_sequence` and `positions` do the
# cutting. This script starts two processes on the CPU, which talk by gloo (on GPUs: `torchrun`, nccl). Each has half the
# sequence; rank 0 stores what came out. If a process fails, its traceback is this cell's error.

# %%
SCRIPT = """
import sys
import torch
import torch.distributed as dist
from fusedops.distributed import context_parallel_attention, positions, shard_sequence, unshard_sequence
def run(rank, world, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    whole = torch.load(f"{folder}/input.pt")  # q, k, v and a loss' weight, on every rank
    q, k, v, weight = (shard_sequence(t, 2, order="zigzag").requires_grad_() for t in whole)
    out = context_parallel_attention(q, k, v, order="zigzag", causal=True)
    (out * weight).sum().backward()  # every rank runs its backward
    print(f"rank {rank}: positions {positions(16, order='zigzag').tolist()}\\n", end="")
    results = [unshard_sequence(t, 2, order="zigzag") for t in (out.detach(), q.grad, k.grad, v.grad)]
    if rank == 0:
        torch.save(results, f"{folder}/output.pt")
    dist.barrier()
    dist.destroy_process_group()
if __name__ == "__main__":
    torch.multiprocessing.spawn(run, (2, sys.argv[1]), nprocs=2)
"""
q, k, v, weight = torch.randn(4, 1, 4, 16, 32)
with tempfile.TemporaryDirectory() as folder:
    script = Path(folder, "two_ranks.py")
    script.write_text(SCRIPT)
    torch.save((q, k, v, weight), f"{folder}/input.pt")
    environment = os.environ | {"FUSEDOPS_BACKEND": "torch"}  # CPU tensors, also where there is a GPU
    command = [sys.executable, script, folder]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if process.returncode:
        raise RuntimeError(f"the processes failed:\n{process.stderr}")
    two_ranks = torch.load(f"{folder}/output.pt")
print("\n".join(sorted(process.stdout.splitlines())))

q, k, v = (t.requires_grad_() for t in (q, k, v))  # one device, the whole sequence: the same output and gradients
out = fusedops.attention(q, k, v, causal=True)
one_device = [out.detach(), *torch.autograd.grad((out * weight).sum(), (q, k, v))]
for name, ours, theirs in zip(("output", "dq", "dk", "dv"), two_ranks, one_device, strict=True):
    close(ours, theirs)
    print(name, "equal")

# %% [markdown]
# ### When is the exchange hidden? A model
#
# A step's computing grows as the square of a shard's length $L$, its exchange as $L$. With $H$ query and $K$ key heads
# of $D$, causal, zig-zag, $e$ bytes an element, in the forward:
#
# $$t_\text{compute} = \frac{2 H L^2 D}{\text{speed}} \qquad t_\text{exchange} = \frac{2 K L D e}{\text{link}}
# \qquad \text{hidden where } L \ge \frac{K e}{H} \cdot \frac{\text{speed}}{\text{link}}$$
#
# **This is modelled, nobody has measured it.** Assumed: 32 and 8 heads of 128, bfloat16; kernels at 600 TFLOP/s (61 % of
# an H200's dense bfloat16 peak); 360 GB/s a GPU and direction inside a node of 8 (80 % of NVLink's 450), 40 GB/s between
# nodes (80 % of one 400 Gb/s port a GPU). Latencies are left out. With 8,000 tokens on each GPU any number of GPUs hides
# its exchange; cut one sequence ever finer, and the ring begins to wait. [The page](../docs/context-parallel.md#how-it-scales-a-model)
# has the whole model, with the backward and the all-to-all method.

# %%
SPEED, INSIDE, BETWEEN = 600e12, 0.8 * 450e9, 0.8 * 50e9


def step_seconds(L, link, H=32, K=8, D=128, e=2):
    return 2 * H * L**2 * D / SPEED, 2 * K * L * D * e / link


def exposed(ranks, L):
    """Percent of the forward in which a rank waits for keys; the slowest link holds up the ring."""
    compute, exchange = step_seconds(L, INSIDE if ranks <= 8 else BETWEEN)
    waits = (ranks - 1) * max(0.0, exchange - compute)
    return 100 * waits / (ranks * compute + waits)


hidden_from = 8 * 2 / 32 * SPEED / BETWEEN
assert [round(1e3 * t, 2) for t in step_seconds(8192, BETWEEN)] == [0.92, 0.84]  # as in the page's tables

shards, gpus = [256 * 2**i for i in range(9)], [8 * 2**i for i in range(8)]
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.3))
left.loglog(shards, [1e3 * step_seconds(n, BETWEEN)[0] for n in shards], color=BLUE, label="computing")
for link, style, name in ((BETWEEN, "-", "exchange between nodes"), (INSIDE, "--", "exchange inside a node")):
    left.loglog(shards, [1e3 * step_seconds(n, link)[1] for n in shards], style, color=ORANGE, label=name)
left.axvline(hidden_from, color="black", linewidth=0.8, linestyle=":", label=f"{hidden_from:,.0f} tokens")
left.set(xlabel="tokens a GPU", ylabel="ms a step, forward", title="A step of the ring (modelled)")
right.semilogx(gpus, [exposed(p, 8192) for p in gpus], "o-", base=2, color=BLUE, label="8,192 tokens a GPU")
right.semilogx(gpus, [exposed(p, 2**20 // p) for p in gpus], "s-", base=2, color=ORANGE, label="1M tokens in all")
right.set(xlabel="GPUs", ylabel="% of the forward spent waiting", title="Exposed exchange (modelled)", ylim=(-3, 100))
left.legend(), right.legend()
plt.show()

# %% [markdown]
# ## What to read next
#
# * [Inference](08_inference.ipynb), the next notebook; [fused attention](04_fused_attention.ipynb): how the kernels work.
# * [docs/attention.md](../docs/attention.md): every option, diagonals and windows, rules of your own.
# * [docs/data.md](../docs/data.md): packing with fixed shapes, sequences over the budget, prefetching.
# * [docs/context-parallel.md](../docs/context-parallel.md): a training loop, ring or all-to-all, windows on many GPUs.
