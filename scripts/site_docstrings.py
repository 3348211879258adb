"""How the site reads docstrings: roles (:func:`…`, :class:`…`) become links where the site has their target."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:func|class|meth|mod|data|attr|exc|ref):`(~?)([\w.]+)`")


def linked(text: str, module: str = "fusedops") -> str:
    """A docstring in Markdown.

    Args:
        module: where names without dots are looked for.
    """

    def link(found: re.Match[str]) -> str:
        short, target = found.groups()
        shown = target.rpartition(".")[2] if short else target
        full = target if "." in target else f"{module}.{target}"
        return f'<autoref identifier="{full}" optional><code>{shown}</code></autoref>'

    return _ROLE.sub(link, text)


class Roles(griffe.Extension):
    """Applies :func:`linked` to every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = linked(obj.docstring.value, obj.parent.path if obj.parent else "fusedops")
