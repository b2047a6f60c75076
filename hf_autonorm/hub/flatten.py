"""Parts of this package as one Python file that imports nothing of it: the code that travels with a saved model.

The text is cut out of the package's own modules, so there is no second copy to keep. Starting from a few definitions,
everything at the top level of a module that they name is taken along, and what that names in turn.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import inspect
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import ModuleType

from ..errors import AutoNormError


class FlattenError(AutoNormError):
    """The package's own sources cannot be put into one file."""


@dataclass
class _Module:
    """The source of one module, by the names at its top level."""

    name: str
    lines: list[str]
    definitions: dict[str, ast.stmt] = field(default_factory=dict)
    own_imports: dict[str, tuple[str, str]] = field(default_factory=dict)  # local name → (module, its name there)
    other_imports: dict[str, str] = field(default_factory=dict)  # local name → the statement


def flatten(roots: Iterable[tuple[str, str]], header: str = "") -> str:
    """One file with the definitions `roots`, (module, name) each, and all that they need.

    Raises FlattenError where two modules use one name for different things.
    """
    modules: dict[str, _Module] = {}
    owner: dict[str, str] = {}  # name in the flat file → the module it is taken from
    imports: dict[str, str] = {}
    order: list[str] = []
    pending = list(roots)
    while pending:
        module_name, name = pending.pop()
        module = _read(module_name, modules, order)
        if name in module.own_imports:
            if module.own_imports[name][1] != name:
                raise FlattenError(f"{module_name} imports {module.own_imports[name]} under another name, {name!r}")
            pending.append(module.own_imports[name])
        elif name in module.other_imports:
            _claim(imports, name, module.other_imports[name])
        elif name in module.definitions:
            if owner.get(name) != module_name:
                _claim(owner, name, module_name)
                pending += [(module_name, used) for used in _names_in(module.definitions[name])]
                pending += _late_imports(module, module.definitions[name])
        elif not hasattr(builtins, name) and (module_name, name) in roots:
            raise FlattenError(f"{module_name} defines no {name!r}")
    if both := owner.keys() & imports.keys():
        raise FlattenError(f"{sorted(both)} are imported by one module and defined by another")
    texts = [header, "from __future__ import annotations\n"]
    texts.append("\n".join(sorted(set(imports.values()), key=_import_order)) + "\n")
    for module_name in order:
        texts += _cut(modules[module_name], {name for name, home in owner.items() if home == module_name})
    return "\n\n".join(text.rstrip("\n") + "\n" for text in texts if text)


def _claim(table: dict[str, str], name: str, value: str) -> None:
    if table.setdefault(name, value) != value:
        raise FlattenError(f"{name!r} is one thing in {table[name]} and another in {value}; rename one of them")


def _read(name: str, modules: dict[str, _Module], order: list[str]) -> _Module:
    """The module, parsed once; `order` gets it after the modules that it imports at its top level."""
    if name in modules:
        return modules[name]
    loaded = importlib.import_module(name)
    source = inspect.getsource(loaded)
    module = modules[name] = _Module(name, source.splitlines())
    for node in ast.parse(source).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            _note_import(module, node, loaded)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            module.definitions[node.name] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            module.definitions.update({t.id: node for t in targets if isinstance(t, ast.Name)})
    for imported in dict.fromkeys(home for home, _ in module.own_imports.values()):
        if imported != name.split(".")[0]:  # the package itself imports everything
            _read(imported, modules, order)
    order.append(name)
    return module


def _note_import(module: _Module, node: ast.Import | ast.ImportFrom, loaded: ModuleType) -> None:
    for alias in node.names:
        local = alias.asname or alias.name
        if isinstance(node, ast.ImportFrom) and node.level:
            module.own_imports[local] = (_absolute(node, loaded), alias.name)
        elif not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            one = ast.Import([alias]) if isinstance(node, ast.Import) else ast.ImportFrom(node.module, [alias], 0)
            module.other_imports[local.split(".")[0]] = ast.unparse(one)


def _absolute(node: ast.ImportFrom, loaded: ModuleType) -> str:
    return importlib.util.resolve_name("." * node.level + (node.module or ""), loaded.__package__)


def _names_in(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def _late(node: ast.AST) -> list[ast.ImportFrom]:
    """The imports from this package inside a function."""
    return [n for n in ast.walk(node) if isinstance(n, ast.ImportFrom) and n.level]


def _late_imports(module: _Module, node: ast.AST) -> list[tuple[str, str]]:
    loaded = importlib.import_module(module.name)
    found = []
    for statement in _late(node):
        if any(alias.asname for alias in statement.names):
            raise FlattenError(f"{module.name}: an own name is imported under another one inside a function")
        found += [(_absolute(statement, loaded), alias.name) for alias in statement.names]
    return found


def _cut(module: _Module, names: set[str]) -> list[str]:
    """The text of these definitions, with the comment above each and without imports from this package."""
    texts = []
    for node in {id(n): n for name, n in module.definitions.items() if name in names}.values():
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        while first > 1 and module.lines[first - 2].startswith("#"):
            first -= 1
        gone = {line for n in _late(node) for line in range(n.lineno, (n.end_lineno or n.lineno) + 1)}
        kept = [module.lines[i - 1] for i in range(first, (node.end_lineno or first) + 1) if i not in gone]
        texts.append("\n".join(kept) + "\n")
    return texts


def _import_order(statement: str) -> tuple[bool, str]:
    return statement.startswith("from"), statement
