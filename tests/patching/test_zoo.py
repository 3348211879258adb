"""Every model of the zoo: what patching fuses in it, and that it still computes what it did."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

import fusedops
from tests.harness.errors import check_error
from tests.patching import zoo
from tests.patching.models import classes
from tests.patching.zoo import ZOO

# nn.TransformerEncoder's own shortcut uses nested tensors.
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")

GENERATING = [name for name, animal in ZOO.items() if animal.generates]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def patched(name, dtype=torch.float32):
    model = zoo.build(name, dtype)
    fusedops.patch(model)
    return model


@pytest.mark.parametrize("name", ZOO)
def test_what_is_fused(name):
    """The report says what it is to say, and what it says is what runs."""
    animal, model = ZOO[name], zoo.build(name)
    planned = fusedops.plan(model)
    report = fusedops.patch(model)
    assert report.replaced == planned.replaced
    assert zoo.functions(report) == animal.fused, str(report)
    reasons = [entry.reason for entry in report.left]
    for pattern, count in animal.left.items():
        matching = [reason for reason in reasons if re.search(pattern, reason)]
        assert len(matching) == count, str(report)
        reasons = [reason for reason in reasons if reason not in matching]
    assert not reasons, str(report)
    with zoo.counted() as calls:
        zoo.results(model, zoo.batch_of(name))
    assert calls == (animal.calls or animal.fused)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", ZOO)
def test_forward(name, dtype):
    """As near to the exact results as the plain model's are, with and without padding."""
    plain = zoo.build(name, dtype)
    model, exact = patched(name, dtype), zoo.exact(plain)
    found = []
    for seed, change in enumerate((dict, zoo.without_padding)):
        batch = change(zoo.batch_of(name, dtype, seed))
        with torch.no_grad():
            results = [zoo.results(model, batch), zoo.results(plain, batch)]
            with zoo.Float64():
                results.insert(1, zoo.results(exact, zoo.moved(batch, torch.float64)))
        found.append(results)
    for results, others in (found, found[::-1]):
        check_error(*results, what=name, more=[others[1:]])


@pytest.mark.parametrize("name", ZOO)
def test_backward(name):
    """So is the gradient of every parameter."""
    plain = zoo.build(name)
    model, exact = patched(name), zoo.exact(plain)
    found = []
    for seed in range(2):
        batch = zoo.batch_of(name, seed=seed)
        results = [zoo.gradients_of(model, batch), zoo.gradients_of(plain, batch)]
        with zoo.Float64():
            results.insert(1, zoo.gradients_of(exact, zoo.moved(batch, torch.float64)))
        found.append(results)
    first, second = found
    assert first[0].keys() == first[2].keys()
    for part in first[0]:
        results, others = ([gradients[part] for gradients in one] for one in (first, second))
        check_error(*results, gradient=True, what=f"{name}: gradient of {part}", more=[others[1:]])


@pytest.mark.parametrize("cache", ["dynamic", "static", None], ids=["dynamic-cache", "static-cache", "no-cache"])
@pytest.mark.parametrize("name", GENERATING)
def test_greedy_tokens_are_the_same(name, cache):
    """From a batch padded on the left, where the model takes padding there."""
    if cache == "static" and not ZOO[name].static_cache:
        pytest.skip("this model has no static cache")
    batch = zoo.batch_of(name)
    prompt = {key: value for key, value in batch.items() if key not in ("use_cache", "decoder_input_ids")}
    options = {"max_new_tokens": 6, "do_sample": False, "use_cache": cache is not None}
    if cache is not None:
        options["cache_implementation"] = cache
    expected, actual = (model.generate(**prompt, **options) for model in (zoo.build(name), patched(name)))
    assert torch.equal(actual, expected)
    assert actual[:, -6:].unique().numel() > 2


@pytest.mark.parametrize("name", ZOO)
def test_everything_goes_back(name):
    model, batch = zoo.build(name), zoo.batch_of(name)
    before = classes(model)
    attributes = {path: dict(module.__dict__) for path, module in model.named_modules()}
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        expected = zoo.results(model, batch)
        assert fusedops.patch(model).replaced
        changed = sum(kind is not before[path] for path, kind in classes(model).items())
        zoo.results(model, batch)
        assert fusedops.unpatch(model) == changed > 0
        assert classes(model) == before
        assert torch.equal(zoo.results(model, batch), expected)
    for path, module in model.named_modules():
        assert module.__dict__.keys() == attributes[path].keys(), path
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ZOO)
def test_a_step_of_training(name):
    losses = []
    for model in (zoo.build(name).train(), patched(name).train()):
        batch = zoo.batch_of(name)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        loss = zoo.loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append([loss.item(), zoo.loss_of(model, batch).item()])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[1][1] < losses[1][0]


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_kernels_serve_whole_models(name, kernel_runner):
    """Interpreted or on a GPU, forward and backward."""
    plain = zoo.build(name).to(kernel_runner.device)
    model, exact = patched(name).to(kernel_runner.device), zoo.exact(plain)
    batches = [zoo.moved(zoo.batch_of(name, seed=seed), kernel_runner.device) for seed in range(2)]
    ours = zoo.loss_of(model, batches[0]), zoo.gradients_of(model, batches[0])
    baseline = [(zoo.loss_of(plain, batch), zoo.gradients_of(plain, batch)) for batch in batches]
    with zoo.Float64():
        reference = [(zoo.loss_of(exact, batch), zoo.gradients_of(exact, batch)) for batch in batches]
    check_error(ours[0], reference[0][0], baseline[0][0], what=name, more=[(reference[1][0], baseline[1][0])])
    for part, gradient in ours[1].items():
        check_error(
            gradient,
            reference[0][1][part],
            baseline[0][1][part],
            gradient=True,
            what=f"{name}: gradient of {part}",
            more=[(reference[1][1][part], baseline[1][1][part])],
        )


# ---- docs/models.md -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def builder():
    """scripts/build_models_page.py."""
    path = Path(__file__).parents[2] / "scripts" / "build_models_page.py"
    spec = importlib.util.spec_from_file_location("build_models_page", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rows(builder):
    return builder.stable_rows(builder.PAGE.read_text())


def test_the_page_lists_the_zoo(rows):
    assert [row[0] for row in rows] == [animal.title for animal in ZOO.values()], "run scripts/build_models_page.py"


@pytest.mark.parametrize("name", ZOO)
def test_the_page_tells_what_is_fused(builder, rows, name):
    row = builder.stable_row(name)
    assert row == rows[list(ZOO).index(name)], "run scripts/build_models_page.py"


def test_the_script_measures(builder):
    """Its numbers are the checks of patch itself: none is more than rounding explains."""
    for name in ("bert", "llama", "sequential"):
        check = zoo.measured(name, torch.float32)
        assert check.explained
        assert check.max_abs_value > 0.1
        assert f"({check.noise_floor:.1e})" in builder.difference(name, torch.float32)
