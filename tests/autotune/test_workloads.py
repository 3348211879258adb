"""From a model's sizes to its problems."""

from __future__ import annotations

import pytest

from fusedops.autotune import workloads
from fusedops.autotune.workloads import Sizes, of_config, of_shapes, problems_of, sizes_of_config
from fusedops.runtime.device import TARGETS

H100 = TARGETS["sm_90"]
GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "n_embd": 768, "n_head": 12, "n_positions": 1024,
    "activation_function": "gelu_new", "n_inner": None,
}  # fmt: skip
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
}  # fmt: skip
VIT = {
    "architectures": ["ViTForImageClassification"], "hidden_size": 1024, "num_attention_heads": 16,
    "intermediate_size": 4096, "hidden_act": "gelu", "image_size": 224, "patch_size": 16,
}  # fmt: skip
BERT = {
    "architectures": ["BertForMaskedLM"], "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072,
    "hidden_act": "gelu", "max_position_embeddings": 512,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "name"),
    [(GPT2, "GPT-2"), (LLAMA, "Llama-3-8B"), (VIT, "ViT-L"), (BERT, "BERT")],
    ids=lambda v: str(v)[:5],
)
def test_a_config_says_what_the_table_says(config, name):
    assert sizes_of_config(config) == workloads.USUAL[name]


def test_a_model_of_several_parts_is_its_text_model():
    text = {k: v for k, v in LLAMA.items() if k != "architectures"}
    found = sizes_of_config({"architectures": ["LlavaForCausalLM"], "text_config": text, "vision_config": VIT})
    assert found == workloads.USUAL["Llama-3-8B"]


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2"])
def test_a_models_type_says_what_its_config_leaves_out(kind):
    sizes = {"hidden_size": 64, "num_attention_heads": 4}
    found = sizes_of_config({"model_type": kind, **sizes})
    assert found.causal
    assert (found.gated, found.norm, found.activation) == (
        (False, "layer", "gelu") if kind == "gpt2" else (True, "rms", "silu")
    )
    assert not sizes_of_config({"model_type": "bert", **sizes}).causal
    assert "causal, rms norm, gated silu MLP of 256" in str(sizes_of_config({"model_type": "llama", **sizes}))


def test_layers_of_two_kinds_and_capped_scores_are_both_met():
    config = {
        **LLAMA, "sliding_window": 128, "attn_logit_softcapping": 50.0,
        "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    met = [problem for operator, problem in of_config(config, H100, batch=1) if operator.name == "attention"]
    assert {problem.window for problem in met} == {True, False}
    assert {problem.features for problem in met} == {"softcap"}


def test_a_config_of_transformers_is_understood():
    transformers = pytest.importorskip("transformers")
    config = transformers.MistralConfig(architectures=["MistralForCausalLM"], sliding_window=4096)
    found = sizes_of_config(config.to_dict())
    assert found == Sizes(4096, 32, 8, 128, 14336, "silu", True, "rms", False, True, 4096, 4096 * 32)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "a model's config is a JSON object; got list"),
        ({}, "the config has none of hidden_size, n_embd, d_model, dim"),
        ({**BERT, "hidden_size": "768"}, "hidden_size must be a positive integer; got '768'"),
        ({**BERT, "num_attention_heads": 0}, "num_attention_heads must be a positive integer; got 0"),
        ({**BERT, "hidden_act": "snake"}, "activation 'snake' is none of gelu"),
        ({**BERT, "hidden_act": ["gelu"]}, r"activation \['gelu'\] is none of gelu"),
        ({**BERT, "intermediate_size": -3}, "intermediate_size must be a positive integer; got -3"),
        ({**BERT, "max_position_embeddings": "long"}, "max_position_embeddings must be a positive integer; got 'long'"),
        ({**BERT, "sliding_window": True}, "sliding_window must be a positive integer; got True"),
        ({**BERT, "architectures": 5}, "architectures must be a list of names; got 5"),
    ],
)
def test_a_config_that_is_none(config, message):
    with pytest.raises(ValueError, match=message):
        of_config(config, H100)


def test_a_model_meets_norms_mlp_and_attention():
    met = of_config(LLAMA, H100, batch=2)
    assert {operator.name for operator, _ in met} == {"norm", "linear", "gated_linear", "attention"}
    attention = [problem for operator, problem in met if operator.name == "attention"]
    assert {problem.kernel for problem in attention} == {"forward", "backward_kv", "backward_q"}
    assert {(p.heads, p.queries, p.seqlen_q, p.causal) for p in attention} == {(64, 4, 2048, True)}
    forward = of_config(LLAMA, H100, batch=2, training=False)
    assert len(forward) < len(met)
    assert all(getattr(problem, "direction", "forward") == "forward" for _, problem in forward)


def test_the_usual_models_have_problems_of_every_dtype():
    for dtype in ("bfloat16", "float16", "float32"):
        met = workloads.usual(H100, dtype=dtype, batch=1)
        assert len({(operator.name, problem) for operator, problem in met}) > 30
        assert {problem.dtype for _, problem in met} == {dtype}


def test_shapes_are_calls():
    value = [
        {"op": "norm", "rows": 64, "width": 128, "kind": "rms"},
        {
            "op": "attention",
            "batch": 1,
            "heads": 2,
            "kv_heads": 1,
            "seqlen_q": 64,
            "seqlen_k": 64,
            "d": 32,
            "window": [8, 0],
        },
    ]
    met = of_shapes(value, H100)
    assert met[:2] == problems_of("norm", H100, rows=64, width=128, kind="rms")
    assert {operator.name for operator, _ in met} == {"norm", "attention"}
    assert all(problem.window for operator, problem in met if operator.name == "attention")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "the shapes are a list of calls"),
        (["norm"], "shape 1 must be a mapping with op and sizes; got 'norm'"),
        ([{"op": "nonsense"}], "shape 1: op must be one of norm"),
        ([{"op": "norm", "rows": 1}], "shape 1: norm needs width; it takes rows, width"),
        ([{"op": "norm", "rows": 1, "width": 2, "depth": 3}], "does not take depth"),
        ([{"op": "norm", "rows": 1, "width": 2, "dtype": "bf17"}], "bf17"),
        ([{"op": "norm", "rows": 1.5, "width": 2}], "shape 1: norm: rows must be an integer; got 1.5"),
        ([{"op": "norm", "rows": -5, "width": 2}], "shape 1: norm: rows must not be negative; got -5"),
        ([{"op": "norm", "rows": 1, "width": 0}], "shape 1: norm: no call has such sizes"),
        ([{"op": "norm", "rows": 1, "width": 1 << 70}], "shape 1: norm: no call has such sizes: width: .* is no size"),
        ([{"op": "norm", "rows": 1, "width": 2, "training": "maybe"}], "training must be yes or no; got 'maybe'"),
        ([{"op": "norm", "rows": 1, "width": 2, "facts": 3}], "shape 1: "),
        ([{"op": "norm", "rows": 1, 2: 3}], "shape 1: "),
        (
            [{"op": "linear", "rows": 1, "in_features": 8, "out_features": 8, "activation": ["gelu"]}],
            "shape 1: linear: KeyError",
        ),
        ([{"op": "attention", "batch": 1, "heads": 1, "seqlen_q": 4, "d": 100_000}], "no call has such sizes"),
    ],
)
def test_shapes_that_are_none(value, message):
    with pytest.raises(ValueError, match=message):
        of_shapes(value, H100)
