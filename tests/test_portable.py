"""What a device needs held otherwise: a pure function of what the device can, so that it is tested without one."""

from __future__ import annotations

import itertools

import pytest
import torch

from kitchen import Written, float8, int8
from test_formats import weight
from test_formats_blocks import mxfp8, nvfp4
from transplant.formats import formats
from transplant.formats.base import Codes, Portable, Rows
from transplant.sdnq_bridge import Compute, portable_for

WITHOUT_E4M3 = {"sm_75": (7, 5), "sm_80": (8, 0), "sm_86": (8, 6)}
WITH_E4M3 = {"sm_89": (8, 9), "sm_90": (9, 0), "sm_100": (10, 0), "sm_120": (12, 0)}
ROCM = {"gfx90a": (9, 0), "gfx942": (9, 4), "gfx1030": (10, 3), "gfx1100": (11, 0), "gfx1201": (12, 0)}
"""torch calls them CUDA devices, and their names' digits capabilities."""
OTHERS = ("cpu", "xpu", "mps")


def adopted(written: Written, portable: Portable) -> Codes:
    layer, layer_format = written.layer(), formats()[str(written.marker["format"])]

    def read(role: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        return written.tensors[role][start:stop] if written.tensors[role].ndim else written.tensors[role]

    return layer_format.adopt(layer, read, Rows(0, written.shape[0], written.shape), portable)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", WITHOUT_E4M3)
def test_cuda_without_conversions_of_e4m3(name: str, compiled: bool) -> None:
    """e8m0 scales become bf16 in any case; e4m3 codes become bytes where Triton would have to load them."""
    portable = portable_for(Compute(compiled=compiled), torch.device("cuda"), WITHOUT_E4M3[name])
    assert portable == Portable(codes=compiled, scales=True)
    fp8 = adopted(float8(weight((8, 64))), portable)
    assert (fp8.weight.dtype, fp8.form.weights_dtype) == (
        (torch.uint8, "float8_e4m3fn_sdnq") if compiled else (torch.float8_e4m3fn, "float8_e4m3fn")
    )
    blocks = adopted(mxfp8(weight((32, 64))), portable)
    assert (blocks.scale.dtype, blocks.form.scale_dtype, blocks.scale_2) == (torch.bfloat16, None, None)


@pytest.mark.parametrize("name", WITHOUT_E4M3)
def test_formats_that_need_nothing(name: str) -> None:
    """SDNQ casts nvfp4's e4m3 scales itself, and Triton has e5m2 everywhere."""
    portable = portable_for(Compute(compiled=True), torch.device("cuda"), WITHOUT_E4M3[name])
    for written in (nvfp4(weight((16, 32))), float8(weight((8, 64)), torch.float8_e5m2), int8(weight((8, 64)))):
        one, other = adopted(written, portable), adopted(written, Portable())
        assert one.form == other.form
        assert (one.weight.dtype, one.scale.dtype) == (other.weight.dtype, other.scale.dtype)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("device", "capability"),
    [*itertools.product(["cuda"], [*WITH_E4M3.values(), *ROCM.values()]), *((name, None) for name in OTHERS)],
    ids=[*WITH_E4M3, *ROCM, *OTHERS],
)
def test_devices_that_hold_the_codes_as_stored(device: str, capability: tuple[int, int] | None, compiled: bool) -> None:
    """Also a CUDA device that is not there, of which nothing is known."""
    assert portable_for(Compute(compiled=compiled), torch.device(device), capability) == Portable()
    assert portable_for(Compute(compiled=compiled), torch.device("cuda"), None) == Portable()
