"""A plan as a value: what loading a file over a base model will do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transplant.architectures.spec import TransformerSpec, Variant
from transplant.base_model import BaseModel
from transplant.checkpoint.header import Header
from transplant.formats.base import Form, QuantizedLayer
from transplant.recipe import Recipe

if TYPE_CHECKING:
    import torch
    from diffusers.models.modeling_utils import ModelMixin

    from transplant.branch import Branch
    from transplant.sdnq_bridge import Compute

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TargetTensor:
    """One parameter or buffer of the model and what it is made of.

    Attributes:
        name: name in the model's state dict.
        recipe: what it is made of, in stored names; None where it is filled with zeros.
        shape: its logical shape.
        stored: safetensors dtype(s) or format(s) it comes from, "" where it is filled with zeros.
        dtype: dtype in the loaded model; of a quantized layer the compute dtype.
        nbytes: bytes in the loaded model.
        transient: bytes needed beside that while it is made.
        mapped: bytes of it that stay a view of the file instead of taking memory of their own.
        offset: file offset of its first byte; targets are built in this order.
        form: how it is held where it stays quantized.
        decoded: whether it is made of codes and does not stay quantized.
    """

    name: str
    recipe: Recipe | None
    shape: Shape
    stored: str
    dtype: torch.dtype
    nbytes: int
    transient: int
    mapped: int
    offset: int
    form: Form | None = None
    decoded: bool = False

    @property
    def module(self) -> str:
        """Name of the module that holds it."""
        return self.name.rpartition(".")[0]

    @property
    def resident(self) -> str:
        """How it is held: the codes' dtype or GGML type, or the dtype's name."""
        return self.form.weights_dtype if self.form else str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class ComponentPlan:
    """One model that the file fills.

    Attributes:
        component: the pipeline component.
        cls: its class.
        config: the config it is made with.
        targets: its tensors, in file order.
        left_alone: buffers that the file does not hold and that keep the values of __init__.
        brings_buffers: whether some targets are buffers, which then need not be computed.
    """

    component: str
    cls: type[ModelMixin]
    config: Mapping[str, Any]
    targets: tuple[TargetTensor, ...]
    left_alone: tuple[str, ...]
    brings_buffers: bool = False


@dataclass(frozen=True)
class LoadPlan:
    """What loading a file will do.

    Attributes:
        header: the file's header.
        base: the base model.
        spec: the architecture.
        layout: how the file's keys are written.
        why: the keys that told so.
        prefix: the prefix that its keys carry.
        companions: what else it holds and is not read (kind → number of tensors).
        dropped: stored names that are known junk.
        layers: quantized layers by the stored name of their weight.
        quantization: where they are declared ("header", "markers", "legacy", "scales", "gguf"), "" where
            there are none.
        transformer: the model that replaces the pipeline's.
        siblings: models that it brings along.
        config_changes: config entries that differ from the base's because the file says so.
        dtype: compute dtype.
        device: where the weights go.
        use_mmap: whether the file is mapped.
        compute: how quantized layers compute.
        warnings: what the user should know, one sentence each.
        branch: what a part does that diffusers' class has not; None where no file of the architecture has one.
        variant: which network of the architecture it is, where there are several that look alike.
    """

    header: Header
    base: BaseModel
    spec: TransformerSpec
    layout: str
    why: str
    prefix: str
    companions: Mapping[str, int]
    dropped: tuple[str, ...]
    layers: Mapping[str, QuantizedLayer]
    quantization: str
    transformer: ComponentPlan
    siblings: tuple[ComponentPlan, ...]
    config_changes: Mapping[str, Any]
    dtype: torch.dtype
    device: torch.device
    use_mmap: bool
    compute: Compute
    warnings: tuple[str, ...]
    branch: Branch | None = None
    variant: Variant | None = None

    @property
    def parts(self) -> tuple[ComponentPlan, ...]:
        """The transformer and its siblings."""
        return (self.transformer, *self.siblings)

    @property
    def targets(self) -> tuple[TargetTensor, ...]:
        """The tensors of all parts."""
        return tuple(target for part in self.parts for target in part.targets)

    @property
    def zero_filled(self) -> tuple[str, ...]:
        """Targets that the file leaves out and that are zero by the architecture's definition."""
        return tuple(target.name for target in self.targets if target.recipe is None)

    @property
    def resident_bytes(self) -> int:
        """Bytes of all weights once loaded."""
        return sum(target.nbytes for target in self.targets)

    @property
    def mapped_bytes(self) -> int:
        """The part of resident_bytes that stays a view of the file."""
        return sum(target.mapped for target in self.targets)

    @property
    def peak_bytes(self) -> int:
        """Memory of its own that the load takes at most, without the views of the file."""
        return self.resident_bytes - self.mapped_bytes + max((t.transient for t in self.targets), default=0)
