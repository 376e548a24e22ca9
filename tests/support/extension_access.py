"""Checks that extensions stand on public names of the core; reads the source only."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping

import torch
import torch.distributed as dist

from support.layers import Module

__all__ = ["check_patches", "check_private_names", "check_public_imports"]

# Classes of torch whose names with an underscore programs use for want of others.
TORCH = (torch.nn.Module(), torch.empty(0), dist.Work, dist.ProcessGroup)


def check_public_imports(modules: Mapping[str, Module], extensions: Collection[str]) -> list[str]:
    """An extension imports from a module of the core only what that module's `__all__` lists."""
    problems = []
    for module in _of(modules, extensions):
        for source, name, line in _imported(module, modules):
            public = _public_names(modules[source])
            if name not in public:
                problems.append(
                    f"{module.name}:{line} imports {name}, which is not public in {source}"
                )
    return problems


def check_private_names(modules: Mapping[str, Module], extensions: Collection[str]) -> list[str]:
    """An extension uses no attribute of the core whose name begins with an underscore.

    What an object is cannot be told from the source: a name counts as the core's if the core
    defines it, and neither the extension itself nor torch does. Nor does an extension's subclass
    of a class of the core override such a method.
    """
    of_parts: dict[str, set[str]] = {}
    for module in modules.values():
        of_parts.setdefault(module.part, set()).update(_defined(module))
    of_core = {name for part in of_parts.keys() - set(extensions) for name in of_parts[part]}
    problems = []
    for module in _of(modules, extensions):
        own = of_parts[module.part]
        bound = _bound_to_core(module, modules)
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Attribute) or not _is_private(node.attr):
                continue
            is_of_core = node.attr in of_core and node.attr not in own
            if _root(node.value) in bound or (
                is_of_core and not any(hasattr(kind, node.attr) for kind in TORCH)
            ):
                problems.append(f"{module.name}:{node.lineno} uses {ast.unparse(node)}")
        problems += _overrides(module, modules, bound)
    return problems


def _overrides(
    module: Module, modules: Mapping[str, Module], bound: Mapping[str, str]
) -> Iterator[str]:
    for kind in ast.walk(module.tree):
        if not isinstance(kind, ast.ClassDef):
            continue
        private = {
            name
            for base in map(ast.unparse, kind.bases)
            if base in bound
            for source in modules.values()
            if source.part == modules[bound[base]].part
            for name in _methods(source, base)
        }
        for node in kind.body:
            if isinstance(node, ast.FunctionDef) and node.name in private:
                yield f"{module.name}:{node.lineno} overrides {kind.name}.{node.name}"


def _methods(module: Module, kind: str) -> Iterator[str]:
    """Yield the private methods of the class `kind` of a module, if it has one of that name."""
    for node in module.tree.body:
        if isinstance(node, ast.ClassDef) and node.name == kind:
            for each in node.body:
                if isinstance(each, ast.FunctionDef) and _is_private(each.name):
                    yield each.name


def check_patches(modules: Mapping[str, Module], extensions: Collection[str]) -> list[str]:
    """An extension replaces nothing in a module or a class of the core."""
    problems = []
    for module in _of(modules, extensions):
        bound = _bound_to_core(module, modules)
        for node in ast.walk(module.tree):
            for target in _replaced(node):
                if _root(target) in bound:
                    problems.append(f"{module.name}:{target.lineno} replaces {ast.unparse(target)}")
    return problems


def _of(modules: Mapping[str, Module], extensions: Collection[str]) -> list[Module]:
    return [module for module in modules.values() if module.part in extensions]


def _imported(module: Module, modules: Mapping[str, Module]) -> Iterator[tuple[str, str, int]]:
    """Yield (module, name, line) for each name that is imported from another part."""
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        source = _source(module, node, modules)
        if source not in modules or modules[source].part in (module.part, "__init__"):
            continue
        for alias in node.names:
            if f"{source}.{alias.name}" not in modules:
                yield source, alias.name, node.lineno


def _source(module: Module, node: ast.ImportFrom, modules: Mapping[str, Module]) -> str:
    if not node.level:
        return node.module or ""
    here = module.name.split(".")
    if not any(name.startswith(f"{module.name}.") for name in modules):  # not an `__init__.py`
        here = here[:-1]
    return ".".join([*here[: len(here) - node.level + 1], *([node.module] if node.module else [])])


def _public_names(module: Module) -> set[str]:
    """Return what `__all__` of a module lists; nothing without one, as the module is internal."""
    public: set[str] = set()
    for node in module.tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if (
            isinstance(node, ast.Assign | ast.AugAssign)
            and target is not None
            and ast.unparse(target) == "__all__"
        ):
            listed = {
                str(each.value) for each in ast.walk(node.value) if isinstance(each, ast.Constant)
            }
            public |= listed
    return public


def _bound_to_core(module: Module, modules: Mapping[str, Module]) -> dict[str, str]:
    """Return the names that stand for something of another part: name → the module it is from."""
    bound = {}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom):
            source = _source(module, node, modules)
            for alias in node.names:
                target = modules.get(f"{source}.{alias.name}") or modules.get(source)
                if target is not None and target.part != module.part:
                    bound[alias.asname or alias.name] = target.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                target = modules.get(alias.name)
                if target is not None and target.part != module.part:
                    bound[alias.asname or alias.name.partition(".")[0]] = target.name
    return bound


def _defined(module: Module) -> Iterator[str]:
    """Yield the private names of functions, classes, variables and attributes of a module."""
    for node in ast.walk(module.tree):
        name = ""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr if _root(node.value) in ("self", "cls") else ""
        if _is_private(name):
            yield name


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _replaced(node: ast.AST) -> Iterator[ast.expr]:
    """Yield x for ``Replaced(x, name, ...)``, ``setattr(x, name, ...)`` and ``x.name = ...``."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
        yield node.value
    elif isinstance(node, ast.Call):
        function = ast.unparse(node.func).rpartition(".")[2]
        if function in ("Replaced", "setattr", "delattr"):
            yield from node.args[:1]


def _root(node: ast.expr) -> str:
    """Return the name with which an expression such as ``a.b[0].c`` begins; "" for none."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
