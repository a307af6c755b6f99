"""Places that compute δ̃ = τδ/Ñ, the prior's strength per example.

A place is a product or quotient with the prior precision and the KL weight in the numerator and the number of examples in
the denominator, in any order and nesting: ``kl_weight * delta / num_data``, ``delta / (num_data / kl_weight)``,
``delta / scale``. Attributes and keys count like names, with any prefix or suffix (``self.kl_weight_now``,
``group["num_data"]``). A local name that is assigned once in a function is replaced by its expression; a use of a local δ̃
does not count again.
"""

from __future__ import annotations

import ast
from typing import NamedTuple

from benchmarks.house.sources import SourceFile

KL_WEIGHT = ("kl_weight", "tau")
PRIOR_PRECISION = ("prior_precision", "prior", "delta")
NUM_DATA = ("num_data", "num_examples", "effective_data", "data_size")
SCALE = "scale"  # the package's name of Ñ/τ

_MAX_DEPTH = 10


class Factors(NamedTuple):
    """The names in the numerator and the denominator of a product."""

    above: frozenset[str]
    below: frozenset[str]


def prior_strengths(files: list[SourceFile]) -> list[str]:
    """Every expression that computes δ̃, as a line with file, line number and expression."""
    return [place for file in files for place in _places(file)]


def _places(file: SourceFile) -> list[str]:
    scopes: list[ast.AST] = [file.tree]
    scopes += [node for node in ast.walk(file.tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    places: dict[int, str] = {}
    for scope in scopes:
        assigned = _single_assignments(scope)
        for node in _outermost_products(scope):
            if _is_strength(_factors(node, assigned, 0)):
                places[node.lineno] = f"{file.name}:{node.lineno}: {ast.unparse(node)}"
    return list(places.values())


def _is_strength(factors: Factors) -> bool:
    return _has(factors.above, KL_WEIGHT) and _has(factors.above, PRIOR_PRECISION) and _has(factors.below, NUM_DATA)


def _has(names: frozenset[str], words: tuple[str, ...]) -> bool:
    return any(f"_{word}_" in f"_{name.strip('_')}_" for name in names for word in words)


def _is_product(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div))


def _outermost_products(scope: ast.AST) -> list[ast.BinOp]:
    """Products that are not a factor of a larger product, so that each expression counts once."""
    inner = {
        id(side)
        for node in ast.walk(scope)
        if isinstance(node, ast.BinOp) and _is_product(node)
        for side in (node.left, node.right)
    }
    return [
        node for node in ast.walk(scope) if isinstance(node, ast.BinOp) and _is_product(node) and id(node) not in inner
    ]


def _single_assignments(scope: ast.AST) -> dict[str, ast.expr]:
    if isinstance(scope, ast.Module):
        return {}
    values: dict[str, list[ast.expr]] = {}
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=False))
            for name, expression in pairs:
                if isinstance(name, ast.Name):
                    values.setdefault(name.id, []).append(expression)
    return {name: expressions[0] for name, expressions in values.items() if len(expressions) == 1}


def _factors(node: ast.expr, assigned: dict[str, ast.expr], depth: int) -> Factors:
    if isinstance(node, ast.BinOp) and _is_product(node):
        left, right = (_factors(side, assigned, depth + 1) for side in (node.left, node.right))
        if isinstance(node.op, ast.Div):
            right = Factors(right.below, right.above)
        return Factors(left.above | right.above, left.below | right.below)
    if isinstance(node, ast.Name) and depth < _MAX_DEPTH:
        value = assigned.get(node.id)
        if value is not None and (_is_product(value) or isinstance(value, (ast.Subscript, ast.Attribute))):
            factors = _factors(value, assigned, depth + 1)
            return Factors(frozenset(), frozenset()) if _is_strength(factors) else factors  # a use of δ̃ is not a copy
    name = _name(node)
    if name == SCALE:
        return Factors(frozenset({NUM_DATA[0]}), frozenset({KL_WEIGHT[0]}))
    return Factors(frozenset({name}), frozenset())


def _name(node: ast.expr) -> str:
    """The name of a factor: a variable, an attribute, a key, or the first argument of a call."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return str(node.slice.value)
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.Call):
        return _name(node.args[0]) if node.args else _name(node.func)
    if isinstance(node, (ast.BoolOp, ast.IfExp)):
        return _name(node.values[0] if isinstance(node, ast.BoolOp) else node.body)
    return ""
