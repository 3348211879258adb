"""What spreads a model over devices and processes: accelerate's hooks, FSDP2, DistributedDataParallel."""

from __future__ import annotations

import copy
import datetime
import json
import sys
import traceback
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fusedops
from tests.patching import zoo
from tests.patching.models import classes
from tests.patching.vision import FOLDER

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
MODELS = ("llama", "opt")


# ---- accelerate's hooks: each module's forward is replaced on the instance ------------------------------------------


def offloaded(model, folder):
    import accelerate

    return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


def dispatched(model, folder):
    """The first layer on the CPU, the second on disk, and everything hooked."""
    import accelerate

    places = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            places |= {f"{path}.0": "cpu", f"{path}.1": "disk"}
    for path, module in model.named_modules():
        inside = any(place.startswith(f"{path}.") for place in places) or not path
        known = any(f"{path}.".startswith(f"{place}.") for place in places)
        if not inside and not known and (module._parameters or module._buffers):
            places[path] = "disk" if path.endswith("norm") else "cpu"
    return accelerate.dispatch_model(model, places, offload_dir=str(folder), force_hooks=True)


PLACES = {"cpu_offload": offloaded, "device_map": dispatched}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("name", MODELS)
def test_hooked_after_patching(name, place, tmp_path):
    """The fused model is offloaded: fused it stays, until it is put back; and so it is without the hooks.

    Except for a gated pair: the hooks fetch the weights of one Linear at a time.
    """
    from accelerate.hooks import remove_hook_from_submodules

    batch, plain, model = zoo.batch_of(name), zoo.build(name), zoo.build(name)
    hooked_plain = place(copy.deepcopy(plain), tmp_path / "plain")
    fusedops.patch(model)
    fused = classes(model)
    model = place(model, tmp_path)
    assert next(model.get_submodule("model").parameters()).device.type == "meta" or place is dispatched
    with torch.no_grad():
        with zoo.counted() as calls:
            torch.testing.assert_close(zoo.results(model, batch), zoo.results(plain, batch), **CLOSE)
        expected = zoo.ZOO[name].fused
        assert all(calls[function] == expected[function] for function in expected if function != "gated_linear"), calls
        again = fusedops.patch(model)
        assert not again.replaced, str(again)
        assert zoo.functions(again) == zoo.ZOO[name].fused
        assert classes(model) == fused
        fusedops.unpatch(model)
        assert classes(model) == classes(plain)
        with zoo.counted() as calls:
            assert torch.equal(zoo.results(model, batch), zoo.results(hooked_plain, batch))
        assert not calls
        remove_hook_from_submodules(model)
        bare = copy.deepcopy(plain).state_dict()
        model.load_state_dict(bare, assign=True)
        with zoo.counted() as calls:
            assert torch.equal(zoo.results(model, batch), zoo.results(plain, batch))
        assert not calls


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("name", MODELS)
def test_patched_after_hooking(name, place, tmp_path):
    """An offloaded model is patched: the hooks stay, what is fused says so truly, and all goes back."""
    batch, plain = zoo.batch_of(name), zoo.build(name)
    model = place(zoo.build(name), tmp_path)
    before = classes(model)
    forwards = {path: module.__dict__.get("forward") for path, module in model.named_modules()}
    report = fusedops.patch(model)
    with torch.no_grad():
        with zoo.counted() as calls:
            torch.testing.assert_close(zoo.results(model, batch), zoo.results(plain, batch), **CLOSE)
        assert calls == zoo.functions(report), str(report)
        # What is not fused here is named.
        missing = Counter(zoo.ZOO[name].fused) - zoo.functions(report)
        assert len(report.left) >= sum(missing.values()), str(report)
        fusedops.unpatch(model)
        assert classes(model) == before
        with zoo.counted() as calls:
            torch.testing.assert_close(zoo.results(model, batch), zoo.results(plain, batch), rtol=0, atol=0)
        assert not calls
    assert {path: module.__dict__.get("forward") for path, module in model.named_modules()} == forwards


def test_hooks_removed_from_a_patched_model_leave_it_fused():
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_submodules

    batch, plain, model = zoo.batch_of("llama"), zoo.build("llama"), zoo.build("llama")
    fusedops.patch(model)
    for module in model.modules():
        add_hook_to_module(module, ModelHook())
    zoo.results(model, batch)
    remove_hook_from_submodules(model)
    with zoo.counted() as calls:
        torch.testing.assert_close(zoo.results(model, batch), zoo.results(plain, batch), **CLOSE)
    assert calls == zoo.ZOO["llama"].fused
    fusedops.unpatch(model)
    with zoo.counted() as calls:
        assert torch.equal(zoo.results(model, batch), zoo.results(plain, batch))
    assert not calls


# ---- two processes --------------------------------------------------------------------------------------------------


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def close(actual, expected, what):
    assert actual.keys() == expected.keys(), what
    for key, value in actual.items():
        torch.testing.assert_close(
            full(value), expected[key], **CLOSE, msg=lambda text, key=key: f"{what} {key}: {text}"
        )


def step(model, batch):
    """Loss, and the gradients of all parameters by their own names."""
    model.zero_grad()
    loss = zoo.loss_of(model, batch)
    loss.backward()
    named = ((name.removeprefix("module."), p.grad) for name, p in model.named_parameters())
    return loss.item(), {name: gradient.clone() for name, gradient in named if gradient is not None}


def sharded(model):
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.decoder.layers if hasattr(model.model, "decoder") else model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def expected_of(name, ranks):
    """The loss of this process' batch, and the gradients averaged over the processes' batches."""
    plain = zoo.build(name)
    steps = [step(plain, zoo.batch_of(name, seed=rank)) for rank in range(ranks)]
    return steps[dist.get_rank()][0], {
        key: sum(gradients[key] for _, gradients in steps) / ranks for key in steps[0][1]
    }


def patched_then_sharded(name, batch, loss, gradients):
    model = zoo.build(name)
    fusedops.patch(model)
    model = sharded(model)
    with zoo.counted() as calls:
        actual, found = step(model, batch)
    assert calls == zoo.ZOO[name].fused, calls
    assert abs(actual - loss) < 1e-4 * loss
    close(found, gradients, "patched, then sharded:")


def sharded_then_patched(name, batch, loss, gradients):
    model = sharded(zoo.build(name))
    before = classes(model)
    report = fusedops.patch(model)
    with zoo.counted() as calls:
        actual, found = step(model, batch)
    assert calls == zoo.functions(report), (calls, str(report))
    missing = Counter(zoo.ZOO[name].fused) - zoo.functions(report)
    assert len(report.left) >= sum(missing.values()), str(report)
    assert abs(actual - loss) < 1e-4 * loss
    close(found, gradients, "sharded, then patched:")
    fusedops.unpatch(model)
    assert classes(model) == before
    close(step(model, batch)[1], gradients, "sharded and put back:")


def replicated(name, batch, loss, gradients):
    model = zoo.build(name)
    fusedops.patch(model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    with zoo.counted() as calls:
        actual, found = step(wrapped, batch)
    assert calls == zoo.ZOO[name].fused, calls
    assert abs(actual - loss) < 1e-4 * loss
    close(found, gradients, "replicated:")
    # The wrapper is looked through, too.
    assert not fusedops.patch(wrapped).replaced
    assert fusedops.unpatch(wrapped)
    assert classes(model) == classes(zoo.build(name))
    assert zoo.functions(fusedops.patch(wrapped)) == zoo.ZOO[name].fused
    close(step(wrapped, batch)[1], gradients, "replicated, then patched:")


PARTS = {"patched-then-sharded": patched_then_sharded, "sharded-then-patched": sharded_then_patched}
PARTS |= {"replicated": replicated}


def process(rank, ranks, folder):
    """One of the processes: every part on every model. What they raise goes into a file."""
    store = dist.FileStore(f"{folder}/store", ranks)
    patience = datetime.timedelta(seconds=90)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=patience)
    raised = {}
    try:
        with fusedops.backend("torch"):
            for name in MODELS:
                loss, gradients = expected_of(name, ranks)
                for part, function in PARTS.items():
                    try:
                        function(name, zoo.batch_of(name, seed=rank), loss, gradients)
                    except Exception:
                        raised[f"{part} {name}"] = traceback.format_exc()
                        # At once: the other process may now wait for this one in vain.
                        Path(folder, f"raised{rank}.json").write_text(json.dumps(raised))
        Path(folder, f"raised{rank}.json").write_text(json.dumps(raised))
        # Not dist.barrier(): who leaves it first closes the connection over which the other one still hears of it.
        store.set(f"finished{rank}", "")
        store.wait([f"finished{other}" for other in range(ranks)], patience)
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch was built without gloo")
def test_two_processes(tmp_path, monkeypatch):
    """This process is the first of them. The parts are one test, as starting the second takes seconds."""
    context = torch.multiprocessing.get_context("spawn")
    other = context.Process(target=process, args=(1, 2, str(tmp_path)), daemon=True)
    # The folder is for processes that have prepared for it.
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [path for path in sys.path if path != str(FOLDER)])
        other.start()
    try:
        process(0, 2, str(tmp_path))
        other.join(60)
    finally:
        files = [path for rank in range(2) if (path := tmp_path / f"raised{rank}.json").exists()]
        found = {path.stem: json.loads(path.read_text()) for path in files}
        texts = [f"{part}, {rank}: {text}" for rank, parts in found.items() for part, text in parts.items()]
        assert not texts, "\n".join(texts)
    assert other.exitcode == 0
