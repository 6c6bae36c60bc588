"""Pictures as PNG files that say what made them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image


FRAME_MS = 62.5
"""Milliseconds that a frame of a video is shown: 16 frames a second, as Wan is trained."""


def png_bytes(image: Image, parameters: str, more_frames: Sequence[Image] = ()) -> bytes:
    """The picture as a PNG whose `parameters` text names what made it, as SD.Next and others write and read it.

    Args:
        image: the picture.
        parameters: from `generate.infotext`.
        more_frames: further frames of a video; with them the PNG is an animated one, which browsers play.
    """
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add_text("parameters", parameters)  # as iTXt where Latin-1 cannot hold it
    buffer = io.BytesIO()
    if more_frames:
        image.save(
            buffer, format="PNG", pnginfo=info, save_all=True, append_images=list(more_frames), duration=FRAME_MS
        )
    else:
        image.save(buffer, format="PNG", pnginfo=info)
    return buffer.getvalue()
