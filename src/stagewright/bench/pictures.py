"""Images that benches load: made, with the size and about the bytes of photographs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import simplejpeg

from stagewright.data.formats.records import Record

HEIGHT, WIDTH = 375, 500
_DISTINCT = 16
_QUALITY = 94


def make_jpegs(height: int = HEIGHT, width: int = WIDTH) -> list[bytes]:
    """Images of waves under noise, with the size and about the bytes of an ImageNet photograph."""
    generator = np.random.default_rng(0)
    rows, columns = np.mgrid[0:height, 0:width]
    jpegs = []
    for _ in range(_DISTINCT):
        picture = 128 + generator.normal(0, 14, (height, width, 3))
        for across, down, phase in generator.uniform(0, 0.15, (6, 3)):
            picture += 20 * np.sin(across * columns + down * rows + 40 * phase)[..., None]
        jpegs.append(simplejpeg.encode_jpeg(picture.clip(0, 255).astype(np.uint8), _QUALITY, "RGB", "420"))
    return jpegs


class InMemory:
    """Records in memory, so that the disk is not measured."""

    def __init__(self, encoded: Sequence[bytes], samples: int) -> None:
        self.classes = 1000
        self.class_names: tuple[str, ...] = ()
        self.fingerprint = f"memory/{samples}"
        self._encoded = encoded
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def get(self, index: int) -> Record:
        return Record(self._encoded[index % len(self._encoded)], index % self.classes, self.name(index))

    def name(self, index: int) -> str:
        return f"record {index}"
