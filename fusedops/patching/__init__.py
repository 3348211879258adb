"""Patching: fused operators inside an existing model, by changing the classes of its modules."""

from fusedops.patching.memory import MemoryReport, MemoryRow, memory_report
from fusedops.patching.patcher import patch, patched, plan, unpatch
from fusedops.patching.report import CheckResult, Left, PatchError, PatchReport, Replacement
from fusedops.patching.rules import register_rule, unregister_rule

__all__ = [
    "CheckResult",
    "Left",
    "MemoryReport",
    "MemoryRow",
    "PatchError",
    "PatchReport",
    "Replacement",
    "memory_report",
    "patch",
    "patched",
    "plan",
    "register_rule",
    "unpatch",
    "unregister_rule",
]
