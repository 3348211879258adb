"""fusedops: fused GPU operators for PyTorch, written in Triton."""

from fusedops import data, nn
from fusedops.attention.block_mask import BlockMask
from fusedops.attention.functional import attention, attention_varlen, scaled_dot_product_attention
from fusedops.attention.functional_decode import append_kv, attention_decode
from fusedops.attention.modifiers import MaskMod, ScoreMod
from fusedops.linear.functional import linear
from fusedops.linear.functional_gated import gated_linear
from fusedops.linear.functional_grouped import batched_linear, grouped_linear
from fusedops.linear.functional_quantized import (
    dequantize_weight,
    fp8_linear,
    quantize_fp8,
    quantize_weight,
    quantized_linear,
)
from fusedops.norm.functional import add_layer_norm, add_rms_norm, group_norm, l2_norm, layer_norm, rms_norm
from fusedops.norm_linear.functional import layer_norm_linear, rms_norm_linear
from fusedops.patching import MemoryReport, PatchError, PatchReport, memory_report, patch, patched, plan, unpatch
from fusedops.runtime.backend import BackendError, FallbackWarning, backend, explain
from fusedops.runtime.graphs import graphed

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "BlockMask",
    "FallbackWarning",
    "MaskMod",
    "MemoryReport",
    "PatchError",
    "PatchReport",
    "ScoreMod",
    "add_layer_norm",
    "add_rms_norm",
    "append_kv",
    "attention",
    "attention_decode",
    "attention_varlen",
    "backend",
    "batched_linear",
    "data",
    "dequantize_weight",
    "explain",
    "fp8_linear",
    "gated_linear",
    "graphed",
    "group_norm",
    "grouped_linear",
    "l2_norm",
    "layer_norm",
    "layer_norm_linear",
    "linear",
    "memory_report",
    "nn",
    "patch",
    "patched",
    "plan",
    "quantize_fp8",
    "quantize_weight",
    "quantized_linear",
    "rms_norm",
    "rms_norm_linear",
    "scaled_dot_product_attention",
    "unpatch",
]
