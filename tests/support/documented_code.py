"""Code blocks of the documentation, and checks of their commands and Python code that start
nothing.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import contextlib
import functools
import importlib
import importlib.util
import inspect
import io
import itertools
import re
import shlex
import symtable
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any

import yaml
from typing_extensions import Self

import lockstep
from lockstep.cli.submit import make_job
from lockstep.errors import LockstepError
from lockstep.hosts import parse_hosts
from lockstep.launcher.options import JobOptions
from lockstep.submit import SCHEDULERS
from lockstep.training.options import TrainOptions

__all__ = [
    "PAGES",
    "ROOT",
    "Block",
    "check_block",
    "check_command",
    "check_inline",
    "is_program",
    "read_blocks",
    "read_inline",
    "subcommands",
]

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("README*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]
)

command_line = importlib.import_module(
    "lockstep.cli.main"
)  # the package has a function of this name

LANGUAGES = ("console", "python", "text", "yaml")


# --- Blocks
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: its path.
        line: the number of its first line.
        language: the word after the opening fence.
        text: its content, without the indentation of the fence.
        not_run: the reason in the comment ``<!-- not run: reason -->`` above it; "" without one.
    """

    page: str
    line: int
    language: str
    text: str
    not_run: str = ""


_FENCED = re.compile(
    r"^(?:(?P<comment_indent> *)<!-- not run: (?P<reason>\S[^\n]*?) -->\n)?"
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


def read_blocks(page: str, text: str) -> list[Block]:
    """Return the fenced blocks in the `text` of a page."""
    blocks = []
    for match in _FENCED.finditer(text):
        lines = [line.removeprefix(match["indent"]) for line in match["text"].splitlines()]
        number = text.count("\n", 0, match.start("text")) + 1
        blocks.append(
            Block(page, number, match["language"], "\n".join(lines) + "\n", match["reason"] or "")
        )
    return blocks


def read_inline(text: str) -> list[str]:
    """Return the inline code of a page, except the first column of tables, which may show other
    libraries.
    """
    lines = _FENCED.sub("", text).splitlines()
    cells = (
        line.split("|", 2)[2] if line.startswith("|") and line.count("|") > 1 else line
        for line in lines
    )
    return [code for line in cells for code in _INLINE.findall(line)]


def check_block(block: Block) -> list[str]:
    """Return what is wrong with the commands or the code of a block."""
    if block.language not in LANGUAGES:
        return [
            f"a block of {block.language or 'no language'}, expected one of {', '.join(LANGUAGES)}"
        ]
    if block.language == "python":
        return check_python(block.text)
    if block.language == "yaml":
        return check_yaml(block.text)
    if block.language == "text":
        found = [line for line in block.text.splitlines() if line.startswith(("$ ", ">>> "))]
        return [f"{line}: a command or code in a text block" for line in found]
    if block.not_run:
        return []
    return [problem for line in command_lines(block.text) for problem in check_command(line)]


def check_yaml(text: str) -> list[str]:
    """Return what is wrong with a file of YAML, or with the launchers that it starts."""
    try:
        yaml.safe_load(text)
    except yaml.YAMLError as error:
        return [" ".join(str(error).split())]
    joined = re.sub(r" \\\n +", " ", text)
    return [
        problem
        for command in re.findall(r"lockstep run .*", joined)
        for problem in check_command(command)
    ]


def check_inline(code: str) -> list[str]:
    """Return what is wrong with inline code, if that is a command or names something of
    Lockstep.
    """
    if re.match(r"lockstep [a-z]", code):
        return _check_flags(code.split())
    of_lockstep = re.match(rf"lockstep\.[A-Za-z_]|(?:{'|'.join(lockstep.__all__)})\(\.\.\.", code)
    code = code.removesuffix("()").replace("…", "...")
    if of_lockstep is None or code in _loggers():
        return []
    try:
        ast.parse(code, mode="eval")
    except SyntaxError:  # prose, such as `lockstep.data.NAME → ImageSet`
        return []
    return check_python(
        code, {name: getattr(lockstep, name) for name in lockstep.__all__}, partial=True
    )


@functools.cache
def _loggers() -> set[str]:
    sources = (ROOT / "src").glob("**/*.py")
    return {
        name
        for source in sources
        for name in re.findall(r'getLogger\("([\w.]+)"\)', source.read_text())
    }


# --- Commands
# --------------------------------------------------------------------------------------------------


def command_lines(text: str) -> list[str]:
    """Return the commands of a console block: lines after "$ ", or all lines if there are none."""
    lines = text.replace("\\\n", " ").splitlines()
    prompted = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return prompted or [
        line for line in lines if line.strip() and not line.lstrip().startswith("#")
    ]


def check_command(line: str) -> list[str]:
    """Return what is wrong with a command line; it is not run."""
    try:
        return [
            f"{line.strip()}: {problem}"
            for problem in _check_words(shlex.split(line, comments=True))
        ]
    except ValueError as error:
        return [f"{line.strip()}: {error}"]


def _check_words(words: list[str]) -> list[str]:
    while words and re.match(r"[A-Z_]+=", words[0]):
        name = words.pop(0).partition("=")[0]
        if name.startswith("LOCKSTEP_") and name not in _variables():
            return [f"no variable {name}"]
    check = _PROGRAMS.get(words[0]) if words else None
    if check is None:
        return [
            "nothing checks this program; add a check, or mark the block with <!-- not run: "
            "reason -->"
        ]
    return check(words)


def _variables() -> set[str]:
    sources = (ROOT / "src/lockstep/environment").glob("*.py")
    return {name for source in sources for name in re.findall(r"LOCKSTEP_\w+", source.read_text())}


def _check_lockstep(words: list[str]) -> list[str]:
    options = argparse.Namespace()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            command_line._parse(words[1:], "lockstep", options)
        _check_values(words[1], options)
    except SystemExit:  # --help, --version
        return []
    except LockstepError as error:
        return [str(error)]
    return []


def _check_values(command: str, options: argparse.Namespace) -> None:
    if command in ("train", "verify"):
        TrainOptions.parse(vars(options))
    if command == "run":
        given = {name: value for name, value in vars(options).items() if name != "hostfile"}
        JobOptions.parse({**given, "program": (options.script, *options.arguments)})
        _require_file(options.script)
    if command == "submit":
        scheduler = SCHEDULERS.load(options.to)()
        scheduler.write(make_job(vars(options), scheduler))
    if command == "doctor" and hasattr(options, "hosts"):
        parse_hosts(options.hosts)


def _require_file(path: str) -> None:
    """Check a path in this repository; a name without a folder stands for the user's own
    program.
    """
    if "/" in path and not (ROOT / path).exists():
        raise LockstepError(f"no file {path}")


def subcommands() -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of the subcommands of ``lockstep``."""
    actions = command_line._parser()._actions
    choices: dict[str, argparse.ArgumentParser] = next(
        action.choices for action in actions if isinstance(action, argparse._SubParsersAction)
    )
    return choices


def _check_flags(words: Sequence[str]) -> list[str]:
    """Check the command and the options of a command line with placeholders, such as `lockstep run
    --restarts N`.
    """
    parsers = subcommands()
    if words[1] not in parsers:
        return [f"{' '.join(words)}: no command {words[1]!r}"]
    known = parsers[words[1]]._option_string_actions
    end = next((number for number, word in enumerate(words) if word.endswith(".py")), len(words))
    flags = [word.partition("=")[0] for word in words[2:end] if word.startswith("-")]
    return [f"{' '.join(words)}: no option {flag}" for flag in flags if flag not in known]


def _check_make(words: list[str]) -> list[str]:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return [
        f"no target {word} in Makefile"
        for word in words[1:]
        if "=" not in word and word not in targets
    ]


def _check_python_program(words: list[str]) -> list[str]:
    if words[1:2] == ["-m"]:
        if words[2:4] == ["pip", "install"]:
            return _check_pip(words[2:])
        if words[2:3] == ["lockstep"]:
            return _check_lockstep(words[2:])
        return [] if importlib.util.find_spec(words[2]) else [f"no module {words[2]}"]
    if len(words) > 1 and words[1].endswith(".py"):
        _, program, *_ = words
        return [] if "/" not in program or (ROOT / program).exists() else [f"no file {program}"]
    return ["expected `python FILE` or `python -m MODULE`"]


def _check_pip(words: list[str]) -> list[str]:
    extras = re.findall(r"^([a-z]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    used = [
        extra
        for word in words
        for extra in ",".join(re.findall(r"\[(.*)\]", word)).split(",")
        if extra
    ]
    files = [file for flag, file in itertools.pairwise(words) if flag == "-c"]
    problems = [f"no extra {extra} in pyproject.toml" for extra in used if extra not in extras]
    return problems + [f"no file {file}" for file in files if not (ROOT / file).exists()]


def _check_torchrun(words: list[str]) -> list[str]:
    from torch.distributed.run import get_args_parser

    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            get_args_parser().parse_args(words[1:])
    except SystemExit:
        return [errors.getvalue().strip().splitlines()[-1]]
    return []


_LAUNCHER_OPTIONS = {
    "mpiexec": ("-n",),
    "srun": ("-n", "--nodes", "--ntasks-per-node"),
}


def _check_launcher(words: list[str]) -> list[str]:
    """Check the command after the options of mpiexec or srun."""
    known, rest = _LAUNCHER_OPTIONS[words[0]], words[1:]
    while rest and rest[0].startswith("-"):
        flag, equals, _ = rest[0].partition("=")
        if flag not in known:
            return [f"no option {flag} of {words[0]} in {__name__}"]
        rest = rest[1 if equals else 2 :]
    return _check_words(rest)


_PROGRAMS: dict[str, Callable[[list[str]], list[str]]] = {
    "lockstep": _check_lockstep,
    "make": _check_make,
    "mpiexec": _check_launcher,
    "pip": _check_pip,
    "python": _check_python_program,
    "srun": _check_launcher,
    "torchrun": _check_torchrun,
}


# --- Python
# --------------------------------------------------------------------------------------------------


def is_program(text: str) -> bool:
    """Return whether Python code defines all names that it uses, so that it can be run by
    itself.
    """
    table = symtable.symtable(text, "<block>", "exec")
    return not _undefined(table, set())


def _undefined(table: symtable.SymbolTable, outer: set[str]) -> set[str]:
    symbols = table.get_symbols()
    bound = {
        symbol.get_name()
        for symbol in symbols
        if symbol.is_assigned() or symbol.is_imported() or symbol.is_parameter()
    }
    known = outer | bound
    names = {symbol.get_name() for symbol in symbols if symbol.is_referenced()}
    missing = {name for name in names - known if not hasattr(builtins, name)}
    return missing.union(*(_undefined(child, known) for child in table.get_children()))


def check_python(
    text: str, names: dict[str, Any] | None = None, partial: bool = False
) -> list[str]:
    """Return the unknown names of Lockstep and the calls that do not fit the signatures, without
    running the code.

    Args:
        text: the code; names that it does not define are those of its context: modules by their
            usual names, `comm` and `trainer` of these classes, and anything else unknown.
        names: further names that it may use.
        partial: whether calls may omit required arguments.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        return [f"line {error.lineno}: {error.msg}"]
    checker = _Checker({**_context(), **(names or {})}, partial)
    for statement in tree.body:
        checker.visit(statement)
    return checker.problems


@dataclass(frozen=True)
class _Instance:
    """An instance of a class, of which only the class is known."""

    cls: type


class _Unknown:
    """A value of which nothing is known."""


_UNKNOWN = _Unknown()


def _context() -> dict[str, Any]:
    import torch

    return {
        "lockstep": lockstep,
        "torch": torch,
        "nn": torch.nn,
        "F": torch.nn.functional,
        "dist": torch.distributed,
        "comm": _Instance(lockstep.Communicator),
        "trainer": _Instance(lockstep.Trainer),
    }


@dataclass
class _Checker(ast.NodeVisitor):
    """Follows names through the statements of a block in their order, and checks attributes and
    calls.
    """

    names: dict[str, Any]
    partial: bool
    problems: list[str] = field(default_factory=list)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            module = self._import(alias.name, node)
            top = alias.name.partition(".")[0]
            self.names[alias.asname or top] = module if alias.asname else self._import(top, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = self._import(str(node.module), node)
        for alias in node.names:
            self.names[alias.asname or alias.name] = self._attribute(module, alias.name, node)

    def visit_Assign(self, node: ast.Assign) -> None:
        value = self._value(node.value)
        for target in node.targets:
            self._bind(target, value)

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            value = self._value(item.context_expr)
            if item.optional_vars is not None:
                self._bind(item.optional_vars, value)
        self._visit_all(node.body)

    def visit_For(self, node: ast.For) -> None:
        self._value(node.iter)
        self._bind(node.target, _UNKNOWN)
        self._visit_all(node.body)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.names[node.name] = _UNKNOWN
        arguments = {
            argument.arg: _UNKNOWN for argument in (*node.args.args, *node.args.kwonlyargs)
        }
        inner = _Checker({**self.names, **arguments}, self.partial, self.problems)
        inner._visit_all(node.body)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.names[node.name] = _UNKNOWN
        _Checker(dict(self.names), self.partial, self.problems)._visit_all(node.body)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        arguments = {argument.arg: _UNKNOWN for argument in node.args.args}
        _Checker({**self.names, **arguments}, self.partial, self.problems).visit(node.body)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._value(node)

    def visit_Call(self, node: ast.Call) -> None:
        self._value(node)

    def _visit_all(self, nodes: Sequence[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    def _bind(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            for element in target.elts:
                self._bind(element, _UNKNOWN)
        else:
            self.visit(target)

    def _value(self, node: ast.expr) -> Any:
        """Return the value of an expression as far as it is known, and check what is in it."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, _UNKNOWN)
        if isinstance(node, ast.Attribute):
            return self._attribute(self._value(node.value), node.attr, node)
        if isinstance(node, ast.Call):
            return self._call(node)
        self.generic_visit(node)
        return _UNKNOWN

    def _attribute(self, owner: Any, name: str, node: ast.AST) -> Any:
        if isinstance(owner, _Instance):
            if not _has_attribute(owner.cls, name):
                self._report(node, f"{owner.cls.__name__} has no attribute {name!r}")
            method = inspect.getattr_static(owner.cls, name, None)
            if inspect.isfunction(method):
                return _Method(method, owner.cls)
            return (
                getattr(owner.cls, name, _UNKNOWN)
                if isinstance(method, (classmethod, staticmethod))
                else _UNKNOWN
            )
        if isinstance(owner, (ModuleType, type)):
            value = getattr(owner, name, _UNKNOWN)
            if value is _UNKNOWN and isinstance(owner, ModuleType):
                with contextlib.suppress(ImportError):
                    return importlib.import_module(f"{owner.__name__}.{name}")
            if value is _UNKNOWN:
                self._report(node, f"{owner.__name__} has no attribute {name!r}")
            return value
        return _UNKNOWN

    def _call(self, node: ast.Call) -> Any:
        function = self._value(node.func)
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            self._value(argument)
        self._check_arguments(function, node)
        return _result(function)

    def _check_arguments(self, function: Any, node: ast.Call) -> None:
        if function is _UNKNOWN or isinstance(function, _Instance):
            return
        try:
            signature = _without_never(
                inspect.signature(function.function if isinstance(function, _Method) else function)
            )
        except (TypeError, ValueError):  # written in C
            return
        signature = _without_never(signature)
        positional: list[Any] = [None] * (len(node.args) + isinstance(function, _Method))
        keywords = {keyword.arg: None for keyword in node.keywords if keyword.arg is not None}
        partial = any(
            isinstance(argument, ast.Starred) or _is_ellipsis(argument) for argument in node.args
        )
        partial = partial or self.partial or len(keywords) < len(node.keywords)
        try:
            if partial:
                signature.bind_partial(**keywords)
            else:
                signature.bind(*positional, **keywords)
        except TypeError as error:
            self._report(node, f"{ast.unparse(node.func)}(): {error}")
        options = _unpacked_options(signature, function)
        for keyword in keywords.keys() - signature.parameters.keys() if options else ():
            if keyword not in options:
                self._report(
                    node,
                    f"{ast.unparse(node.func)}(): got an unexpected keyword argument {keyword!r}",
                )

    def _import(self, name: str, node: ast.AST) -> Any:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if name.partition(".")[0] in ("lockstep", "torch"):
                self._report(node, str(error))
            return _UNKNOWN

    def _report(self, node: ast.AST, problem: str) -> None:
        self.problems.append(f"line {getattr(node, 'lineno', 0)}: {problem}")


@dataclass(frozen=True)
class _Method:
    """A function of a class, called on an instance."""

    function: Callable[..., Any]
    cls: type


def _is_ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def _without_never(signature: inspect.Signature) -> inspect.Signature:
    """Return the signature without ``**name: Never``, which only words the error for an unknown
    argument.
    """
    return signature.replace(
        parameters=[p for p in signature.parameters.values() if p.annotation != "Never"]
    )


def _without_never(signature: inspect.Signature) -> inspect.Signature:
    """Return the signature without ``**unknown: Never``, with which a function refuses other
    keywords by itself.
    """
    kept = [each for each in signature.parameters.values() if str(each.annotation) != "Never"]
    return signature.replace(parameters=kept)


def _unpacked_options(signature: inspect.Signature, function: Any) -> set[str]:
    """Return the keywords that ``**name: Unpack[TypedDict]`` accepts; empty if there is no such
    parameter.
    """
    for parameter in signature.parameters.values():
        match = re.fullmatch(r"Unpack\[(\w+)\]", str(parameter.annotation))
        if match is not None and parameter.kind is parameter.VAR_KEYWORD:
            return set(
                getattr(importlib.import_module(function.__module__), match[1]).__annotations__
            )
    return set()


def _has_attribute(cls: type, name: str) -> bool:
    """Return whether instances of `cls` have the attribute: of the class, annotated, or set on
    `self`.
    """
    if hasattr(cls, name) or (hasattr(cls, "__getattr__") and cls is not lockstep.Communicator):
        return True
    return any(name in _own_attributes(base) for base in cls.__mro__[:-1])


def _own_attributes(cls: type) -> Iterator[str]:
    yield from cls.__dict__.get("__annotations__", {})
    with contextlib.suppress(OSError, TypeError):
        yield from re.findall(r"\bself\.(\w+)", inspect.getsource(cls))


_NONE = type(None)


def _result(function: Any) -> Any:
    """Return what a call returns: an instance of the class, or of the class in the return
    annotation.
    """
    if isinstance(function, type):
        return _Instance(function)
    cls = function.cls if isinstance(function, _Method) else None
    function = function.function if isinstance(function, _Method) else function
    if not inspect.isfunction(function) or not function.__module__.startswith("lockstep"):
        return _UNKNOWN
    try:
        annotation = typing.get_type_hints(function).get("return")
    except (NameError, TypeError):
        return _UNKNOWN
    is_union = typing.get_origin(annotation) in (typing.Union, UnionType)
    members = [
        member
        for member in (typing.get_args(annotation) if is_union else (annotation,))
        if member is not _NONE
    ]
    if len(members) != 1:
        return _UNKNOWN
    result = cls if members[0] is Self else members[0]
    return (
        _Instance(result) if isinstance(result, type) and result is not Any else _UNKNOWN
    )  # Any is a class
