"""The laws of the house: who may import whom, who may know what."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from storyteller import lanes

ROOT = Path(__file__).parent.parent
PACKAGES = ("storyteller", "gateway", "loadbots")
MODULES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
MAY_USE = {"storyteller": set(), "gateway": {"storyteller"}, "loadbots": {"gateway"}}
COMPUTES = {"model", "cache", "sampling", "quantize", "checkpoint", "kernels", "architectures"}
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "base", "manager", "core", "misc"}


def imports(path: Path) -> set[str]:
    """Full names of all that a module imports, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def room(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", MODULES, ids=room)
def test_a_package_uses_another_only_through_its_wire(path: Path) -> None:
    own = path.relative_to(ROOT).parts[0]
    for name in imports(path):
        package, _, rest = name.partition(".")
        if package in PACKAGES and package != own:
            assert package in MAY_USE[own], f"{room(path)} imports {name}"
            assert rest.split(".")[0] in ("wire", ""), f"{room(path)} imports {name}"


@pytest.mark.parametrize("package", ["storyteller", "gateway"])
def test_a_wire_imports_the_standard_library_and_a_codec(package: str) -> None:
    for name in imports(ROOT / package / "wire.py"):
        assert name.split(".")[0] in sys.stdlib_module_names | {"msgspec"}


@pytest.mark.parametrize("path", MODULES, ids=room)
def test_only_the_rooms_that_compute_know_torch_and_transformers(path: Path) -> None:
    heavy = {name.split(".")[0] for name in imports(path)} & {"torch", "transformers"}
    assert not heavy or (path.parent.name == "storyteller" and path.stem in COMPUTES)


@pytest.mark.parametrize("path", MODULES, ids=room)
def test_only_the_rooms_at_the_queue_know_redis(path: Path) -> None:
    allowed = {"gateway/stories.py", "storyteller/inbox.py", "storyteller/outbox.py", "storyteller/teller.py"}
    if "redis" in {name.split(".")[0] for name in imports(path)}:
        assert room(path) in allowed or path.stem == "__main__"


def test_the_scheduler_neither_computes_nor_connects_nor_waits() -> None:
    for name in ("scheduler", "cache", "story"):
        path = ROOT / "storyteller" / f"{name}.py"
        outside = {one.split(".")[0] for one in imports(path)} - set(sys.stdlib_module_names) - {"storyteller"}
        assert not outside
        assert not imports(path) & {"asyncio", "threading", "time", "socket"}


def test_compiled_code_is_kept_for_as_long_as_its_sources_stay_the_same() -> None:
    """What is compiled, and what it reads: a change to any of them must lead to another cache folder."""
    compiled = {path.name for path in MODULES if {"storyteller.lanes", "storyteller.lanes.compiled"} & imports(path)}
    assert compiled - {"model.py"} < set(lanes._SOURCES)
    assert all((ROOT / "storyteller" / name).exists() for name in lanes._SOURCES)


def test_packages_begin_empty_and_no_room_is_a_drawer() -> None:
    for package in PACKAGES:
        assert (ROOT / package / "__init__.py").read_text() == ""
    assert not {path.stem for path in MODULES} & FORBIDDEN_NAMES


@pytest.mark.parametrize("path", [path for path in MODULES if path.name != "__init__.py"], ids=room)
def test_every_room_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("service", PACKAGES)
def test_help_lists_the_settings_of_a_service(service: str) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", service, "--help"], capture_output=True, text=True, cwd=ROOT, timeout=60, check=True
    ).stdout
    assert {"storyteller": "STORYTELLER_MODEL", "gateway": "GATEWAY_WS_PORT", "loadbots": "--players"}[service] in shown


@pytest.mark.parametrize(
    ("service", "variable"), [("storyteller", "STORYTELLER_BATCH_SIZE"), ("gateway", "GATEWAY_WS_PORT")]
)
def test_a_wrong_setting_ends_a_service_with_one_line_and_exit_code_2(service: str, variable: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", service], capture_output=True, text=True, cwd=ROOT, timeout=60, env={variable: "x"}
    )
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert f"{variable}=x: expected" in ended.stderr
