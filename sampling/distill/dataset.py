"""The generated text on disk: one safetensors file per page. A page is written completely or not at all."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save

from sampling.distill.generate import Page
from utils.files import replacing


class Corpus:
    """The pages in a folder, numbered from 0."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def __len__(self) -> int:
        """The number of pages; their numbers have no gaps."""
        count = 0
        while self._path(count).exists():
            count += 1
        return count

    @property
    def generated_tokens(self) -> int:
        """The number of tokens in all pages that the target generated; tokens of the template do not count."""
        total = 0
        for number in range(len(self)):
            with safe_open(self._path(number), framework="pt") as file:
                total += int(file.metadata()["count"])
        return total

    def add(self, page: Page) -> None:
        """Write a page after the last one."""
        # "voices" and "warmths" are names of the file format, for sources and temperatures.
        tensors = {
            "tokens": page.tokens,
            "features": page.features,
            "voices": page.sources,
            "warmths": page.temperatures,
        }
        with replacing(self._path(len(self))) as file:
            file.write(save(tensors, metadata={"count": str(int(page.generated.sum()))}))

    def page(self, number: int) -> Page:
        """One page, memory-mapped."""
        tensors = load_file(self._path(number))
        return Page(tensors["tokens"], tensors["features"], tensors["voices"], tensors["warmths"])

    def _path(self, number: int) -> Path:
        return self._folder / f"page-{number:05d}.safetensors"
