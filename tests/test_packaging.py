"""What is installed: the wheel holds `lightning_bayes` and nothing else, from the tree and from the sdist alike."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest depends on it below 3.11

ROOT = Path(__file__).parents[1]
MAPPED = ("callbacks", "configs", "zoo")


def git(*args):
    done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"git {args[0]} does not work here: {done.stderr.strip()}")
    return done.stdout


@pytest.fixture(scope="module")
def checkout():
    if shutil.which("git") is None:
        pytest.skip("git is not installed, so the files of the repository are not known")
    if not (ROOT / ".git").exists():  # a file in a worktree
        pytest.skip("not a git checkout (an unpacked sdist?), so the files of the repository are not known")
    return ROOT


@pytest.fixture(scope="module")
def tree(checkout, tmp_path_factory):
    """A copy of the repository's files, so that build/ and egg-info do not litter the working tree."""
    target = tmp_path_factory.mktemp("tree")
    for name in git("ls-files", "-co", "--exclude-standard", "-z").split("\0"):
        source = checkout / name
        if name and (source.is_symlink() or source.is_file()):  # a deleted file is still listed
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name, follow_symlinks=False)
    return target


@pytest.fixture(scope="module")
def build(tree, tmp_path_factory):
    """Run `python -m build` with the installed setuptools, so without a network; returns the folder of the results."""
    if importlib.util.find_spec("build") is None:
        pytest.skip("the package `build` is not installed")
    if int(importlib.metadata.version("setuptools").partition(".")[0]) < 77:
        pytest.skip("setuptools is older than 77, the version that pyproject.toml asks for")

    def run(*options):
        out = tmp_path_factory.mktemp("dist")
        command = [sys.executable, "-m", "build", *options, "--no-isolation", "--outdir", str(out), str(tree)]
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return out

    return run


@pytest.fixture(scope="module")
def wheel(build):
    return wheel_files(build("--wheel"))


@pytest.fixture(scope="module")
def sdist_and_its_wheel(build):
    return build()  # without options: the sdist first, then the wheel from the unpacked sdist


def wheel_files(folder):
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def pyproject():
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def package_of(path):
    parts = path.relative_to(ROOT).parent.parts
    return ".".join(("lightning_bayes", *parts) if parts[0] in MAPPED else parts)


def packages_in_the_tree():
    own = ROOT / "lightning_bayes"
    inits = [path for path in own.rglob("__init__.py") if path.relative_to(own).parts[0] not in MAPPED]
    return {package_of(path) for path in [*inits, *(p for name in MAPPED for p in (ROOT / name).rglob("__init__.py"))]}


def sources_in_the_tree(tree):
    """Every Python and YAML file of the repository under the name that it has in the wheel."""
    own = {path.relative_to(tree).as_posix() for path in (tree / "lightning_bayes").glob("**/*.py")}
    mapped = {
        f"lightning_bayes/{path.relative_to(tree).as_posix()}"
        for name in MAPPED
        for pattern in ("**/*.py", "**/*.yaml")
        for path in (tree / name).glob(pattern)
    }
    return own | mapped


def test_the_wheel_installs_only_lightning_bayes(wheel):
    top = {name.partition("/")[0] for name in wheel}
    info = {name for name in top if re.fullmatch(r"lightning_bayes-[^/]+\.dist-info", name)}
    assert len(info) == 1
    assert top - info == {"lightning_bayes"}


def test_the_wheel_holds_every_source_file(wheel, tree):
    in_wheel = {name for name in wheel if ".dist-info/" not in name}
    posteriors = {f"lightning_bayes/zoo/posteriors/{path.name}" for path in (tree / "zoo" / "posteriors").iterdir()}
    assert in_wheel == sources_in_the_tree(tree) | posteriors | {
        "lightning_bayes/py.typed",
        "lightning_bayes/report/page.html",
    }


@pytest.mark.parametrize("pattern", ["callbacks/.+[.]py", "zoo/.+[.]py", "configs/.+[.]yaml", "py[.]typed"])
def test_the_wheel_holds_the_mapped_directories(wheel, pattern):
    assert any(re.fullmatch(f"lightning_bayes/{pattern}", name) for name in wheel)


def test_the_wheel_carries_the_license(wheel):
    assert any(re.search(r"\.dist-info/.*LICENSE$", name) for name in wheel)


def test_the_wheel_of_the_sdist_holds_the_same_files(sdist_and_its_wheel, wheel):
    assert wheel_files(sdist_and_its_wheel) == wheel


def test_the_sdist_holds_license_and_readme(sdist_and_its_wheel):
    (path,) = sdist_and_its_wheel.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml"} <= names


def test_pyproject_lists_the_packages_of_the_tree():
    listed = pyproject()["tool"]["setuptools"]["packages"]
    assert set(listed) == packages_in_the_tree(), "add the new package to [tool.setuptools] packages in pyproject.toml"
    assert len(listed) == len(set(listed))


@pytest.mark.usefixtures("checkout")
@pytest.mark.parametrize("name", MAPPED)
def test_the_link_is_committed_as_a_link(name):
    link = f"lightning_bayes/{name}"
    assert git("ls-files", "--stage", link).startswith("120000 "), f"{link} is not in the index as a symbolic link"
    assert git("cat-file", "blob", f":{link}") == f"../{name}"


@pytest.mark.parametrize("name", MAPPED)
def test_the_link_leads_to_the_directory(name):
    link = ROOT / "lightning_bayes" / name
    if not link.is_symlink():
        pytest.skip("this clone has no symbolic links (core.symlinks=false)")
    assert link.resolve() == (ROOT / name).resolve()
