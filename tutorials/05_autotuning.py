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
from typer.testing import CliRunner

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
from fusedops.cli.app import app

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
BLUE, ORANGE, GREEN, PINK, GREY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#BBBBBB"
plt.rcParams.update({"figure.dpi": 80, "font.size": 9, "figure.constrained_layout.use": True})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})

# %% [markdown]
# ## There is no best configuration
#
# A kernel of `fusedops.linear` works in tiles. How large they are, how many warps work on one and how many loads are in flight is its
# *configuration*. Take a layer of 4,096 to 4,096 features, 16, 256 or 8,192 rows, and three GPUs: nine problems. For each we ask a model
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


cases = {f"{gpu}, {rows}": linear(gpu, rows) for gpu in ("H100", "A100", "RTX 4090") for rows in (16, 256, 8192)}
tiles = dict.fromkeys(
    c for operator, problem, _ in cases.values() for c in operator.space(problem) if c.kernel == "tiled"
)
best = {name: min(tiles, key=lambda config: modelled(config, *case)) for name, case in cases.items()}
cost = torch.tensor([[modelled(best[other], *cases[name]) for other in cases] for name in cases], dtype=torch.float64)
cost = cost / cost.diagonal()[:, None]
assert (cost >= 1 - 1e-9).all()
assert (cost.max(0).values > 1.3).all()  # each winner is far behind somewhere, or does not fit there

figure, axes = plt.subplots(figsize=(7.5, 4.6))
axes.imshow(cost.clamp(max=4).log2(), cmap="Blues", aspect="auto")
for row, column in itertools.product(range(9), repeat=2):
    value = cost[row, column].item()
    axes.text(
        column, row, "does\nnot fit" if value == float("inf") else f"{value:.2f}", ha="center", va="center",
        color="white" if value > 2 else "black", fontsize=8,
    )  # fmt: skip
labels = [f"{name}\n{c.rows}×{c.cols}×{c.depth}, {c.num_warps} warps" for name, c in best.items()]
axes.set_xticks(range(9), labels=labels, rotation=60, ha="right", fontsize=7)
axes.set_yticks(range(9), labels=list(cases))
axes.set(
    ylabel="problem: GPU, rows",
    xlabel="tile that is best for",
    title="Times the time of the problem's own best tile (a model)",
)
plt.show()

# %% [markdown]
# A large tile reads its operands fewest times, and leaves most of the GPU idle where rows are few. A tile that fits an H100's shared
# memory does not fit another GPU's. So a configuration belongs to a **problem** on a **device**.
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
# A model that has not seen the code believes too much. Here are eight tiles, two of which the rules above would already have stopped,
# compiled for an H100 as a search compiles its candidates. Then the model is asked again, with what the compiler said.

# %%
default = operator.default(problem, facts)
tiles = [(64, 64, 64, 3, 4), (128, 64, 32, 2, 4), (64, 256, 64, 3, 4), (128, 128, 64, 4, 8)]
tiles += [(256, 128, 64, 4, 8), (128, 256, 64, 3, 4), (256, 256, 64, 3, 8)]
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
    print(
        f"{shape} | {report.registers:9} {report.spill_bytes:5} {report.shared:6} | {before * 1e6:5.0f}, {after * 1e6:5.0f}"
    )
    for text in (*report.warnings, operator.unfit(config, problem, facts)):
        print("      ^", text) if text else None

believed = min(table, key=lambda row: row[2])
known = min((row for row in table if not row[1].spill_bytes and not row[1].warnings), key=lambda row: row[3])
assert believed[1].spill_bytes > 0  # what looked best does not fit into registers
assert known[3] < believed[3]

# %% [markdown]
# The 256×256 tile looks best: fewest reads. But its sums do not fit into 255 registers a thread; they spill to memory, and the assembler
# gives up running the matrix instructions asynchronously. A search *demotes* such candidates (they are tried last, if at all), and prunes
# those that exceed the shared memory. Each dot below is a candidate, the corner that it may use is white:

# %%
figure, axes = plt.subplots(figsize=(7, 3.6))
limit, spilt = facts.shared_memory / 1024, [row for row in table if row[1].spill_bytes]
axes.axvspan(limit, 262, color="#EEEEEE"), axes.axhspan(255, 300, color="#EEEEEE")
axes.text(limit + 3, 90, "more than a\nprogram may\nhave", fontsize=8)
axes.text(25, 284, "more than a thread has: spilt", fontsize=8, va="center")
times = [row[3] * 1e6 for row in table]
needs = [row[1].registers + (20 if row[1].spill_bytes else 0) for row in table]
shared = [row[1].shared / 1024 for row in table]
dots = axes.scatter(shared, needs, c=times, cmap="cividis_r", s=90, edgecolor="black", vmin=min(times), vmax=max(times))
for (config, report, *_), x, y in zip(table, shared, needs, strict=True):
    label = f"{config.rows}×{config.cols}" + (" (default)" if config == default else "")
    axes.annotate(
        label + (", demoted" if report.spill_bytes else ""),
        (x, y),
        xytext=(8, -3),
        textcoords="offset points",
        fontsize=8,
    )
figure.colorbar(dots, label="µs, by the model")
axes.set(xlabel="shared memory a program, KiB", ylabel="registers a thread", xlim=(20, 262), ylim=(60, 300))
axes.set_title(
    "Eight tiles, compiled for an H100 (registers and shared memory as the compiler reports them)", fontsize=9
)
plt.show()
assert all(x <= limit for x in shared)

# %% [markdown]
# ## A ranking without a GPU
#
# `fusedops autotune --offline --target H100` does that for whole models, and stores the outcome. From Python, with a small budget of eight
# candidates, for the backward of a LayerNorm:

# %%
_, (operator, problem) = problems_of("norm", facts, rows=4096, width=768)
(result,) = rank([(operator, problem, "")], facts, most=8)
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


def command(line, lines=100, code=0, **environment):
    """``fusedops`` in this process; in one of its own where it gets another environment. Dates are left out."""
    if environment:
        call = [sys.executable, "-m", "fusedops", *shlex.split(line)]
        done = subprocess.run(call, env=os.environ | environment, capture_output=True, text=True)
        output, exited = done.stdout + done.stderr, done.returncode
    else:
        done = CliRunner().invoke(app, shlex.split(line))
        output, exited = done.output, done.exit_code
    assert exited == code, output
    text = re.sub(r"\d{4}-\d\d-\d\d(T[\d:]+Z)?", "DATE", output.replace(str(folder), "FOLDER"))
    print(f"$ fusedops {line}", *text.rstrip().splitlines()[:lines], sep="\n")


command("cache list")
command("cache show norm width=768", lines=26)

# %% [markdown]
# ## Where a configuration comes from
#
# In this order: the process's memory, your store, the files in `FUSEDOPS_CONFIG_PATH`, what ships for this GPU, then the files' and the
# shipped ones for another GPU of the same architecture, then the same again for the nearest size, then the default, which always fits.
# A look-up never raises and never searches. `explain` asks them all:

# %%
fields = operator.key(problem)
command(f"cache explain norm {fields} --target H100", lines=14)

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
for question, (asked, where) in questions.items():
    found = look_up(operator, asked, where)
    print(f"{question:10}  {found.source}{' (exactly this problem on this GPU)' if found.exact else ''}")
    assert operator.unfit(found.config, asked, where) is None  # whatever the source, it was checked
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
interpreted = {} if device == "cuda" else {"TRITON_INTERPRET": "1"}
command(f"record --output met.jsonl -- {shlex.quote(sys.executable)} train.py".replace(sys.executable, "python"), code=0,
        PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", **interpreted)  # fmt: skip
met, wrong = fusedops.autotune.read_recorded(Path("met.jsonl"))
assert not wrong
for item in met:
    print(item.operator.name, item.problem.direction, item.problem.rows, item.problem.width, item.problem.kind)
assert [(item.problem.direction, item.problem.rows) for item in met] == [
    ("forward", 128),
    ("backward", 128),
]  # 100 rows
command("autotune --from met.jsonl --offline --target H100 --dry-run", lines=11)

# %% [markdown]
# On the machine with the GPU it is `fusedops autotune --from met.jsonl --budget 10m`. After Ctrl-C, or at the budget's end, the same command
# goes on where it stopped.
#
# ## Sharing
#
# An export is one sorted file with a line an entry: it can be committed and diffed. It is data alone, and is checked before anything uses
# it. On another machine, here another folder:

# %%
command("cache export team.json")
command("cache verify team.json")
command("cache import team.json", FUSEDOPS_CACHE_DIR=str(folder / "colleague"))
command("cache merge all.json team.json team.json")
assert Path("all.json").read_bytes() == Path("team.json").read_bytes()  # the same entries, the same bytes
command("cache diff team.json store")

# %% [markdown]
# Or name the file in `FUSEDOPS_CONFIG_PATH` and import nothing: bake it into a container's image, or put it on a shared disk. A container
# whose cache is empty then finds it:

# %%
command(
    f"cache explain norm {fields} --target H100",
    lines=4,
    FUSEDOPS_CACHE_DIR=str(folder / "empty"),
    FUSEDOPS_CONFIG_PATH="team.json",
)

# %% [markdown]
# What someone has edited by hand, or what no longer fits, is refused, and the next source answers:

# %%
text = Path("team.json").read_text()
Path("edited.json").write_text(re.sub(r'"num_warps": ?\d+', '"num_warps": 3', text))
assert json.loads(text) != json.loads(Path("edited.json").read_text())
command("cache verify edited.json", code=1)

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
    _, (operator, problem) = problems_of(
        "norm", fusedops.runtime.device.device_facts(torch.device("cuda")), rows=4096, width=768
    )
    (result,) = fusedops.autotune.tune([problem], key_budget_s=20)
    print(
        result.refused
        or f"the winner takes {result.entry.median * 1e6:.1f} µs, the default {result.entry.default_median * 1e6:.1f} µs"
    )
    print(Counter(candidate.outcome for candidate in result.candidates))
    command("cache show norm width=768", lines=26)
else:
    print("no GPU here: nothing to time")

# %% [markdown]
# ## What to read next
#
# * [Autotuning](../docs/autotuning.md): all of it, with the search's rules and the environment variables.
# * [Containers](../docs/containers.md) and [inspection](../docs/inspection.md): images, Slurm, and what a kernel compiles to.
# * Next tutorial: [train a small GPT](06_train_a_small_gpt.ipynb); your own tuned kernel is in [the last one](09_your_own_operator.ipynb).
