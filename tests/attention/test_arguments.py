"""A wrong argument raises an error that names it, on every backend, before any launch."""

from __future__ import annotations

import pytest
import torch

import fusedops

Q = torch.ones(2, 4, 5, 8)
K = torch.ones(2, 2, 6, 8)
V = torch.ones(2, 2, 6, 3)
K4 = torch.ones(2, 4, 6, 8)

ATTENTION = {
    "q is a list": (TypeError, "q must be a torch.Tensor", ([1.0], K, V), {}),
    "k is integral": (TypeError, "k must be a floating-point tensor", (Q, K.long(), V), {}),
    "v is sparse": (TypeError, "v must be a strided tensor", (Q, K, V.to_sparse()), {}),
    "q has three dimensions": (ValueError, r"q must be of four dimensions", (Q[0], K, V), {}),
    "k has three dimensions": (ValueError, r"k must be of four dimensions", (Q, K[0], V), {}),
    "k is float64": (TypeError, r"k must be of the dtype of q \(torch.float32\); got a float64",
                     (Q, K.double(), V), {}),
    "v is float16": (TypeError, r"v must be of the dtype of q \(torch.float32\); got a float16",
                     (Q, K, V.half()), {}),
    "v is elsewhere": (ValueError, r"v must be on the device of q \(cpu\)", (Q, K, V.to("meta")), {}),
    "another batch": (ValueError, r"k must be of shape \(2, heads, length, 8\)", (Q, K[:1], V[:1]), {}),
    "another head size": (ValueError, r"k must be of shape \(2, heads, length, 8\)", (Q, K[..., :7], V), {}),
    "heads do not divide": (ValueError, "k must be of a number of heads that divides q's 4",
                            (Q, K4[:, :3], K4[:, :3]), {}),
    "no key heads": (ValueError, "k must be of a number of heads that divides q's 4", (Q, K[:, :0], V[:, :0]), {}),
    "other heads of v": (ValueError, r"v must be of shape \(2, 2, 6, head size\)", (Q, K, V[:, :1]), {}),
    "another length of v": (ValueError, r"v must be of shape \(2, 2, 6, head size\)", (Q, K, V[:, :, 1:]), {}),
    "mask is a list": (TypeError, "attn_mask must be a bool or floating", (Q, K, V), {"attn_mask": [True]}),
    "mask is integral": (TypeError, "attn_mask must be a bool tensor", (Q, K, V), {"attn_mask": torch.ones(6).long()}),
    "mask does not broadcast": (ValueError, r"attn_mask must be of a shape that broadcasts to \(2, 4, 5, 6\)",
                                (Q, K, V), {"attn_mask": torch.ones(5, 5, dtype=torch.bool)}),
    "mask has five dimensions": (ValueError, "attn_mask must be of a shape", (Q, K, V),
                                 {"attn_mask": torch.ones(1, 1, 1, 1, 6)}),
    "mask is sparse": (TypeError, "attn_mask must be a strided tensor", (Q, K, V),
                       {"attn_mask": torch.ones(5, 6, dtype=torch.bool).to_sparse()}),
    "mask is elsewhere": (ValueError, r"attn_mask must be on the device of q", (Q, K, V),
                          {"attn_mask": torch.ones(5, 6, device="meta")}),
    "scale is a string": (TypeError, "scale must be a number", (Q, K, V), {"scale": "small"}),
    "scale is a bool": (TypeError, "scale must be a number", (Q, K, V), {"scale": True}),
    "causal is a number": (TypeError, "causal must be False, True", (Q, K, V), {"causal": 2}),
    "causal is None": (TypeError, "causal must be False, True", (Q, K, V), {"causal": None}),
    "causal is misspelt": (ValueError, "causal must be False, True", (Q, K, V), {"causal": "top-left"}),
    "return_lse is a number": (TypeError, "return_lse must be a bool", (Q, K, V), {"return_lse": 1}),
    "window is a number": (TypeError, "window must be a pair", (Q, K, V), {"window": 3}),
    "window of three": (TypeError, "window must be a pair", (Q, K, V), {"window": (1, 2, 3)}),
    "window is fractional": (TypeError, "window must be a pair", (Q, K, V), {"window": (1.5, 0)}),
    "window of a bool": (TypeError, "window must be a pair", (Q, K, V), {"window": (True, 0)}),
    "window is negative": (ValueError, "window must be a pair .* None for no limit", (Q, K, V), {"window": (-1, 0)}),
    "softcap is negative": (ValueError, "softcap must be 0", (Q, K, V), {"softcap": -1.0}),
    "softcap is a string": (TypeError, "softcap must be a number", (Q, K, V), {"softcap": "low"}),
    "softcap is a bool": (TypeError, "softcap must be a number", (Q, K, V), {"softcap": False}),
    "dropout_p is None": (TypeError, "dropout_p must be a number", (Q, K, V), {"dropout_p": None}),
    "dropout_p is too large": (ValueError, "dropout_p must be a probability", (Q, K, V), {"dropout_p": 1.5}),
    "dropout_p is negative": (ValueError, "dropout_p must be a probability", (Q, K, V), {"dropout_p": -0.5}),
    "alibi_slopes is a list": (TypeError, "alibi_slopes must be a torch.Tensor", (Q, K, V), {"alibi_slopes": [1.0]}),
    "alibi_slopes of other heads": (ValueError, r"alibi_slopes must be of shape \(4,\) or \(2, 4\)", (Q, K, V),
                                    {"alibi_slopes": torch.ones(2)}),
    "alibi_slopes of another batch": (ValueError, r"alibi_slopes must be of shape \(4,\) or \(2, 4\)", (Q, K, V),
                                      {"alibi_slopes": torch.ones(3, 4)}),
    "alibi_slopes elsewhere": (ValueError, "alibi_slopes must be on the device of q", (Q, K, V),
                               {"alibi_slopes": torch.ones(4, device="meta")}),
    "sinks are integral": (TypeError, "sinks must be a floating", (Q, K, V), {"sinks": torch.ones(4).long()}),
    "sinks of a batch": (ValueError, r"sinks must be of shape \(4,\)", (Q, K, V), {"sinks": torch.ones(2, 4)}),
    "score_mod is a Python function": (TypeError, "score_mod must be a fusedops.ScoreMod", (Q, K, V),
                                       {"score_mod": lambda score, *_: score}),
    "mask_mod is a tensor": (TypeError, "mask_mod must be a fusedops.MaskMod", (Q, K, V),
                             {"mask_mod": torch.ones(5, 6)}),
    "block_mask is a tensor": (TypeError, "block_mask must be a fusedops.BlockMask", (Q, K, V),
                               {"block_mask": torch.ones(5, 6)}),
    "block_mask of other lengths": (ValueError, r"block_mask must be of shape \(2, 4, 5, 6\)", (Q, K, V),
                                    {"block_mask": fusedops.BlockMask.from_document_ids(torch.zeros(6).long())}),
    "document_ids are floating": (TypeError, "document_ids must be an integer tensor", (Q, K, V),
                                  {"document_ids": torch.zeros(5)}),
    "document_ids of unequal lengths": (ValueError, r"document_ids must be None where queries \(5\)", (Q, K, V),
                                        {"document_ids": torch.zeros(5).long()}),
    "document_ids of another length": (ValueError, r"document_ids must be of shape \(2, 6\)", (K4, K, V),
                                       {"document_ids": torch.zeros(5).long()}),
    "two block masks": (ValueError, "document_ids must be None where block_mask is given", (K4, K, V),
                        {"document_ids": torch.zeros(6).long(),
                         "block_mask": fusedops.BlockMask.from_document_ids(torch.zeros(6).long())}),
}  # fmt: skip

DROP_IN = {
    "query is a list": (TypeError, "query must be a torch.Tensor", ([1.0], K4, K4), {}),
    "value is float16": (TypeError, "value must be of the dtype of query", (Q, K4, K4.half()), {}),
    "query has one dimension": (ValueError, "query must be of at least 2 dimensions", (Q[0, 0, 0], K4, K4), {}),
    "no heads to share": (ValueError, "key must be of at least 3 dimensions", (Q, K4[0, 0], K4), {"enable_gqa": True}),
    "another head size": (ValueError, "key must be of query's head size 8", (Q, K4[..., :7], K4), {}),
    "another length of value": (ValueError, "value must be of key's length 6", (Q, K4, K4[:, :, 1:]), {}),
    "heads differ": (ValueError, r"key must be broadcastable to .*\(2, 4\).*enable_gqa=True", (Q, K, V), {}),
    "batches differ": (ValueError, "value must be broadcastable", (Q, K4, K4.expand(3, 2, 4, 6, 8)[:, :1, :3]), {}),
    "heads do not divide": (ValueError, "key must be of a number of heads that divides query's 4", (Q, K4[:, :3], K4),
                            {"enable_gqa": True}),
    "mask has one dimension": (ValueError, "attn_mask must be of at least 2 dim", (Q, K4, K4, torch.ones(6)), {}),
    "mask does not broadcast": (ValueError, r"attn_mask must be of a shape that broadcasts to \(2, 4, 5, 6\)",
                                (Q, K4, K4, torch.ones(5, 5)), {}),
    "mask and is_causal": (ValueError, "attn_mask must be None where is_causal is True",
                           (Q, K4, K4, torch.ones(5, 6)), {"is_causal": True}),
    "dropout_p is a string": (TypeError, "dropout_p must be a number", (Q, K4, K4), {"dropout_p": "half"}),
    "dropout_p is too large": (ValueError, "dropout_p must be from 0 to 1", (Q, K4, K4), {"dropout_p": 1.5}),
    "is_causal is a string": (TypeError, "is_causal must be a bool", (Q, K4, K4), {"is_causal": "top_left"}),
    "scale is a tensor": (TypeError, "scale must be a number", (Q, K4, K4), {"scale": torch.ones(())}),
    "enable_gqa is a number": (TypeError, "enable_gqa must be a bool", (Q, K4, K4), {"enable_gqa": 1}),
}  # fmt: skip

CASES = [(fusedops.attention, *case) for case in ATTENTION.items()]
CASES += [(fusedops.scaled_dot_product_attention, *case) for case in DROP_IN.items()]


@pytest.mark.parametrize(("function", "name", "case"), CASES, ids=[f"{f.__name__}: {n}" for f, n, _ in CASES])
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_wrong_argument(function, name, case, backend):
    error, message, args, kwargs = case
    with fusedops.backend(backend):
        for call in (function, lambda *a, **k: fusedops.explain(function, *a, **k)):
            with pytest.raises(error, match=f"^{function.__name__}: {message}"):
                call(*args, **kwargs)


WIDE = torch.ones(1, 1, 2, 257)
NARROW = torch.ones(1, 1, 2, 3)
REASONS = {
    "dtype": (fusedops.attention, (Q.double(), K.double(), V.double()), {}, "float64"),
    "size of queries": (fusedops.attention, (WIDE, WIDE, NARROW), {}, "head size 257 of queries"),
    "size of values": (fusedops.attention, (NARROW, NARROW, WIDE), {}, "head size 257 of values"),
    "a rule without a Triton function": (
        fusedops.attention,
        (Q, K, V),
        {"mask_mod": fusedops.MaskMod(None, definition=lambda batch, head, i, j: i >= j)},
        "mask_mod has no Triton function",
    ),
    "heads": (fusedops.scaled_dot_product_attention, (Q, K, K4), {"enable_gqa": True}, "number of heads"),
}


@pytest.mark.parametrize("case", REASONS)
def test_explain_tells_why_the_kernels_cannot_serve(case):
    function, args, kwargs, reason = REASONS[case]
    assert any(reason in r for r in fusedops.explain(function, *args, **kwargs).reasons)


@pytest.mark.interpreter
@pytest.mark.parametrize("case", REASONS)
def test_the_triton_backend_refuses_and_auto_falls_back(case):
    function, args, kwargs, reason = REASONS[case]
    with fusedops.backend("triton"), pytest.raises(fusedops.BackendError, match=reason):
        function(*args, **kwargs)
    with fusedops.backend("auto"):
        assert function(*args, **kwargs).shape[:3] == args[0].shape[:3]
