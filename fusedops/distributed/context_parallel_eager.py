"""Context parallel attention as torch.compile meets it: a call outside its graphs. Imported where Dynamo is already."""

from __future__ import annotations

import torch

from fusedops.distributed.context_parallel import _run

run = torch.compiler.disable(_run)
