"""Writes the tables of README.md from the figures in benchmarks/results; ``--check`` only compares.

    python benchmarks/readme.py
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

_VARIANTS = {
    "default": "Adam, default",
    "foreach": "Adam, `foreach=False`",
    "fused": "Adam, `fused=True`",
    "recipe": "the bare per-parameter recipe",
    "ours": "**`BackwardFusedOptimizer`**",
}


def load(name: str) -> dict[str, Any]:
    """The figures of one benchmark, by the name of its file."""
    data: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return data


def markdown(rows: list[list[str]]) -> str:
    """A Markdown table whose first row is the head."""
    head, *body = rows
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, rule, *body))


TABLES: dict[str, Callable[[], str]] = {}


def rendered(text: str) -> str:
    """The README with every table made anew."""

    def replace(match: re.Match[str]) -> str:
        return f"{match[1]}{TABLES[match[2]]()}{match[3]}"

    return _BLOCK.sub(replace, text)


def main() -> int:
    """Writes the tables, or with ``--check`` tells by the exit code whether they are up to date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only compare, exit with 1 if README.md is out of date")
    options = parser.parse_args()
    before = README.read_text()
    after = rendered(before)
    if options.check:
        return int(before != after)
    README.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
