"""Which children's tensors a module's forward reads directly, told from its source.

A wrapped layer whose weight the parent reads (`F.linear(x, self.qkv.weight)`) is bypassed: its forward never runs. The
module tree does not show it and hooks do not either (any hook makes `nn.TransformerEncoderLayer` leave the fused
path that hides the fault), so the methods reachable from `forward` are read as a syntax tree.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap

from torch import nn

_TENSORS = {"weight", "bias", "gamma", "beta", "eps", "variance_epsilon"}
# What may be asked of a tensor without computing with it.
_HARMLESS = {
    "dtype",
    "device",
    "shape",
    "ndim",
    "is_meta",
    "requires_grad",
    "size",
    "dim",
    "numel",
    "is_cuda",
    "data_ptr",
}
_QUESTIONS = {"isinstance", "hasattr", "getattr", "type", "id", "callable"}

Path = tuple[str, ...]


@functools.cache
def direct_reads(cls: type[nn.Module]) -> frozenset[Path]:
    """Paths of descendants, as attribute names with `*` for an index, whose tensors `cls.forward` computes with.

    `self.attn.qkv.weight` passed to a call gives `("attn", "qkv")`; `.weight.dtype`, `is None`, `isinstance` give
    nothing.
    """
    found: set[Path] = set()
    seen: set[str] = set()
    pending = ["forward"]
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        tree = _source_tree(cls, name)
        if tree is None:
            continue
        visitor = _Reads(tree)
        found |= visitor.paths
        pending += visitor.calls
    return frozenset(found)


def is_read(relative: Path, reads: frozenset[Path]) -> bool:
    """Whether the descendant at `relative` (as in its dotted name) is among `reads`."""
    return any(
        len(pattern) == len(relative) and all(p in ("*", r) for p, r in zip(pattern, relative)) for pattern in reads
    )


def _source_tree(cls: type, name: str) -> ast.AST | None:
    method = inspect.getattr_static(cls, name, None)
    if isinstance(method, (staticmethod, classmethod)):
        method = method.__func__
    method = inspect.unwrap(method) if callable(method) else None
    if method is None or (getattr(method, "__module__", None) or "").startswith("torch.nn.modules.module"):
        return None
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, TypeError, SyntaxError, IndentationError):
        return None


class _Reads(ast.NodeVisitor):
    def __init__(self, tree: ast.AST) -> None:
        self.paths: set[Path] = set()
        self.calls: set[str] = set()
        self._aliases: dict[str, Path] = {}
        self._parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self.visit(tree)

    def visit_Assign(self, node: ast.Assign) -> None:
        if len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            path = self._path(node.value)
            if path:
                self._aliases[node.targets[0].id] = path
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        source, target = node.iter, node.target
        if isinstance(source, ast.Call) and getattr(source.func, "id", "") == "enumerate" and source.args:
            source = source.args[0]
            target = target.elts[-1] if isinstance(target, ast.Tuple) else target
        path = self._path(source)
        if path and isinstance(target, ast.Name):
            self._aliases[target.id] = (*path, "*")
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            self.calls.add(node.attr)  # a method or property of the class; anything else is passed over
        if node.attr in _TENSORS and isinstance(node.ctx, ast.Load):
            path = self._path(node.value)
            if path and not self._harmless(node):
                self.paths.add(path)
        self.generic_visit(node)

    def _path(self, node: ast.AST) -> Path | None:
        if isinstance(node, ast.Name):
            return () if node.id == "self" else self._aliases.get(node.id)
        if isinstance(node, ast.Attribute):
            base = self._path(node.value)
            return None if base is None else (*base, node.attr)
        if isinstance(node, ast.Subscript):
            base = self._path(node.value)
            return None if base is None else (*base, "*")
        return None

    def _harmless(self, node: ast.AST) -> bool:
        parent = self._parents.get(node)
        if isinstance(parent, ast.Attribute):
            return parent.attr in _HARMLESS
        if isinstance(parent, ast.Compare):
            return all(isinstance(op, (ast.Is, ast.IsNot)) for op in parent.ops)
        if isinstance(parent, ast.Call):
            return node in parent.args and getattr(parent.func, "id", "") in _QUESTIONS
        return isinstance(parent, (ast.BoolOp, ast.UnaryOp, ast.If, ast.IfExp)) and not isinstance(
            getattr(parent, "op", None), ast.USub
        )
