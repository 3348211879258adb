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
# # Autotuning: which launch configuration, and who decides
#
# Afterwards you can say why no configuration is best everywhere, read which candidates a search drops and why, and find out where any
# kernel's configuration comes from. You can also share what was found with a team, a container or a thousand ranks.
#
# **Needs** half a minute and Triton, but no GPU: no kernel runs here. They are *compiled* for an H100, which Triton does on any machine.
# On a GPU the last cells search for real.

# %%
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import torch

folder = Path(tempfile.mkdtemp())
os.chdir(folder)
os.environ["FUSEDOPS_CACHE_DIR"] = str(folder / "cache")  # before the import: your own store is left alone
import fusedops
from fusedops.autotune.buckets import bucket
from fusedops.autotune.compiling import compile_configs, with_issue
from fusedops.autotune.identity import Identity
from fusedops.autotune.lookup import look_up, store
from fusedops.autotune.offline import rank
from fusedops.autotune.roofline import PRODUCTS, estimate
from fusedops.autotune.workloads import problems_of

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
BLUE, ORANGE, GREEN, PINK, GREY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#BBBBBB"
plt.rcParams.update({"figure.dpi": 80, "font.size": 9, "figure.constrained_layout.use": True})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})

# %% [markdown]
# ## There is no best configuration
#
# A kernel of `fusedops.linear` works in tiles. How large they are, how many warps work on one and how many loads are in flight is its
# *configuration*. Take a layer of 4,096 to 4,096 features, 16, 256 or 8,192 rows, and two GPUs: six problems. For each we ask a model
# for its best tile, and then what the tile that is best for one problem costs on another.
#
# The model is a roofline with occupancy, latency and waves (`fusedops/autotune/roofline.py` has its assumptions). It takes public figures
# of a GPU and gives seconds. **Nothing here is measured**; a real search measures.


# %%
def linear(gpu, rows):
    sizes = {"rows": rows, "in_features": 4096, "out_features": 4096, "activation": "gelu_tanh", "training": False}
    ((operator, problem),) = problems_of("linear", PRODUCTS[gpu].facts, **sizes)
    return operator, problem, PRODUCTS[gpu].facts


def modelled(config, operator, problem, facts):
    """Seconds; infinite where the configuration does not fit."""
    if operator.unfit(config, problem, facts):
        return float("inf")
    return estimate(operator.work(config, problem, facts), facts)


cases = {f"{gpu}, {rows}": linear(gpu, rows) for gpu in ("H100", "RTX 4090") for rows in (16, 256, 8192)}
spaces = (operator.space(problem) for operator, problem, _ in cases.values())
tiles = dict.fromkeys(config for space in spaces for config in space if config.kernel == "tiled")
best = {name: min(tiles, key=lambda config: modelled(config, *case)) for name, case in cases.items()}
cost = torch.tensor([[modelled(best[other], *cases[name]) for other in cases] for name in cases], dtype=torch.float64)
cost = cost / cost.diagonal()[:, None]
assert (cost >= 1 - 1e-9).all()
assert (cost.max(0).values > 1.3).all()  # each winner is far behind somewhere, or does not fit there

figure, axes = plt.subplots(figsize=(6, 3.6))
axes.imshow(cost.clamp(max=4).log2(), cmap="Blues", aspect="auto")
for row, column in itertools.product(range(6), repeat=2):
    value = cost[row, column].item()
    shown = "ruled\nout" if value == float("inf") else f"{value:.2f}"
    axes.text(column, row, shown, ha="center", va="center", color="white" if value > 2 else "black", fontsize=8)
labels = [f"{name}\n{c.rows}×{c.cols}×{c.depth}, {c.num_warps} warps" for name, c in best.items()]
axes.set_xticks(range(6), labels=labels, rotation=60, ha="right", fontsize=7)
axes.set_yticks(range(6), labels=list(cases))
axes.set(ylabel="problem: GPU, rows", xlabel="tile that is best for", title="Times the time of the best tile (a model)")
plt.show()

# %% [markdown]
# A large tile reads its operands fewest times, and leaves most of the GPU idle where rows are few; larger than the problem it is ruled out. One
# that fits an H100's shared memory does not fit every GPU's. So a configuration belongs to a **problem** on a **device**.
#
# ## The problem's key, and its buckets
#
# What the key holds: the operator, the direction, dtypes, every flag that changes the code, and sizes.

# %%
operator, problem, facts = cases["H100, 8192"]
print(operator.key(problem))

# %% [markdown]
# Features are exact: they are a model's. Rows change with every batch, so they count in buckets: powers of two up to 256, then two an
# octave, up to a cap. A new sequence length is not a new search.

# %%
sizes = torch.arange(1, 40_000)
buckets = torch.tensor([bucket(size) for size in sizes.tolist()])
assert (buckets.diff() >= 0).all()
assert ((buckets >= sizes) | (buckets == 32768)).all()
print(f"{len(sizes):,} lengths, {len(buckets.unique())} problems")
figure, axes = plt.subplots(figsize=(5.5, 2.6))
axes.loglog(sizes, buckets, color=BLUE, drawstyle="steps-pre")
axes.loglog(sizes, sizes, color=GREY, ls=":")
axes.set(
    xlabel="rows, or a sequence's length",
    ylabel="counts as",
    title="A bucket is at most twice the size (up to the cap)",
)
plt.show()

# %% [markdown]
# ## The search space
#
# All combinations of the configuration's fields. Most fall before anything is compiled: an operator's `prune` knows from the tile's size
# that the shared memory, or a thread's registers, cannot hold it.

# %%
space = list(operator.space(problem))
why = Counter(operator.unfit(config, problem, facts) or "fits" for config in space)
print(f"{len(space):,} configurations of this problem on an H100")
for reason, count in why.most_common():
    print(f"{count:6,}  {reason}")
assert why["fits"] + sum(count for reason, count in why.items() if reason != "fits") == len(space)

# %% [markdown]
# Thousands are left; timing each is out of the question. The model ranks them, and a search takes 32: the default, what is stored for near
# problems, the default's neighbours (the ranking may be wrong), and the best of the ranking.
#
# ## Pruning by compiled code
#
# A model that has not seen the code believes too much. Here are six tiles, two of which the rules above would already have stopped,
# compiled for an H100 as a search compiles its candidates. Then the model is asked again, with what the compiler said.

# %%
default = operator.default(problem, facts)
tiles = [(64, 64, 64, 3, 4), (64, 256, 64, 3, 4), (128, 128, 64, 4, 8)]
tiles += [(128, 256, 64, 3, 4), (256, 256, 64, 3, 8)]
names = ("rows", "cols", "depth", "num_stages", "num_warps")
chosen = [default, *(replace(default, **dict(zip(names, tile, strict=True))) for tile in tiles)]
reports = compile_configs(operator, problem, facts, chosen, threads=os.cpu_count() or 1)

print("rows cols depth stages warps | registers spilt shared | model before, after (µs)")
table = []
for config in chosen:
    report, work = reports[config], operator.work(config, problem, facts)
    before, after = estimate(work, facts), estimate(work, facts, with_issue(report))
    table.append((config, report, before, after))
    shape = f"{config.rows:4} {config.cols:4} {config.depth:5} {config.num_stages:6} {config.num_warps:5}"
    figures = f"{report.registers:9} {report.spill_bytes:5} {report.shared:6}"
    print(f"{shape} | {figures} | {before * 1e6:5.0f}, {after * 1e6:5.0f}")
    for text in (*report.warnings, operator.unfit(config, problem, facts)):
        print("      ^", text) if text else None

believed = min(table, key=lambda row: row[2])
known = min((row for row in table if not row[1].spill_bytes and not row[1].warnings), key=lambda row: row[3])
assert believed[1].spill_bytes > 0  # what looked best does not fit into registers
assert known[3] < believed[3]

# %% [markdown]
# The 256×256 tile looks best: fewest reads. But its sums do not fit into 255 registers a thread; they spill to memory, and the assembler
# gives up running the matrix instructions asynchronously. A search *demotes* such candidates (they are tried last, if at all), and prunes
# those that exceed the shared memory. Each dot below is a candidate; it may use what is white:

# %%
figure, axes = plt.subplots(figsize=(7, 3.6))
limit = facts.shared_memory / 1024
axes.axvspan(limit, 262, color="#EEEEEE"), axes.axhspan(255, 300, color="#EEEEEE")
axes.text(limit + 3, 90, "more than a\nprogram may\nhave", fontsize=8)
axes.text(25, 284, "more than a thread has: spilt", fontsize=8, va="center")
times = [row[3] * 1e6 for row in table]
needs = [row[1].registers + (20 if row[1].spill_bytes else 0) for row in table]
shared = [row[1].shared / 1024 for row in table]
dots = axes.scatter(shared, needs, c=times, cmap="cividis_r", s=90, edgecolor="black", vmin=min(times), vmax=max(times))
for (config, report, *_), x, y in zip(table, shared, needs, strict=True):
    label = f"{config.rows}×{config.cols}" + ("\n(default)" if config == default else "")
    label += "\ndemoted" if report.spill_bytes else ""
    axes.annotate(label, (x, y), xytext=(8, -3), textcoords="offset points", fontsize=8)
figure.colorbar(dots, label="µs, by the model")
axes.set(xlabel="shared memory a program, KiB", ylabel="registers a thread", xlim=(20, 262), ylim=(60, 300))
axes.set_title("Six tiles, compiled for an H100 (registers and shared memory as the compiler reports them)", fontsize=9)
plt.show()
assert all(x <= limit for x in shared)

# %% [markdown]
# ## A ranking without a GPU
#
# `fusedops autotune --offline --target H100` does that for whole models, and stores the outcome. From Python, with a small budget of six
# candidates, for the backward of a LayerNorm:

# %%
_, (operator, problem) = problems_of("norm", facts, rows=4096, width=768)
(result,) = rank([(operator, problem, "")], facts, most=6)
entry = result.entry
print(operator.key(problem))
for candidate in result.candidates:
    mark = "*" if candidate.config == entry.config else "d" if candidate.config == entry.default else " "
    names = ("block_m", "num_warps", "programs_per_multiprocessor", "num_stages", "num_ctas")
    print(mark, *(f"{name}={candidate.config[name]}" for name in names), "|", candidate.outcome, "|", candidate.reason)
print("source:", entry.source, "| median:", entry.median)
assert entry.source == "heuristic"
assert entry.median is None

# %% [markdown]
# `heuristic`: nobody measured it. Such an entry displaces the default (`d`) only where the model takes it (`*`) for more than 25 % faster,
# and a search on such a GPU replaces it. All configurations that ship with fusedops are of this kind so far.
#
# ## The store
#
# One JSON file for each GPU and operator, under `FUSEDOPS_CACHE_DIR` or your user's cache folder. Writers lock, merge and replace whole
# files; readers need no lock; nothing in it stops a model.

# %%
store().put(Identity.of(facts), [entry])
Path("lines.py").write_text("""
import shlex, sys
from fusedops.cli.app import app

for line in sys.argv[1:]:
    print("$ fusedops", line, flush=True)
    try:
        app(shlex.split(line))
    except SystemExit as end:
        print("[exit code 1]" if end.code else "", flush=True)
""")


def fusedops_command(*lines, **environment):
    """Lines of the ``fusedops`` command, in a process without this page's colours. Dates are left out."""
    plain = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "CLICOLOR_FORCE")}
    plain |= {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "110", "PYTHONUTF8": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run([sys.executable, "lines.py", *lines], env=plain | environment, **pipes)
    text = done.stdout.replace(str(folder), "FOLDER").replace(sys.executable, "python")
    return re.sub(r"\d{4}-\d\d-\d\d(T[\d:]+Z)?", lambda date: "DATE".ljust(len(date[0])), text).strip()


asked = "norm width=768 itemsize=2 direction=backward sums=2 rows=4096"  # the other fields have their usual values
told = fusedops_command("cache list", "cache show norm width=768", f"cache explain {asked} --target H100")
told, _, explained = told.rpartition("$ ")
print(told.partition("Candidates")[0])  # those are as printed above
assert "heuristic" in told

# %% [markdown]
# ## Where a configuration comes from
#
# In this order: the process's memory, your store, the files in `FUSEDOPS_CONFIG_PATH`, what ships for this GPU, then the files' and the
# shipped ones for another GPU of the same architecture, then the same again for the nearest size, then the default, which always fits.
# A look-up never raises and never searches. `explain` asks them all:

# %%
print("$", explained)
assert "your store answers" in explained

# %% [markdown]
# The same from Python, for four questions whose answers come from four places:

# %%
wide = problem._replace(width=1000)  # of which nothing is known
questions = {
    "as stored": (problem, facts),
    "other rows": (problem._replace(rows=3072), facts),
    "on an H200": (problem, PRODUCTS["H200"].facts),
    "width 1000": (wide, facts),
}
for question, (wanted, where) in questions.items():
    found = look_up(operator, wanted, where)
    print(f"{question:10}  {found.source}{' (exactly this problem on this GPU)' if found.exact else ''}")
    assert operator.unfit(found.config, wanted, where) is None  # whatever the source, it was checked
assert look_up(operator, problem, facts).source == "your store"
assert look_up(operator, wide, facts).source == "default"

# %% [markdown]
# ## A miss
#
# No entry of its own, so a default or a neighbour's serves at once. `FUSEDOPS_AUTOTUNE`, or `fusedops.autotune.mode(...)` around a part of
# a program, decides what else happens:
#
# | mode | |
# |---|---|
# | `cached` (default) | the first miss of a process says what to run |
# | `on` | the first miss of a problem searches then and there, up to 20 seconds |
# | `record` | the problem is written to a file, to be searched later |
# | `off` | defaults only, whatever is stored |
#
# Recording is the way for a training job: run two steps, then search what they met. Here a small script runs in Triton's interpreter, which
# executes a kernel's Python on CPU tensors.

# %%
Path("train.py").write_text("""
import torch, fusedops
layer = fusedops.nn.RMSNorm(512, device="cuda" if torch.cuda.is_available() else "cpu")
layer(torch.randn(100, 512, device=layer.weight.device)).sum().backward()
""")
told = fusedops_command(
    f"record --output met.jsonl -- {shlex.quote(sys.executable)} train.py",
    "autotune --from met.jsonl --offline --target H100 --dry-run",
    **({} if device == "cuda" else {"TRITON_INTERPRET": "1"}),
)
print(told)
met, wrong = fusedops.autotune.read_recorded(Path("met.jsonl"))
assert not wrong
for item in met:
    print(item.operator.name, item.problem.direction, item.problem.rows, item.problem.width, item.problem.kind)
assert {item.problem.rows for item in met} == {bucket(100)}

# %% [markdown]
# On the machine with the GPU it is `fusedops autotune --from met.jsonl --budget 10m`. After Ctrl-C, or at the budget's end, the same command
# goes on where it stopped.
#
# ## Sharing
#
# An export is one sorted file with a line an entry: it can be committed and diffed. It is data alone, and is checked before anything uses
# it. On another machine, here another folder:

# %%
print(fusedops_command("cache export team.json", "cache verify team.json", "cache diff team.json store"))
print(fusedops_command("cache merge all.json team.json team.json"))
assert Path("all.json").read_bytes() == Path("team.json").read_bytes()  # the same entries, the same bytes
told = fusedops_command("cache import team.json", FUSEDOPS_CACHE_DIR=str(folder / "colleague"))
print(told)
assert "1 added" in told

# %% [markdown]
# Or name the file in `FUSEDOPS_CONFIG_PATH` and import nothing: bake it into a container's image, or put it on a shared disk. A container
# whose cache is empty then finds it. What someone has edited by hand is refused, and the next source answers:

# %%
text = Path("team.json").read_text()
Path("edited.json").write_text(re.sub(r'"num_warps": ?\d+', '"num_warps": 3', text))
assert json.loads(text) != json.loads(Path("edited.json").read_text())
for file, answers in (("team.json", "team.json answers"), ("edited.json", "shipped with fusedops answers")):
    elsewhere = {"FUSEDOPS_CACHE_DIR": str(folder / "empty"), "FUSEDOPS_CONFIG_PATH": file}
    told = fusedops_command(f"cache verify {file}", f"cache explain {asked} --target H100", **elsewhere)
    print(*(line for line in told.splitlines() if re.search("^\\$|wrong|answers:", line)), sep="\n")
    assert answers in told

# %% [markdown]
# ## Several ranks
#
# Ranks that search for themselves may choose differently and then wait for each other, so with `torch.distributed` running, calls only look
# up. After the first step call `fusedops.autotune.sync()` on every rank: the first rank searches what any of them has missed, all use what it
# found. It is the tuner's only collective call. Alone, it searches what this process has missed, which here is nothing:

# %%
assert fusedops.autotune.sync() == []

# %% [markdown]
# ## A search
#
# On a GPU, each candidate is compiled, compared with a float32 reference, and only then timed, in a process of its own. What you will see:
# the candidates with their outcome (`timed` with a median, `demoted`, `pruned`, `wrong`, `failed`), and the winner, which is the default
# unless another takes less time by more than 2 % and twice the deviation. If another process uses the GPU, the default's time drifts, and
# the search says so and stores nothing.

# %%
if device == "cuda":
    (result,) = fusedops.autotune.tune([problem], key_budget_s=20)
    entry = result.entry
    print(result.refused or f"winner: {entry.median * 1e6:.1f} µs, default: {entry.default_median * 1e6:.1f} µs")
    print(Counter(candidate.outcome for candidate in result.candidates))
    print(fusedops_command("cache show norm width=768"))
else:
    print("no GPU here: nothing to time")

# %% [markdown]
# ## What to read next
#
# * [Autotuning](../docs/autotuning.md): all of it, with the search's rules and the environment variables.
# * [Containers](../docs/containers.md) and [inspection](../docs/inspection.md): images, Slurm, and what a kernel compiles to.
# * Next tutorial: [train a small GPT](06_train_a_small_gpt.ipynb); your own tuned kernel is in [the last one](09_your_own_operator.ipynb).
