"""What a person reads: headings, sentences, tables, and claims that are printed only once they have been checked."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 100
INDENT = "   "


class DemoError(Exception):
    """The demo cannot go on, or something that it was to show is not so."""


class Terminal:
    """Prints, and counts the claims that held."""

    def __init__(self) -> None:
        self.claims = 0
        self._sections = 0

    def section(self, title: str) -> None:
        self._sections += 1
        print(f"\n{self._sections}. {title}", flush=True)

    def say(self, text: str, *, indent: str = INDENT) -> None:
        print(_wrapped(text, indent, indent), flush=True)

    def claim(self, text: str, holds: bool) -> None:
        """Prints `text` as a fact.

        Raises:
            DemoError: It is none.
        """
        if not holds:
            raise DemoError(f"this should be so and is not: {text}")
        self.claims += 1
        print(_wrapped(text, f"{INDENT}ok  ", f"{INDENT}    "), flush=True)

    def table(self, rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> None:
        """Prints rows of equal length; the columns in `right` are aligned at their right."""
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = [
                cell.rjust(width) if index in right else cell.ljust(width)
                for index, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            print(f"{INDENT}  {'  '.join(cells)}".rstrip(), flush=True)


def _wrapped(text: str, first: str, other: str) -> str:
    return textwrap.fill(
        text, WIDTH, initial_indent=first, subsequent_indent=other, break_long_words=False, break_on_hyphens=False
    )


def size(count: int) -> str:
    """Bytes for people: ``812 B``, ``51.2 kB``, ``3.4 MB``."""
    if count < 1000:
        return f"{count} B"
    return f"{count / 1e3:.1f} kB" if count < 1e6 else f"{count / 1e6:.1f} MB"
