"""What comes after a norm: `norm="identity"` takes a norm away only where a corrected layer stands in for it."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap

from torch import nn

from ..nn.affine import Correction
from .survey import Survey, Target


def keep_needed_norms(survey: Survey, targets: list[Target]) -> None:
    """Gives every norm a reason to stay unless all layers that its parent hands its output to are corrected ones.

    A corrected layer divides by the length of its input, which is what a norm before it is for.
    """
    corrected = {id(t.module) for t in targets if t.kind != "norm" and t.reason is None}
    corrected |= {id(m) for m in survey.modules.values() if isinstance(m, Correction)}
    for target in targets:
        if target.kind == "norm" and target.reason is None:
            reason = _why_needed(survey, target, corrected)
            if reason is not None:
                target.reason = reason


def _why_needed(survey: Survey, target: Target, corrected: set[int]) -> str | None:
    parents = survey.parents.get(id(target.module), [])
    if not parents:
        return "no layer after it in this model"
    for parent, attribute in parents:
        if isinstance(parent, nn.Sequential):
            later = list(parent._modules)[list(parent._modules).index(attribute) + 1 :][:1]
        else:
            kind: type = type(parent)
            later = sorted(followers(kind, attribute))
        children = [parent._modules.get(name) for name in later]
        if not children or not all(
            child is not None and any(id(m) in corrected for m in child.modules()) for child in children
        ):
            after = " and ".join(later) or "what follows it"
            return f"{type(parent).__name__} hands its output to {after}, which has no corrected layer"
    return None


@functools.cache
def followers(cls: type[nn.Module], attribute: str) -> frozenset[str]:
    """The children that methods of `cls` call on the output of `self.<attribute>`, told from the source.

    h = self.norm(x); y = self.attention(h)      → {"attention"}
    x = x + self.mlp(self.norm(x))               → {"mlp"}
    """
    found: set[str] = set()
    for name, _ in inspect.getmembers(cls, inspect.isfunction):
        if name.startswith("__") or name in vars(nn.Module):
            if name != "forward":
                continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(getattr(cls, name)))))
        except (OSError, TypeError, SyntaxError):
            continue
        found |= _followers_in(tree, attribute)
    return frozenset(found)


def _followers_in(tree: ast.AST, attribute: str) -> set[str]:
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    found: set[str] = set()
    for call in ast.walk(tree):
        if _called_child(call) != attribute:
            continue
        node = call
        while not isinstance(node, ast.stmt):
            node = parents[node]
            inner = _called_child(node)
            if inner is not None:
                found.add(inner)
                break
        else:
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                found |= _readers(tree, node.targets[0].id, node)
    return found


def _readers(tree: ast.AST, variable: str, after: ast.Assign) -> set[str]:
    """The children called with `variable` between this assignment to it and the next."""
    found: set[str] = set()
    later = [n for n in ast.walk(tree) if isinstance(n, ast.stmt) and n.lineno > after.end_lineno]
    for statement in sorted(later, key=lambda n: n.lineno):
        if isinstance(statement, (ast.If, ast.For, ast.While, ast.With, ast.Try)):
            continue  # its statements are in the list themselves
        for call in ast.walk(statement):
            child = _called_child(call)
            if child is None or not isinstance(call, ast.Call):
                continue
            arguments = [*call.args, *(k.value for k in call.keywords)]
            if any(isinstance(n, ast.Name) and n.id == variable for a in arguments for n in ast.walk(a)):
                found.add(child)
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if any(isinstance(n, ast.Name) and n.id == variable for t in targets for n in ast.walk(t)):
            break
    return found


def _called_child(node: ast.AST) -> str | None:
    """`name` where the node is a call `self.name(…)`."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    owner = node.func.value
    return node.func.attr if isinstance(owner, ast.Name) and owner.id == "self" else None
