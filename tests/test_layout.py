"""The architecture as tests: import directions, ownership of third parties, budgets, packaging."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("configs", "envs", "kernels", "launch", "policy", "rl", "rollout")

# Folder, or folder.module, that a folder may import from.
MAY_IMPORT = {
    "configs": set(),
    "kernels": set(),
    "envs": {"configs"},
    "policy": {"kernels", "configs", "envs.types"},
    "rollout": {"policy", "envs", "configs"},
    "rl": {"policy", "kernels", "configs", "rollout.types"},
    "launch": {"configs", "envs", "kernels", "policy", "rl", "rollout"},
}

# Third party -> where it may be imported; a trailing slash means a folder.
OWNERS = {
    "deepspeed": {"rl/engine.py"},
    "ray": {"rollout/actor.py", "rollout/pool.py", "rl/actor.py", "launch/"},
    "triton": {"kernels/"},
    "gymnasium": {"envs/"},
    "omegaconf": {"configs/load.py"},
    "yaml": {"configs/load.py"},
    "vllm": {"rollout/vllm.py"},
    "fla": {"kernels/kda/unbounded.py", "launch/"},
    "trl": {"rl/", "launch/bench_trl.py", "launch/bench_logprob.py"},
    "liger_kernel": {"launch/"},
    "matplotlib": {"launch/"},
    "rich": {"launch/"},
    "tensorboard": {"launch/"},
    "torch": {"kernels/", "policy/", "rollout/", "rl/", "launch/"},
    "transformers": {"policy/", "rl/", "launch/"},
    "tokenizers": {"policy/"},
    "PIL": {"policy/images.py"},
    "safetensors": {"policy/", "rl/resume.py"},
}


def sources() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Every imported module of a file as (dotted path, ours); ours are given from the root."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            if node.module:
                yield ".".join((*base, node.module)), True
            else:
                yield from ((".".join((*base, alias.name)), True) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, False


def test_the_sources_are_found() -> None:
    assert {"configs/load.py", "launch/train.py"} <= {name_of(path) for path in sources()}


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_between_folders_go_one_way(folder: str) -> None:
    wrong = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for module, ours in imports(path):
            if ours:
                parts = module.split(".")
                allowed = {folder} | MAY_IMPORT[folder]
                if parts[0] not in allowed and ".".join(parts[:2]) not in allowed:
                    wrong.append(f"{name_of(path)} imports {module}")
            elif module.split(".")[0] == "farhorizon":
                wrong.append(f"{name_of(path)} imports {module} by its absolute name")
    assert wrong == []


def test_third_parties_stay_with_their_owner() -> None:
    wrong = []
    for path in sources():
        name = name_of(path)
        for module, ours in imports(path):
            owners = OWNERS.get(module.split(".")[0])
            if ours or owners is None:
                continue
            if not any(name.startswith(o) if o.endswith("/") else name == o for o in owners):
                wrong.append(f"{name} imports {module}")
    assert wrong == []


def test_files_and_functions_keep_their_budgets() -> None:
    wrong = []
    for path in sources():
        text = path.read_text()
        lines = len(text.splitlines())
        if lines > 400:
            wrong.append(f"{name_of(path)}: {lines} lines")
        budget = 150 if name_of(path).startswith("kernels/") else 80
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > budget:
                    wrong.append(f"{name_of(path)}: {node.name} has {length} lines")
    assert wrong == []


def test_functions_are_typed() -> None:
    wrong = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if any("jit" in ast.dump(item) for item in node.decorator_list):
                continue  # Triton kernels: the shape comment is the type
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            untyped = [a.arg for a in arguments if a.annotation is None]
            if set(untyped) - {"self", "cls", "ctx"} or node.returns is None:
                wrong.append(f"{name_of(path)}:{node.lineno} {node.name}")
    assert wrong == []


def test_sources_are_ascii_and_free_of_mocks() -> None:
    wrong = []
    for path in [*sources(), *sorted((ROOT / "tests").rglob("*.py"))]:
        text = path.read_text(encoding="utf-8")
        if not text.isascii():
            wrong.append(f"{name_of(path)} is not ASCII")
        if any(module.startswith(("unittest.mock", "mock")) for module, _ in imports(path)):
            wrong.append(f"{name_of(path)} imports mocks")
    assert wrong == []


def test_package_list_is_what_is_on_disk() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    setuptools = project["tool"]["setuptools"]
    on_disk = {
        "farhorizon." + name_of(path).replace("/", ".")
        for folder in FOLDERS
        for path in [ROOT / folder, *(ROOT / folder).rglob("*")]
        if path.is_dir() and path.name != "__pycache__" and any(path.glob("*.py"))
    }
    # kernels is a namespace folder: with an __init__.py it would shadow the package `kernels` of
    # Hugging Face in processes started from the checkout.
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert set(setuptools["packages"]) == on_disk | {"farhorizon.kernels"}
    assert setuptools["package-dir"] == {f"farhorizon.{folder}": folder for folder in FOLDERS}
    for package in on_disk - {"farhorizon.kernels"}:
        folder = ROOT / package.removeprefix("farhorizon.").replace(".", "/")
        assert (folder / "__init__.py").exists(), package


def test_what_is_imported_is_a_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["vllm"], *extras["bench"]]
    modules = {
        "pyyaml": "yaml",
        "pillow": "PIL",
        "flash-linear-attention": "fla",
        "liger-kernel": "liger_kernel",
    }
    names = (re.split(r"[><=;]", text)[0] for text in wanted)
    declared = {modules.get(name, name) for name in names}
    used = {m.split(".")[0] for path in sources() for m, ours in imports(path) if not ours}
    assert used - set(sys.stdlib_module_names) - {"farhorizon"} <= declared


def test_yaml_folders_are_packages() -> None:
    for path in (ROOT / "configs").rglob("*.yaml"):
        assert (path.parent / "__init__.py").exists(), path
