"""What the stored names say: bundled companions, the transformer's prefix, wrappers, siblings. No torch.

The same normalisation serves detection and loading, so that a file that one of them understands
is a file that the other understands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transplant.errors import DuplicateTensor, MixedPrefixes

PREFIXES = ("model.diffusion_model.", "diffusion_model.", "transformer.", "model.", "net.")
"""Prefixes that transformers are saved under, longest first. No prefix is the sixth."""

COMPANIONS: Mapping[str, str] = {
    "cond_stage_model.": "text encoder",
    "conditioner.": "text encoder",
    "text_encoders.": "text encoder",
    "first_stage_model.": "VAE",
    "vae.": "VAE",
    "audio_vae.": "audio VAE",
    "vocoder.": "vocoder",
    "text_embedding_projection.": "text projection",
    "model_ema.": "EMA copy",
}
"""Prefixes of what all-in-one files carry beside the transformer, and what it is. Never read.

Where a file holds normal and EMA weights the normal ones are used, as ComfyUI and SD.Next do.
"""

BUNDLED = frozenset({"text encoder", "VAE", "audio VAE", "vocoder", "text projection"})
"""Kinds of companions that make a file an all-in-one bundle."""

SCHEDULE_BUFFERS = frozenset({
    "alphas_cumprod", "alphas_cumprod_prev", "betas", "log_one_minus_alphas_cumprod", "logvar",
    "posterior_log_variance_clipped", "posterior_mean_coef1", "posterior_mean_coef2", "posterior_variance",
    "sqrt_alphas_cumprod", "sqrt_one_minus_alphas_cumprod", "sqrt_recip_alphas_cumprod",
    "sqrt_recipm1_alphas_cumprod", "denoiser.sigmas", "ztsnr", "v_pred",
})  # fmt: skip
"""Loose tensors of Stable Diffusion files that belong to the sampler. Never read."""

WRAPPERS = ("module.", "_orig_mod.")
"""Name parts that DistributedDataParallel and torch.compile put in front of a module's own name."""

_MAYBE_PREFIXED = (*PREFIXES, *WRAPPERS)
_MAYBE_COMPANIONS = (*COMPANIONS, *WRAPPERS)
"""What a name begins with that is worth a closer look: most names are sorted by one C call."""

_GLOBAL_MARKERS = frozenset({"scaled_fp8"})
"""Markers that speak of the whole file and may stand outside the prefix."""


@dataclass(frozen=True)
class NamedKeys:
    """The transformer's keys under their own names.

    Attributes:
        prefix: the prefix that was taken off, "" for none.
        stored: own name → stored name, in file order.
        companions: what else the file holds (kind → number of tensors). Not to be read.
        wrappers: the wrapper parts that were taken off.
    """

    prefix: str
    stored: Mapping[str, str]
    companions: Mapping[str, int]
    wrappers: tuple[str, ...]


def normalise(path: Path, names: Iterable[str]) -> NamedKeys:
    """Take companions, prefix and wrappers off the stored names.

    Args:
        path: the file, for messages.
        names: stored names in file order.

    Returns:
        The names that the transformer itself would use.

    Raises:
        MixedPrefixes: keys outside the dominant prefix that belong to no known companion.
        DuplicateTensor: two stored names become one.
    """
    names = list(names)
    uniform = _under_one_prefix(names)
    if uniform is not None:
        return uniform
    own, companions = drop_companions(names)
    prefix = dominant_prefix(own)
    foreign = PREFIXES[:2]
    strangers = [name for name in own if (not name.startswith(prefix) if prefix else name.startswith(foreign))]
    strangers = [name for name in strangers if name not in _GLOBAL_MARKERS]
    if strangers:
        raise MixedPrefixes(path, prefix, strangers)
    stored: dict[str, str] = {}
    wrappers: set[str] = set()
    for name in own:
        bare = unwrap(name.removeprefix(prefix), wrappers)
        if bare in stored:
            raise DuplicateTensor(path, bare, (stored[bare], name))
        stored[bare] = name
    return NamedKeys(prefix, stored, companions, tuple(sorted(wrappers)))


def _under_one_prefix(names: Sequence[str]) -> NamedKeys | None:
    """The names of a file that holds a transformer alone, by searches in one text; None for any other file."""
    text = "\n".join(("", *names))
    unusual = any(f"\n{prefix}" in text for prefix in COMPANIONS) or any(wrapper in text for wrapper in WRAPPERS)
    if unusual or text.count("\n") != len(names) or not SCHEDULE_BUFFERS.isdisjoint(names):
        return None
    prefix = next((prefix for prefix in PREFIXES if f"\n{prefix}" in text), "")
    if prefix and text.count(f"\n{prefix}") != len(names):
        return None
    stored = {name[len(prefix) :]: name for name in names}
    return NamedKeys(prefix, stored, {}, ()) if len(stored) == len(names) else None


def drop_companions(names: Iterable[str]) -> tuple[list[str], dict[str, int]]:
    """Split names into the transformer's and a count per kind of companion."""
    own: list[str] = []
    counts: Counter[str] = Counter()
    for name in names:
        family = _companion_of(name) if name.startswith(_MAYBE_COMPANIONS) else None
        if name in SCHEDULE_BUFFERS:
            counts["schedule buffer"] += 1
        elif family is None:
            own.append(name)
        else:
            counts[COMPANIONS[family]] += 1
    return own, dict(counts)


def _companion_of(name: str) -> str | None:
    unwrapped = name.removeprefix(_wrappers_of(name))
    return next((prefix for prefix in COMPANIONS if unwrapped.startswith(prefix)), None)


def dominant_prefix(names: Sequence[str]) -> str:
    """The known prefix that most names carry, with the wrapper in front of it if there is one.

    A name counts for the longest prefix that it begins with. "" wins where most names carry none.
    """
    asked = (name for name in names if name not in _GLOBAL_MARKERS)
    votes: Counter[str] = Counter(_prefix_of(name) if name.startswith(_MAYBE_PREFIXED) else "" for name in asked)
    if not votes:
        return ""
    most = max(votes.values())
    return max((prefix for prefix, count in votes.items() if count == most), key=len)


def unwrap(name: str, seen: set[str]) -> str:
    """`name` without wrapper parts: `module.` at its start, `_orig_mod.` before any part."""
    if name.startswith("_orig_mod.") or "._orig_mod." in name:
        name = ".".join(part for part in name.split(".") if part != "_orig_mod")
        seen.add("_orig_mod.")
    while name.startswith("module."):
        name = name.removeprefix("module.")
        seen.add("module.")
    return name


def split_siblings(names: Iterable[str], inline_prefixes: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Split own names into the transformer's and those of the siblings stored beside it.

    Args:
        names: own names, as in NamedKeys.stored.
        inline_prefixes: for example `llm_adapter.`.

    Returns:
        The transformer's names, and per inline prefix the names under it (prefix kept).
    """
    own: list[str] = []
    siblings: dict[str, list[str]] = {}
    for name in names:
        prefix = next((p for p in inline_prefixes if name.startswith(p)), None)
        (own if prefix is None else siblings.setdefault(prefix, [])).append(name)
    return own, siblings


def _prefix_of(name: str) -> str:
    """The prefix of one name, wrappers in front of it included."""
    head = _wrappers_of(name)
    known = next((prefix for prefix in PREFIXES if name.startswith(prefix, len(head))), "")
    return head + known if known else ""


def _wrappers_of(name: str) -> str:
    """All wrapper parts at the start of a name."""
    head = ""
    while wrapper := next((w for w in WRAPPERS if name.startswith(w, len(head))), None):
        head += wrapper
    return head
