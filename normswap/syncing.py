"""Bring files and folders to the disk, so that a loss of power does not undo what was done."""

from __future__ import annotations

import errno
import os
from pathlib import Path

__all__ = ["sync", "sync_tree"]


def sync_tree(folder: Path) -> None:
    """Bring a folder with all that is in it to the disk."""
    for path, _, files in os.walk(folder):
        for name in files:
            sync(Path(path) / name)
        sync(Path(path))


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk.

    Raises:
        OSError: the disk refuses, or is full.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some file systems cannot sync a folder; they say so with EINVAL.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(handle)
