"""Copies pages of the repository to where Sphinx looks for them."""

import pathlib
import shutil


def copy_pages(root: pathlib.Path, docs: pathlib.Path, patterns: tuple[str, ...]) -> None:
    """Makes ``docs/PATH`` the same as ``PATH`` for all files that match, and removes old copies.

    Times of change are copied, too: Sphinx then reads only what has changed.
    """
    pages = {page.relative_to(root) for pattern in patterns for page in root.glob(pattern)}
    for folder in {page.parts[0] for page in pages}:
        for old in (docs / folder).rglob("*.*"):
            if old.relative_to(docs) not in pages:
                old.unlink()
    for page in pages:
        (docs / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / page, docs / page)
