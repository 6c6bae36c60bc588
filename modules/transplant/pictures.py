"""Pictures as PNG files that say what made them."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image


def png_bytes(image: Image, parameters: str) -> bytes:
    """The picture as a PNG whose `parameters` text names what made it, as SD.Next and others write and read it.

    Args:
        image: the picture.
        parameters: from `generate.infotext`.
    """
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add_text("parameters", parameters)  # as iTXt where Latin-1 cannot hold it
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", pnginfo=info)
    return buffer.getvalue()
