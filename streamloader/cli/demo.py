"""`streamloader demo`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.option("--keep", type=click.Path(path_type=Path, file_okay=False), help="Work in this new folder and keep it.")
def demo(keep: Path | None) -> None:
    """Convert real images to a bucket, train from it, kill, resume, evaluate."""
    from streamloader.demo.story import tell

    tell(keep)
