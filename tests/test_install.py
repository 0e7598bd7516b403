"""The page about installation has every extra, with its packages."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
OF_CONTRIBUTORS = {"docs", "dev", "integrations"}


def test_the_page_has_each_extra_with_its_packages():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {
        name: packages for name, packages in project["optional-dependencies"].items() if name not in OF_CONTRIBUTORS
    }
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", (ROOT / "docs" / "install.md").read_text(), re.MULTILINE)
    names = {name: {re.split(r"[\[>;]", package)[0] for package in packages} for name, packages in extras.items()}
    assert {name: set(packages.split(", ")) for name, packages in rows} == names


def test_the_page_has_each_package_of_the_default_installation():
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    page = (ROOT / "docs" / "install.md").read_text()
    table = page[page.index("| package | MB") :]
    for package in {re.split(r"[\[>;]", each)[0] for each in dependencies} - {"torch"}:
        assert package in table, f"docs/install.md: {package} is not in the table of sizes"
