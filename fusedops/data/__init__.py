"""Feeding a GPU: batches that arrive before they are asked for, and sequences packed without padding."""

from fusedops.data.packing import PackedSequences, pack_sequences
from fusedops.data.prefetching import Prefetcher, prefetch

__all__ = ["PackedSequences", "Prefetcher", "pack_sequences", "prefetch"]
