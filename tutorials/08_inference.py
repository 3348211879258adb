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
# # Inference: caches, speculation, graphs
#
# Afterwards you can size a key-value cache, choose its kind (contiguous, ring, paged, 8 bits), write a generation loop
# with `fusedops.nn.KVCache`, speculate, and record a step in a CUDA graph. Each claim is checked as it is made.
#
# **Needs** half a minute and Triton, but no GPU. Without a GPU the kernels run in Triton's interpreter, which executes a kernel's
# Python step by step on CPU tensors: slow, but the same kernels; the model runs on torch's operators there.

# %%
import functools
import os
import warnings

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import ListedColormap

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")  # before what imports Triton
warnings.filterwarnings("ignore", message="IProgress")  # progress bars in notebooks: there are none here
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel

import fusedops
from fusedops.nn import KVCache

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model_backend = "auto" if device == "cuda" else "torch"
BLUE, ORANGE, GREEN, GREY = "#56B4E9", "#E69F00", "#009E73", "#DDDDDD"  # told apart by everyone
plt.rcParams.update({"figure.dpi": 80, "font.size": 9, "figure.constrained_layout.use": True})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


# %% [markdown]
# ## A step is the reading of bytes
#
# To make one token, attention reads the keys and values of all tokens before it. For $L$ layers, $K$ key heads of $D$, $n$
# tokens and $e$ bytes a number, that are
#
# $$2 \cdot L \cdot K \cdot D \cdot n \cdot e \quad \text{bytes a sequence.}$$
#
# Four things make it smaller: fewer key heads, each read by a group of query heads (grouped-query attention, Ainslie et al.
# 2023); 8 bits a number and a float32 scale for each token and head; a sliding window; and pages, which hold no room that no
# token has. A cache on torch's `meta` device has shapes and no memory, so we can ask real ones:

# %%
L, D, n = 32, 128, 32768
caches = {
    "32 key heads, bfloat16": KVCache(L, 1, 32, n, D, dtype=torch.bfloat16, device="meta"),
    "8 key heads, bfloat16": KVCache(L, 1, 8, n, D, dtype=torch.bfloat16, device="meta"),
    "8 key heads, int8": KVCache(L, 1, 8, n, D, dtype=torch.int8, device="meta"),
    "8 key heads, int8, window of 4,096": KVCache(L, 1, 8, None, D, window=4095, dtype=torch.int8, device="meta"),
}
assert caches["32 key heads, bfloat16"].nbytes() == 2 * L * 32 * D * n * 2 + 4  # 4: the sequence's length is there too
assert caches["8 key heads, bfloat16"].nbytes() == 2 * L * 8 * D * n * 2 + 4
assert caches["8 key heads, int8"].nbytes() == 2 * L * 8 * n * (D + 4) + 4  # a number is a byte, a scale four

figure, axes = plt.subplots(figsize=(7, 1.9))
sizes = [cache.nbytes() / 2**30 for cache in caches.values()]
axes.bar_label(axes.barh(list(caches), sizes, color=[ORANGE, BLUE, BLUE, GREEN]), [f" {size:.2f}" for size in sizes])
axes.set(xlabel="GiB a sequence", title=f"Cache of {n:,} tokens: {L} layers, heads of {D}")
axes.invert_yaxis()
plt.show()

# %% [markdown]
# How little is computed for it: a query head spends $4 D$ operations on a token's key and value, whose $2 D e$ bytes serve
# $H/K$ query heads. In bfloat16 with $H/K = 4$ that is 4 operations a byte, where an H200's data sheet has 206 (989 TFLOP/s,
# 4.8 TB/s). So a kernel for decoding has one duty: read the cache once, with the whole GPU.
#
# ## Contiguous: `attention_decode`
#
# `q` holds the last token of each sequence, `cache_seqlens` how many tokens each has, on the device. New `k` and `v` are written
# into the cache first. It is attention of the last query to all keys:

# %%
batch, heads, kv_heads, size, room = 3, 8, 2, 32, 64
keys, values = torch.randn(2, batch, kv_heads, room, size, device=device)
lengths = torch.tensor([63, 17, 40], dtype=torch.int32, device=device)
q = torch.randn(batch, heads, 1, size, device=device)
k, v = torch.randn(2, batch, kv_heads, 1, size, device=device)

out = fusedops.attention_decode(q, keys, values, cache_seqlens=lengths, k=k, v=v)
lengths += 1
for row, length in enumerate(lengths.tolist()):
    seen = (keys[row : row + 1, :, :length], values[row : row + 1, :, :length])
    torch.testing.assert_close(seen[0][:, :, -1], k[row : row + 1, :, 0], rtol=0, atol=0)  # it was written
    close(out[row : row + 1], fusedops.attention(q[row : row + 1], *seen, causal="bottom_right"))

# %% [markdown]
# ## Paged
#
# A contiguous cache has the room of the longest sequence for all. Paged (Kwon et al. 2023, *PagedAttention*), sequences take
# pages from a pool as they grow, and a table says which. `KVCache` does the bookkeeping. Three sequences of 20, 40 and 10 tokens
# grow by 12 each; then the second ends, and a new one of 30 tokens takes its row while the others go on.

# %%
cache = KVCache(1, 3, kv_heads, 64, size, page_size=16, num_pages=10, device=device)


def feed(counts):
    """New tokens, as many as each sequence has, padded to the longest; 16 at most at a time."""
    for begin in range(0, max(counts), 16):
        parts = [max(0, min(16, count - begin)) for count in counts]
        q, k, v = (torch.randn(3, h, max(parts), size, device=device) for h in (heads, kv_heads, kv_heads))
        cache.attend(q, k, v)
        cache.advance(torch.tensor(parts, device=device))


def draw_pages(table_axes, pool_axes, title):
    table, seqlens = cache.block_table.tolist(), cache.seqlens.tolist()
    pool_axes.imshow(torch.ones(10, 16), cmap="gray", vmin=0, vmax=1.15, aspect="auto")
    for row, (pages, length) in enumerate(zip(table, seqlens, strict=True)):  # what lies past a length is not read
        for place, page in enumerate(pages[: -(-length // 16)]):
            colour = (BLUE, ORANGE, GREEN)[row]
            table_axes.add_patch(plt.Rectangle((place, row), 1, 1, color=colour, ec="grey"))
            table_axes.text(place + 0.5, row + 0.5, page, ha="center", va="center")
            pool_axes.barh(page, min(16, length - 16 * place), 0.9, left=-0.5, color=colour)
    table_axes.set(xlim=(0, 4), ylim=(3, 0), title=f"{title}\nblock_table", xticks=[])
    table_axes.set_yticks([0.5, 1.5, 2.5], labels=[f"sequence {row}: {seqlens[row]}" for row in range(3)])
    pool_axes.set(title="the pool", xlabel="token of the page", ylabel="page", yticks=range(10), xticks=[0, 5, 10, 15])


figure, axes = plt.subplots(1, 4, figsize=(11, 3))
feed([20, 40, 10])
feed([12, 12, 12])
draw_pages(axes[0], axes[1], "three sequences")
cache.reset([1])
feed([1, 30, 1])
draw_pages(axes[2], axes[3], "the second is another")
plt.show()

# %% [markdown]
# The kernel reads through the table. The same keys and values, scattered over pages in any order, give the same attention:

# %%
table = torch.randperm(12, device=device).view(3, 4).int()  # 12 pages of 16 tokens for 3 sequences of up to 64
key_pages, value_pages = torch.zeros(2, 12, kv_heads, 16, size, device=device)
for pages, whole in ((key_pages, keys), (value_pages, values)):
    pages[table.flatten().long()] = whole.unflatten(2, (4, 16)).transpose(1, 2).flatten(0, 1)
out = fusedops.attention_decode(q, keys, values, cache_seqlens=lengths)
close(fusedops.attention_decode(q, key_pages, value_pages, cache_seqlens=lengths, block_table=table), out)

# %% [markdown]
# ## Ring
#
# With a sliding window, what left the window is never seen again. A ring of `room` tokens keeps token $p$ in row $p \bmod
# \text{room}$ and serves a sequence for ever. Here are 100 tokens through a window of 24 keys before a token's own:

# %%
window = 24
cache = KVCache(1, 1, kv_heads, None, size, window=window, device=device)
q_all, k_all, v_all = (torch.randn(1, h, 100, size, device=device) for h in (heads, kv_heads, kv_heads))
parts = []
for begin in range(0, 100, 10):  # ten tokens a call; at most 16
    new = slice(begin, begin + 10)
    parts.append(cache.attend(q_all[:, :, new], k_all[:, :, new], v_all[:, :, new]))
    cache.advance(10)
close(torch.cat(parts, 2), fusedops.attention(q_all, k_all, v_all, causal=True, window=(window, 0)))

ring = cache.keys[0].shape[2]
where = [max(p for p in range(100) if p % ring == row) for row in range(ring)]  # the last token of each row
torch.testing.assert_close(cache.keys[0], k_all[:, :, where], rtol=0, atol=0)
figure, axes = plt.subplots(figsize=(9, 0.9))
axes.imshow([[token >= 99 - window for token in where]], cmap=ListedColormap([GREY, BLUE]))
for row, token in enumerate(where):
    axes.text(row, 0, token, ha="center", va="center", fontsize=8)
axes.set(xlabel="row", yticks=[], title=f"A ring of {ring} rows after 100 tokens (blue: token 99 sees them)")
plt.show()

# %% [markdown]
# ## 8 bits
#
# `dtype=torch.int8` or a float8 halves the cache of a 16-bit model. Each token and head has a scale such that its largest
# magnitude becomes the dtype's largest; scores and weights are multiplied with it in registers. What it costs, on random
# numbers (a model's own decide: compare its loss; float8 runs on torch's operators where there is no GPU):

# %%
old, last = ([torch.randn(1, h, n, size, device=device) for h in (heads, kv_heads, kv_heads)] for n in (48, 1))
results = {}
for dtype in (torch.float32, torch.int8, torch.float8_e4m3fn):
    cache = KVCache(1, 1, kv_heads, 64, size, dtype=dtype, device=device)
    cache.attend(*old)
    cache.advance(48)
    results[dtype] = cache.attend(*last)
    error = (results[dtype] - results[torch.float32]).norm() / results[torch.float32].norm()
    print(f"{dtype}: {cache.keys[0].element_size()} bytes a number, relative error {error:.1%}")
    assert error < (0.02 if dtype == torch.int8 else 0.08)

# %% [markdown]
# ## A generation loop
#
# A small GPT-2, taught four phrases of ten tokens in any order, so that it has something to say. (The same with real weights:
# [examples/generate_gpt2.py](../examples/generate_gpt2.py).) The model is patched; `step` is its forward with `cache.attend` in
# the place of attention.

# %%
torch.manual_seed(1)
shape = {"vocab_size": 64, "n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 4}
model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0)).to(device).eval()
phrases, optimizer = torch.randint(64, (4, 10), device=device), torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(60):
    text = phrases[torch.randint(4, (16, 7), device=device)].flatten(1)
    torch.nn.functional.cross_entropy(model(text).logits[:, :-1].flatten(0, 1), text[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
print(fusedops.patch(model))


def step(ids, cache):
    """Logits (batch, tokens, vocabulary) of new tokens after those in the cache."""
    body, (batch, tokens) = model.transformer, ids.shape
    x = body.wte(ids) + body.wpe(cache.seqlens[:, None] + torch.arange(tokens, device=device))
    for layer, block in enumerate(body.h):
        q, k, v = block.attn.c_attn(block.ln_1(x)).view(batch, tokens, 3, 4, 16).permute(2, 0, 3, 1, 4)
        x = x + block.attn.c_proj(cache.attend(q, k, v, layer).transpose(1, 2).flatten(2))
        x = x + block.mlp(block.ln_2(x))
    return model.lm_head(body.ln_f(x))


new_cache = functools.partial(KVCache, num_layers=2, batch_size=1, num_kv_heads=4, max_length=128, head_dim=16)


@torch.no_grad()
def greedy(prompt, count):
    cache, ids, new = new_cache(device=device), list(prompt), list(prompt)
    for _ in range(count):
        logits = step(torch.tensor([new], device=device), cache)
        cache.advance(len(new))
        new = [int(logits[0, -1].argmax())]
        ids += new
    return ids


prompt = phrases[0, :4].tolist()
with torch.no_grad(), fusedops.backend(model_backend):
    text = greedy(prompt, 60)
    for place in range(len(prompt), len(text)):  # the model's own attention, without a cache, says the same
        logits = model(torch.tensor([text[:place]], device=device), use_cache=False).logits
        assert int(logits[0, -1].argmax()) == text[place]
print(torch.tensor(text).view(4, 16))

# %% [markdown]
# ## Speculation
#
# A step reads weights and cache, whether for one token or for several. So guess what comes, feed the guess along, and keep
# what the model agrees with (Leviathan et al. 2023). The cheapest guesser is the text itself: what followed the last two tokens
# when they last occurred. Here that is good, for the phrases return; what it brings depends on the text. `attention_decode` takes up to 16 queries of a sequence, each of which sees the keys up to its own place;
# `advance` counts what was accepted, and what was rejected is written over.


# %%
def guess(ids, count):
    for at in range(len(ids) - 3, -1, -1):
        if ids[at : at + 2] == ids[-2:]:
            return ids[at + 2 : at + 2 + count]
    return []


@torch.no_grad()
def speculative(prompt, count, most=7):
    cache, ids, new, gains, end = new_cache(device=device), list(prompt), list(prompt), [], len(prompt) + count
    while len(ids) < end:
        guessed = guess(ids, min(most, end - len(ids) - 1)) if gains else []
        best = step(torch.tensor([new + guessed], device=device), cache)[0, len(new) - 1 :].argmax(-1).tolist()
        wrong = [place for place, token in enumerate(guessed) if token != best[place]]
        right = wrong[0] if wrong else len(guessed)
        cache.advance(len(new) + right)
        ids, new = ids + best[: right + 1], best[right : right + 1]
        gains.append(right + 1)
    return ids, gains


with fusedops.backend(model_backend):
    speculated, gains = speculative(prompt, 60)
assert speculated == text  # the same tokens
figure, axes = plt.subplots(figsize=(6, 2))
axes.bar(range(1, len(gains) + 1), gains, color=BLUE)
axes.set(xlabel="step", ylabel="tokens", yticks=range(max(gains) + 1), title=f"60 tokens in {len(gains)} steps")
plt.show()

# %% [markdown]
# ## Enough programs for the GPU, and a deterministic merge
#
# One program a sequence and key head is little: 1 sequence of 8 key heads is 8 programs, and an H200 has 132 multiprocessors. So
# the keys of a head are divided among `num_splits` programs (Flash-Decoding, Dao et al. 2023), and a second kernel merges their
# results by the softmax's denominators, $\text{lse} = \log \sum_i e^{\text{lse}_i}$ and $\text{out} = \sum_i e^{\text{lse}_i - \text{lse}}
# \, \text{out}_i$. By hand, with two parts:

# %%
full = torch.full((batch,), room, dtype=torch.int32, device=device)
whole, lse = fusedops.attention_decode(q, keys, values, cache_seqlens=full, return_lse=True)
parts = [
    fusedops.attention_decode(q, keys[:, :, part], values[:, :, part], cache_seqlens=full // 2, return_lse=True)
    for part in (slice(0, room // 2), slice(room // 2, room))
]
close(torch.logsumexp(torch.stack([part_lse for _, part_lse in parts]), 0), lse)
close(sum((part_lse - lse).exp()[..., None] * part for part, part_lse in parts), whole)

# %% [markdown]
# The merge goes in a fixed order, without atomics. Left alone, the number of splits follows from the cache's room, the batch
# and the device. With `num_splits` given, a sequence's result does not depend on the batch that it happens to be in, to the bit:

# %%
with fusedops.backend("triton"):  # the kernels, or an error
    together = fusedops.attention_decode(q, keys, values, cache_seqlens=lengths, num_splits=4)
    alone = fusedops.attention_decode(q[1:2], keys[1:2], values[1:2], cache_seqlens=lengths[1:2], num_splits=4)
torch.testing.assert_close(together[1:2], alone, rtol=0, atol=0)
close(together, fusedops.attention_decode(q, keys, values, cache_seqlens=lengths, num_splits=1))

# %% [markdown]
# ## CUDA graphs
#
# A step of a small model is many short operators, and the host launches each. A CUDA graph records the launches once and replays
# them by one call. That needs lengths that live on the device, as the cache's do: the recorded step serves sequences that grow.
# `fusedops.graphed` records a module; **on the CPU it returns the module itself**, so that the code below is the same everywhere.
# Warm-up and recording run the step a few times: we put the lengths back afterwards.


# %%
class Count(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += not function.is_view
        return function(*args, **(kwargs or {}))


class Step(torch.nn.Module):
    def forward(self, tokens):  # of the cache below
        logits = step(tokens, cache)
        cache.advance(1)
        return logits[:, -1].argmax(-1, keepdim=True)


with torch.no_grad(), fusedops.backend(model_backend):
    cache = new_cache(device=device)
    tokens = step(torch.tensor([prompt], device=device), cache)[:, -1].argmax(-1, keepdim=True)
    cache.advance(len(prompt))
    cache.reserve(30)  # room for what replays will write: they do not ask
    before = cache.seqlens.clone()
    fast = fusedops.graphed(Step().eval(), tokens)
    cache.seqlens.copy_(before)
    cache.refresh()
    ids = [tokens]
    for _ in range(19):
        ids.append(fast(ids[-1]))  # on a GPU nothing here waits for the device
    cache.refresh()  # the host learns how far the replays have come
    assert torch.cat(ids, 1)[0].tolist() == text[len(prompt) : len(prompt) + 20]
    with Count() as counter:
        step(tokens, cache)
print(f"recorded: {type(fast).__name__}; operators of a step, sent one by one, views left out: {counter.calls}")

# %% [markdown]
# On the CPU the type is `Step`, the module itself; on a GPU `Graphed`. Shapes are fixed: record one graph for each batch size,
# and prompts without one. A graph reads weights where they lay; weights written in place are seen.
#
# ## Batches that are there when they are needed
#
# `fusedops.data.prefetch` copies the next batches to the GPU, from pinned memory and on a stream of its own, while it computes
# on this one. On the CPU it hands on the loader's own batches:

# %%
texts = [{"input_ids": torch.randint(64, (int(n),))} for n in torch.randint(4, 24, (12,))]
packs = list(fusedops.data.pack_sequences(texts, max_tokens=48))
arrived = list(fusedops.data.prefetch(packs, device, depth=2))
assert all(pack.data["input_ids"].device.type == device for pack in arrived)
assert (arrived[0] is packs[0]) == (device == "cpu")

figure, axes = plt.subplots(figsize=(8, 2))
for b in range(4):
    for row, begin, length in ((3, 3 * b, 1), (2, 3 * b + 1, 2), (1, b, 1), (0, 2 * b + 1, 2)):
        axes.barh(row, length, 0.8, left=begin, color=(ORANGE, GREY)[row % 2], edgecolor="white")
        axes.text(begin + length / 2, row, b, ha="center", va="center")
axes.set_yticks([3, 2, 1, 0], labels=["plain loop: copies", "computing", "prefetch: copies", "computing"])
axes.set(xlabel="time (a sketch, not a measurement)", xticks=[], title="Batches 0 to 3, copied and computed on")
plt.show()

# %% [markdown]
# ## What to read next
#
# * [Your own operator](09_your_own_operator.ipynb), the next notebook; [long sequences](07_long_sequences.ipynb), the one before.
# * [docs/decoding.md](../docs/decoding.md): all caches and options, beams, compiled steps.
# * [docs/composition.md](../docs/composition.md#cuda-graphs): what may be recorded in a graph, and how.
# * [docs/data.md](../docs/data.md): prefetching and packing.
