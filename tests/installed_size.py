"""Prints the bytes of each package that an installed one needs, as JSON: python installed_size.py NAME [LEFT OUT]."""

import json
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement


def needed(name: str) -> dict[str, int]:
    """The size of a package and of all that it needs: of the files in its wheel, by their names."""
    sizes: dict[str, int] = {}
    todo = [name]
    while todo:
        try:
            package = distribution(todo.pop())
        except PackageNotFoundError:
            continue  # of an extra, or another platform
        if (key := package.metadata["Name"].lower().replace("_", "-")) in sizes:
            continue
        files = [Path(str(file.locate())) for file in package.files or () if "__pycache__" not in str(file)]
        sizes[key] = sum(file.stat().st_size for file in files if file.is_file())
        for text in package.requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.append(requirement.name)
    return sizes


if __name__ == "__main__":
    name, *left_out = sys.argv[1:]
    ignored = {key for each in left_out for key in needed(each)}
    print(json.dumps({key: size for key, size in needed(name).items() if key not in ignored}))
