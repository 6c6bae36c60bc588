"""Detection: the same under every prefix, the variant where a header states it, a warning where the slot is another."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from test_architectures import BY_NAME, EXPECTED, base_folder, full_config, keys_of, shapes_of, tiny_config
from tiny_configs import TINY
from tiny_models import manifest, write_sparse
from transplant.architectures.detect import TRANSFORMER, identify
from transplant.checkpoint.naming import PREFIXES, WRAPPERS
from transplant.plan import plan
from transplant.view import plan_json, plan_rows

VARIANTS = {
    "ideogram4_conditional_fp8_scaled": "conditional",
    "ideogram4_unconditional_int8_convrot": "cannot be told: conditional or unconditional",
    "krea2_raw_bf16": "cannot be told: raw or turbo",
    "krea2_turbo_nvfp4": "cannot be told: raw or turbo",
    "wan22_t2v_a14b_high_noise_fp16": "cannot be told: Wan 2.1, Wan 2.2 high noise or Wan 2.2 low noise",
    "wan22_t2v_a14b_low_noise_fp16": "cannot be told: Wan 2.1, Wan 2.2 high noise or Wan 2.2 low noise",
    "flux2_klein_4b_bf16": "cannot be told: Klein or Klein base",
    "flux2_dev_bfl_bf16": None,
    "z_image_turbo_comfy_bf16": None,
}


@pytest.mark.parametrize(("name", "variant"), VARIANTS.items())
def test_variant(name: str, variant: str | None) -> None:
    source = manifest(name)
    found = identify(keys_of(source.tensors), metadata=source.metadata).variant
    assert (str(found) if found else None) == variant


@pytest.mark.parametrize(("says", "component", "warned"), [
    ("ideogram4_cond", "transformer", False),
    ("ideogram4_cond", "unconditional_transformer", True),
    ("ideogram4_uncond", "transformer", True),
    ("ideogram4_uncond", "unconditional_transformer", False),
    ("something else", "transformer", False),
    (None, "unconditional_transformer", False),
])  # fmt: skip
def test_a24_a_file_in_the_other_slot_is_warned_of_and_used(
    says: str | None, component: str, warned: bool, tmp_path: Path
) -> None:
    """The slot decides where a file goes; what its header says against it is a warning."""
    spec = BY_NAME["Ideogram 4"]
    base = base_folder(tmp_path / "base", spec, tiny_config(spec))
    (base / "unconditional_transformer").mkdir()
    (base / "unconditional_transformer" / "config.json").write_bytes((base / "transformer/config.json").read_bytes())
    index = (base / "model_index.json").read_text()
    both = index.replace('"transformer":', f'"unconditional_transformer": ["diffusers", "{spec.cls}"], "transformer":')
    (base / "model_index.json").write_text(both)
    tensors = {name: ("BF16", shape) for name, shape in shapes_of(spec.cls, tiny_config(spec)).items()}
    metadata = {"model_type": says} if says else None
    planned = plan(write_sparse(tmp_path / "x.safetensors", tensors, metadata), base, component=component)
    told = [text for text in planned.warnings if "its header says that it is the" in text]
    assert bool(told) == warned
    if warned:
        other = "unconditional_transformer" if component == "transformer" else "transformer"
        assert f"made for {other}, not for {component}" in told[0]
    assert planned.transformer.component == component
    shown = "cannot be told" if says in (None, "something else") else str(planned.variant)
    assert dict(plan_rows(planned))["variant"].startswith(shown)
    assert plan_json(planned)["variant"] == str(planned.variant)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(EXPECTED)),
    wrappers=st.lists(st.sampled_from(WRAPPERS), max_size=2),
    prefix=st.sampled_from(("", *PREFIXES)),
    seed=st.integers(0, 2**16),
    part=st.floats(0.0, 0.5),
)
def test_b08_detection_is_that_of_the_bare_names(
    name: str, wrappers: list[str], prefix: str, seed: int, part: float
) -> None:
    """detect(x) == detect(prefix(x)), also where tensors are missing and in any order."""
    bare = list(keys_of(manifest(name).tensors).stored)
    mixed = random.Random(seed)
    mixed.shuffle(bare)
    bare = bare[int(part * len(bare)) :]
    head = "".join(wrappers) + prefix
    plainly, wrapped = (identify(keys_of(names)) for names in (bare, [head + own for own in bare]))
    assert replace(wrapped, why=plainly.why) == plainly
    assert wrapped.why == plainly.why or wrapped.kind != TRANSFORMER


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_one_answer_and_a_reason_for_each_other(name: str) -> None:
    found = identify(keys_of(manifest(name).tensors))
    fits = {fit.spec.name for fit in found.fits}
    for spec in BY_NAME.values():
        reasons = [lost for lost in found.rejected if lost.architecture == spec.name]
        assert len(reasons) == (0 if spec.name in fits else len(spec.layouts)), spec.name
        assert all(lost.verdict.lacking or lost.verdict.forbidden for lost in reasons)


def test_config_of_a_test_is_whole() -> None:
    """The tiny configs name only what their classes know."""
    for cls, config in TINY.items():
        known: Any = full_config(cls, {})
        assert config.keys() <= known.keys(), cls
