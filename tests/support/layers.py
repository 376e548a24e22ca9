"""Checks that the modules of the package keep to the layers of the architecture; reads the source,
imports nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from support.sources import paused_collector, syntax_trees

__all__ = [
    "Module",
    "check_cycles",
    "check_docstrings",
    "check_environment",
    "check_layers",
    "check_names",
    "check_optional",
    "check_table",
    "check_tiny",
    "read_package",
    "read_table",
]

# The only part that may look at the process's environment.
ENVIRONMENT = "environment"
ENVIRONMENT_NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


@dataclass(frozen=True)
class Import:
    """One imported module.

    Attributes:
        target: its full name.
        line: where.
        top: whether it is imported as soon as the importing module is.
        runtime: False where it is for type checkers only.
    """

    target: str
    line: int
    top: bool
    runtime: bool


@dataclass
class Module:
    """One source file of the package.

    Attributes:
        name: its full name; a package's is that of its folder.
        part: the top-level module or package it lies in, as the layers table names it: `name`, or
            `name/`.
        text: its source.
        tree: its syntax tree.
        imports: everything it imports, wherever in the file.
    """

    name: str
    part: str
    text: str = field(repr=False)
    tree: ast.Module = field(repr=False)
    imports: list[Import] = field(default_factory=list, repr=False)


# --- reading
# ------------------------------------------------------------------------------------------------


def read_table(document: str) -> dict[str, int]:
    """The layer of every part, from the rows ``| layer | `part`, `part` | purpose |`` of a Markdown
    table.
    """
    layers: dict[str, int] = {}
    for row in re.findall(r"^\|\s*(\d+)\s*\|([^|]*)\|", document, flags=re.MULTILINE):
        for part in re.findall(r"`([^`]+)`", row[1]):
            if part in layers:
                raise ValueError(f"the layers table names {part} twice")
            layers[part] = int(row[0])
    return layers


def read_package(root: Path) -> dict[str, Module]:
    """Every module of the package in folder `root`, by full name."""
    modules = {}
    for path, tree in syntax_trees(root).items():
        parts = path.relative_to(root).with_suffix("").parts
        part = f"{parts[0]}/" if len(parts) > 1 else parts[0]
        name = ".".join((root.name, *(parts[:-1] if parts[-1] == "__init__" else parts)))
        modules[name] = Module(name, part, path.read_text(), tree)
    packages = {
        f"{root.name}.{path.relative_to(root).as_posix().replace('/', '.')}"
        for path in _folders(root)
    }
    with paused_collector():
        for module in modules.values():
            is_package = module.name == root.name or module.name in packages
            module.imports = list(_imports(module, is_package, modules))
    return modules


def _folders(root: Path) -> Iterator[Path]:
    return (path.parent for path in root.rglob("__init__.py") if path.parent != root)


def _imports(module: Module, is_package: bool, modules: Mapping[str, Module]) -> Iterator[Import]:
    here = module.name if is_package else module.name.rpartition(".")[0]
    for node, top, runtime in _walk(module.tree.body, top=True, runtime=True):
        for target in _targets(node, here, modules):
            yield Import(target, getattr(node, "lineno", 0), top, runtime)


def _targets(node: ast.AST, here: str, modules: Mapping[str, Module]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        above = here.split(".")[: len(here.split(".")) - node.level + 1]
        base = ".".join([*above, *([node.module] if node.module else [])])
    # `from package import name` may name a module of the package
    return [f"{base}.{a.name}" if f"{base}.{a.name}" in modules else base for a in node.names]


def _walk(body: list[ast.stmt], top: bool, runtime: bool) -> Iterator[tuple[ast.AST, bool, bool]]:
    """Every statement below `body`, with whether it runs on import and whether it runs at all."""
    for statement in body:
        yield from _walk_node(statement, top, runtime)


def _walk_node(node: ast.AST, top: bool, runtime: bool) -> Iterator[tuple[ast.AST, bool, bool]]:
    yield node, top, runtime
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        top = False
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        yield from _walk(node.body, top, False)
        yield from _walk(node.orelse, top, runtime)
        return
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _walk_node(child, top, runtime)


# --- the checks: each returns what is wrong, in words
# -------------------------------------------------------


def check_table(modules: Mapping[str, Module], layers: Mapping[str, int]) -> list[str]:
    """Every part of the package is in the table, and nothing else is."""
    parts = {module.part for module in modules.values()}
    missing = [f"{part} is not in the layers table" for part in sorted(parts - layers.keys())]
    return missing + [
        f"the layers table names {part}, which is not there"
        for part in sorted(layers.keys() - parts)
    ]


def check_layers(modules: Mapping[str, Module], layers: Mapping[str, int]) -> list[str]:
    """Modules import from lower layers, and within their own part."""
    found = []
    for module in modules.values():
        for used in module.imports:
            other = _inside(used.target, modules)
            if other is None or other.part == module.part:
                continue
            own, below = layers.get(module.part), layers.get(other.part)
            if own is not None and below is not None and below >= own:
                found.append(
                    f"{module.name}:{used.line} (layer {own}) imports {other.name} (layer {below})"
                )
    return found


def check_tiny(
    modules: Mapping[str, Module], excused: Collection[str] = (), lines: int = 80
) -> list[str]:
    """A module of fewer than `lines` lines that one other module alone imports belongs into that
    one.

    Args:
        modules: of the package.
        excused: modules that may stand alone, as what registers name, commands, data; each must
            need its excuse.
        lines: how many are enough.
    """
    importers = _importers(modules)
    tiny = {
        name: next(iter(importers[name]))
        for name, module in modules.items()
        if len(importers[name]) == 1
        and module.text.count("\n") < lines
        and not _is_package(name, modules)
    }
    found = [
        f"{name} has one importer, {importer}: merge it"
        for name, importer in tiny.items()
        if name not in excused
    ]
    return found + [f"{name} is excused without need" for name in excused if name not in tiny]


def _importers(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {name: set() for name in modules}
    for module in modules.values():
        for used in module.imports:
            other = _inside(used.target, modules)
            if other is not None and other is not module:
                found[other.name].add(module.name)
    return found


def _is_package(name: str, modules: Mapping[str, Module]) -> bool:
    return any(other.startswith(f"{name}.") for other in modules)


def check_names(modules: Mapping[str, Module], roles: Collection[str] = ()) -> list[str]:
    """No two modules have the same name, unless it is that of a role that each plays in its own
    package.

    Args:
        modules: of the package.
        roles: names that several may have; each must be that of several.
    """
    places: dict[str, list[str]] = {}
    for name in modules:
        if not _is_package(name, modules):
            places.setdefault(name.rpartition(".")[2], []).append(name)
    several = {last: names for last, names in places.items() if len(names) > 1}
    found = [
        f"{last} is the name of {' and '.join(names)}"
        for last, names in several.items()
        if last not in roles
    ]
    return found + [f"{role} is not the name of several" for role in roles if role not in several]


def check_cycles(
    modules: Mapping[str, Module], excused: Collection[tuple[str, str]] = ()
) -> list[str]:
    """No module imports itself by way of others, imports for type checkers included.

    Args:
        modules: of the package.
        excused: imports (module, imported module) that may close a cycle; each must be needed for
            that.
    """
    graph = {name: _neighbours(module, modules) for name, module in modules.items()}
    gone = [(name, target) for name, target in excused if target not in graph.get(name, ())]
    for name, target in excused:
        graph[name] = [other for other in graph.get(name, ()) if other != target]
    idle = [pair for pair in excused if pair not in gone and not _leads(pair[1], pair[0], graph)]
    found = [f"{name} is excused for importing {target}, and does not" for name, target in gone]
    return (
        _cycles(graph)
        + found
        + [f"{name} imports {target} without a cycle" for name, target in idle]
    )


def _leads(start: str, end: str, graph: Mapping[str, list[str]]) -> bool:
    """Whether imports lead from module `start` to module `end`."""
    seen, ahead = {start}, [start]
    while ahead:
        fresh = [name for name in graph.get(ahead.pop(), ()) if name not in seen]
        seen.update(fresh)
        ahead += fresh
    return end in seen


def _cycles(graph: Mapping[str, list[str]]) -> list[str]:
    found, done = [], set[str]()
    for start in sorted(graph):
        cycle = _cycle_from(start, graph, done, [])
        if cycle:
            done.update(cycle)  # told once
            found.append(" imports ".join(cycle))
    return found


def _neighbours(module: Module, modules: Mapping[str, Module]) -> list[str]:
    targets = (_inside(used.target, modules) for used in module.imports)
    return sorted(
        {target.name for target in targets if target is not None and target is not module}
    )


def _cycle_from(
    name: str, graph: Mapping[str, list[str]], done: set[str], path: list[str]
) -> list[str]:
    if name in path:
        return [*path[path.index(name) :], name]
    if name in done:
        return []
    for neighbour in graph[name]:
        cycle = _cycle_from(neighbour, graph, done, [*path, name])
        if cycle:
            return cycle
    done.add(name)
    return []


def check_environment(modules: Mapping[str, Module]) -> list[str]:
    """The process's environment is read and written in one place."""
    return [
        f"{module.name}:{node.lineno} uses os.{name}; that is the part of {ENVIRONMENT}"
        for module in modules.values()
        if module.part.rstrip("/") != ENVIRONMENT  # a module, or a package
        for node, name in _uses_of_environment(module.tree)
    ]


def _uses_of_environment(tree: ast.Module) -> Iterator[tuple[ast.Attribute | ast.ImportFrom, str]]:
    names = {
        alias.asname or "os"
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "os" or (alias.name.startswith("os.") and alias.asname is None)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT_NAMES:
            if isinstance(node.value, ast.Name) and node.value.id in names:
                yield node, node.attr
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from (
                (node, alias.name)
                for alias in node.names
                if alias.name in {*ENVIRONMENT_NAMES, "*"}
            )


def check_docstrings(modules: Mapping[str, Module]) -> list[str]:
    """Every module begins with one sentence that says what it is for."""
    found = []
    for module in modules.values():
        paragraph = " ".join((ast.get_docstring(module.tree) or "").split("\n\n")[0].split())
        if not paragraph:
            found.append(f"{module.name} has no docstring")
        elif not paragraph.endswith((".", "?", "!")) or _has_more_sentences(paragraph):
            found.append(
                f"{module.name}: its docstring begins with other than one sentence: {paragraph!r}"
            )
    return found


def _has_more_sentences(paragraph: str) -> bool:
    plain = re.sub(r"\b(e\.g|i\.e|cf|vs|etc)\.", "", paragraph)
    return re.search(r"[.!?]\s+[A-Z`\"]", plain) is not None


def check_optional(
    modules: Mapping[str, Module], optional: Mapping[str, tuple[str, ...]]
) -> list[str]:
    """Packages in `optional` are imported where they are used, or at the top of the modules named
    for them.
    """
    found = []
    for module in modules.values():
        for used in module.imports:
            for package, places in optional.items():
                is_used = used.target == package or used.target.startswith(f"{package}.")
                if is_used and used.top and used.runtime and module.name not in places:
                    found.append(f"{module.name}:{used.line} imports {package} at its top")
    return found


def _inside(target: str, modules: Mapping[str, Module]) -> Module | None:
    """The module of the package that `target` is, or lies in."""
    while target:
        if target in modules:
            return modules[target]
        target = target.rpartition(".")[0]
    return None
