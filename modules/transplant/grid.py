"""Pictures side by side, labelled, with how far each is from the first of its row. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont, ImageFont

INK, PAPER, FAINT = (20, 20, 20), (255, 255, 255), (110, 110, 110)
MARGIN, LINE, LABEL_WIDTH, MIN_CELL = 8, 18, 180, 160


@dataclass(frozen=True)
class Cell:
    """One picture of a grid.

    Attributes:
        image: the picture; None where it was not made.
        caption: what stands below it, for example how long it took.
    """

    image: Image | None = None
    caption: str = ""


@dataclass(frozen=True)
class Column:
    """The pictures of one file.

    Attributes:
        title: the file.
        caption: what is to be said of all of them, for example the time of the load, or why there are none.
        cells: a picture for each row, from the top; those that were not made are left out or empty.
    """

    title: str
    caption: str
    cells: tuple[Cell, ...]


def psnr(image: Image, reference: Image) -> float:
    """Peak signal-to-noise ratio of two pictures of one size, in dB; infinite where they are the same."""
    difference = np.asarray(image.convert("RGB"), np.float64) - np.asarray(reference.convert("RGB"), np.float64)
    error = float(np.mean(difference**2))
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)


def closeness(image: Image, reference: Image) -> str:
    """The same for people: "same" or decibels."""
    if image.size != reference.size:
        return "another size"
    decibels = psnr(image, reference)
    return "same" if math.isinf(decibels) else f"{decibels:.1f} dB"


def compose(columns: Sequence[Column], rows: Sequence[str]) -> Image:
    """The grid as one picture.

    Args:
        columns: at least one; the first is what the others are compared with.
        rows: a label for each row.

    Returns:
        An RGB picture. Below each picture stand its caption and, from the second column on, its PSNR to the first.
    """
    from PIL import Image, ImageDraw, ImageFont

    images = [cell.image for column in columns for cell in column.cells if cell.image is not None]
    width = max([MIN_CELL, *(image.width for image in images)])
    height = max([MIN_CELL // 2, *(image.height for image in images)])
    font = ImageFont.load_default(13)
    captions = [_wrapped(column.caption, width, font) for column in columns]
    top = MARGIN + LINE * (1 + max(len(lines) for lines in captions)) + MARGIN
    size = (LABEL_WIDTH + (width + MARGIN) * len(columns) + MARGIN, top + (height + LINE + MARGIN) * len(rows) + MARGIN)
    canvas = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(canvas)
    for index, label in enumerate(rows):
        lines = _wrapped(label, LABEL_WIDTH - 2 * MARGIN, font)[: (height + LINE) // LINE]
        _write(draw, MARGIN, top + index * (height + LINE + MARGIN), lines, font, INK)
    for index, (column, lines) in enumerate(zip(columns, captions, strict=True)):
        left = LABEL_WIDTH + index * (width + MARGIN)
        _write(draw, left, MARGIN, [_cut(column.title, width, font)], font, INK)
        _write(draw, left, MARGIN + LINE, lines, font, FAINT)
        for row, cell in enumerate(column.cells):
            y = top + row * (height + LINE + MARGIN)
            if cell.image is not None:
                canvas.paste(cell.image.convert("RGB"), (left, y))
            _write(draw, left, y + height + 2, [_cut(_told(columns, index, row), width, font)], font, FAINT)
    return canvas


def _told(columns: Sequence[Column], index: int, row: int) -> str:
    """What stands below a picture."""
    cell, first = columns[index].cells[row], columns[0].cells
    parts = [cell.caption] if cell.caption else []
    reference = first[row].image if index > 0 and row < len(first) else None
    if cell.image is not None and reference is not None:
        parts.append(closeness(cell.image, reference))
    return ", ".join(parts)


def _write(
    draw: ImageDraw, x: int, y: int, lines: Sequence[str], font: FreeTypeFont | ImageFont, color: tuple[int, int, int]
) -> None:
    for number, line in enumerate(lines):
        draw.text((x, y + number * LINE), line, fill=color, font=font)


def _wrapped(text: str, width: int, font: FreeTypeFont | ImageFont) -> list[str]:
    """Text in lines that fit; a word that does not is cut."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and font.getlength(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(_cut(word, width, font))
    return lines


def _cut(text: str, width: int, font: FreeTypeFont | ImageFont) -> str:
    """Text that fits, with an ellipsis where it is cut."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(f"{text}…") > width:
        text = text[:-1]
    return f"{text}…"
