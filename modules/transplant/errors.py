"""The error tree. Every message says what is wrong, with which tensor or file, and what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path


def printable(text: str) -> str:
    """`text` with control characters and lone surrogates escaped, fit for a message or a log line."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def counted(number: int, noun: str) -> str:
    """`1 tensor`, `1,000 tensors`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def sample(names: Sequence[str], limit: int = 5) -> str:
    """Up to `limit` names as one phrase, with how many more there are."""
    shown = ", ".join(printable(name) for name in names[:limit])
    more = len(names) - limit
    return f"{shown} and {more} more" if more > 0 else shown


def nearest(name: str, known: Sequence[str], limit: int = 3) -> list[str]:
    """Up to `limit` of the known names that are like `name`: those that hold it first, then by likeness."""
    wanted = name.casefold()
    holding = [known_name for known_name in known if wanted and wanted in known_name.casefold()]
    alike = difflib.get_close_matches(name, known, limit)
    return list(dict.fromkeys([*holding, *alike]))[:limit]


OUT_OF_MEMORY = "there was not enough memory: choose a smaller file, size or dtype, or close other programs"

_SHORT = ("out of memory", "not enough memory", "allocate memory", "Storage size calculation overflowed", "buffer size")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, Python's or torch's, says that memory was short."""
    if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__:
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _SHORT)


class TransplantError(Exception):
    """Base of every error that Transplant raises on purpose."""


class BaseModelError(TransplantError):
    """The base model's folder cannot be used: no model_index.json, no such component, unknown class."""


class OptionError(TransplantError):
    """A value that an option cannot take.

    Attributes:
        key: the option's key.
        value: the value that was refused.
        reason: why, without the key.
    """

    def __init__(self, key: str, value: object, reason: str) -> None:
        super().__init__(f"{key}: {reason}")
        self.key = key
        self.value = value
        self.reason = reason


class MissingPackage(TransplantError):
    """A library that is needed is not installed.

    Attributes:
        package: its import name.
    """

    def __init__(self, package: str, purpose: str) -> None:
        super().__init__(
            f"the Python package {package!r} is not installed: {purpose}. "
            "Alone, start Transplant with extension.py, which installs it; in a host, update the host"
        )
        self.package = package


class AdapterRefused(TransplantError):
    """A LoRA that cannot be right on weights that are stored narrower than they compute; nothing was changed.

    Attributes:
        problem: why.
        remedy: what the user can do about it.
    """

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"the LoRA cannot be used on these weights: {problem}; {remedy}")
        self.problem = problem
        self.remedy = remedy


class ConversionError(TransplantError):
    """A folder that cannot be written: its place is taken, or the disk is too small."""


class LoadCancelled(TransplantError):
    """The user cancelled a load. What was loaded before is unchanged or restored."""


class OverrideArchMismatch(TransplantError):
    """A chosen file that cannot replace the transformer. The one recoverable error of a load.

    Attributes:
        file: path of the refused file.
        problem: what is wrong, without the file's name.
        remedy: what the user can do about it.
    """

    def __init__(self, file: Path | str, problem: str, remedy: str) -> None:
        self.file = Path(file)
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{printable(self.file.name)}: {problem}. {remedy}")


class UnreadableFile(OverrideArchMismatch):
    """The bytes are not a complete, valid safetensors or GGUF file."""


class NotACheckpoint(UnreadableFile):
    """The file is something else: a web page, a git-lfs pointer, a pickle, an archive, empty.

    Attributes:
        found: what the file really is.
    """

    def __init__(self, file: Path | str, found: str, remedy: str) -> None:
        expected = "GGUF" if Path(file).suffix.lower() == ".gguf" else "safetensors"
        super().__init__(file, f"is not a {expected} file but {found}", remedy)
        self.found = found


class TruncatedFile(UnreadableFile):
    """The file ends before its header or its last tensor does.

    Attributes:
        found_bytes: the file's size.
        expected_bytes: the size that the header promises.
        where: "header" or "data".
    """

    def __init__(self, file: Path | str, found_bytes: int, expected_bytes: int, where: str) -> None:
        at_least = "at least " if where == "header" else ""
        cut = "inside the header" if where == "header" else "inside the tensor data"
        super().__init__(
            file,
            f"is incomplete, cut {cut}: {found_bytes:,} of {at_least}{expected_bytes:,} bytes",
            "Download it again",
        )
        self.found_bytes = found_bytes
        self.expected_bytes = expected_bytes
        self.where = where


class TrailingBytes(UnreadableFile):
    """The file is longer than its header promises.

    Attributes:
        found_bytes: the file's size.
        expected_bytes: the size that the header promises.
    """

    def __init__(self, file: Path | str, found_bytes: int, expected_bytes: int) -> None:
        super().__init__(
            file,
            f"has {counted(found_bytes - expected_bytes, 'byte')} after its last tensor "
            f"({found_bytes:,} bytes, the header promises {expected_bytes:,})",
            "It was damaged or appended to: download it again",
        )
        self.found_bytes = found_bytes
        self.expected_bytes = expected_bytes


class BadHeader(UnreadableFile):
    """The header contradicts itself or its format.

    Attributes:
        tensor: the tensor whose entry is wrong, or None where the header as a whole is.
    """

    def __init__(self, file: Path | str, detail: str, tensor: str | None = None) -> None:
        where = f"tensor {printable(tensor)}: " if tensor is not None else ""
        super().__init__(file, f"has a broken header: {where}{detail}", "Download it again, or ask its author")
        self.tensor = tensor


class UnknownDtype(UnreadableFile):
    """A tensor is stored in a dtype that is not known.

    Attributes:
        tensor: the tensor's name.
        dtype: the dtype as written in the header.
    """

    def __init__(self, file: Path | str, tensor: str, dtype: str, known: Sequence[str] = ()) -> None:
        super().__init__(
            file,
            f"tensor {printable(tensor)} has the dtype {printable(dtype)!r}, which cannot be loaded",
            f"Convert it to one of: {', '.join(known)}" if known else "Convert it to BF16, F16 or F32",
        )
        self.tensor = tensor
        self.dtype = dtype


class MissingShards(UnreadableFile):
    """Some of the files that make up one checkpoint are not there.

    Attributes:
        missing: their names.
        count: how many files the set has.
    """

    def __init__(self, file: Path | str, missing: Sequence[str], count: int) -> None:
        lacking = "is" if len(missing) == 1 else "are"
        super().__init__(
            file,
            f"stands for {counted(count, 'file')}, of which {sample(missing)} {lacking} not there",
            "Download the rest into the same folder",
        )
        self.missing = tuple(missing)
        self.count = count


class BadIndex(UnreadableFile):
    """The index of a checkpoint in several files cannot be used."""

    def __init__(self, file: Path | str, detail: str) -> None:
        super().__init__(file, detail, "Download the index again, or choose the first of the files themselves")


class FileChanged(UnreadableFile):
    """The file on the disk is not the one that was planned: its size or time differs."""

    def __init__(self, file: Path | str) -> None:
        super().__init__(file, "was changed on disk between reading its header and loading it", "Choose it again")


class DuplicateTensor(UnreadableFile):
    """Two stored tensors claim one name once prefixes and wrappers are taken off.

    Attributes:
        tensor: the name that both claim.
        stored: the two stored names.
    """

    def __init__(self, file: Path | str, tensor: str, stored: tuple[str, str]) -> None:
        super().__init__(
            file,
            f"holds {printable(tensor)} twice, as {printable(stored[0])} and as {printable(stored[1])}",
            "It cannot be told which of them is meant: use a file that holds one",
        )
        self.tensor = tensor
        self.stored = stored


class MixedPrefixes(OverrideArchMismatch):
    """Keys under more than one prefix, of which only one can be the transformer.

    Attributes:
        prefix: the prefix that most keys carry ("" for none).
        strangers: stored names outside it that belong to no known companion.
    """

    def __init__(self, file: Path | str, prefix: str, strangers: Sequence[str]) -> None:
        named = f"the prefix {prefix!r}" if prefix else "no prefix"
        super().__init__(
            file,
            f"mixes key prefixes: most keys have {named}, but {len(strangers)} do not follow it "
            f"and belong to no known part of a bundle ({sample(strangers)})",
            "Use a file that holds the transformer alone, or a bundle with the usual prefixes",
        )
        self.prefix = prefix
        self.strangers = tuple(strangers)


class NotATransformer(OverrideArchMismatch):
    """A checkpoint of another kind: LoRA, VAE, text encoder, ControlNet and the like.

    Attributes:
        kind: what the file is.
        why: the key or keys that show it.
    """

    def __init__(self, file: Path | str, kind: str, why: str, remedy: str) -> None:
        article = "an" if kind.startswith(("I", "i")) else "a"
        super().__init__(file, f"is {article} {kind}, not a transformer ({why})", remedy)
        self.kind = kind
        self.why = why


class WrongArchitecture(OverrideArchMismatch):
    """The file's network is another one than the base model's.

    Attributes:
        expected: architecture of the base model.
        found: architecture of the file, or None where no known one fits.
    """

    def __init__(self, file: Path | str, expected: str, found: str | None, why: str) -> None:
        what = f"holds a transformer of the {found} family" if found else "is of no architecture known here"
        remedy = (
            f"Choose a base model of the {found} family first, or a file made for {expected}"
            if found
            else f"Choose a file made for {expected}"
        )
        super().__init__(file, f"{what} ({why}), the base model is {expected}", remedy)
        self.expected = expected
        self.found = found


class ShapeMismatch(OverrideArchMismatch):
    """A tensor of another shape than the base model's config asks for.

    Attributes:
        tensor: the target tensor's name.
        stored: the stored name(s) it comes from.
        expected: the shape that the model has.
        found: the shape in the file.
        count: how many tensors differ altogether.
    """

    def __init__(
        self,
        file: Path | str,
        tensor: str,
        stored: str,
        expected: tuple[int, ...],
        found: tuple[int, ...],
        count: int,
    ) -> None:
        more = f"; {count} tensors differ altogether" if count > 1 else ""
        super().__init__(
            file,
            f"is of another size than the base model: tensor {printable(stored)} has shape {list(found)}, "
            f"{tensor} of the model has {list(expected)}{more}",
            "Choose a base model of this file's size, or a file of the base model's",
        )
        self.tensor = tensor
        self.stored = stored
        self.expected = expected
        self.found = found
        self.count = count


class InputMismatch(ShapeMismatch):
    """A network that takes text or latents of another width than the base model's other components give.

    Attributes:
        what: "text" or "latents".
    """

    def __init__(
        self, file: Path | str, tensor: str, stored: str, expected: tuple[int, ...], found: tuple[int, ...],
        count: int, what: str, giver: str,
    ) -> None:  # fmt: skip
        super().__init__(file, tensor, stored, expected, found, count)
        self.problem = (
            f"takes {what} {found[1]} wide, the base model's {giver} gives {expected[1]}: {printable(stored)} has "
            f"shape {list(found)}, {tensor} of the base model's has {list(expected)}"
        )
        self.what = what
        self.remedy = "Choose a base model of this file's size and variant, or a file made for this base model"
        self.args = (f"{printable(self.file.name)}: {self.problem}. {self.remedy}",)


class MissingTensors(OverrideArchMismatch):
    """The file lacks tensors that the model needs.

    Attributes:
        names: the target tensors' names.
    """

    def __init__(self, file: Path | str, names: Sequence[str], architecture: str, present: Sequence[str] = ()) -> None:
        """`present` are the names of the target tensors that the file does hold."""
        super().__init__(
            file,
            f"lacks {counted(len(names), 'tensor')} of {architecture} ({_by_block(names, present)})",
            "It is incomplete or a variant that is not supported: use a complete file",
        )
        self.names = tuple(names)


def _by_block(names: Sequence[str], present: Sequence[str]) -> str:
    """Names as one phrase; blocks of which nothing is there are named once each."""
    held = {_block_of(name) for name in present}
    blocks = list(dict.fromkeys(block for name in names if (block := _block_of(name)) and block not in held))
    others = [name for name in names if _block_of(name) not in blocks]
    return ", ".join([*([f"all of {sample(blocks, 12)}"] if blocks else []), *([sample(others)] if others else [])])


def _block_of(name: str) -> str | None:
    """`layers.3` of `layers.3.attention.to_q.weight`."""
    found = re.match(r"(\w+\.\d+)\.", name)
    return found[1] if found else None


class UnexpectedTensors(OverrideArchMismatch):
    """The file holds tensors that have no place in the model.

    Attributes:
        names: the stored names.
    """

    def __init__(self, file: Path | str, names: Sequence[str], architecture: str) -> None:
        super().__init__(
            file,
            f"holds {counted(len(names), 'tensor')} without a place in {architecture} ({sample(names)})",
            "Leaving them out would change the result: use a file made for this model",
        )
        self.names = tuple(names)


class UnsupportedQuantization(OverrideArchMismatch):
    """Quantized layers in a form that cannot be loaded exactly.

    Attributes:
        formats: the formats found, each with its count of layers.
    """

    def __init__(self, file: Path | str, formats: Sequence[str], why: str, remedy: str) -> None:
        problem = f"is quantized in a form that cannot be loaded here: {', '.join(formats)} ({why})"
        super().__init__(file, problem, remedy)
        self.formats = tuple(formats)


class NonFiniteWeight(OverrideArchMismatch):
    """A weight that holds NaN or infinity and is to be quantized: its scales could not be either.

    Attributes:
        tensor: the target tensor's name.
    """

    def __init__(self, file: Path | str, tensor: str) -> None:
        super().__init__(
            file,
            f"cannot be quantized: {printable(tensor)} holds NaN or infinity",
            "The file is damaged or was saved wrongly: download it again, or choose another one",
        )
        self.tensor = tensor


class SavedQuantizedFolder(OverrideArchMismatch):
    """A model's own folder whose weights are quantized: it is loaded as it is, not planned over another's config.

    Attributes:
        method: whose quantization it is, as its config says.
    """

    def __init__(self, folder: Path | str, method: str) -> None:
        super().__init__(
            folder,
            f"is the folder of a model that was saved quantized ({method}); such a folder cannot be chosen as a file",
            "Choose the single file that it was made from, put the folder in the place of the transformer in a copy of "
            "the base model, or load it with transplant.load_transformer",
        )
        self.method = method


class ConverterFailed(OverrideArchMismatch):
    """The architecture's key converter does not understand the file's keys.

    Attributes:
        converter: the converter's name.
        detail: what it said.
    """

    def __init__(self, file: Path | str, converter: str, detail: str) -> None:
        super().__init__(
            file,
            f"has keys that {converter} cannot convert: {detail}",
            "It is a variant that is not supported: use a file in the ComfyUI, original or diffusers layout",
        )
        self.converter = converter
        self.detail = detail
