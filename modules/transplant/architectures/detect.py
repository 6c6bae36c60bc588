"""What is this file: a value that explains itself. From names and shapes alone, no torch.

Guarantee: every real layout of a listed architecture is recognised, as exactly that architecture,
with any known prefix. Files of architectures that are not listed are never taken for a listed one
unless they hold all of its telling keys.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from transplant.architectures import SPECS
from transplant.architectures.spec import Layout, TransformerSpec, Variant, Verdict
from transplant.checkpoint.naming import BUNDLED, NamedKeys
from transplant.errors import NotATransformer

TRANSFORMER, BUNDLE = "transformer", "all-in-one bundle"
SHARD = "pipeline shard"
"""Of a checkpoint in several files, of which others are missing."""
UNKNOWN = "unknown"

_LORA = (
    ".lora_A.", ".lora_B.", ".lora_down.", ".lora_up.", ".lora.down.", ".lora.up.", ".lokr_w", ".hada_w",
    ".oft_blocks", ".dora_scale",
)  # fmt: skip
_CONTROLNET = ("control_model.", "controlnet_", "control_layers.", "input_hint_block.")
_TEXT_ENCODER = (
    "text_model.encoder.layers.", "encoder.block.0.layer.0.SelfAttention", "embed_tokens.weight", "language_model.",
    "layers.0.self_attn.q_proj.", "transformer.resblocks.", "encoder.layers.0.self_attn.",
)  # fmt: skip
_VAE = (
    "decoder.conv_in.", "decoder.conv1.", "decoder.up_blocks.", "decoder.mid.", "decoder.upsamples.",
    "decoder.layers.", "taesd_",
)  # fmt: skip

_IP_ADAPTER = ("image_proj.", "ip_adapter.")
_IMAGE_ENCODER = ("vision_model.encoder.layers.", "visual.transformer.")
_EMBEDDING = frozenset({"emb_params", "clip_l", "clip_g", "t5xxl"})
"""All names that a textual inversion has; or one that stands in the prompt, like `<cat>`."""

MARKERS = (_LORA, _CONTROLNET, _TEXT_ENCODER, _VAE, _IP_ADAPTER, _IMAGE_ENCODER, sorted(_EMBEDDING))
"""What tells files that are no transformers."""

_OTHER_KINDS = ("LoRA", "ControlNet", "text encoder", "VAE", "IP-Adapter", "image encoder", "textual inversion")
_REMEDY = (
    "It cannot replace a transformer: use it where your program takes {kind}s, if it does, and choose a file "
    "with a whole transformer here"
)


@dataclass(frozen=True)
class Rejected:
    """Why a file is not a certain architecture in a certain layout."""

    architecture: str
    layout: str
    verdict: Verdict

    def __str__(self) -> str:
        return f"{self.architecture} ({self.layout} layout): {self.verdict}"


@dataclass(frozen=True)
class Fit:
    """An architecture whose telling keys a file holds, and how it is written."""

    spec: TransformerSpec
    layout: Layout
    verdict: Verdict


@dataclass(frozen=True)
class Detection:
    """The answer.

    Attributes:
        kind: "transformer", "all-in-one bundle", "LoRA", "ControlNet", "text encoder", "VAE", "IP-Adapter",
            "image encoder", "textual inversion" or "unknown".
        spec: the architecture, where the kind is a known transformer.
        layout: how its keys are written.
        why: the keys that decided it.
        rejected: why each other architecture lost.
        fits: every architecture that the file may be, the winner first. More than one only where neither names
            nor shapes tell them apart, as with Anima and Cosmos Predict 2.
        variant: which network of the architecture it is, where there are several that look alike.
    """

    kind: str
    spec: TransformerSpec | None
    layout: Layout | None
    why: str
    rejected: tuple[Rejected, ...]
    fits: tuple[Fit, ...] = ()
    variant: Variant | None = None

    def seen_as(self, spec: TransformerSpec) -> Detection:
        """This detection with `spec` as the winner, where the file may be that: the base model then decides."""
        fit = next((fit for fit in self.fits if fit.spec.name == spec.name), None)
        return replace(self, spec=spec, layout=fit.layout, why=str(fit.verdict)) if fit else self

    @property
    def architecture(self) -> str | None:
        """Name of the architecture, or None."""
        return self.spec.name if self.spec else None

    @property
    def may_be(self) -> tuple[str, ...]:
        """Names of every architecture that the file may be."""
        return tuple(fit.spec.name for fit in self.fits)

    def resembles(self, spec: TransformerSpec) -> bool:
        """Whether the file holds some of the keys that tell an architecture, and none that speaks against it."""
        lost = [rejected.verdict for rejected in self.rejected if rejected.architecture == spec.name]
        return any(verdict.found and not verdict.forbidden for verdict in lost)

    @property
    def nearest(self) -> Rejected | None:
        """The architecture of which the fewest telling keys are lacking, where some were found."""
        partial = [r for r in self.rejected if r.verdict.found and not r.verdict.forbidden]
        return min(partial, key=lambda r: len(r.verdict.lacking), default=None)


def identify(
    keys: NamedKeys, specs: Collection[TransformerSpec] = SPECS, metadata: Mapping[str, str] | None = None
) -> Detection:
    """Say what a file is.

    Args:
        keys: its names, normalised.
        specs: the architectures to choose from, the more special first.
        metadata: the header's.

    Returns:
        The first architecture whose keys fit, or another kind of file, or "unknown"; with reasons.
    """
    names = keys.stored.keys()
    for kind, markers, inside in (("LoRA", _LORA, True), ("ControlNet", _CONTROLNET, False)):
        if shown := _first(keys.stored, markers, inside):
            return Detection(kind, None, None, f"holds {shown}", ())
    judged = [Fit(spec, layout, layout.keys.judge(names)) for spec in specs for layout in spec.layouts]
    fits: dict[str, Fit] = {}
    for fit in judged:
        if fit.verdict.holds:
            fits.setdefault(fit.spec.name, fit)
    rejected = tuple(
        Rejected(lost.spec.name, lost.layout.name, lost.verdict) for lost in judged if lost.spec.name not in fits
    )
    if fits:
        winner = next(iter(fits.values()))
        kind = TRANSFORMER if BUNDLED.isdisjoint(keys.companions) else BUNDLE
        variants = winner.spec.variants
        variant = variants.of(metadata) if variants and variants.where.judge(names).holds else None
        why = str(winner.verdict)
        return Detection(kind, winner.spec, winner.layout, why, rejected, tuple(fits.values()), variant)
    return _other_kind(keys, rejected)


def refuse_other_kinds(path: Path, detection: Detection) -> None:
    """Raise NotATransformer where a file is known to be something else: a LoRA, a VAE, a text encoder."""
    if detection.kind in _OTHER_KINDS:
        raise NotATransformer(path, detection.kind, detection.why, _REMEDY.format(kind=detection.kind))


def _other_kind(keys: NamedKeys, rejected: tuple[Rejected, ...]) -> Detection:
    if not keys.stored and keys.companions:
        counts = ", ".join(f"{count} {kind} tensors" for kind, count in keys.companions.items())
        why = f"holds {counts} and nothing else"
        bundled = [kind for kind in keys.companions if kind in BUNDLED]
        if not bundled:
            return Detection(UNKNOWN, None, None, why, rejected)
        most = max(bundled, key=lambda kind: keys.companions[kind])
        kind = "VAE" if most.endswith(("VAE", "vocoder")) else "text encoder"
        return Detection(kind, None, None, why, rejected)
    if keys.stored.keys() <= _EMBEDDING or (len(keys.stored) == 1 and next(iter(keys.stored)).startswith("<")):
        return Detection("textual inversion", None, None, f"holds {', '.join(keys.stored)} alone", rejected)
    starts = {"text encoder": _TEXT_ENCODER, "VAE": _VAE, "IP-Adapter": _IP_ADAPTER, "image encoder": _IMAGE_ENCODER}
    for kind, markers in starts.items():
        if shown := _first(keys.stored, markers, inside=False):
            return Detection(kind, None, None, f"holds {shown}", rejected)
    return Detection(UNKNOWN, None, None, "no known architecture's keys", rejected)


def _first(stored: Mapping[str, str], markers: tuple[str, ...], inside: bool) -> str | None:
    """The first stored name that shows a marker: anywhere in it, or at its start."""
    text = "\n".join(("", *stored))
    markers = tuple(marker for marker in markers if (marker if inside else f"\n{marker}") in text)
    for own, name in stored.items() if markers else ():
        if any(marker in own for marker in markers) if inside else own.startswith(markers):
            return name
    return None
