"""Patching: fused operators inside an existing model, by changing the classes of its modules."""

from fusedops.patching.patcher import patch, patched, plan, unpatch
from fusedops.patching.report import CheckResult, Left, PatchError, PatchReport, Replacement

__all__ = ["CheckResult", "Left", "PatchError", "PatchReport", "Replacement", "patch", "patched", "plan", "unpatch"]
