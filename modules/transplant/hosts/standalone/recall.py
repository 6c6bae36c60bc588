"""Read a picture's parameters back: the form's fields, and the models that made it. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transplant.digest import Digests
from transplant.errors import TransplantError, printable
from transplant.hosts.standalone.folders import Catalog, find
from transplant.hosts.standalone.models import BASE
from transplant.request import parse_infotext
from transplant.samplers import DEFAULT_SAMPLER
from transplant.slots import DEFAULT, SLOTS

USER_COMMENT = 0x9286
"""The EXIF tag in which others write the parameters of a JPEG or WebP."""


@dataclass(frozen=True)
class Recalled:
    """What a picture's metadata say.

    Attributes:
        fields: values of the form by name, those that could be read.
        models: base model and overrides that made it and are here, by option.
        warnings: what is not here, or not the same.
    """

    fields: Mapping[str, Any]
    models: Mapping[str, str]
    warnings: tuple[str, ...]


def recall(file: Path, catalog: Catalog, digests: Digests) -> Recalled:
    """Read a picture's parameters.

    Args:
        file: a picture of ours, of SD.Next or of another program that writes the same form.
        catalog: where its models are looked up, by name and by hash.
        digests: hashes that are known already; none is computed here.

    Raises:
        TransplantError: the file is no picture, or holds no parameters.
    """
    entries = parse_infotext(_parameters(file))
    if not entries:
        raise TransplantError(f"{printable(file.name)}: no parameters are written in this picture")
    models: dict[str, str] = {}
    warnings: list[str] = []
    name = entries.get("Model", "")
    if find(catalog.bases, name):
        models[BASE] = name
    elif name:
        warnings.append(f"The base model {printable(name)} is not here.")
    for kind in SLOTS:
        wanted, digest = entries.get(kind.title), entries.get(f"{kind.title} hash", "")
        if wanted is None:
            models[kind.option] = DEFAULT
            continue
        found, warning = _override(wanted, digest, catalog, digests)
        models |= {kind.option: found} if found else {}
        warnings += [warning] if warning else []
    return Recalled(_fields(entries), models, tuple(warnings))


def _override(wanted: str, digest: str, catalog: Catalog, digests: Digests) -> tuple[str | None, str | None]:
    """The entry that a picture was made with, and what is to be said of it."""
    known = {name: digests.known(path) for name, path in catalog.overrides.items()}
    same = next((name for name, hashed in known.items() if digest and hashed == digest), None)
    named = wanted if find(catalog.overrides, wanted) else None
    if same is not None and named is None:
        return same, f"The override {printable(wanted)} is here under the name {same}."
    if same is not None:
        return (named if known.get(wanted) == digest else same), None
    if named is None:
        return None, f"The override {printable(wanted)} is not here."
    if digest and known.get(wanted):
        return named, f"The file {named} is another one than made this picture: their hashes differ."
    return named, None


def _parameters(file: Path) -> str:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(file) as image:
            text: Any = image.info.get("parameters") or image.getexif().get_ifd(0x8769).get(USER_COMMENT, b"")
    except (OSError, UnidentifiedImageError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise TransplantError(f"{printable(file.name)} cannot be read as a picture ({error})") from error
    if isinstance(text, bytes):
        kind, text = text[:8], text[8:]
        text = text.decode("utf-16-be" if kind.startswith(b"UNICODE") else "utf-8", "replace")
    return str(text)


def _fields(entries: Mapping[str, str]) -> dict[str, Any]:
    """The form's values; an entry that is no number is left out."""
    fields: dict[str, Any] = {"prompt": entries["Prompt"], "negative": entries["Negative prompt"]}
    fields["sampler"] = entries.get("Sampler", DEFAULT_SAMPLER)
    size = re.fullmatch(r"(\d{1,5})x(\d{1,5})", entries.get("Size", ""))
    if size:
        fields |= {"width": int(size[1]), "height": int(size[2])}
    for field, name in (("steps", "Steps"), ("seed", "Seed"), ("frames", "Frames")):
        if re.fullmatch(r"\d{1,19}", entries.get(name, "")):
            fields[field] = int(entries[name])
    if re.fullmatch(r"\d{1,3}(\.\d{1,6})?", entries.get("CFG scale", "")):
        fields["guidance"] = float(entries["CFG scale"])
    return fields
