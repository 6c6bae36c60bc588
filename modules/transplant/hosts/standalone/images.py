"""Where pictures go, and what is written into them. No torch."""

from __future__ import annotations

import re
import shutil
import tempfile
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from transplant.errors import TransplantError
from transplant.pictures import png_bytes

if TYPE_CHECKING:
    from transplant.generate import Picture


class PictureStore:
    """Saves pictures into a folder per day, or into a temporary one that goes at exit.

    Attributes:
        outputs: the folder for saved pictures.
        temporary: the folder for the others, and for what the WebUI needs while it runs.
    """

    def __init__(self, outputs: Path) -> None:
        self.outputs = outputs
        self.temporary = Path(tempfile.mkdtemp(prefix="transplant-"))

    def save(self, picture: Picture, infotext: str, keep: bool) -> Path:
        """Write a PNG with `infotext` in its metadata, as NNNNN-seed.png; an animated one where it is a video.

        Raises:
            TransplantError: it cannot be written.
        """
        folder = (self.outputs if keep else self.temporary) / date.today().isoformat()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return _write(folder, picture.seed, png_bytes(picture.image, infotext, picture.more_frames))
        except OSError as error:
            reason = error.strerror or str(error)
            raise TransplantError(f"the picture cannot be saved in {folder} ({reason})") from error

    def close(self) -> None:
        """Remove what was not to be kept."""
        shutil.rmtree(self.temporary, ignore_errors=True)


def _write(folder: Path, seed: int, data: bytes) -> Path:
    numbers = [int(match[1]) for path in folder.iterdir() if (match := re.match(r"(\d{5,})-", path.name))]
    path = folder / f"{max(numbers, default=-1) + 1:05d}-{seed}.png"
    try:
        with path.open("xb") as file:
            file.write(data)
    except FileExistsError:
        raise
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return path
