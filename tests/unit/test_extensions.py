"""Extensions stand on public names of the core, and each check can fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support import extension_access, layers

ROOT = Path(__file__).parents[2]

EXTENSIONS = [
    "compat/",
    "doctor/",
    "emulation/",
    "pipelining/",
    "planning/",
    "proof/",
    "ray/",
    "submit/",
]

Tree = Callable[[dict[str, str]], dict[str, layers.Module]]


@pytest.fixture(scope="module")
def modules() -> dict[str, layers.Module]:
    return layers.read_package(ROOT / "src" / "lockstep")


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


def test_every_package_above_the_core_is_checked(modules: dict[str, layers.Module]) -> None:
    assert {module.part for module in modules.values()} >= set(EXTENSIONS)


def test_extensions_stand_on_public_names_of_the_core(modules: dict[str, layers.Module]) -> None:
    problems = [
        *extension_access.check_public_imports(modules, EXTENSIONS),
        *extension_access.check_private_names(modules, EXTENSIONS),
        *extension_access.check_patches(modules, EXTENSIONS),
    ]
    assert not problems, "\n".join(problems)


# --- the checks fail when they should -----------------------------------------------------------

CORE = {
    "__init__.py": "",
    "core/__init__.py": """
__all__ = ['Public']
__all__ += ['run']
from .inner import Public, run, other
""",
    "core/inner.py": """
__all__ = ['Public', 'run']
class Public:
    def __init__(self):
        self._hidden = 1

    def _run(self): ...

def run(): ...
def other(): ...
""",
}


def test_a_name_that_is_not_public_is_found(tree: Tree) -> None:
    text = (
        "from ..core import Public, run, other\nfrom ..core.inner import run\nfrom . import own\n"
    )
    modules = tree({**CORE, "more/__init__.py": "", "more/own.py": "_x = 1\n", "more/a.py": text})
    assert extension_access.check_public_imports(modules, ["more/"]) == [
        "pack.more.a:1 imports other, which is not public in pack.core",
    ]


def test_a_private_name_is_not_public_even_where_all_names_are(tree: Tree) -> None:
    modules = tree(
        {
            **CORE,
            "more/__init__.py": "",
            "more/a.py": "def f():\n    from ..core.inner import _secret\n",
        }
    )
    assert extension_access.check_public_imports(modules, ["more/"]) == [
        "pack.more.a:2 imports _secret, which is not public in pack.core.inner",
    ]


def test_a_module_of_the_core_without_a_list_of_names_is_internal(tree: Tree) -> None:
    modules = tree(
        {
            **CORE,
            "core/internal.py": "def run(): ...\n",
            "more/__init__.py": "",
            "more/a.py": "from ..core.internal import run\n",
        }
    )
    assert extension_access.check_public_imports(modules, ["more/"]) == [
        "pack.more.a:1 imports run, which is not public in pack.core.internal",
    ]


def test_a_private_attribute_of_the_core_is_found(tree: Tree) -> None:
    text = "class Own:\n    _mine = 1\n\nfound = (x._hidden, own._mine, tensor._version)\n"
    modules = tree({**CORE, "more/__init__.py": "", "more/a.py": text})
    assert extension_access.check_private_names(modules, ["more/"]) == [
        "pack.more.a:4 uses x._hidden"
    ]


def test_a_private_name_of_a_module_of_the_core_is_found(tree: Tree) -> None:
    text = "from ..core import inner\nx = inner._anything\n"
    modules = tree({**CORE, "more/__init__.py": "", "more/a.py": text})
    assert extension_access.check_private_names(modules, ["more/"]) == [
        "pack.more.a:2 uses inner._anything"
    ]


def test_a_private_method_that_is_overridden_is_found(tree: Tree) -> None:
    text = "from ..core import Public\n\nclass More(Public):\n    def _run(self): ...\n"
    modules = tree({**CORE, "more/__init__.py": "", "more/a.py": text})
    assert extension_access.check_private_names(modules, ["more/"]) == [
        "pack.more.a:4 overrides More._run"
    ]


@pytest.mark.parametrize(
    ("statement", "found"),
    [
        ("Replaced(Public, 'run', make)", "Public"),
        ("setattr(inner, 'run', make)", "inner"),
        ("inner.run = make", "inner"),
        ("inner.Public.run = make", "inner.Public"),
        ("del Public.run", "Public"),
        ("mine.run = make", ""),
        ("Replaced(mine, 'run', make)", ""),
    ],
)
def test_a_patch_of_the_core_is_found(tree: Tree, statement: str, found: str) -> None:
    text = f"from ..core import Public, inner\nfrom . import mine\n{statement}\n"
    modules = tree({**CORE, "more/__init__.py": "", "more/mine.py": "", "more/a.py": text})
    expected = [f"pack.more.a:3 replaces {found}"] if found else []
    assert extension_access.check_patches(modules, ["more/"]) == expected
