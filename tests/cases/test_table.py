"""README.md leaves no kind of fault out, and names only tests that exist and run by default."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = {
    int(number): re.findall(r"`([^`]+)`", tests)
    for number, tests in re.findall(
        r"^\| (\d+) \|[^|]*\| (.*) \|$", Path(__file__).with_name("README.md").read_text(encoding="utf-8"), re.M
    )
}


@functools.cache
def functions(file: str) -> dict[str, list[str]]:
    """The tests of a file, with their decorators as text."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    module_marks = [ast.unparse(n) for n in tree.body if isinstance(n, ast.Assign) and "pytestmark" in ast.unparse(n)]
    return {
        node.name: [*module_marks, *map(ast.unparse, node.decorator_list)]
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@pytest.mark.parametrize("row", sorted(ROWS))
def test_the_tests_of_a_row_exist_and_run(row):
    assert ROWS[row]
    for name in ROWS[row]:
        file, _, function = name.partition("::")
        assert function in functions(file), f"{file} has no {function}"
        marks = " ".join(functions(file)[function])
        assert not re.search(r"\.(slow|skip|skipif|xfail)\b", marks), f"{name} does not run by default: {marks}"


def test_no_row_is_missing(shared):
    """Against the list itself, where it is at hand."""
    text = (shared / "cases.md").read_text(encoding="utf-8")
    wanted = set()
    for section in re.split(r"^## ", text, flags=re.M)[1:]:
        if not section.startswith("8."):
            wanted |= {int(n) for n in re.findall(r"^\| (\d+) \|", section, flags=re.M)}
    assert len(wanted) > 50 and wanted == {row for row in ROWS if not 76 <= row <= 82}
