"""What has to be tried in a fresh process: loading where fusedops is not, or not yet, imported; process groups.

One process, which takes seconds to import what it needs, runs the parts one after the other.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fusedops
from tests.patching.models import bert, block, gpt2, inputs

# Each part is a function; what it raises is printed.
PROGRAM = """
import copy, json, sys, traceback
from collections import Counter
from pathlib import Path

def saved(folder):
    sys.modules["fusedops"] = None  # it is not there
    import torch, transformers
    models = list((folder / "saved").iterdir())
    assert len(models) == 2
    for model_folder in models:
        batch, expected = torch.load(model_folder / "expected.pt")
        model = getattr(transformers, model_folder.name).from_pretrained(model_folder).eval()
        torch.testing.assert_close(model(**batch).logits, expected, rtol=1e-5, atol=1e-6)

def pickled(folder):
    del sys.modules["fusedops"]
    import torch
    paths = list(folder.glob("*.model"))
    assert len(paths) == 3
    for path in paths:
        model = torch.load(path, weights_only=False)
        batch, expected = torch.load(path.with_suffix(".expected"))
        fused = [module for module in model.modules() if "fused_rule" in vars(type(module))]
        import fusedops
        from fusedops.patching import attention, linears
        calls = Counter()
        originals = [(linears, "linear", linears.linear)]
        originals += [(attention, "scaled_dot_product_attention", attention.scaled_dot_product_attention)]
        for module, name, original in originals:
            def counted(*args, original=original, name=name, **kwargs):
                calls[name] += 1
                return original(*args, **kwargs)
            setattr(module, name, counted)
        with fusedops.backend("torch"):
            result = model(**batch)
        for module, name, original in originals:
            setattr(module, name, original)
        torch.testing.assert_close(getattr(result, "logits", result), expected, rtol=1e-5, atol=1e-6)
        pairs, attentions = {"block": (1, 0), "bert": (3, 2), "gpt2": (2, 2)}[path.stem]
        assert calls["linear"] == pairs, calls
        assert calls["scaled_dot_product_attention"] == attentions, calls
        assert fusedops.unpatch(model) == len(fused) > 2

def gradients(model, batch):
    torch.manual_seed(0)
    model(**batch).logits.square().mean().backward()
    full = [p.grad for p in model.parameters()]
    return [g if g is None or not hasattr(g, "full_tensor") else g.full_tensor() for g in full]

def distributed(folder):
    global torch
    import torch
    import torch.distributed as dist
    if not dist.is_available():
        return
    import fusedops
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from tests.patching.models import bert, gpt2, inputs
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for build in (bert, gpt2):
        plain = build()
        batch = inputs(plain)
        expected = gradients(plain, batch)
        for wrap in ("fsdp", "fsdp of every linear", "ddp"):
            plain.zero_grad()
            model = copy.deepcopy(plain)
            replaced = len(fusedops.patch(model).replaced)
            if wrap == "ddp":
                model = DistributedDataParallel(model, find_unused_parameters=True)
                assert len(fusedops.patch(model).already) == replaced
            else:
                mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
                parts = model.bert.encoder.layer if build is bert else model.transformer.h
                for part in parts:
                    if wrap != "fsdp":
                        fully_shard(part.intermediate.dense if build is bert else part.mlp.c_fc, mesh=mesh)
                    fully_shard(part, mesh=mesh)
                fully_shard(model, mesh=mesh)
            with fusedops.backend("torch"):
                actual_gradients = gradients(model, batch)
            for actual, reference in zip(actual_gradients, expected, strict=True):
                assert (actual is None) == (reference is None)
                if actual is not None:
                    torch.testing.assert_close(actual, reference, rtol=1e-4, atol=1e-6)
        sharded = copy.deepcopy(plain)
        fully_shard(sharded, mesh=mesh)
        reasons = {entry.reason for entry in fusedops.patch(sharded).left}
        assert any("its weight is a DTensor" in reason for reason in reasons), reasons
    dist.destroy_process_group()

raised = {}
for part in (saved, pickled, distributed):
    try:
        part(Path(sys.argv[1]))
    except Exception:
        raised[part.__name__] = traceback.format_exc()
print(json.dumps(raised))
"""


@pytest.fixture(scope="module")
def raised(tmp_path_factory) -> dict[str, str]:
    """What the parts raised in another process, on models that were saved and pickled in this one."""
    folder = tmp_path_factory.mktemp("models")
    with fusedops.backend("torch"):
        for build in (bert, gpt2):
            save(build(), folder / "saved")
        for name, build in {"block": block, "bert": bert, "gpt2": gpt2}.items():
            model = build()
            fusedops.patch(model)
            batch = inputs(model) if hasattr(model, "config") else {"input": torch.randn(2, 8)}
            result = model(**batch)
            torch.save(model, folder / f"{name}.model")
            torch.save((batch, getattr(result, "logits", result).detach()), folder / f"{name}.expected")
    root = Path(fusedops.__file__).parents[1]
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def save(model, folder):
    """The patched model's configuration and weights, and beside them a batch and its logits."""
    batch = inputs(model)
    fusedops.patch(model)
    expected = model(**batch).logits.detach()
    folder /= type(model).__name__
    model.save_pretrained(folder)
    assert "fused" not in (folder / "config.json").read_text().lower()
    loaded = type(model).from_pretrained(folder).eval()
    assert loaded.config._attn_implementation == "sdpa"
    torch.testing.assert_close(loaded(**batch).logits, expected, rtol=1e-5, atol=1e-6)
    torch.save((batch, expected), folder / "expected.pt")


@pytest.mark.parametrize(
    "part",
    [
        pytest.param("saved", id="saved_models_load_where_fusedops_is_not"),
        pytest.param("pickled", id="pickled_models_load_where_it_is_not_imported_yet"),
        pytest.param("distributed", id="sharded_and_replicated_models"),
    ],
)
def test_in_another_process(raised, part):
    assert part not in raised, raised[part]
