"""``memory_report``: what autograd keeps, by module; and the estimate of a report for a size that nobody has run."""

from __future__ import annotations

import copy
import gc
import io
import json
import pickle

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedops
from fusedops.patching.memory import MemoryReport, kept_for_backward
from fusedops.runtime import backend
from tests.patching.models import MLP, bert, block, classes, gpt2, inputs


def rows(report):
    return {row.path: (row.own_unpatched, row.own_patched) for row in report.rows}


def shown(value, width=200):
    console = Console(width=width, file=io.StringIO())
    console.print(value)
    return console.file.getvalue()


def test_every_byte_is_known():
    # Linear: the input is the model's, so nothing. Sigmoid: its output. The last Linear: its input, which is the same.
    model = nn.Sequential(nn.Linear(8, 16), nn.Sigmoid(), nn.Linear(16, 4, bias=False), nn.Tanh())
    report = fusedops.memory_report(model, torch.randn(5, 8), patch=False)
    assert rows(report) == {"": (0, None), "1": (5 * 16 * 4, None), "3": (5 * 4 * 4, None)}
    assert (report.unpatched, report.patched, report.saved) == (5 * 20 * 4, None, 0)


def test_views_of_one_tensor_count_once_and_whole():
    class Chunks(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            return q * k * v[..., :1]

    x = torch.randn(2, 8)
    report = fusedops.memory_report(Chunks(), x, patch=False)
    assert report.unpatched == 2 * 24 * 4 + 2 * 8 * 4  # the product q * k too


def test_a_graph_that_is_dropped_is_not_kept():
    class Drops(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            self.b(x).exp().sigmoid()
            return self.a(x).exp()

    assert fusedops.memory_report(Drops(), torch.randn(3, 8), patch=False).unpatched == 3 * 8 * 4


def test_bytes_go_to_the_innermost_module_and_add_up():
    model = gpt2()
    report = fusedops.memory_report(model, inputs(model))
    assert sum(row.own_unpatched for row in report.rows) == report.unpatched == report.rows[0].unpatched
    assert sum(row.own_patched for row in report.rows) == report.patched == report.rows[0].patched
    by_path = {row.path: row for row in report.rows}
    parent = by_path["transformer.h.0.mlp"]
    inside = [row for path, row in by_path.items() if path.startswith("transformer.h.0.mlp.")]
    assert parent.unpatched == sum(row.own_unpatched for row in inside) > parent.patched
    assert by_path["transformer.h.0.attn"].kind == "GPT2Attention"


def test_what_the_fused_path_keeps_is_what_its_kernels_keep():
    # GPT-2's GELU is seven operators, and most of them keep a tensor. The kernel keeps the one that its derivative is a
    # function of, and the second product keeps its input, both ways.
    model = gpt2(n_inner=64, resid_pdrop=0.0).transformer.h[0].mlp
    report = fusedops.memory_report(model, torch.randn(2, 7, 32))
    hidden = 2 * 7 * 64 * 4
    kept = rows(report)
    assert kept["c_fc"] == (0, hidden)
    assert kept["c_proj"] == (hidden, hidden)
    assert kept["act"][0] >= 3 * hidden
    assert report.patched == 2 * hidden


def test_scores_of_eager_attention_are_saved():
    def kept(length):
        model = bert("eager", attention_probs_dropout_prob=0.0, max_position_embeddings=64)
        report = fusedops.memory_report(model, {"input_ids": torch.randint(3, 40, (2, length))})
        return next(row for row in report.rows if row.path == "bert.encoder.layer.1.attention.self")

    short, long = kept(32), kept(64)
    probabilities = 2 * 2 * 32 * 32 * 4
    # What grows with the square of the length is doubled by twice the length once more than what does not.
    assert long.unpatched - 2 * short.unpatched >= 2 * probabilities
    assert long.patched == 2 * short.patched


@pytest.mark.parametrize("make", [block, MLP, lambda: gpt2("eager"), bert], ids=["block", "MLP", "gpt2", "bert"])
def test_no_trace_is_left(make):
    model = make().eval()
    next(model.modules()).flag = "mine"
    given = inputs(model) if hasattr(model, "config") else torch.randn(2, 8)
    before = classes(model), [dict(m.__dict__) for m in model.modules()], torch.get_rng_state()
    values = copy.deepcopy(model.state_dict())
    fusedops.memory_report(model, given)
    assert classes(model) == before[0]
    assert [dict(m.__dict__) for m in model.modules()] == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not model.training


def test_no_trace_is_left_by_a_model_that_fails():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.batch_norm = nn.LayerNorm(8), nn.BatchNorm1d(8)

        def forward(self, x):
            y = self.batch_norm(self.norm(x))
            if type(self.norm) is not nn.LayerNorm:
                self.seen = True
                raise RuntimeError("no")
            return y

    model = Fails().eval()
    with pytest.raises(RuntimeError, match="no"):
        fusedops.memory_report(model, torch.randn(4, 8))
    assert type(model.norm) is nn.LayerNorm
    assert not hasattr(model, "seen")
    assert not model.training
    assert model.batch_norm.num_batches_tracked == 0
    assert torch.equal(model.batch_norm.running_mean, torch.zeros(8))


def test_a_patched_model_is_measured_both_ways_and_stays_patched():
    plain, patched = gpt2(), gpt2()
    patched.load_state_dict(plain.state_dict())
    fusedops.patch(patched)
    before = classes(patched)
    given = inputs(plain)
    assert fusedops.memory_report(plain, given) == fusedops.memory_report(patched, given)
    assert classes(patched) == before


def test_partly_patched():
    model = block()
    fusedops.patch(model[2])
    report = fusedops.memory_report(model, torch.randn(2, 8))
    assert type(model[2]).__name__ == "FusedLayerNorm"
    assert type(model[0]) is nn.Linear
    assert report.patched is not None


def test_frozen_models():
    model = block()
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.raises(ValueError, match="memory_report: nothing that the model returns requires a gradient"):
        fusedops.memory_report(model, torch.randn(2, 8))
    x = torch.randn(2, 8, requires_grad=True)
    assert fusedops.memory_report(model, x).unpatched > 0
    assert x.grad is None


def test_wrong_arguments():
    with pytest.raises(TypeError, match=r"memory_report: model must be a torch.nn.Module; got function"):
        fusedops.memory_report(lambda x: x, torch.randn(2))
    with pytest.raises(TypeError, match=r"memory_report: inputs must be a tuple of arguments, .*; got list"):
        fusedops.memory_report(block(), [torch.randn(2, 8)])
    with pytest.raises(TypeError, match="memory_report: patch must be a bool; got str"):
        fusedops.memory_report(block(), torch.randn(2, 8), patch="yes")


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_keep_their_inputs_alone(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.body = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 32), nn.Sigmoid(), nn.Linear(32, 8))

        def forward(self, x):
            return checkpoint(self.body, self.first(x), use_reentrant=reentrant)

    report = fusedops.memory_report(Checkpointed(), torch.randn(4, 8), patch=False)
    assert report.unpatched == 4 * 8 * 4


def test_in_half_precision_and_under_autocast():
    model = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 4))
    full = fusedops.memory_report(model, torch.randn(6, 8), patch=False).unpatched
    half = fusedops.memory_report(copy.deepcopy(model).bfloat16(), torch.randn(6, 8).bfloat16(), patch=False).unpatched
    assert half * 2 == full
    with torch.autocast("cpu", torch.bfloat16):
        mixed = fusedops.memory_report(model, torch.randn(6, 8), patch=False).unpatched
    # Autocast's copies: of the input for the first weight's gradient, of the second weight for the hidden gradient.
    assert mixed == half + 6 * 8 * 2 + 16 * 4 * 2


def test_dropout_and_norms_keep_what_they_do_on_a_gpu():
    x = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    assert fusedops.memory_report(nn.Dropout(0.5), x).unpatched == 4 * 8  # booleans
    assert fusedops.memory_report(nn.LayerNorm(8).bfloat16(), x, patch=False).unpatched == 2 * 4 * 4
    rms = fusedops.memory_report(nn.RMSNorm(8).bfloat16(), x)
    assert rms.unpatched == rms.patched == 4 * 4
    heads = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)

    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = heads

        def forward(self, x):
            return self.heads(x, x, x, need_weights=False)[0]

    for length in (64, 128):
        kept = fusedops.memory_report(Attends(), torch.randn(1, length, 8), patch=False).unpatched
        assert kept < 2 * length * length * 4  # no scores
        assert kept % length == 0


def test_compiled_and_wrapped_models():
    model = block()
    x = torch.randn(2, 8)
    expected = fusedops.memory_report(model, x)
    assert fusedops.memory_report(torch.compile(model, backend="eager"), x) == expected
    assert fusedops.memory_report(nn.DataParallel(model), x) == expected


def test_texts_and_dictionary():
    model = gpt2()
    report = fusedops.memory_report(model, inputs(model))
    data = json.loads(json.dumps(report.to_dict()))
    assert data["saved"] == report.unpatched - report.patched
    assert MemoryReport(**{k: v for k, v in data.items() if k not in ("rows", "saved")}, rows=()).patched
    for text in (str(report), shown(report)):
        assert "kept for the backward unpatched" in text
        assert "transformer.h.*.mlp.c_fc" in text
        assert " % less" in text
    assert len(str(report).splitlines()) < 20
    alone = fusedops.memory_report(model, inputs(model), patch=False)
    assert "patched" not in str(alone).replace("unpatched", "")
    assert "patched" not in shown(alone).replace("unpatched", "")


def test_a_row_that_grows_is_explained():
    model = nn.Sequential(nn.Linear(8, 64), nn.SiLU(), nn.Linear(64, 8))
    report = fusedops.memory_report(model, torch.randn(4, 8))
    assert rows(report)["0"][0] < rows(report)["0"][1]
    assert report.patched <= report.unpatched
    for text in (str(report), shown(report)):
        assert "note: where a line grows, its modules now keep what others kept before" in text
    assert "note:" not in str(fusedops.memory_report(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), torch.ones(4, 8)))
    assert "note:" not in str(fusedops.memory_report(model, torch.randn(4, 8), patch=False))


def test_the_outputs_hold_what_was_counted():
    model = nn.Sequential(nn.Linear(8, 16), nn.Sigmoid())
    own, outputs = kept_for_backward(model, (torch.randn(2, 8),), {})
    assert own == {"1": 2 * 16 * 4}
    outputs[0].sum().backward()
    assert model[0].weight.grad is not None


def test_without_triton_the_numbers_are_the_same(monkeypatch):
    model = gpt2(n_layer=1)
    given = inputs(model)
    expected = fusedops.memory_report(model, given)
    monkeypatch.setattr(backend, "HAS_TRITON", False)
    monkeypatch.setattr(backend, "_running", {})
    assert fusedops.memory_report(model, given) == expected
    assert expected.patched < expected.unpatched


def test_where_the_kernels_cannot_serve_torchs_operators_are_measured():
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16)).double()  # the kernels take no float64
    report = fusedops.memory_report(model, torch.randn(3, 8, dtype=torch.float64))
    assert report.unpatched > 0
    assert report.patched > 0


@pytest.mark.gpu
def test_the_numbers_of_a_cpu_are_those_of_a_gpu():
    layer = nn.TransformerEncoderLayer(64, 2, 256, dropout=0.1, activation=nn.GELU("tanh"), batch_first=True)
    model = nn.Sequential(nn.RMSNorm(64), layer, nn.Linear(64, 64), nn.SiLU()).bfloat16()
    x = torch.randn(4, 128, 64, dtype=torch.bfloat16)
    here = fusedops.memory_report(model, x)
    with fusedops.backend("triton"):
        there = fusedops.memory_report(model.cuda(), x.cuda())
    # A seed more, and a row statistic in another layout.
    assert there.unpatched == pytest.approx(here.unpatched, rel=0.02)
    assert there.patched == pytest.approx(here.patched, rel=0.02)
    assert here.peak_unpatched is here.peak_patched is None
    assert there.peak_unpatched > there.unpatched
    assert there.peak_patched > there.patched
    assert all(p.grad is None for p in model.parameters())
    assert "peak of a forward and backward" in str(there)


# The estimate


def test_estimate_equals_the_measurement():
    model = gpt2("sdpa", n_layer=1)
    memory = fusedops.plan(model).activation_memory(2, 7, torch.float32)
    report = fusedops.memory_report(model.train(), {"input_ids": torch.zeros(2, 7, dtype=torch.long)})
    assert (memory.unpatched, memory.patched) == (report.unpatched, report.patched)
    assert memory.saved == report.saved > 0
    assert memory.reason == ""


def test_estimate_by_kind():
    model = gpt2("sdpa")
    memory = fusedops.plan(model).activation_memory(4, 16)
    by_call = {saving.calls: saving for saving in memory.savings}
    gelu = by_call['fusedops.linear(activation="gelu_tanh")']
    assert (gelu.count, gelu.where) == (2, "transformer.h.*.mlp.c_fc")
    assert gelu.bytes >= 2 * 4 * 16 * 128 * 2 * 2
    assert sum(saving.bytes for saving in memory.savings) == memory.saved


def test_estimate_grows_with_the_batch_and_the_dtype():
    model = block()
    memory = fusedops.plan(model).activation_memory(4, 16)
    half = fusedops.plan(model).activation_memory(4, 16, torch.float16)
    assert (half.unpatched, half.dtype) == (memory.unpatched, "float16")
    assert fusedops.plan(model).activation_memory(4, 16, "fp16") == half
    assert fusedops.plan(model).activation_memory(8, 16).unpatched == 2 * memory.unpatched


def test_estimate_of_a_patched_and_of_an_unpatched_model_is_the_same():
    model = gpt2("sdpa", n_layer=1)
    report = fusedops.patch(model)
    before = classes(model)
    memory = report.activation_memory(2, 8)
    assert classes(model) == before
    fusedops.unpatch(model)
    assert report.activation_memory(2, 8) == memory
    fusedops.patch(model)
    assert fusedops.patch(model).activation_memory(2, 8) == memory  # all was replaced already


def test_estimate_of_models_that_begin_with_a_layer():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), 2, enable_nested_tensor=False)
    for model in (MLP(), block(), nn.Sequential(nn.LayerNorm(8), MLP()), encoder, encoder.layers[0]):
        memory = fusedops.plan(model).activation_memory(2, 8)
        assert memory.unpatched > 0
        assert memory.patched > 0
    assert fusedops.plan(nn.Sequential(nn.Embedding(4, 8), block())).activation_memory(2, 8).unpatched > 0


def test_estimate_with_inputs():
    model = nn.Sequential(nn.Conv1d(3, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(48, 8), nn.ReLU())
    assert "give inputs=" in fusedops.plan(model).activation_memory(2, 8).reason
    memory = fusedops.plan(model).activation_memory(5, 8, torch.float32, inputs=torch.zeros(5, 3, 8))
    assert memory.unpatched == fusedops.memory_report(model, torch.zeros(5, 3, 8), patch=False).unpatched


def test_estimate_of_what_has_no_shapes_says_so():
    class Depends(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, x):
            return self.norm(x) if x.sum() > 0 else x

    model = Depends()
    memory = fusedops.plan(model).activation_memory(2, 8)
    assert (memory.unpatched, memory.patched, memory.saved) == (None, None, None)
    assert "cannot be traced without data" in memory.reason
    assert "no estimate" in str(memory)
    assert "no estimate" in shown(memory)


def test_estimate_allocates_nothing_and_holds_no_model():
    with torch.device("meta"):
        model = gpt2("sdpa", n_embd=4096, n_layer=1, n_head=32, vocab_size=50257)
    report = fusedops.plan(model)
    memory = report.activation_memory(64, 32)
    assert memory.unpatched > 64 * 32 * 4096 * 2 * 10
    assert json.loads(json.dumps(memory.to_dict()))["saved"] == memory.saved
    assert "64 x 32, bfloat16" in str(memory)
    assert "transformer.h.0.mlp.c_fc" in shown(memory)
    del model
    gc.collect()
    with pytest.raises(ValueError, match="does not exist any more"):
        report.activation_memory(64, 32)


def test_a_report_is_copied_without_its_model():
    model = block()
    report = fusedops.plan(model)
    for other in (pickle.loads(pickle.dumps(report)), copy.deepcopy(report)):
        assert other == report
        with pytest.raises(ValueError, match="does not exist any more"):
            other.activation_memory(2, 8)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 8), ValueError, "batch must be positive; got 0"),
        ((2, 8.0), TypeError, "sequence must be an int; got float"),
        ((2, 8, torch.int8), TypeError, "dtype must be a floating-point torch.dtype, or one of .*; got torch.int8"),
        ((2, 8, "int8"), ValueError, "dtype must be a torch.dtype or one of .*; got 'int8'"),
    ],
)
def test_wrong_arguments_of_the_estimate(arguments, error, message):
    model = block()
    with pytest.raises(error, match=f"activation_memory: {message}"):
        fusedops.plan(model).activation_memory(*arguments)
