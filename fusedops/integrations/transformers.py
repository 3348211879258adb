"""fusedops in Hugging Face transformers: ``attn_implementation="fusedops"``, and a callback for its Trainer.

    import fusedops.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fusedops")

Importing this module registers the attention function and its masks under that name; nothing that transformers has is
replaced. Every model that lets one choose its attention can have it, also those that refuse ``sdpa``: softcaps,
attention sinks, position biases and sliding windows are the kernel's own, causality and windows are flags of it rather
than masks in memory, and padding-free batches (``DataCollatorWithFlattening``) are attended to without a mask.
Attention weights are never computed: ``output_attentions=True`` gives none.

:func:`fusedops.patch` does the same for a model's attention without this name, and more for its other parts; both go
together.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, TrainerCallback

from fusedops.attention.functional import attention_varlen
from fusedops.integrations.patches import Patches, tell
from fusedops.integrations.transformers_masks import StructuredMask, fused_mask
from fusedops.patching.attention import PUBLIC, with_bias
from fusedops.patching.attention_eager import attend_with
from fusedops.patching.report import PatchReport

__all__ = ["FusedOpsCallback", "StructuredMask", "fused_attention", "fused_mask"]

_log = logging.getLogger(__name__)


def fused_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of ``attn_implementation="fusedops"``; further arguments are ignored.

    Args:
        module: the attention module: its ``is_causal`` counts where there is no mask, its ``sinks`` where there is no
            ``s_aux``.
        query: (batch, heads, queries, size); float32, float16 or bfloat16 (float64 on the torch backend).
        key, value: (batch, key heads, keys, size).
        attention_mask: what :func:`fused_mask` made; or a dense mask that broadcasts to (batch, heads, queries, keys),
            bool (True: attend) or floating (added to the scores). None: causal, query i sees keys up to i, if
            ``is_causal`` says so and there is more than one query.
        dropout: probability that an attention weight is dropped.
        scaling: factor of the scores; None: 1/√size.
        is_causal: in place of the module's.
        position_bias: broadcastable to (batch, heads, queries, keys), added to the scores, with a gradient.
        softcap: caps the scores: ``softcap · tanh(score / softcap)``.
        s_aux: (heads,), attention sinks, with a gradient.
        sliding_window: how many keys up to its own a query sees; heeded with ``cu_seq_lens_q`` alone, for everywhere
            else the mask has the window.
        cu_seq_lens_q, cu_seq_lens_k: (sequences + 1,), where packed sequences begin, and the end of the last one. Then
            the batch is 1 and there is no mask but of packing.
        max_length_q, max_length_k: at least the length of the longest of these.

    Returns:
        (batch, queries, heads, size), contiguous, and None in place of the weights.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype or shape; the message names it.

    Examples:
        A model made with the name calls it:

        >>> import torch, transformers
        >>> import fusedops.integrations.transformers
        >>> sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 100}
        >>> config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, attn_implementation="fusedops")
        >>> model = transformers.LlamaForCausalLM(config)
        >>> model(torch.arange(5)[None]).logits.shape
        torch.Size([1, 5, 100])
    """
    if s_aux is None:
        s_aux = module._parameters.get("sinks")
    options: dict[str, Any] = {"softcap": softcap, "sinks": s_aux, "scale": scaling, "dropout_p": dropout}
    causal = getattr(module, "is_causal", True) if is_causal is None else bool(is_causal)
    mask = attention_mask
    structured = isinstance(mask, StructuredMask)
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None and (mask is None or structured):
        if position_bias is not None:
            raise ValueError("fusedops attention: position_bias must be None with cu_seq_lens_q")
        if structured and mask.padding is None:  # type: ignore[union-attr]
            window: Any = (mask.left, mask.right)  # type: ignore[union-attr]
            causal = mask.right == 0  # type: ignore[union-attr]
        elif structured:
            raise ValueError("fusedops attention: attention_mask must have no padding with cu_seq_lens_q")
        else:
            side = None if sliding_window is None else sliding_window - 1
            window = (side, 0 if causal else side)
        if query.shape[0] != 1:
            raise ValueError(f"fusedops attention: a batch of 1 is needed with cu_seq_lens_q; got {query.shape[0]}")
        out = attention_varlen(
            *(x[0].transpose(0, 1) for x in (query, key, value)),
            cu_seq_lens_q,
            cu_seq_lens_k,
            *(length if isinstance(length, int) else None for length in (max_length_q, max_length_k)),
            causal="bottom_right" if causal else False,
            window=window if window != (None, None) else None,
            **{**options, "softcap": softcap or 0.0},
        )
        assert isinstance(out, torch.Tensor)
        return out[None], None
    if structured:
        assert isinstance(mask, StructuredMask)
        if mask.left is not None or mask.right not in (None, 0):
            options["window"] = mask.left, mask.right
        options["causal"] = "bottom_right" if mask.right == 0 else False
        options["block_mask"] = mask.blocks()
        padding = None if mask.padding is None else mask.padding[:, None, None]
        if position_bias is None or padding is None:
            mask = padding if position_bias is None else position_bias
        else:
            mask = position_bias.masked_fill(~padding, float("-inf"))
    else:
        if mask is None and causal and query.shape[2] > 1:
            options["causal"] = True
            queries = query.shape[2]
            if key.shape[2] > queries:  # the room of a static cache, which no query may see
                key, value = key[:, :, :queries], value[:, :, :queries]
                position_bias = None if position_bias is None else position_bias[..., :queries]
        if position_bias is not None:
            mask = with_bias(mask, position_bias, key)
    return attend_with(query, key, value, attn_mask=mask, **options).transpose(1, 2).contiguous(), None


class FusedOpsCallback(TrainerCallback):
    """Lets the Trainer's model call fusedops' operators: :func:`fusedops.patch` when training begins.

    What was replaced is printed once, by the world's first process, logged (logger
    ``fusedops.integrations.transformers``, level INFO) and kept as :attr:`report`. The Trainer's model may be wrapped
    (DDP, FSDP, torch.compile), and checkpoints hold what they always held.

    Args:
        unpatch: put back what this has patched when training ends; an exception that ends it leaves the model patched.
            By default it stays patched, for evaluation and generation after the training.
        verbose: whether to print the report, or only log it.
        strict, include, exclude: as for :func:`fusedops.patch`.

    Attributes:
        report: of the last training that began; None before.

    Raises:
        PatchError, TypeError, ValueError: when training begins, as :func:`fusedops.patch`.

    Examples:
        >>> from fusedops.integrations.transformers import FusedOpsCallback
        >>> callback = FusedOpsCallback(exclude="*.lm_head")  # Trainer(..., callbacks=[callback])
        >>> print(callback.report)
        None
    """

    def __init__(
        self,
        *,
        unpatch: bool = False,
        verbose: bool = True,
        strict: bool = False,
        include: Any = None,
        exclude: Any = None,
    ) -> None:
        super().__init__()
        self.report: PatchReport | None = None
        self._options = {"strict": strict, "include": include, "exclude": exclude}
        self._verbose = verbose
        self._patches = Patches(unpatch)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._patches.put_back()  # of a training that was broken off
        self.report = self._patches.patch(model, **self._options)
        if state.is_world_process_zero:
            tell(self.report, _log, self._verbose)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._patches.put_back()


AttentionInterface.register(PUBLIC, fused_attention)
AttentionMaskInterface.register(PUBLIC, fused_mask)
