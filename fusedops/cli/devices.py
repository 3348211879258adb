"""GPUs by the names that people have for them."""

from __future__ import annotations

import re

from fusedops.runtime.device import TARGETS, DeviceFacts, device_facts


def facts_named(name: str | None) -> DeviceFacts:
    """Facts of a GPU by its product's name or its architecture; of this machine's where there is no name.

    Raises:
        ValueError: it is unknown; the message lists those known.
        RuntimeError: no name is given, and there is no GPU.
    """
    from fusedops.autotune.identity import canonical_name
    from fusedops.autotune.roofline import PRODUCTS
    from fusedops.autotune.tuner import tunable_device

    if name is None:
        return device_facts(tunable_device())
    wanted = _plain(name)
    for known, product in PRODUCTS.items():
        if _plain(known) in (wanted, _plain(canonical_name(name))):  # also as a driver names it
            return product.facts
    for arch in TARGETS:
        if _plain(arch) == wanted:
            return next(product.facts for product in PRODUCTS.values() if product.facts.arch == arch)
    raise ValueError(f"target must be one of {', '.join(PRODUCTS)}, or of {', '.join(TARGETS)}; got {name!r}")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
