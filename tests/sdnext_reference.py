"""Pictures of the standalone product, drawn in a real SD.Next's Python so that both use the same libraries.

    SDNEXT_PYTHON sdnext_reference.py SITE_PACKAGES OUT < requests

`requests` is JSON: by name, a base model's folder, a file for each slot or null, the guidance, and whether files rest
in float8. OUT gets the pictures as arrays. What that Python lacks comes from SITE_PACKAGES, last on sys.path.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "modules")]
sys.path.append(sys.argv[1])

from diffusers.image_processor import VaeImageProcessor  # noqa: E402

from transplant.generate import generate  # noqa: E402
from transplant.hosts.base import LoadSettings, PlainHost  # noqa: E402
from transplant.pipeline import Session  # noqa: E402
from transplant.request import Request  # noqa: E402
from transplant.sdnq_bridge import Compute  # noqa: E402
from transplant.slots import SLOTS, Override  # noqa: E402


def cut_off(images: np.ndarray) -> list[Image.Image]:
    """Bytes as SD.Next makes them of floats: it cuts off what diffusers rounds."""
    return [Image.fromarray((255.0 * image).astype(np.uint8)) for image in images]


def main() -> None:
    VaeImageProcessor.numpy_to_pil = staticmethod(cut_off)
    pictures: dict[str, np.ndarray] = {}
    loaded = session = None
    for name, (base, files, guidance, fp8) in json.load(sys.stdin).items():
        if (base, fp8) != loaded:
            settings = LoadSettings(torch.device("cpu"), torch.float32, True, Compute(fp8_storage=fp8))
            session = Session(PlainHost(settings))
            session.load_base(base)
            loaded = base, fp8
        for kind, file in zip(SLOTS, files, strict=False):
            outcome = session.choose(Override(Path(file).stem, Path(file)) if file else None, kind)
            assert outcome.refused is None, outcome.refused
        request = Request("a red circle", "", steps=2, guidance=guidance, width=64, height=64, seed=3)
        pictures[name] = np.asarray(next(iter(generate(session.pipeline, request))).image)
    np.savez(sys.argv[2], **pictures)


main()
