"""What is known of an architecture, as data. No torch: classes and converters are named, and resolved late."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

Shape = tuple[int, ...]
Config = Mapping[str, Any]
Converter = str | Callable[..., dict[str, Any]]
"""`module:function`, or the function itself."""

DIFFUSERS_LAYOUT = "diffusers"


@dataclass(frozen=True)
class Keys:
    """A condition on the names of a file. An entry that ends in a dot means any name under it.

    Attributes:
        all_of: each must be there.
        any_of: at least one must be there.
        none_of: none may be there.
    """

    all_of: tuple[str, ...] = ()
    any_of: tuple[str, ...] = ()
    none_of: tuple[str, ...] = ()

    def judge(self, names: Collection[str]) -> Verdict:
        """Whether `names` meet the condition, and the names that decided it."""
        asked = (*self.all_of, *self.any_of, *self.none_of)
        present = {key for key in asked if key in names or (key.endswith(".") and _begins(key, names))}
        lacking = tuple(key for key in self.all_of if key not in present)
        if self.any_of and present.isdisjoint(self.any_of):
            lacking += (" or ".join(self.any_of),)
        forbidden = tuple(key for key in self.none_of if key in present)
        found = tuple(key for key in (*self.all_of, *self.any_of) if key in present)
        return Verdict(found, lacking, forbidden)


@dataclass(frozen=True)
class Verdict:
    """How a file's names meet a condition.

    Attributes:
        found: required names that are there.
        lacking: required names that are not.
        forbidden: names that must not be there and are.
    """

    found: tuple[str, ...]
    lacking: tuple[str, ...]
    forbidden: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """True where the condition is met."""
        return not self.lacking and not self.forbidden

    def __str__(self) -> str:
        if self.forbidden:
            return f"has {', '.join(self.forbidden)}"
        if self.lacking:
            return f"lacks {', '.join(self.lacking)}"
        return f"has {', '.join(self.found)}"


@dataclass(frozen=True)
class Layout:
    """One way in which an architecture's keys are written.

    Attributes:
        name: "comfyui", "original" or "diffusers".
        keys: what tells this layout.
        converter: a key converter `(checkpoint, config=..., **kwargs) -> dict` as in diffusers'
            single-file table; None where the names are the model's own.
    """

    name: str
    keys: Keys
    converter: Converter | None = None


@dataclass(frozen=True)
class SiblingSpec:
    """A second model that files of an architecture carry beside the transformer.

    Attributes:
        component: the pipeline component that it becomes.
        subfolder: the base model's folder that holds its config.
        inline_prefix: its keys' prefix, after the transformer's prefix is taken off.
        cls: name of its diffusers class.
        converter: as in Layout, called with the names after inline_prefix; None where they are its own.
    """

    component: str
    subfolder: str
    inline_prefix: str
    cls: str
    converter: Converter | None = None


@dataclass(frozen=True)
class VariantSpec:
    """Networks of one architecture that names and shapes do not tell apart.

    Attributes:
        names: what they are called.
        key: the header's metadata entry that says which one a file is, "" where none does.
        values: its values and the names that they stand for.
        components: names and the pipeline components that such networks are for, where a pipeline has both.
        where: what the names of a file must meet for the question to arise.
    """

    names: tuple[str, ...]
    key: str = ""
    values: tuple[tuple[str, str], ...] = ()
    components: tuple[tuple[str, str], ...] = ()
    where: Keys = Keys()

    def of(self, metadata: Mapping[str, str] | None) -> Variant:
        """Which variant a file with these metadata is."""
        name = dict(self.values).get((metadata or {}).get(self.key, "")) if self.key else None
        return Variant(name, self.names, dict(self.components).get(name or ""))


@dataclass(frozen=True)
class Variant:
    """Which of its architecture's variants a file is.

    Attributes:
        name: the variant; None where nothing in the file tells.
        names: what it may be.
        component: the pipeline component that it is for, where the file says so.
    """

    name: str | None
    names: tuple[str, ...]
    component: str | None = None

    def __str__(self) -> str:
        return self.name or f"cannot be told: {', '.join(self.names[:-1])} or {self.names[-1]}"


@dataclass(frozen=True)
class InputSpec:
    """Where a network takes what another component of the pipeline gives.

    Attributes:
        weight: target name of the weight, of shape (out, in, ...).
        what: what it takes, as in "takes text 4096 wide".
        giver: what it comes from.
    """

    weight: str
    what: str
    giver: str


def takes_text(weight: str) -> InputSpec:
    """The weight that text embeddings go into."""
    return InputSpec(weight, "text", "text encoder")


def takes_latents(weight: str) -> InputSpec:
    """The weight that latents go into: (out, channels × patch, ...)."""
    return InputSpec(weight, "latents", "pipeline")


@dataclass(frozen=True)
class BranchSpec:
    """A part of the network that some files of an architecture hold and its diffusers class has not.

    Attributes:
        title: what the plan calls it.
        weights: own names of its weights, in every layout.
        gate: those of them of which one, all zeros, makes the whole part do nothing.
        cls: name of the class of our own that has the part.
    """

    title: str
    weights: tuple[str, ...]
    gate: tuple[str, ...]
    cls: str


@dataclass(frozen=True)
class TransformerSpec:
    """What is known of an architecture.

    Attributes:
        name: as users call it.
        cls: name of the diffusers class.
        model_types: beginnings of the names of the pipeline classes that it belongs to.
        layouts: how its keys are written; the first that fits is taken.
        component: the pipeline component that it replaces.
        subfolder: the base model's folder that holds its config.
        infer_config: corrects the base's config by what the file's shapes say; returns the changed
            entries only.
        siblings: models that its files may carry beside it.
        acceptable_missing: beginnings of names of buffers that files leave out.
        zero_init_missing: names that are filled with zeros where a file leaves them out; one that ends in a dot
            means any name under it.
        junk: own names that have no home in the model and are dropped; `*` stands for any run of characters.
        fp8_skip_patterns: modules whose weights stay out of FP8 storage beside those that the class declares:
            embedders and the last layer, which are small and which every token depends on.
        other_classes: names of further diffusers classes with the same keys.
        branch: a part that some files hold and the class has not.
        variants: networks that names and shapes do not tell apart.
        inputs: weights that take along dimension 1 what other components give: a file of another width there
            belongs to another pipeline.
        picture: width and height in pixels of the pictures that its published models are made for.
    """

    name: str
    cls: str
    model_types: tuple[str, ...]
    layouts: tuple[Layout, ...]
    component: str = "transformer"
    subfolder: str = "transformer"
    infer_config: Callable[[Config, Mapping[str, Shape]], Config] | None = None
    siblings: tuple[SiblingSpec, ...] = ()
    acceptable_missing: tuple[str, ...] = ("rope.", "pos_embedder.", "learnable_pos_embed.")
    zero_init_missing: tuple[str, ...] = ()
    junk: tuple[str, ...] = ()
    fp8_skip_patterns: tuple[str, ...] = field(default=())
    other_classes: tuple[str, ...] = ()
    branch: BranchSpec | None = None
    variants: VariantSpec | None = None
    inputs: tuple[InputSpec, ...] = ()
    picture: tuple[int, int] = (1024, 1024)

    def serves(self, cls: str, pipeline: str) -> bool:
        """Whether this is the spec for a component of class `cls` in a pipeline of class `pipeline`."""
        of_branch = (self.branch.cls,) if self.branch else ()
        return cls in (self.cls, *self.other_classes, *of_branch) and pipeline.startswith(self.model_types)

    def is_zero_where_missing(self, name: str) -> bool:
        """Whether a tensor is zero where a file leaves it out."""
        return any(
            name == entry or (entry.endswith(".") and name.startswith(entry)) for entry in self.zero_init_missing
        )

    def drops(self, name: str) -> bool:
        """Whether a name is known junk."""
        return any(fnmatchcase(name, pattern) for pattern in self.junk)


def _begins(start: str, names: Collection[str]) -> bool:
    return f"\n{start}" in "\n".join(("", *names))
