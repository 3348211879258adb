"""Which GPU a timing belongs to: what is the same for all GPUs of a product, whatever driver or system names it."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Literal

from fusedops.autotune.operator import checked_fields
from fusedops.runtime.device import DeviceFacts

# Words of a device's name that say who makes it, what it plugs into and how much memory it has (which has a field of
# its own). "GPU" ends the names of laptops' devices.
_NOISE = re.compile(
    r"NVIDIA|AMD|CORPORATION|INC\.?|GEFORCE|TESLA|QUADRO|INSTINCT|RADEON|GPU"
    r"|SXM\d*|PCIE|OAM|HBM\d?\w?|GDDR\d?\w?|\d+GI?B?",
    re.IGNORECASE,
)
_MIG = re.compile(r"\bMIG\s+(\S+)\s*$", re.IGNORECASE)
_SEPARATORS = re.compile(r"[\s\-]+")
_TRADEMARKS = re.compile(r"\((?:R|TM|C)\)|[®™©]", re.IGNORECASE)

# What the rules make of a name -> the product whose timings it shares.
_ALIASES = {
    "MI250X/MI250": "MI250X",
    "MI300X VF": "MI300X",  # a virtual function that has the whole device
    "MI300X HF": "MI300X",
    "MI325X VF": "MI325X",
    "H100 NVL": "H100",
    "H200 NVL": "H200",
    "A100X": "A100",
    "RX 7900XTX": "RX 7900 XTX",
    "B200 AC": "B200",
    "B300 AC": "B300",
}
_LONGEST = 64


def canonical_name(name: str) -> str:
    """The product behind a device's name, without its maker, form factor, memory and MIG profile.

    Names that no rule knows keep their words. A name stays what it is when it is made canonical again.

    Examples:
        >>> [canonical_name(n) for n in ("NVIDIA H100 80GB HBM3", "NVIDIA_H100", "NVIDIA A100-SXM4-80GB")]
        ['H100', 'H100', 'A100']
        >>> canonical_name("NVIDIA GeForce RTX 4090"), canonical_name("AMD Instinct MI300X")
        ('RTX 4090', 'MI300X')
    """
    while (shorter := _shortened(name)) != name:
        name = shorter
    return name


def _shortened(name: str) -> str:
    words = _SEPARATORS.sub(" ", _MIG.sub("", _readable(name))).strip()[:_LONGEST].split()
    kept = " ".join(word for word in words if not _NOISE.fullmatch(word)) or " ".join(words)
    return _ALIASES.get(kept, kept)


def _readable(name: str) -> str:
    return "".join(c if c.isprintable() and c != "_" else " " for c in _TRADEMARKS.sub(" ", name))


def mig_profile(name: str) -> str:
    """The MIG profile in a device's name ("1g.10gb"), in lower case; "" for a whole device."""
    found = _MIG.search(_readable(name))
    return found[1].lower()[:_LONGEST] if found else ""


def memory_class(memory: int) -> int:
    """Device memory in GiB, rounded up to a multiple of 8 (of 2 up to 16), 0 where it is unknown.

    Drivers keep differing amounts for themselves: the 80 GB of one product are 79.1 GiB here and 79.3 there.

    Args:
        memory: bytes.
    """
    step = 2 if memory <= 16 << 30 else 8
    return -(-memory // (step << 30)) * step


@dataclass(frozen=True, slots=True)
class Identity:
    """What timings are stored by. Versions of driver, CUDA and torch are no part of it: entries record them.

    Attributes:
        vendor: maker of the device; ``interpreter`` for Triton's interpreter.
        arch: ``sm_90``, ``gfx942``, …
        multiprocessors: streaming multiprocessors or compute units.
        shared_memory: bytes that one program may use.
        cache: bytes of the level-2 cache.
        memory_gb: size class of the device's memory, GiB (:func:`memory_class`).
        name: the product (:func:`canonical_name`).
        mig: the MIG profile; "" for a whole device.
    """

    vendor: Literal["nvidia", "amd", "interpreter"]
    arch: str
    multiprocessors: int
    shared_memory: int
    cache: int
    memory_gb: int
    name: str
    mig: str = ""

    @classmethod
    def of(cls, facts: DeviceFacts) -> Identity:
        """The identity of a device.

        Examples:
            >>> from fusedops.runtime.device import TARGETS
            >>> Identity.of(TARGETS["sm_90"]).name
            'H100'
        """
        return cls(
            vendor=facts.vendor,
            arch=facts.arch,
            multiprocessors=facts.multiprocessor_count,
            shared_memory=facts.shared_memory,
            cache=facts.cache,
            memory_gb=memory_class(facts.memory),
            name=canonical_name(facts.name),
            mig=mig_profile(facts.name),
        )

    @property
    def key(self) -> str:
        """A name for files, safe on every system, that no other identity has: readable parts, then a hash of all.

        Examples:
            >>> from fusedops.runtime.device import TARGETS
            >>> Identity.of(TARGETS["sm_90"]).key.rpartition("-")[0]
            'nvidia-sm_90-H100-132mp-0gb'
        """
        return _key(self)

    def to_json(self) -> dict[str, int | str]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> Identity:
        """The identity that :meth:`to_json` wrote.

        Raises:
            ValueError: it is none; the message says why.
        """
        values = checked_fields(cls, value)
        for name, part in values.items():
            if isinstance(part, int) and not 0 <= part < 1 << 53:
                raise ValueError(f"Identity.{name}: {part} is no size")
            if isinstance(part, str) and (not part.isprintable() or len(part) > 2 * _LONGEST):
                raise ValueError(f"Identity.{name}: {part[:_LONGEST]!r} is no name")
        return cls(**values)

    def facts(self) -> DeviceFacts:
        """Facts of a device that has this identity, its memory rounded."""
        wide = self.vendor == "amd" and self.arch.startswith("gfx9")  # CDNA's wavefronts have 64 threads, RDNA's 32
        name = f"{self.name} MIG {self.mig}" if self.mig else self.name
        return DeviceFacts(
            self.vendor, self.arch, name, self.multiprocessors, self.shared_memory, 64 if wide else 32, self.cache,
            self.memory_gb << 30,
        )  # fmt: skip

    def same_gpu(self, other: Identity) -> bool:
        """Whether both are the same product with the same part of it in use: what shipped files are matched by."""
        return self._product == other._product

    def same_arch(self, other: Identity) -> bool:
        """Whether both run the same machine code."""
        return (self.vendor, self.arch) == (other.vendor, other.arch)

    @property
    def _product(self) -> tuple[str, str, str, int, str]:
        return self.vendor, self.arch, self.name, self.multiprocessors, self.mig


@lru_cache(maxsize=256)
def _key(of: Identity) -> str:
    digest = hashlib.sha256(json.dumps(of.to_json(), sort_keys=True).encode()).hexdigest()[:10]
    parts = [of.vendor, of.arch, of.name, f"{of.multiprocessors}mp", f"{of.memory_gb}gb", of.mig]
    return "-".join(slug for slug in map(_slug, dict.fromkeys(parts)) if slug) + f"-{digest}"


def _slug(part: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "_", part)[:40].strip("._")
