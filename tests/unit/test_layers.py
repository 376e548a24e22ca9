"""The package keeps to the layers table of docs/architecture.md, and each check can fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support import layers

ROOT = Path(__file__).parents[2]

# package → the modules that may import it at their top; all others import it in the functions that
# need it
OPTIONAL: dict[str, tuple[str, ...]] = {
    "PIL": (),
    "accelerate": (),
    "cloudpickle": ("lockstep.pickling",),  # where it is installed
    "matplotlib": (),
    "mpi4py": (),
    "psutil": (),
    "pyarrow": (),
    "ray": (),
    "rich": (),
    "setproctitle": (),
    "tensorboard": (),
    "torch.utils.tensorboard": (),
    "yaml": (),
}

# The core imports none of them: they are in layers above it.
EXTENSIONS = [
    "compat/",
    "doctor/",
    "emulation/",
    "pipelining/",
    "planning/",
    "proof/",
    "ray/",
    "submit/",
    "testing/",
]
ABOVE_EXTENSIONS = ["__init__", "__main__", "cli/"]  # what offers them to users

CYCLES: list[tuple[str, str]] = []

# Small modules with one importer that stand alone all the same.
PLUG_INS = [
    "lockstep.callbacks",  # a name by which users import
    *("lockstep.cli.diff", "lockstep.cli.join"),  # commands
    "lockstep.invariance",  # a name by which users import
    *(f"lockstep.models.{name}" for name in ("conv_net", "le_net", "perceptron", "resnet")),
    "lockstep.training.callbacks.learning_rates",  # callbacks have a file each
    "lockstep.training.callbacks.pretrained",
    # where programs look for them: MXNet's and Horovod's own modules
    *(
        "lockstep.compat.gluon.loss",
        "lockstep.compat.gluon.utils",
        "lockstep.compat.horovod.torch.sync_batch_norm",
    ),
]

# Names of modules that play the same role in several packages.
ROLES = [
    *(
        "collectives",
        "context",
        "full_state",
        "options",
        "point_to_point",
        "process_group",
        "rendezvous",
        "signatures",
    ),
    *("client", "messages"),  # of a job, and of an elastic one; all messages, and those of a job
    # commands have the names of what they command
    *("blame", "diff", "ledger", "replay", "timeline"),
    *("loss", "trainer"),  # MXNet's own modules
]

Tree = Callable[[dict[str, str]], dict[str, layers.Module]]


@pytest.fixture(scope="module")
def modules() -> dict[str, layers.Module]:
    return layers.read_package(ROOT / "src" / "lockstep")


@pytest.fixture(scope="module")
def table() -> dict[str, int]:
    return layers.read_table((ROOT / "docs" / "architecture.md").read_text())


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Writes files of a package `pack` and reads it: path → source."""

    def write(files: dict[str, str]) -> dict[str, layers.Module]:
        for name, text in files.items():
            path = tmp_path / "pack" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return layers.read_package(tmp_path / "pack")

    return write


# --- the package itself
# -------------------------------------------------------------------------------------


def assert_none(problems: list[str]) -> None:
    assert not problems, "\n".join(problems)


def test_table_and_modules_are_the_same(
    modules: dict[str, layers.Module], table: dict[str, int]
) -> None:
    assert_none(layers.check_table(modules, table))
    assert len(table) > 10


def test_imports_run_down(modules: dict[str, layers.Module], table: dict[str, int]) -> None:
    assert_none(layers.check_layers(modules, table))


def test_the_core_is_below_every_extension(table: dict[str, int]) -> None:
    core = {
        part: layer for part, layer in table.items() if part not in (*EXTENSIONS, *ABOVE_EXTENSIONS)
    }
    assert max(core.values()) < min(table[part] for part in EXTENSIONS)


def test_there_is_no_import_cycle(modules: dict[str, layers.Module]) -> None:
    assert_none(layers.check_cycles(modules, CYCLES))


def test_jobs_of_fixed_size_load_nothing_of_elastic_ones(modules: dict[str, layers.Module]) -> None:
    elastic = "lockstep.launcher.elastic_jobs"
    assert_none(
        [
            f"{name}:{each.line} imports {each.target} at its top"
            for name, module in modules.items()
            for each in module.imports
            if name.startswith("lockstep.launcher") and not name.startswith(elastic)
            if each.top and each.runtime and each.target.startswith(elastic)
        ]
    )


def test_no_module_is_a_piece_of_another(modules: dict[str, layers.Module]) -> None:
    assert_none(layers.check_tiny(modules, PLUG_INS))


def test_names_of_modules_are_distinct(modules: dict[str, layers.Module]) -> None:
    assert_none(layers.check_names(modules, ROLES))


def test_one_module_alone_touches_the_environment(modules: dict[str, layers.Module]) -> None:
    assert_none(layers.check_environment(modules))


def test_docstrings_begin_with_one_sentence(modules: dict[str, layers.Module]) -> None:
    assert_none(layers.check_docstrings(modules))


def test_slow_and_optional_packages_are_imported_where_used(
    modules: dict[str, layers.Module],
) -> None:
    assert_none(layers.check_optional(modules, OPTIONAL))


# --- the checks fail when they should
# -----------------------------------------------------------------------


def test_table_is_read_from_markdown() -> None:
    document = (
        "# x\n\n| Layer | Module | Purpose |\n|---|---|---|\n| 1 | `a` | `no` |\n| 12 | `b/`, `c` "
        "| x |\n"
    )
    assert layers.read_table(document) == {"a": 1, "b/": 12, "c": 12}


def test_a_part_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="names a twice"):
        layers.read_table("| 1 | `a` | x |\n| 2 | `a` | x |\n")


def test_a_module_not_in_the_table_is_found(tree: Tree) -> None:
    modules = tree({"__init__.py": "", "a.py": "", "new.py": "", "more/__init__.py": ""})
    assert layers.check_table(modules, {"__init__": 9, "a": 1, "old": 1}) == [
        "more/ is not in the layers table",
        "new is not in the layers table",
        "the layers table names old, which is not there",
    ]


LAYERS = {"a": 1, "b": 1, "c": 2, "p/": 3, "q/": 3, "__init__": 9}


@pytest.mark.parametrize(
    ("path", "source", "found"),
    [
        ("a.py", "from . import c", "pack.a:1 (layer 1) imports pack.c (layer 2)"),
        ("a.py", "from .c import x", "pack.a:1 (layer 1) imports pack.c (layer 2)"),
        ("a.py", "import pack.c", "pack.a:1 (layer 1) imports pack.c (layer 2)"),
        ("a.py", "from pack import c", "pack.a:1 (layer 1) imports pack.c (layer 2)"),
        ("a.py", "from pack import name", "pack.a:1 (layer 1) imports pack (layer 9)"),
        ("a.py", "from .b import x", "pack.a:1 (layer 1) imports pack.b (layer 1)"),
        ("a.py", "def f():\n    from .c import x", "pack.a:2 (layer 1) imports pack.c (layer 2)"),
        (
            "a.py",
            "if TYPE_CHECKING:\n    from .c import x",
            "pack.a:2 (layer 1) imports pack.c (layer 2)",
        ),
        ("c.py", "from .p import inner", "pack.c:1 (layer 2) imports pack.p.inner (layer 3)"),
        ("c.py", "from .p.inner import x", "pack.c:1 (layer 2) imports pack.p.inner (layer 3)"),
        ("p/inner.py", "from ..q import x", "pack.p.inner:1 (layer 3) imports pack.q (layer 3)"),
        ("p/__init__.py", "from ..q import x", "pack.p:1 (layer 3) imports pack.q (layer 3)"),
    ],
)
def test_an_import_that_runs_up_or_sideways_is_found(
    tree: Tree, path: str, source: str, found: str
) -> None:
    files = {
        "__init__.py": "",
        "a.py": "",
        "b.py": "",
        "c.py": "",
        "p/__init__.py": "",
        "p/inner.py": "",
    }
    assert layers.check_layers(tree({**files, "q/__init__.py": "", path: source}), LAYERS) == [
        found
    ]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("c.py", "from . import a, b\nimport os.path"),
        (
            "p/inner.py",
            "from .other import x\nfrom . import other\nfrom ..c import x\nfrom .. import c",
        ),
        ("p/__init__.py", "from .inner import x\nfrom ..c import x"),
        ("__init__.py", "from .p.inner import x\nfrom . import a"),
    ],
)
def test_an_import_that_runs_down_is_allowed(tree: Tree, path: str, source: str) -> None:
    files = {
        "__init__.py": "",
        "a.py": "",
        "b.py": "",
        "c.py": "",
        "p/__init__.py": "",
        "p/other.py": "",
    }
    assert (
        layers.check_layers(
            tree({**files, "q/__init__.py": "", "p/inner.py": "", path: source}), LAYERS
        )
        == []
    )


def test_an_import_cycle_is_found(tree: Tree) -> None:
    modules = tree(
        {
            "__init__.py": "",
            "p/__init__.py": "",
            "p/a.py": "from .b import x",
            "p/b.py": "def f():\n    from . import c",
            "p/c.py": "import pack.p.a",
            "p/d.py": "from .a import x",
        }
    )
    assert layers.check_cycles(modules) == [
        "pack.p.a imports pack.p.b imports pack.p.c imports pack.p.a"
    ]


TYPES_ONLY = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import x\n"


def test_an_import_for_type_checkers_closes_a_cycle(tree: Tree) -> None:
    modules = tree({"__init__.py": "", "a.py": "from .b import x", "b.py": TYPES_ONLY})
    assert layers.check_cycles(modules) == ["pack.a imports pack.b imports pack.a"]
    assert layers.check_cycles(modules, [("pack.b", "pack.a")]) == []


def test_an_exemption_of_an_import_cycle_must_be_needed(tree: Tree) -> None:
    modules = tree({"__init__.py": "", "a.py": "", "b.py": TYPES_ONLY})
    assert layers.check_cycles(modules, [("pack.b", "pack.a")]) == [
        "pack.b imports pack.a without a cycle"
    ]
    assert layers.check_cycles(modules, [("pack.a", "pack.b")]) == [
        "pack.a is excused for importing pack.b, and does not"
    ]


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.environ['X'] = '1'",
        "import os as system\nsystem.getenv('X')",
        "from os import environ",
        "from os import getenv as look",
        "from os import *",
        "import os.path\ndef f():\n    return os.putenv('X', '1')",
    ],
)
def test_a_look_at_the_environment_is_found(tree: Tree, source: str) -> None:
    modules = tree({"a.py": source, "environment.py": source})
    assert [line.partition(" uses ")[0] for line in layers.check_environment(modules)] == [
        f"pack.a:{source.count(chr(10)) + 1}"
    ]


def test_the_part_that_touches_the_environment_may_be_a_package(tree: Tree) -> None:
    modules = tree(
        {
            "environment/__init__.py": "import os\nos.environ",
            "environment/a.py": "import os\nos.environ",
        }
    )
    assert layers.check_environment(modules) == []


def test_other_environments_are_not_found(tree: Tree) -> None:
    source = (
        "import os\nfrom . import environment\nenvironment.getenv()\njob.environ = 1\nos.getcwd()\n"
    )
    assert layers.check_environment(tree({"a.py": source})) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("x = 1", "pack.a has no docstring"),
        (
            '"""No full stop"""',
            "pack.a: its docstring begins with other than one sentence: 'No full stop'",
        ),
        (
            '"""One. Two."""',
            "pack.a: its docstring begins with other than one sentence: 'One. Two.'",
        ),
    ],
)
def test_a_docstring_that_is_not_one_sentence_is_found(tree: Tree, source: str, found: str) -> None:
    assert layers.check_docstrings(tree({"a.py": source})) == [found]


@pytest.mark.parametrize(
    "source",
    ['"""One, e.g. This, 0.5 and `a.b`."""', '"""One\nover lines.\n\nAnd more. And more."""'],
)
def test_a_docstring_that_begins_with_one_sentence_is_allowed(tree: Tree, source: str) -> None:
    assert layers.check_docstrings(tree({"a.py": source})) == []


@pytest.mark.parametrize(
    "source",
    [
        "import rich.live",
        "from rich import print",
        "try:\n    import rich\nexcept ImportError:\n    pass",
    ],
)
def test_an_early_import_of_an_optional_package_is_found(tree: Tree, source: str) -> None:
    modules = tree({"a.py": source, "b.py": source})
    line = 2 if source.startswith("try") else 1
    assert layers.check_optional(modules, {"rich": ("pack.b",)}) == [
        f"pack.a:{line} imports rich at its top"
    ]


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    import rich",
        "if TYPE_CHECKING:\n    import rich",
        "import richer",
        "from . import rich",
    ],
)
def test_a_late_import_of_an_optional_package_is_allowed(tree: Tree, source: str) -> None:
    assert layers.check_optional(tree({"a.py": source, "rich.py": ""}), {"rich": ()}) == []


LONG = "\n" * 80


@pytest.mark.parametrize(
    ("files", "excused", "found"),
    [
        (
            {"a.py": "", "b.py": "from .a import x"},
            [],
            ["pack.a has one importer, pack.b: merge it"],
        ),
        (
            {"a.py": "", "b.py": "def f():\n    from . import a"},
            [],
            ["pack.a has one importer, pack.b: merge it"],
        ),
        ({"a.py": "", "b.py": "from .a import x"}, ["pack.a"], []),
        ({"a.py": LONG, "b.py": "from .a import x"}, [], []),
        (
            {"a.py": LONG, "b.py": "from .a import x"},
            ["pack.a"],
            ["pack.a is excused without need"],
        ),
        ({"a.py": "", "b.py": "from .a import x", "c.py": "from .a import y"}, [], []),
        ({"a.py": ""}, [], []),
        ({"a/__init__.py": "", "a/c.py": LONG, "b.py": "from .a import x"}, [], []),
    ],
)
def test_a_tiny_module_with_one_importer_is_found(
    tree: Tree, files: dict[str, str], excused: list[str], found: list[str]
) -> None:
    assert layers.check_tiny(tree({"__init__.py": "", **files}), excused) == found


@pytest.mark.parametrize(
    ("files", "roles", "found"),
    [
        (("p/a.py", "q/a.py"), [], ["a is the name of pack.p.a and pack.q.a"]),
        (("a.py", "q/a.py"), [], ["a is the name of pack.a and pack.q.a"]),
        (("p/a.py", "q/a.py"), ["a"], []),
        (("p/a.py", "q/b.py"), ["a"], ["a is not the name of several"]),
        (("p/a.py", "q/b.py"), [], []),
        (("p/a/__init__.py", "p/a/c.py", "q/a/__init__.py", "q/a/b.py"), [], []),
    ],
)
def test_a_name_of_several_modules_is_found(
    tree: Tree, files: tuple[str, ...], roles: list[str], found: list[str]
) -> None:
    modules = tree(
        {"__init__.py": "", "p/__init__.py": "", "q/__init__.py": "", **dict.fromkeys(files, "")}
    )
    assert layers.check_names(modules, roles) == found


def test_a_module_of_a_package_has_no_row_of_its_own(tree: Tree) -> None:
    modules = tree({"__init__.py": "", "p/__init__.py": "", "p/low.py": ""})
    assert layers.check_table(modules, {"p/low": 1, "p/": 3, "__init__": 4}) == [
        "the layers table names p/low, which is not there"
    ]
