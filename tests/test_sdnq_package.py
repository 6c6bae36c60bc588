"""Which SDNQ is used, and what becomes of block scales where it is an older one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kitchen import Written, float8, int8, write
from transplant import sdnq_package
from transplant.formats.base import join
from transplant.sdnq_bridge import Compute, decoded, portable_for
from transplant.sdnq_package import has_scales_of_scales, name, part

ROOT = Path(__file__).parent.parent


def test_the_pypi_package_is_the_default() -> None:
    assert name() == "sdnq"
    assert part("dequantizer").SDNQDequantizer.__module__ == "sdnq.dequantizer"
    assert has_scales_of_scales()


def test_no_other_sdnq_once_one_is_in_use() -> None:
    part()
    with pytest.raises(RuntimeError, match="comes too late: sdnq is in use"):
        sdnq_package.use(torch)
    assert name() == "sdnq"


def test_a_host_gives_its_copy() -> None:
    """Every part comes from the copy; giving it once more changes nothing; nothing imports the PyPI package."""
    code = (
        "import sys, types\n"
        "copy = types.ModuleType('host_copy'); copy.__path__ = []\n"
        "held = types.ModuleType('host_copy.dequantizer')\n"
        "class SDNQDequantizer:\n"
        "    def __init__(self, weights_dtype): pass\n"
        "held.SDNQDequantizer = SDNQDequantizer\n"
        "sys.modules |= {'host_copy': copy, 'host_copy.dequantizer': held}\n"
        "from transplant import sdnq_package\n"
        "sdnq_package.use(copy); sdnq_package.use(copy)\n"
        "from transplant.sdnq_fp32_rotation import Fp32RotationDequantizer\n"
        "assert issubclass(Fp32RotationDequantizer, SDNQDequantizer)\n"
        "assert not sdnq_package.has_scales_of_scales()\n"
        "assert 'sdnq' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT / "modules")


@pytest.mark.parametrize("missing", ["sdnq", "torch"])
def test_what_is_missing_is_named(missing: str) -> None:
    """SDNQ itself, or something that it imports."""
    code = f"import sys; from transplant.sdnq_package import part\nsys.modules[{missing!r}] = None\npart('dequantizer')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "modules")
    assert done.returncode == 1
    assert (
        done.stderr.strip()
        .splitlines()[-1]
        .startswith(f"transplant.errors.MissingPackage: the Python package {missing!r} is not installed")
    )


# -- the plain form ------------------------------------------------------------------------------------------------


def nvfp4(weight: torch.Tensor) -> Written:
    return write(weight, "TensorCoreNVFP4Layout", {"format": "nvfp4"})


def mxfp8(weight: torch.Tensor) -> Written:
    return write(weight, "TensorCoreMXFP8Layout", {"format": "mxfp8"})


def w4a8(weight: torch.Tensor) -> Written:
    marker = {"format": "asym_w4a8_int8", "group_size": 64, "convrot_groupsize": 64}
    return write(weight, "AsymW4A8Int8Layout", marker, group_size=64, convrot_groupsize=64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [nvfp4, mxfp8, w4a8, int8, float8])
def test_the_plain_form_stands_for_the_same_values(make: Callable[[torch.Tensor], Written], dtype: torch.dtype) -> None:
    """Of all rows, of some, and of rows of two layers; in fp32 those of comfy-kitchen's eager code."""
    generator = torch.Generator().manual_seed(0)
    one, other = (make(torch.randn(96, 256, generator=generator) * size) for size in (0.05, 0.4))
    codes = one.codes(plain=True)
    assert (codes.form.scale_dtype, codes.form.codebook, codes.scale_2) == (None, False, None)
    assert codes.scale.dtype.is_floating_point and codes.scale.dtype.itemsize > 1
    assert torch.equal(decoded(codes, (96, 256), dtype), decoded(one.codes(), (96, 256), dtype))
    if dtype == torch.float32:
        assert torch.equal(decoded(codes, (96, 256), dtype), one.value(dtype))
    joined, expected = (
        join([one.codes(8, 40, plain=plain), other.codes(0, 24, plain=plain)]) for plain in (True, False)
    )
    assert torch.equal(decoded(joined, (56, 256), dtype), decoded(expected, (56, 256), dtype))
    planned = one.codes(plain=True, meta=True)
    assert (planned.form, planned.scale.shape) == (codes.form, codes.scale.shape)


def test_an_older_sdnq_asks_for_the_plain_form() -> None:
    assert portable_for(Compute(), torch.device("cpu"), None, plain=True).plain
    assert not portable_for(Compute(), torch.device("cuda"), (8, 0)).plain
