"""``torch.compile(model, backend="fusedops")``: fused operators for models that no patching rule knows."""

from fusedops.dynamo.backend import backend, fuse, last_report
from fusedops.dynamo.report import Entry, Report

__all__ = ["Entry", "Report", "backend", "fuse", "last_report"]
