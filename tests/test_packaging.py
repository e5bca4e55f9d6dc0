"""What is installed: the lock files and the package's own description agree with each other and with the code."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import files, packages_distributions
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def pins(lock: str) -> dict[str, str]:
    """Name and version of each package in a lock file."""
    return dict(re.findall(r"^([a-z0-9-]+)==([^ ;]+)", (ROOT / lock).read_text("utf-8"), re.MULTILINE))


def package_of(requirement: str) -> str:
    """The normalised name of the package that a requirement asks for."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name is not None
    return re.sub(r"[._-]+", "-", name[0]).lower()


def used_in_source() -> tuple[set[str], set[str]]:
    """Top-level packages that modules below `src` import, and their string constants."""
    imported, constants = set[str](), set[str]()
    for node in (node for file in SRC.rglob("*.py") for node in ast.walk(ast.parse(file.read_text("utf-8")))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imported.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            constants.add(node.value)
    return imported, constants


def names_given_by(package: str) -> tuple[set[str], set[str]]:
    """What one can import of an installed package, and the programs that it brings."""
    importable = {name for name, owners in packages_distributions().items() if package in map(package_of, owners)}
    programs = {file.name for file in files(package) or () if file.parent.name == "bin"}
    return importable, programs


EXTRAS = {
    package_of(one)
    for extra in PROJECT["optional-dependencies"].values()
    for one in extra
    if package_of(one) != "mulligan"
}


def test_the_demo_is_installed_from_a_lock_file_with_every_dependency() -> None:
    assert {package_of(one) for one in PROJECT["dependencies"]} - pins("requirements.lock").keys() == set()


def test_the_page_is_installed_from_a_lock_file_with_every_dependency() -> None:
    needed = {package_of(one) for one in PROJECT["optional-dependencies"]["serve"]}
    assert needed - pins("requirements-serve.lock").keys() == set()


@pytest.mark.parametrize("smaller", ["requirements.lock", "requirements-serve.lock"])
def test_the_developers_lock_file_keeps_the_versions_of_the_smaller_ones(smaller: str) -> None:
    """Otherwise `make test` would replace what `make run` has installed."""
    assert pins(smaller).items() - pins("requirements-dev.lock").items() == set()


def test_each_locked_package_has_a_hash() -> None:
    for lock in sorted(ROOT.glob("requirements*.lock")):
        entries = re.split(r"^(?=[a-z0-9])", lock.read_text("utf-8"), flags=re.MULTILINE)[1:]
        assert entries and [entry for entry in entries if "--hash=sha256:" not in entry] == []


@pytest.mark.parametrize("package", sorted(EXTRAS))
def test_what_an_extra_brings_is_used_below_src(package: str) -> None:
    (imported, constants), (importable, programs) = used_in_source(), names_given_by(package)
    assert imported & importable or constants & programs


CORE = {
    "apsw",
    "backports-zstd",
    "click",
    "cryptography",
    "google-re2",
    "orjson",
    "pydantic",
    "uuid-utils",
}


def test_without_extras_the_package_needs_no_other_package_than_its_core() -> None:
    """The web timeline and its server come with the extra `serve`."""
    assert {package_of(one) for one in PROJECT["dependencies"]} == CORE


PAGE_MAX_BYTES = 200 * 1024


def test_the_page_adds_at_most_200_kb_to_the_wheel(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with ZipFile(wheel) as packed:
        page = [one for one in packed.infolist() if one.filename.startswith("mulligan/servers/http/static/")]
        (metadata,) = [one for one in packed.namelist() if one.endswith(".dist-info/METADATA")]
        needed = re.findall(r"^Requires-Dist: (.*)$", packed.read(metadata).decode(), re.MULTILINE)
    assert {Path(one.filename).name for one in page} == {
        file.name for file in (SRC / "mulligan/servers/http/static").iterdir()
    }
    assert sum(one.compress_size for one in page) <= sum(one.file_size for one in page) <= PAGE_MAX_BYTES
    assert {package_of(one) for one in needed if "extra ==" not in one} == CORE


def test_the_package_claims_linux_and_no_other_system() -> None:
    systems = [one for one in PROJECT["classifiers"] if one.startswith("Operating System ::")]
    assert systems == ["Operating System :: POSIX :: Linux"]


def test_every_python_that_the_package_claims_is_tested_for_each_change() -> None:
    claimed = {one.removeprefix("Programming Language :: Python :: ") for one in PROJECT["classifiers"]}
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
    tested = set(workflow["jobs"]["test"]["strategy"]["matrix"]["python-version"])
    assert {one for one in claimed if re.fullmatch(r"3\.\d+", one)} <= tested


def test_a_commit_runs_the_commands_of_make_check() -> None:
    recipe = re.search(r"^check: (.*) ##", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert recipe is not None
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    entries = {hook["entry"] for hook in repository["hooks"]}
    assert entries == {f"make --no-print-directory {target}" for target in recipe[1].split()}
