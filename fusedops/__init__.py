"""fusedops: fused GPU operators for PyTorch, written in Triton."""

from fusedops.norm.functional import layer_norm, rms_norm
from fusedops.runtime.backend import BackendError, FallbackWarning, backend, explain

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "FallbackWarning",
    "backend",
    "explain",
    "layer_norm",
    "rms_norm",
]
