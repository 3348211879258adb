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
# # Train a small GPT, patched and not
#
# You write a small GPT in plain PyTorch, train it on real text, patch it, train it again from the same start, and see that it learns the
# same, what it keeps in memory, and what fused parts change when you write them into the model yourself.
#
# It takes half a minute on a CPU, where torch's operators serve all calls. On a GPU the same code runs the kernels and larger sizes.

# %%
import copy
import sysconfig
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

import fusedops

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    layers, width, heads, context, batch_size, steps = 8, 512, 8, 1024, 16, 300
else:
    layers, width, heads, context, batch_size, steps = 3, 96, 4, 96, 8, 80

# %% [markdown]
# ## Text
#
# Python's own standard library: real text, and it is already on your disk. A token is a byte.

# %%
files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = b"".join(path.read_bytes() for path in files)[:1_500_000]
data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
print(f"{len(data):,} bytes of {len(files)} files")

starts = torch.randint(len(data) - context, (steps, batch_size, 1))
batches = data[starts + torch.arange(context + 1)]  # (steps, batch, context + 1)

# %% [markdown]
# ## The model
#
# Nothing of fusedops in it: RMS norms, `F.scaled_dot_product_attention`, a gated MLP (SwiGLU), written as you would.


# %%
class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(width), Attention(width, heads)
        self.norm2, self.mlp = nn.RMSNorm(width), MLP(width, 4 * width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, layers, width, heads, context):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


plain = GPT(layers, width, heads, context).to(device)
patched = copy.deepcopy(plain)  # the same weights
print(f"{sum(p.numel() for p in plain.parameters()):,} parameters")

# %%
report = fusedops.patch(patched)
print(report)

# %% [markdown]
# `patch` found all of it in classes that it has never seen: torch's norms by class, attention by the call in `Attention.forward`, and the
# gated MLP by the lines of `MLP.forward`.
#
# ## Training
#
# An ordinary loop. On a GPU it runs under bfloat16 autocast; fused operators follow autocast's rules as torch's do.


# %%
def loss_of(model, batch):
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        logits = model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def train(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    losses = []
    for batch in batches:
        loss = loss_of(model, batch.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        warmup.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


# %% [markdown]
# Before any step the gradients agree, parameter by parameter:

# %%
first = batches[0].to(device)
for model in (plain, patched):
    loss_of(model, first).backward()
worst = max(
    float((a.grad - b.grad).norm() / a.grad.norm())
    for a, b in zip(plain.parameters(), patched.parameters(), strict=True)
)
print("largest relative distance of a gradient below 1e-4:", worst < (1e-4 if device == "cpu" else 0.05))
assert worst < (1e-4 if device == "cpu" else 0.05)

# %%
losses = {"plain": train(plain), "patched": train(patched)}

fig, ax = plt.subplots(figsize=(6, 3))
ax.plot(losses["plain"], color="#999999", lw=4, label="plain")
ax.plot(losses["patched"], color="#0072B2", lw=1.2, label="patched")
ax.axhline(torch.log(torch.tensor(256.0)), color="#D55E00", ls=":", label="guessing")
ax.set(xlabel="step", ylabel="loss, nats a byte", ylim=(0, 6))
ax.legend(frameon=False)
ax.spines[["top", "right"]].set_visible(False)
fig.tight_layout()
plt.show()
print("largest difference of the losses below 1e-3:", bool((losses["plain"] - losses["patched"]).abs().max() < 1e-3))

# %% [markdown]
# On a CPU the fused operators of this model run torch's own, so that the two runs hardly differ. On a GPU the kernels round in other places,
# and training amplifies that as it does any rounding: two kinds of GPU, or two versions of cuBLAS, differ as much. They learn the same.

# %%
ends = {name: float(values[-10:].mean()) for name, values in losses.items()}
assert losses["plain"][0] - ends["plain"] > 2.0  # it has learnt something
assert abs(ends["plain"] - ends["patched"]) < 0.05
print("mean of the last ten steps agrees to 0.05 nats")

# %% [markdown]
# ## Memory
#
# What one step keeps for its backward, by `memory_report`. On a CPU it counts what a GPU would keep.

# %%
memory = fusedops.memory_report(patched, first[:, :-1])
print(f"{1 - memory.patched / memory.unpatched:.0%} less than unpatched")
assert memory.patched < memory.unpatched

# %% [markdown]
# `patch` keeps a model's structure. A model that you write yourself can fuse across its parts: the residual sum into the norm behind it
# (`add_rms_norm` gives the sum and its norm in one pass), and the MLP's norm into its first product, whose normalised input is then not
# kept (`rms_norm_linear`). Here is the block with the first of these:


# %%
class FusedBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.attention = fusedops.nn.RMSNorm(width), Attention(width, heads)
        self.norm2, self.mlp = fusedops.nn.AddRMSNorm(width), fusedops.nn.GatedMLP(width, 4 * width)

    def forward(self, x):
        normalised, x = self.norm2(self.attention(self.norm1(x)), x)  # the sum's norm, and the sum
        return x + self.mlp(normalised)


class FusedGPT(GPT):
    def __init__(self, layers, width, heads, context):
        super().__init__(layers, width, heads, context)
        self.blocks = nn.ModuleList(FusedBlock(width, heads) for _ in range(layers))


def renamed(name):
    for ours, theirs in (("gate.", "gate_proj."), ("up.", "up_proj."), ("down.", "down_proj.")):
        name = name.replace(f"mlp.{ours}", f"mlp.{theirs}")
    return name


fused = FusedGPT(layers, width, heads, context).to(device)
fused.load_state_dict({renamed(name): value for name, value in plain.state_dict().items()})
fusedops.patch(fused)  # its attention
with torch.no_grad():
    torch.testing.assert_close(fused(first[:, :-1]), plain(first[:, :-1]), rtol=1e-3, atol=1e-3)

kept = {
    "plain": memory.unpatched,
    "patched": memory.patched,
    "written with\nfused parts": fusedops.memory_report(fused, first[:, :-1]).patched,
}
fig, ax = plt.subplots(figsize=(5, 2.6))
bars = ax.bar(list(kept), [size / 2**20 for size in kept.values()], color=["#999999", "#0072B2", "#009E73"], width=0.6)
ax.bar_label(bars, fmt="%.1f")
ax.set_ylabel("kept for the backward, MiB")
ax.spines[["top", "right"]].set_visible(False)
fig.tight_layout()
plt.show()

# %% [markdown]
# The sum of two tensors keeps nothing either way: what `add_rms_norm` saves is a pass over memory, not memory.
#
# ## Keep the model
#
# Its `state_dict` is the plain model's. Whoever loads it needs no fusedops.

# %%
fresh = GPT(layers, width, heads, context).to(device)
fresh.load_state_dict(patched.state_dict())
fusedops.unpatch(patched)
with torch.no_grad():
    assert torch.equal(fresh(first[:, :-1]), patched(first[:, :-1]))


# %% [markdown]
# ## What it has learnt


# %%
@torch.no_grad()
def continued(model, prompt, count):
    tokens = torch.tensor(list(prompt.encode()), device=device)[None]
    for _ in range(count):
        logits = model(tokens[:, -context:])[:, -1]
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


print(continued(fresh, "def ", 40))

# %% [markdown]
# Eighty steps on a CPU teach it spaces and a few words; three hundred on a GPU some syntax.
#
# ## Where the time goes, on a GPU
#
# `fusedops record -- python train.py` writes down which kernels' problems a run meets, `fusedops autotune --from FILE` searches their
# configurations once, and every later run uses them ([autotuning](05_autotuning.ipynb)). A profile is torch's own:

# %%
if device == "cuda":
    fusedops.patch(fresh)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        loss_of(fresh, first).backward()
    print(profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=12))
else:
    print("no GPU here: nothing to profile")

# %% [markdown]
# ## What to read next
#
# * [Norms](../docs/norm.md): `add_rms_norm`, `rms_norm_linear`, and what each keeps.
# * [Composition](../docs/composition.md): mixed precision, checkpointing, CUDA graphs; [distributed](../docs/distributed.md) training.
# * Next tutorial: [long sequences](07_long_sequences.ipynb).
