"""Every option as data, once: the settings page, quicksettings, the API, a host's settings and the docs read this."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from transplant.errors import OptionError, nearest
from transplant.slots import DEFAULT

Control = Literal["dropdown", "checkbox", "text", "number", "multiselect"]
Effect = Literal["none", "base", "transformer", "reload", "page", "restart"]


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        key: its name in config.json and the API; SD.Next's own where SD.Next has it.
        default: its value until the user sets another.
        label: as shown.
        control: how it is shown.
        section: title of its section on the settings page.
        choices: fixed choices; "bases", "overrides" or "options" name lists that change while running.
        help: one sentence.
        effect: what a change does: nothing until used, loads a base model, swaps the transformer, reloads
            what is loaded, needs the page to be loaded again, or needs a restart.
        minimum: smallest number.
        maximum: largest number.
    """

    key: str
    default: Any
    label: str
    control: Control
    section: str
    choices: tuple[str, ...] | Literal["bases", "overrides", "options"] | None = None
    help: str = ""
    effect: Effect = "none"
    minimum: float | None = None
    maximum: float | None = None

    def checked(self, value: object, dynamic: Mapping[str, Sequence[str]] | None = None) -> Any:
        """The value as this option stores it.

        Args:
            value: what someone wants to set.
            dynamic: the current members of the lists that change while running; a list that is not
                given is not checked.

        Raises:
            OptionError: wrong type, not among the choices, out of range.
        """
        if self.control == "checkbox":
            return self._boolean(value)
        if self.control == "number":
            return self._number(value)
        if self.control == "multiselect":
            return self._several(value, dynamic or {})
        if not isinstance(value, str):
            raise OptionError(self.key, value, f"must be a text, not {type(value).__name__}")
        if self.control == "dropdown":
            self._check_choice(value, dynamic or {})
        elif "\0" in value or "\n" in value:
            raise OptionError(self.key, value, "must be one line")
        return value

    def _boolean(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise OptionError(self.key, value, f"must be true or false, not {value!r}")
        return value

    def _number(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise OptionError(self.key, value, f"must be a number, not {value!r}")
        if (self.minimum is not None and value < self.minimum) or (self.maximum is not None and value > self.maximum):
            raise OptionError(self.key, value, f"must be from {self.minimum:g} to {self.maximum:g}, not {value:g}")
        if isinstance(self.default, int) and value != int(value):
            raise OptionError(self.key, value, f"must be a whole number, not {value:g}")
        return int(value) if isinstance(self.default, int) else float(value)

    def _several(self, value: object, dynamic: Mapping[str, Sequence[str]]) -> list[str]:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in cast("list[object]", value)):
            raise OptionError(self.key, value, "must be a list of texts")
        items = list(dict.fromkeys(cast("list[str]", value)))
        for item in items:
            self._check_choice(item, dynamic)
        return items

    def _check_choice(self, value: str, dynamic: Mapping[str, Sequence[str]]) -> None:
        choices = dynamic.get(self.choices) if isinstance(self.choices, str) else self.choices
        if choices is not None and value not in choices:
            listed = choices if len(choices) <= SHOWN else [*dict.fromkeys([*nearest(value, choices), *choices])]
            shown = ", ".join(listed[:SHOWN]) + (", ..." if len(choices) > SHOWN else "")
            raise OptionError(self.key, value, f"there is no {value!r}; the choices are {shown or 'none yet'}")


SHOWN = 8
"""How many choices a refusal tells, those that are like the refused one first."""

MODELS, LOADING, OFFLOAD, FP8, QUANTIZATION = "Models", "Loading", "Offload", "FP8 storage", "Quantization"
FOLDERS, PICTURES, INTERFACE, TAKEOVERS = "Folders", "Pictures", "User interface", "In SD.Next"

OPTIONS: tuple[Option, ...] = (
    Option(
        "sd_model_checkpoint", "", "Base model", "dropdown", MODELS, "bases",
        "The diffusers pipeline that everything but the transformer comes from.", "base",
    ),
    Option(
        "sd_unet", DEFAULT, "UNET model", "dropdown", MODELS, "overrides",
        "The file that replaces the base model's transformer; Default is the base model's own.", "transformer",
    ),
    Option(
        "sd_unet_secondary", DEFAULT, "UNET model secondary", "dropdown", MODELS, "overrides",
        "The file for the second transformer of pipelines that have two: the low-noise one of Wan 2.2, the "
        "unconditional one of Ideogram 4.", "transformer",
    ),
    Option(
        "transplant_other_files", "mark", "Files for other base models", "dropdown", MODELS, ("mark", "hide", "show"),
        "What the lists of files do with a LoRA, a VAE or a transformer of another architecture than the loaded base "
        "model's: say what it is, leave it out, or neither.",
    ),
    Option(
        "transplant_load_at_once", True, "Load a choice at once", "checkbox", MODELS,
        help="Off: a base model or file that is chosen is loaded with the next picture.",
    ),
    Option(
        "transplant_hub_cache", True, "List base models of the Hugging Face cache", "checkbox", MODELS,
        help="Also offer pipelines that were downloaded by other programs.",
    ),
    Option(
        "cuda_dtype", "auto", "Compute dtype", "dropdown", LOADING, ("auto", "bf16", "fp16", "fp32"),
        "Auto is bf16 on a GPU that computes in it, else fp16; fp32 on the CPU.", "reload",
    ),
    Option(
        "transplant_mmap", "auto", "Map files into memory", "dropdown", LOADING, ("auto", "on", "off"),
        "On keeps weights in their file where that is possible; off reads files from start to end, for network "
        "drives. Auto is off on Windows.", "reload",
    ),
    Option(
        "unet_cache", 0, "Transformers kept in RAM", "number", LOADING,
        help="That many of the transformers last used stay in RAM, for changing back and forth at once.",
        minimum=0, maximum=16,
    ),
    Option(
        "diffusers_offload_mode", "none", "Model offload mode", "dropdown", OFFLOAD, ("none", "model", "group"),
        "Where GPU memory is short: with model the parts of the pipeline rest in RAM and each comes whole while it "
        "computes, with group layer by layer, which is slower and takes least. Needs CUDA or XPU.", "reload",
    ),
    Option(
        "group_offload_stream", False, "Group offload with streams", "checkbox", OFFLOAD,
        help="The next layers come while one computes: faster, on CUDA alone, with a pinned copy of the weights in "
        "RAM.", effect="reload",
    ),
    Option(
        "fp8_storage", False, "FP8 storage", "checkbox", FP8,
        help="Weights of Linears and convolutions rest in float8, half of bf16, and compute in the compute dtype. "
        "Needs CUDA or XPU; quantized files stay as they are.", effect="reload",
    ),
    Option(
        "sdnq_quantize_weights_mode", "none", "Quantize on load", "dropdown", QUANTIZATION,
        ("none", "int8", "float8_e4m3fn", "int6", "uint5", "uint4", "int4", "float4_e2m1fn", "uint3", "uint2"),
        "SDNQ quantizes the Linears of float files while they load; quantized files stay as they are.", "reload",
    ),
    Option(
        "sdnq_quantize_weights_group_size", 0, "Group size", "number", QUANTIZATION,
        help="Columns that share a scale: 0 for SDNQ's choice, -1 for a row.", effect="reload",
        minimum=-1, maximum=4096,
    ),
    Option(
        "sdnq_use_svd", False, "Keep a low-rank part (SVD)", "checkbox", QUANTIZATION,
        help="Closer to the float weights, slower to load.", effect="reload",
    ),
    Option(
        "sdnq_svd_rank", 32, "SVD rank", "number", QUANTIZATION, help="Rank of that part.", effect="reload",
        minimum=1, maximum=512,
    ),
    Option(
        "sdnq_use_hadamard", False, "Rotate weights (Hadamard)", "checkbox", QUANTIZATION,
        help="Spreads outliers over the columns before they are quantized.", effect="reload",
    ),
    Option(
        "sdnq_modules_to_not_convert", "", "Modules to leave", "text", QUANTIZATION,
        help="Names or patterns, separated by commas, that quantize on load leaves, beside those that SDNQ knows of "
        "the model's class.", effect="reload",
    ),
    Option(
        "sdnq_modules_dtype_dict", "{}", "Modules in another dtype", "text", QUANTIZATION,
        help='As JSON, for example {"int8": ["attention", "layers.0.*"]}.', effect="reload",
    ),
    Option(
        "sdnq_use_quantized_matmul", False, "Quantized matmul", "checkbox", QUANTIZATION,
        help="Quantized layers multiply in int8 or fp8 instead of dequantizing: faster on many GPUs, less exact.",
        effect="reload",
    ),
    Option(
        "sdnq_quantized_matmul_mode", "auto", "Quantized matmul dtype", "dropdown", QUANTIZATION,
        ("auto", "int8", "float8_e4m3fn", "float16"), "Auto is what suits the codes.", "reload",
    ),
    Option(
        "sdnq_dequantize_fp32", True, "Dequantize in fp32", "checkbox", QUANTIZATION,
        help="Keep fp32 scales; off is faster and rounds more often.", effect="reload",
    ),
    Option(
        "sdnq_dequantize_compile", False, "Compile dequantization", "checkbox", QUANTIZATION,
        help="With torch.compile; needs Triton on a GPU or a C++ compiler on the CPU.", effect="restart",
    ),
    Option(
        "diffusers_dir", "", "Folder with base models", "text", FOLDERS,
        help="Empty for Diffusers in the models folder.",
    ),
    Option(
        "unet_dir", "", "Folder with UNET files", "text", FOLDERS, help="Empty for UNET in the models folder.",
    ),
    Option(
        "outdir_samples", "", "Folder for pictures", "text", FOLDERS, help="Empty for outputs in the data folder.",
        effect="restart",
    ),
    Option(
        "samples_save", True, "Save every picture", "checkbox", PICTURES,
        help="Pictures that are not saved are gone when the program ends.",
    ),
    Option(
        "quicksettings_list", ["sd_model_checkpoint", "sd_unet"], "Quicksettings", "multiselect", INTERFACE, "options",
        "Options shown at the top of the page, in this order.", "page",
    ),
)  # fmt: skip
"""In the order of the settings page. Options that a host has already are not registered again there."""


HOST_OPTIONS: tuple[Option, ...] = (
    Option(
        "transplant_loader", True, "Load UNET files with Transplant", "checkbox", TAKEOVERS,
        help="Off: the host's own loader reads .safetensors files.", effect="transformer",
    ),
    Option(
        "transplant_gguf", True, "Load GGUF files with Transplant", "checkbox", TAKEOVERS,
        help="Off: the host's own loader reads .gguf files.", effect="transformer",
    ),
    Option(
        "transplant_swap", True, "Swap the transformer in place", "checkbox", TAKEOVERS,
        help="Another UNET model replaces the transformer alone. Off: the host loads the whole model again.",
        effect="transformer",
    ),
)  # fmt: skip
"""What only a host has: which of its loads are taken over. All off leaves the host as it is."""

IN_HOST = ("transplant_mmap", "fp8_storage")
"""Keys of the options that a host lacks and that are registered there, too."""


def option(key: str) -> Option:
    """The option called `key`. Raises OptionError where there is none."""
    found = next((option for option in OPTIONS if option.key == key), None)
    if found is None:
        raise OptionError(key, None, "there is no such option")
    return found
