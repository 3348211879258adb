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
# # Five minutes to a faster model
#
# You have a model. In the next five minutes you patch it with one line, see what was replaced and what was not, check that
# its results are what they were, see what it keeps in memory, and take the patch back.
#
# It runs anywhere. Without a GPU torch's operators serve every call (the results and reports are the same); on a GPU the same
# lines run fusedops' Triton kernels.

# %%
import copy
import warnings

import matplotlib.pyplot as plt
import torch

warnings.filterwarnings("ignore", message="IProgress")  # of a progress bar that nothing here shows
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import fusedops

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% [markdown]
# ## A model
#
# A small Llama with random weights, so that nothing has to be downloaded. Yours may be any `torch.nn.Module`: of transformers,
# of timm, of torch.nn, or your own. `patch` goes by what a model is built of, not by its name.

# %%
config = LlamaConfig(
    hidden_size=256,
    intermediate_size=688,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=1000,
)
model = LlamaForCausalLM(config).to(device).eval()
tokens = torch.randint(0, config.vocab_size, (2, 128), device=device)

with torch.no_grad():
    plain = model(tokens).logits

# %% [markdown]
# ## Look before you leap
#
# `fusedops.plan` changes nothing. It says what `patch` would replace, by which rule, and what it recognised and would leave alone,
# with the reason.

# %%
plan = fusedops.plan(model)
print(plan)
assert not plan.applied

# %% [markdown]
# ## One line

# %%
report = fusedops.patch(model)
print(len(report.replaced), "places call a fused operator;", len(report.left), "were recognised and left alone")

# %% [markdown]
# The model is the same object. Its modules, parameters, optimisers and hooks are those that it had: each module's *class* was
# swapped for a fused subclass of its own class.

# %%
norm = model.model.norm
print("the class of model.model.norm is now", type(norm).__name__)
assert isinstance(norm, transformers.models.llama.modeling_llama.LlamaRMSNorm)

# %% [markdown]
# ## The same results
#
# Fused kernels round less often, so the last bits differ. How far may they? `check=` runs the model before and after, and
# measures the model's own *noise floor*: how far its outputs move when every step rounds a little differently.

# %%
with torch.no_grad():
    fused = model(tokens).logits
torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4)

fusedops.unpatch(model)
report = fusedops.patch(model, check=(tokens,))
print("largest difference within ten times the noise floor:", report.check.explained)
assert report.check.explained

# %% [markdown]
# ## What it keeps in memory
#
# A training step keeps tensors from the forward for the backward. Llama's norms and gated MLPs are written out in several steps,
# and each step keeps its own. Fused operators keep what their formula needs. `memory_report` counts it, module by module: whole
# storages, as autograd holds them. On a CPU it counts what a GPU would keep.

# %%
batch = {"input_ids": tokens, "labels": tokens}
memory = fusedops.memory_report(model, batch)
print(memory)

# %% [markdown]
# The same as a picture, by kind of module:

# %%
MIB = 2**20
kinds = {}
for row in memory.rows:
    if row.own_unpatched == row.own_patched == 0:
        continue
    before, after = kinds.get(row.kind, (0, 0))
    kinds[row.kind] = before + row.own_unpatched / MIB, after + row.own_patched / MIB

fig, ax = plt.subplots(figsize=(7.5, 2.6))
left = [0.0, 0.0]
colors = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"]
for (kind, sizes), color in zip(sorted(kinds.items()), colors, strict=True):
    ax.barh(["unpatched", "patched"], sizes, left=left, label=kind, color=color)
    left = [a + b for a, b in zip(left, sizes, strict=True)]
for position, total in enumerate(left):
    ax.text(total + 0.3, position, f"{total:.1f} MiB", va="center")
ax.set_xlim(0, 1.15 * max(left))
ax.invert_yaxis()
ax.set_xlabel("kept for the backward, MiB (batch 2, 128 tokens, float32)")
ax.spines[["top", "right"]].set_visible(False)
ax.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
fig.tight_layout()
plt.show()
assert memory.patched < memory.unpatched

# %% [markdown]
# ## Train it
#
# Nothing about training changes. Gradients are those of the unpatched model, up to rounding:

# %%
other = copy.deepcopy(model)
fusedops.unpatch(other)


def gradients(m):
    m.zero_grad()
    m(**batch).loss.backward()
    return {name: p.grad.clone() for name, p in m.named_parameters()}


fused_gradients, plain_gradients = gradients(model), gradients(other)
for name, gradient in plain_gradients.items():
    torch.testing.assert_close(fused_gradients[name], gradient, rtol=1e-3, atol=1e-5)
print(f"{len(plain_gradients)} gradients agree")

# %% [markdown]
# Checkpoints are those of the plain model: a `state_dict` of one loads into the other.

# %%
other.load_state_dict(model.state_dict())
assert model.state_dict().keys() == other.state_dict().keys()

# %% [markdown]
# ## Choose, and take back
#
# `include=` and `exclude=` choose modules by name, `with fusedops.patched(model):` patches for a while, and `unpatch` puts everything
# back, to the bit.

# %%
fusedops.unpatch(model)
with torch.no_grad():
    assert torch.equal(model(tokens).logits, plain)

only_norms = fusedops.patch(model, exclude=["*.mlp", "*.self_attn"])
print({replacement.rule for replacement in only_norms.replaced})

with fusedops.patched(model):
    pass  # all of it, in here
fusedops.unpatch(model)

# %% [markdown]
# ## Which backend is at work?
#
# `explain` says it of one call, with every reason. On a CPU torch's operators serve; on a GPU the kernels do.

# %%
x = torch.randn(4, 256, device=device)
print(fusedops.explain(fusedops.rms_norm, x, 256))

# %% [markdown]
# ## On a GPU
#
# Run this notebook there and compare the time of a step. Kernels are compiled at their first call, so the first step takes seconds;
# the search for the best launch configurations is one command, once a GPU (tutorial 05).

# %%
if device == "cuda":
    model = model.to(torch.bfloat16).train()
    tokens = torch.randint(0, config.vocab_size, (8, 512), device=device)
    batch = {"input_ids": tokens, "labels": tokens}

    def milliseconds():
        for _ in range(3):
            model(**batch).loss.backward()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            model(**batch).loss.backward()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 10

    before = milliseconds()
    fusedops.patch(model)
    print(f"a step: {before:.2f} ms unpatched, {milliseconds():.2f} ms patched")
else:
    print("no GPU here: nothing to time")

# %% [markdown]
# ## What to read next
#
# * [Patching](../docs/patching.md): what is recognised and how, rules of your own, Trainer and Lightning.
# * [Models](../docs/models.md): 36 models, what is fused in each, how far their outputs move.
# * [Troubleshooting](../docs/troubleshooting.md), by message.
# * Next tutorial: [how a fused layer norm works](02_fused_layer_norm.ipynb).
