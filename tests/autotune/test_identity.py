"""Which GPU a timing belongs to: names of drivers made one, and names of files that are safe."""

from __future__ import annotations

import dataclasses
import json
import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusedops.autotune.identity import Identity, canonical_name, memory_class, mig_profile
from fusedops.runtime.device import INTERPRETER, TARGETS

GIB = 1 << 30
H100 = Identity("nvidia", "sm_90", 132, 232448, 50 << 20, 80, "H100")


@pytest.mark.parametrize(
    ("name", "product", "mig"),
    [
        ("NVIDIA H100 80GB HBM3", "H100", ""),
        ("NVIDIA H100 PCIe", "H100", ""),
        ("NVIDIA H100 NVL", "H100", ""),
        ("NVIDIA_H100", "H100", ""),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "H100", "1g.10gb"),
        ("NVIDIA_H100_80GB_HBM3_MIG_1g.10gb", "H100", "1g.10gb"),
        ("NVIDIA A100-SXM4-40GB MIG 3G.20GB+me", "A100", "3g.20gb+me"),
        ("NVIDIA A100-SXM4-80GB", "A100", ""),
        ("A100-PCIE-40GB", "A100", ""),
        ("NVIDIA A100 80GB PCIe", "A100", ""),
        ("NVIDIA H200", "H200", ""),
        ("NVIDIA GH200 480GB", "GH200", ""),
        ("NVIDIA GH200 144G HBM3e", "GH200", ""),
        ("NVIDIA B200", "B200", ""),
        ("NVIDIA B300 SXM6 AC", "B300", ""),
        ("NVIDIA L40S", "L40S", ""),
        ("NVIDIA L40", "L40", ""),
        ("Tesla T4", "T4", ""),
        ("Tesla V100-SXM2-16GB", "V100", ""),
        ("NVIDIA GeForce RTX 4090", "RTX 4090", ""),
        ("NVIDIA GeForce RTX 4090 D", "RTX 4090 D", ""),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4090 Laptop", ""),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 Ti SUPER", ""),
        ("NVIDIA GeForce GTX 1060 6GB", "GTX 1060", ""),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada Generation", ""),
        ("Quadro RTX 6000", "RTX 6000", ""),
        ("AMD Instinct MI300X", "MI300X", ""),
        ("AMD Instinct MI300X OAM", "MI300X", ""),
        ("AMD Instinct MI300X VF", "MI300X", ""),
        ("AMD Instinct MI250X/MI250", "MI250X", ""),
        ("AMD Radeon(TM) RX 7900 XTX", "RX 7900 XTX", ""),
        ("NVIDIA", "NVIDIA", ""),
        ("", "", ""),
    ],
)
def test_names_of_drivers(name, product, mig):
    assert (canonical_name(name), mig_profile(name)) == (product, mig)


@pytest.mark.parametrize("facts", [*TARGETS.values(), INTERPRETER], ids=lambda facts: facts.arch)
def test_the_products_of_our_tables_have_canonical_names(facts):
    assert canonical_name(facts.name) == facts.name


WORDS = [
    "NVIDIA",
    "AMD",
    "GeForce",
    "Tesla",
    "Instinct",
    "SXM5",
    "PCIe",
    "80GB",
    "HBM3e",
    "MIG",
    "1g.10gb",
    "H100",
    "NVL",
]
NAMES = st.one_of(
    st.text(max_size=100), st.lists(st.sampled_from(WORDS), max_size=8).map(" ".join), st.text("MIG _-a1", max_size=30)
)


@given(NAMES)
def test_a_canonical_name_stays_and_is_short_and_printable(name):
    product = canonical_name(name)
    assert canonical_name(product) == product
    assert product.isprintable()
    assert len(product) <= 64


@given(
    st.sampled_from(["H100", "RTX 4090", "MI300X", "L40S"]),
    st.lists(st.sampled_from(["NVIDIA", "AMD", "Corporation", "GeForce", "Tesla", "Instinct"]), max_size=3),
    st.lists(st.sampled_from(["SXM4", "PCIE", "80GB", "192GB", "HBM3", "OAM", "GPU"]), max_size=3),
    st.sampled_from([" ", "-", "_", "  "]),
)
def test_maker_form_and_memory_do_not_matter(product, before, after, separator):
    assert canonical_name(separator.join([*before, *product.split(), *after])) == product


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_memory_classes_are_ordered_and_near(a, b):
    small, large = sorted((a, b))
    assert memory_class(small) <= memory_class(large)
    assert memory_class(a) * GIB >= a
    assert memory_class(a) * GIB - a < 8 * GIB
    assert (memory_class(a) == 0) == (a == 0)


@pytest.mark.parametrize(
    ("reported", "size"),
    [
        ((79.1, 79.3, 79.65, 80), 80),
        ((23.5, 23.65, 24), 24),
        ((39.4, 39.56), 40),
        ((9.5, 9.75), 10),
        ((14.6, 15.9), 16),
    ],
)
def test_what_drivers_keep_for_themselves_does_not_matter(reported, size):
    assert {memory_class(int(gib * GIB)) for gib in reported} == {size}


def test_of_the_same_product_by_whatever_name():
    one = dataclasses.replace(TARGETS["sm_90"], name="NVIDIA H100 80GB HBM3", memory=int(79.1 * GIB))
    other = dataclasses.replace(TARGETS["sm_90"], name="NVIDIA_H100", memory=int(79.6 * GIB))
    assert Identity.of(one) == Identity.of(other)
    assert Identity.of(one).key == Identity.of(other).key
    assert Identity.of(one).memory_gb == 80


@pytest.mark.parametrize(
    ("changes", "gpu", "arch"),
    [
        ({}, True, True),
        ({"memory_gb": 96, "cache": 1, "shared_memory": 1}, True, True),
        ({"multiprocessors": 114}, False, True),
        ({"mig": "1g.10gb"}, False, True),
        ({"name": "H200"}, False, True),
        ({"arch": "sm_100"}, False, False),
        ({"vendor": "amd"}, False, False),
    ],
)
def test_which_devices_share_shipped_files(changes, gpu, arch):
    other = dataclasses.replace(H100, **changes)
    assert (H100.same_gpu(other), H100.same_arch(other)) == (gpu, arch)
    assert (other.same_gpu(H100), other.same_arch(H100)) == (gpu, arch)
    assert (H100.key == other.key) == (changes == {})


HOSTILE = [
    "../../etc/passwd",
    "..",
    ".",
    "",
    "/",
    "C:\\x",
    "con",
    "a\0b",
    "\n",
    "~",
    "*",
    "x" * 10_000,
    "é",
    "\ud800",
    "🙂",
    "-rf",
]


@given(*[st.one_of(st.sampled_from(HOSTILE), st.text(max_size=50))] * 3)
def test_a_key_is_a_safe_name_for_a_file(arch, name, mig):
    for identity in (
        Identity("nvidia", arch, 1, 2, 3, 4, name, mig),
        Identity.of(dataclasses.replace(TARGETS["sm_90"], arch=arch, name=f"{name} MIG {mig}")),
    ):
        assert re.fullmatch(r"nvidia[A-Za-z0-9._-]*-[0-9a-f]{10}", identity.key)
        assert len(identity.key) < 200
        assert os.path.basename(identity.key) == identity.key


@given(*[st.tuples(st.text(max_size=5), st.text(max_size=5), st.integers(0, 3), st.integers(0, 3))] * 2)
def test_different_devices_have_different_keys(a, b):
    one, other = (Identity("amd", arch, x, 0, 0, y, name) for arch, name, x, y in (a, b))
    assert (one.key == other.key) == (one == other)


@given(
    st.sampled_from(["nvidia", "amd", "interpreter"]),
    NAMES,
    *[st.integers(0, 1 << 50)] * 3,
)
def test_json_and_back(vendor, name, multiprocessors, shared_memory, memory):
    facts = dataclasses.replace(
        TARGETS["sm_80"],
        vendor=vendor,
        name=name,
        multiprocessor_count=multiprocessors,
        shared_memory=shared_memory,
        memory=memory,
    )
    identity = Identity.of(facts)
    assert Identity.from_json(json.loads(json.dumps(identity.to_json()))) == identity


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vendor": "intel"}, "vendor"),
        ({"multiprocessors": "132"}, "multiprocessors"),
        ({"multiprocessors": True}, "multiprocessors"),
        ({"multiprocessors": -1}, "multiprocessors"),
        ({"cache": 10**30}, "cache"),
        ({"memory_gb": 80.0}, "memory_gb"),
        ({"name": None}, "name"),
        ({"name": "a\x1b[31m"}, "name"),
        ({"arch": "x" * 1000}, "arch"),
        ({"uuid": "GPU-0"}, "unknown: uuid"),
    ],
)
def test_other_json_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Identity.from_json({**H100.to_json(), **changes})
    with pytest.raises(ValueError, match="missing: mig"):
        Identity.from_json({name: value for name, value in H100.to_json().items() if name != "mig"})
    with pytest.raises(ValueError, match="Identity"):
        Identity.from_json([1])
