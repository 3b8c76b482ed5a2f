"""An index on disk: the passages, what is needed to search them, and a manifest that says what they are.

Whatever its kind, an index holds `passages.bin` (id, title and text of each passage, one after the other, UTF-8) and
`passages.ends.npy` (int64, where each of these fields ends). Both are memory-mapped: opening costs no memory.
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from data.retrieval import Passage
from schemas.artifacts import MANIFEST, Manifest, file_errors, read_manifest
from schemas.errors import ArtifactError

INDEX_KIND = "retrieval-index"
INDEX_VERSION = 1
TEXT, ENDS = "passages.bin", "passages.ends.npy"

_REMEDY = "build it again with `rsipo index build --force`"


class IndexDirectory:
    """One index. `passage` may be called from several threads."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> IndexDirectory:
        """The index at `path`; checks that every file is there and has its size, not every byte.

        Raises ArtifactError for a directory that is missing, unfinished, damaged, or no index.
        """
        root = Path(os.path.realpath(os.path.expanduser(path)))
        if not root.is_dir():
            raise ArtifactError(
                "there is no index here",
                where=str(root),
                expected="a directory that `rsipo index build` has made",
                found="a file" if root.exists() else "nothing",
                remedy="build one with: rsipo index build --passages FILE --out DIR",
            )
        manifest = read_manifest(root, verify=False, remedy=_REMEDY)
        facts = manifest.extra
        if manifest.kind != INDEX_KIND or facts.get("version") != INDEX_VERSION:
            raise ArtifactError(
                "the directory is not an index of this release",
                where=str(root),
                expected=f"{INDEX_KIND} of version {INDEX_VERSION}",
                found=f"{manifest.kind} of version {facts.get('version', 'none')}",
                remedy=_REMEDY,
            )
        return cls(root, manifest)

    def map_passages(self) -> None:
        """Map the passages now. To be called once all else is mapped: then every file is of this index, come what may.

        Raises ArtifactError when another build has taken its place meanwhile.
        """
        with file_errors(self.path):
            _ = self._ends, self._text
            if (self.path / MANIFEST).read_bytes() != self.manifest.to_bytes():
                raise ArtifactError(
                    "the index was replaced while it was opened",
                    where=str(self.path),
                    remedy="run the same command again",
                )

    def verify(self) -> None:
        """Compare every byte with the manifest. Raises ArtifactError for the first difference."""
        read_manifest(self.path, verify=True, remedy=_REMEDY)
        ends = self._ends
        if ends.shape != (3 * self.passages,) or (ends[1:] < ends[:-1]).any() or ends[-1] != len(self._text):
            raise ArtifactError("the index is damaged", where=str(self.path / ENDS), remedy=_REMEDY)

    @property
    def index_id(self) -> str:
        """Hash of the corpus and the settings: equal for equal passages in equal order, however they were given."""
        return str(self.manifest.extra["index_id"])

    @property
    def corpus_sha256(self) -> str:
        """Hash of the passages alone, see `data.retrieval.index.passages.corpus_sha256`."""
        return str(self.manifest.extra["corpus_sha256"])

    @property
    def kind(self) -> str:
        """`bm25` or `dense`."""
        return str(self.settings["kind"])

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the answers besides the passages."""
        return dict(self.manifest.extra["settings"])

    @property
    def sources(self) -> dict[str, str]:
        """What it was made with by name, such as the embedding model: no part of its identity."""
        return dict(self.manifest.extra["sources"])

    @property
    def figures(self) -> dict[str, Any]:
        """Sizes of the index, for people."""
        return dict(self.manifest.extra["figures"])

    @property
    def passages(self) -> int:
        """How many passages there are, at least one."""
        return int(self.manifest.extra["passages"])

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(entry.bytes for entry in self.manifest.files.values())

    def passage(self, number: int) -> Passage:
        """The passage with this number, from 0, in the order of the corpus.

        Raises IndexError outside of it, ArtifactError where the files turn out to be damaged.
        """
        if not 0 <= number < self.passages:
            raise IndexError(f"passage {number} of {self.passages}")
        start = int(self._ends[3 * number - 1]) if number else 0
        fields = []
        for end in self._ends[3 * number : 3 * number + 3].tolist():
            try:
                fields.append(self._text[start:end].tobytes().decode())
            except UnicodeDecodeError as error:
                raise ArtifactError(
                    "the index is damaged", where=str(self.path / TEXT), found=str(error), remedy=_REMEDY
                ) from error
            start = end
        return Passage(*fields)

    @cached_property
    def _ends(self) -> np.ndarray:
        return self.array(ENDS)

    @cached_property
    def _text(self) -> np.ndarray:
        return np.asarray(np.memmap(self.path / TEXT, np.uint8, "r"))

    def array(self, name: str) -> np.ndarray:
        """A `.npy` file of the index, memory-mapped. Raises ArtifactError when it is damaged."""
        try:
            return np.asarray(np.load(self.path / name, mmap_mode="r", allow_pickle=False))
        except Exception as error:  # a damaged header raises errors of many kinds
            raise ArtifactError(
                "a file of the index is damaged", where=str(self.path / name), found=str(error), remedy=_REMEDY
            ) from error
