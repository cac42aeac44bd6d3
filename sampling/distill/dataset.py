"""What a target wrote, on disk: a safetensors file per page, written whole or not at all, so that an interruption costs one page."""

from __future__ import annotations

import os
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sampling.distill.generate import Page


class Corpus:
    """The pages in a folder, by their number."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def __len__(self) -> int:
        """Pages written: 0, 1, ... without a gap."""
        count = 0
        while self._path(count).exists():
            count += 1
        return count

    @property
    def count(self) -> int:
        """Tokens that the target chose."""
        total = 0
        for number in range(len(self)):
            with safe_open(self._path(number), framework="pt") as file:
                total += int(file.metadata()["count"])
        return total

    def add(self, page: Page) -> None:
        """Behind the last one."""
        path = self._path(len(self))
        half = path.with_suffix(".part")
        parts = {"tokens": page.tokens, "features": page.features, "voices": page.voices, "warmths": page.warmths}
        save_file(parts, half, metadata={"count": str(int(page.own.sum()))})
        os.replace(half, path)

    def page(self, number: int) -> Page:
        """One page, mapped."""
        return Page(**load_file(self._path(number)))

    def _path(self, number: int) -> Path:
        return self._folder / f"page-{number:05d}.safetensors"
