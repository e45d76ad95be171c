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


def load(name: str) -> dict[str, Any]:
    """The figures of one benchmark, by the name of its file."""
    data: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return data


def markdown(rows: list[list[str]]) -> str:
    """A Markdown table whose first row is the head."""
    head, *body = rows
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, rule, *body))


def memory() -> str:
    """Peak memory of ViT-L/16 in every way to train it."""
    data = load("memory_vit_l_16_adam_batch1_cpu")
    head = ["ViT-L/16, batch 1, Adam: GB at the peak", "resident", "resident, freed memory returned", "live"]
    rows = [[*head, "s/iteration"]]
    for variant, result in data["results"].items():
        name = _VARIANTS[variant]
        sizes = (result["resident"], result["resident_returning"], result["live"]["total"])
        # The first iteration creates the optimizer's state.
        later = result["seconds"][1:]
        rows.append([name, *(f"{size / 1e9:.2f}" for size in sizes), f"{sum(later) / len(later):.1f}"])
    return f"{markdown(rows)}\n{_source(data, data['versions']['torch'], data['device'])}"


_VARIANTS = {
    "default": "ordinary, default flags",
    "foreach=False": "ordinary, `foreach=False`",
    "fused=True": "ordinary, `fused=True`",
    "recipe": "an optimizer and a hook for each parameter",
    "BackwardFusedOptimizer": "**`BackwardFusedOptimizer`**",
}


def cost() -> str:
    """What a small parameter costs."""
    data = load("speed_cost")
    found = data["results"]["microseconds"]
    rows = [["microseconds a parameter (1,000 of 64 elements)", "median", "quartiles"]]
    rows += [[_code(name), f"{middle:.1f}", f"{low:.1f} to {high:.1f}"] for name, (low, middle, high) in found.items()]
    return f"{markdown(rows)}\n{_source(data, data['torch'], data['processor'])}"


def iterations() -> str:
    """Whole iterations over the ordinary optimizer's."""
    data = load("speed_iterations")
    rows = [["one iteration, Adam, over the ordinary one with the same flags", "ordinary", "recipe", "fused_optim"]]
    for row in data["results"]:
        name = f"{row['model']}, batch {row['batch']}, {row['flags']}"
        plain = f"{row['plain_seconds'][1] * 1e3:.0f} ms"
        rows.append([name, plain, _ratio(row["recipe_ratio"]), _ratio(row["ours_ratio"])])
    return f"{markdown(rows)}\n{_source(data, data['torch'], data['processor'])}"


def digits() -> str:
    """The worked example."""
    data = load("digits")
    rows = [["", "test accuracy", "seconds"]]
    rows += [[f"`{name}`", f"{share:.1%}", f"{data['seconds'][name]:.0f}"] for name, share in data["accuracy"].items()]
    text = f"{len(data['losses'])} losses, all weights and all state are equal, bit for bit."
    return f"{markdown(rows)}\n{text} {_source(data, data['torch'], data['processor'])}"


def _ratio(figures: list[float]) -> str:
    low, median, high = figures
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def _code(name: str) -> str:
    return f"`{name}`" if not name.startswith("recipe") else name


def _source(data: dict[str, Any], version: str, device: str) -> str:
    version = version.partition("+")[0]
    conditions = f"PyTorch {version}, {device}, {data['threads']} threads, {data['date']}"
    return f"Measured with `{data['command']}`: {conditions}.\n"


TABLES: dict[str, Callable[[], str]] = {"memory": memory, "cost": cost, "iterations": iterations, "digits": digits}


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
