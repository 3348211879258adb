"""Machine code written by hand."""

from __future__ import annotations


def machine_code(text: str) -> str:
    """What ``nvdisasm -c`` would print of an instruction or a label (``x:``) a line."""
    lines = []
    for line in text.strip().splitlines():
        line = line.strip()
        lines.append(f".L_{line}" if line.endswith(":") else f"        /*0010*/  {line} ;")
    return "\n".join(lines)
