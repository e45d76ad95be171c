"""The README says what was measured, and its code is code."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_tables_are_made_from_the_results() -> None:
    checked = subprocess.run([sys.executable, ROOT / "benchmarks" / "readme.py", "--check"], check=False)
    assert checked.returncode == 0, "run python benchmarks/readme.py"


def test_python_blocks_parse() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) > 10
    for block in blocks:
        ast.parse(block)


def test_files_that_are_named_exist() -> None:
    for name in re.findall(r"\]\(([\w/.]+)\)|python (benchmarks/\w+\.py)", README):
        assert (ROOT / (name[0] or name[1])).exists(), name


def test_main_job_and_test_command_are_there() -> None:
    assert README.count("python benchmarks/memory.py\n") == 1
    assert README.count("python -m pytest\n") == 1
