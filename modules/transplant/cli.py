"""The command line: serve, inspect, load, convert, generate.

Exit status: 0 done (inspect: the file can be loaded), 2 the file was refused, 1 wrong call or another error.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from transplant.errors import (
    OUT_OF_MEMORY,
    BaseModelError,
    OptionError,
    OverrideArchMismatch,
    TransplantError,
    is_out_of_memory,
    printable,
)
from transplant.request import LIMITS, Request, make_request
from transplant.samplers import DEFAULT_SAMPLER, SAMPLERS

if TYPE_CHECKING:
    from transplant.base_model import BaseModel
    from transplant.hosts.base import LoadSettings
    from transplant.sdnq_bridge import QuantizeOnLoad

OK, FAILED, REFUSED = 0, 1, 2

DESCRIPTION = "Put a single-file diffusion transformer into a diffusers pipeline."


class _Parser(argparse.ArgumentParser):
    """argparse exits with 2 on a wrong call, which here means that a file was refused."""

    def error(self, message: str) -> NoReturn:
        """See argparse."""
        self.print_usage(sys.stderr)
        self.exit(FAILED, f"{self.prog}: {message}\n")


def main(argv: Sequence[str]) -> int:
    """Run one command.

    Args:
        argv: the arguments without the program's name; no command or an option first means `serve`.

    Returns:
        The exit status.
    """
    arguments = list(argv)
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments.insert(0, "serve")
    if arguments[0] == "serve":
        from transplant.hosts.standalone.server import serve

        return serve(arguments[1:])
    try:
        chosen = _parser().parse_args(arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else FAILED
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("transplant").setLevel(logging.INFO if chosen.command == "generate" else logging.WARNING)
    logging.getLogger("sdnq").setLevel(logging.ERROR)  # it warns of kernels that nobody asked for
    command: Callable[[argparse.Namespace], int] = chosen.run
    try:
        return command(chosen)
    except OverrideArchMismatch as refusal:
        return _refused(refusal, chosen)
    except (TransplantError, ValueError, OSError) as error:
        print(f"{_PROGRAM}: {error}", file=sys.stderr)
        return FAILED
    except (MemoryError, RuntimeError) as error:  # the latter torch's
        text = str(error).strip().splitlines()[0] if str(error).strip() else "no reason given"
        text = OUT_OF_MEMORY if is_out_of_memory(error) else f"{type(error).__name__}: {text}; try other settings"
        print(f"{_PROGRAM}: {text}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"{_PROGRAM}: stopped", file=sys.stderr)
        return FAILED


_PROGRAM = "extension.py"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=_PROGRAM, description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    commands.add_parser("serve", help="the WebUI (default); serve --help lists its options", add_help=False)

    inspect = commands.add_parser("inspect", help="what a file holds and whether it can be loaded; from its header")
    inspect.add_argument("file", type=_existing_file, help="a file, or a folder: lists what is in it")
    inspect.add_argument("--base", help="the base model it is meant for: a diffusers folder or a cached repository id")
    inspect.add_argument("--json", action="store_true", help="print JSON")
    _loading_options(inspect)
    inspect.set_defaults(run=_inspect)

    load = commands.add_parser("load", help="load a file over a base model; reports time and memory")
    load.add_argument("file", type=_existing_file)
    load.add_argument("--base", required=True)
    load.add_argument("--json", action="store_true", help="print JSON")
    _loading_options(load)
    load.set_defaults(run=_load)

    convert = commands.add_parser(
        "convert", help="write what a file holds as a folder of diffusers', whole or not at all"
    )
    convert.add_argument("file", type=_existing_file)
    convert.add_argument("out", type=Path, help="the folder to write; it must not exist, or be empty")
    convert.add_argument("--base", help="the base model it is for; without it the architecture's published size")
    convert.add_argument(
        "--dtype", default="auto", choices=("auto", "bf16", "fp16", "fp32"), help="auto: the file's own"
    )
    convert.add_argument("--force", action="store_true", help="replace a folder that holds a model and nothing else")
    convert.add_argument("--json", action="store_true", help="print JSON")
    _quantizing_options(convert, "--weights", "--quantize")
    convert.set_defaults(run=_convert)

    generate = commands.add_parser("generate", help="make a picture")
    generate.add_argument("--base", required=True)
    generate.add_argument("--unet", type=_existing_file, help="the file that replaces the base model's transformer")
    generate.add_argument("--unet-secondary", type=_existing_file, help="the same for a second transformer")
    generate.add_argument("--prompt", help="needed with every base model but the built-in one")
    generate.add_argument("--negative-prompt", default="")
    generate.add_argument("--steps", type=_limited("steps"), default=Request.steps)
    generate.add_argument("--guidance", type=_limited("guidance"), default=Request.guidance)
    generate.add_argument("--width", type=_limited("width"), help="pixels; by default what base model and device suit")
    generate.add_argument("--height", type=_limited("height"), help="the same")
    generate.add_argument("--seed", type=_limited("seed"), default=-1, help="-1, the default, draws one")
    generate.add_argument("--sampler", choices=[DEFAULT_SAMPLER, *SAMPLERS], default=DEFAULT_SAMPLER)
    generate.add_argument(
        "--frames", type=_limited("frames"), default=1, help="of a video, where the pipeline makes one"
    )
    generate.add_argument("-o", "--output", type=_png, default=Path("out.png"), help="a .png file, default out.png")
    generate.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    generate.add_argument("--offload", choices=("none", "model", "group"), default="none", help="see docs/options.md")
    generate.add_argument("--offload-stream", action="store_true", help="with group: the next layers come meanwhile")
    _loading_options(generate)
    generate.set_defaults(run=_generate)
    return parser


def _loading_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps, xpu")
    parser.add_argument("--dtype", default="auto", choices=("auto", "bf16", "fp16", "fp32"), help="compute dtype")
    parser.add_argument("--fp8-storage", action="store_true", help="let weights rest in float8_e4m3fn (CUDA, XPU)")
    _quantizing_options(parser, "--quantize")
    parser.add_argument("--quantized-matmul", action="store_true", help="quantized layers multiply in int8 or fp8")
    parser.add_argument("--no-mmap", action="store_true", help="read files from start to end instead of mapping them")


def _quantizing_options(parser: argparse.ArgumentParser, *names: str) -> None:
    """How float files are quantized while they load; the names are those of SD.Next's options."""
    parser.add_argument(
        *names,
        dest="quantize",
        metavar="DTYPE",
        help="quantize float files with SDNQ while they load: int8, uint4, ...",
    )
    parser.add_argument("--group-size", type=_whole(-1, 1 << 20), default=0, help="columns a scale; -1: a row")
    parser.add_argument("--svd-rank", type=_whole(0, 4096), default=0, help="keep a low-rank part of this rank")
    parser.add_argument("--hadamard", action="store_true", help="rotate weights before they are quantized")
    parser.add_argument("--modules-to-not-convert", default="", metavar="NAMES", help="left as they are: a,b.0.*,c")
    parser.add_argument("--modules-dtype", default="{}", metavar="JSON", help='other dtypes: {"int8": ["a", "b.0.*"]}')


def _quantize_on_load(arguments: argparse.Namespace) -> QuantizeOnLoad | None:
    from transplant.hosts.base import module_names, modules_by_dtype
    from transplant.sdnq_bridge import QuantizeOnLoad
    from transplant.sdnq_names import Keys, check_names

    other_dtypes = modules_by_dtype("--modules-dtype", arguments.modules_dtype)
    if not arguments.quantize:
        return None
    wanted = QuantizeOnLoad(
        arguments.quantize, arguments.group_size, arguments.svd_rank > 0, arguments.svd_rank or 32, arguments.hadamard,
        module_names(arguments.modules_to_not_convert), other_dtypes,
    )  # fmt: skip
    check_names(wanted, Keys("--quantize", "--modules-to-not-convert", "--modules-dtype"), False)
    return wanted


def _settings(arguments: argparse.Namespace) -> LoadSettings:
    from transplant.hosts.base import default_settings
    from transplant.sdnq_bridge import Compute

    quantize = _quantize_on_load(arguments)
    matmul = "auto" if arguments.quantized_matmul else ""
    compute = Compute(quantized_matmul=matmul, fp8_storage=arguments.fp8_storage, quantize=quantize)
    return default_settings(arguments.device, arguments.dtype, False if arguments.no_mmap else None, compute)


def _whole(least: int, most: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{value} is not from {least} to {most}")
        return value

    return number


def _limited(name: str) -> Callable[[str], float]:
    """A number as the page and the API take it, too."""

    def number(text: str) -> float:
        try:
            return LIMITS[name].checked(name, int(text) if LIMITS[name].multiple else float(text))
        except OptionError:
            raise argparse.ArgumentTypeError(f"{text} is not {LIMITS[name]}") from None

    return number


def _png(text: str) -> Path:
    if Path(text).suffix.lower() != ".png":
        raise argparse.ArgumentTypeError(f"{text} does not end in .png")
    return Path(text)


def _existing_file(text: str) -> Path:
    path = Path(text)
    try:
        path.stat()
    except FileNotFoundError:
        raise argparse.ArgumentTypeError(f"there is no file {text}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise argparse.ArgumentTypeError(f"{text[:80]} cannot be read ({reason})") from None
    return path


def _inspect(arguments: argparse.Namespace) -> int:
    from transplant.checkpoint.shards import model_in
    from transplant.inspection import inspect_file
    from transplant.view import file_groups, file_rows, group_table, table

    if arguments.file.is_dir() and model_in(arguments.file) is None:
        return _list(arguments)
    if arguments.base:
        return _inspect_over_base(arguments)
    found = inspect_file(arguments.file)
    if arguments.json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        rows = file_rows(found.header, found.keys, found.detection)
        print(f"{table(rows)}\n\n{group_table(file_groups(found.header, found.keys))}")
    return OK


def _list(arguments: argparse.Namespace) -> int:
    """What lies in a folder: every checkpoint with its kind and architecture."""
    from transplant.inventory import Inventory, checkpoints_in, default_cache
    from transplant.view import inventory_json, inventory_table

    entries = Inventory(default_cache()).look_at(checkpoints_in(arguments.file))
    told = json.dumps(inventory_json(entries), indent=2) if arguments.json else inventory_table(arguments.file, entries)
    print(told)
    return OK


def _inspect_over_base(arguments: argparse.Namespace) -> int:
    from transplant.base_model import read_base
    from transplant.inspection import inspect_over_base
    from transplant.slots import PRIMARY
    from transplant.view import file_rows, group_table, plan_groups, plan_rows, table

    base = read_base(arguments.base)
    component = PRIMARY.component_in(base) or PRIMARY.components[0]
    found = inspect_over_base(arguments.file, base, component, _settings(arguments))
    if found.plan is None:
        assert found.refusal is not None
        if not arguments.json:
            print(table(file_rows(found.header, found.keys, found.detection)))
        return _refused(found.refusal, arguments, found.as_json())
    if arguments.json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        print(f"{table(plan_rows(found.plan))}\n\n{group_table(plan_groups(found.plan))}")
    return OK


def _load(arguments: argparse.Namespace) -> int:
    from transplant.build import build
    from transplant.memory import anonymous_bytes
    from transplant.plan import plan
    from transplant.view import plan_json, plan_rows, size, table

    settings = _settings(arguments)
    start = time.perf_counter()
    planned = plan(
        arguments.file,
        arguments.base,
        dtype=settings.dtype,
        device=settings.device,
        use_mmap=settings.use_mmap,
        compute=settings.compute,
    )
    planning = time.perf_counter() - start
    before = anonymous_bytes()
    built = build(planned)
    grown = max(anonymous_bytes() - before, 0)
    if arguments.json:
        figures = {"plan_seconds": planning, "build_seconds": built.seconds, "memory_bytes": grown}
        print(json.dumps({**plan_json(planned), **figures}, indent=2))
    else:
        rows = plan_rows(planned)[:-1]
        rows.append(("loaded", f"planned in {planning:.2f} s, built in {built.seconds:.2f} s"))
        rows.append(("memory", f"{size(grown)} of its own on the CPU, {size(planned.mapped_bytes)} mapped"))
        print(table(rows))
    return OK


def _convert(arguments: argparse.Namespace) -> int:
    from transplant.conversion import convert
    from transplant.hosts.base import default_settings
    from transplant.view import size, table

    start = time.perf_counter()
    dtype = None if arguments.dtype == "auto" else default_settings("cpu", arguments.dtype).dtype
    made = convert(
        arguments.file, arguments.out, base=arguments.base, dtype=dtype, quantize=_quantize_on_load(arguments),
        force=arguments.force,
    )  # fmt: skip
    loads = made.needs_transplant or "SDNQ's load_sdnq_model"
    if arguments.json:
        told = {"folder": str(made.folder), "bytes": made.nbytes, "warnings": list(made.plan.warnings)}
        print(json.dumps(told | {"needs_transplant": made.needs_transplant or None}, indent=2))
        return OK
    rows = [("folder", f"{made.folder} ({size(made.nbytes)}, {time.perf_counter() - start:.1f} s)")]
    rows += [
        (
            "loads with",
            f"Transplant only: {loads}" if made.needs_transplant else f"Transplant, or exactly too with {loads}",
        )
    ]
    rows += [("siblings", ", ".join(part.component for part in made.plan.siblings))] if made.plan.siblings else []
    print(table(rows + [("warning", warning) for warning in made.plan.warnings]))
    return OK


def _generate(arguments: argparse.Namespace) -> int:
    from transplant.base_model import read_base
    from transplant.checkpoint.shards import title
    from transplant.digest import Digests
    from transplant.generate import generate
    from transplant.hosts.base import PlainHost
    from transplant.offload import Offload, refusal_on
    from transplant.pictures import png_bytes
    from transplant.pipeline import Session
    from transplant.request import infotext
    from transplant.slots import SLOTS, Override
    from transplant.storage import write_atomically

    _check_writable(arguments.output.parent)
    offload = Offload(arguments.offload, arguments.offload_stream)
    settings = _settings(arguments)
    if offload.mode != "none" and (reason := refusal_on(settings.device)):
        print(f"offloading has no effect: it {reason}", file=sys.stderr)
    settings, base = settings.offloaded(offload), read_base(arguments.base)
    request = _request(arguments, base.path, settings.device.type == "cpu")
    _check_files(arguments, base, settings)
    session = Session(PlainHost(settings))
    files = [Override(title(file), file) if file else None for file in (arguments.unet, arguments.unet_secondary)]
    outcome = session.load_base(arguments.base, *files)
    if outcome.refused is not None:
        raise outcome.refused
    assert session.pipeline is not None and session.base is not None
    names = {"Model": session.base.path.name}
    for kind, file in zip(SLOTS, files, strict=True):
        if file is not None:
            names |= {kind.title: file.name, f"{kind.title} hash": Digests().short(file.path)}
    for picture in generate(session.pipeline, request):
        text = infotext(request, picture.seed, names)
        write_atomically(arguments.output, png_bytes(picture.image, text, picture.more_frames))
    print(f"seed {request.seed}", file=sys.stderr)
    print(arguments.output)
    return OK


def _request(arguments: argparse.Namespace, base: Path, on_cpu: bool) -> Request:
    """What to draw; what is not said is as on a new page."""
    from transplant.hosts.standalone.starting import start_for

    start = start_for(base, on_cpu)
    prompt = start.prompt if arguments.prompt is None else arguments.prompt
    if arguments.prompt is None and not prompt:
        raise OptionError("--prompt", None, "say what to draw")
    return make_request(
        prompt, arguments.negative_prompt, arguments.steps, arguments.guidance, arguments.width or start.width,
        arguments.height or start.height, arguments.seed, 1, arguments.sampler, arguments.frames,
    )  # fmt: skip


_FILES = {"primary": "--unet", "secondary": "--unet-secondary"}


def _check_files(arguments: argparse.Namespace, base: BaseModel, settings: LoadSettings) -> None:
    """Plan the files before the base model is loaded. Raises OverrideArchMismatch, BaseModelError."""
    from transplant.plan import plan
    from transplant.slots import SLOTS

    for kind, file in zip(SLOTS, (arguments.unet, arguments.unet_secondary), strict=True):
        if file is None:
            continue
        component = kind.component_in(base)
        if component is None:
            lacks = "no transformer that a file could replace" if kind is SLOTS[0] else "no second transformer"
            raise BaseModelError(f"{arguments.base} has {lacks}: leave {_FILES[kind.name]} out")
        plan(
            file, base, component=component, dtype=settings.dtype, device=settings.rests_on,
            use_mmap=settings.use_mmap, compute=settings.compute,
        )  # fmt: skip


def _check_writable(folder: Path) -> None:
    """Before a picture is drawn for it. Raises TransplantError."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise TransplantError(f"nothing can be written to {folder} ({error.strerror}): name another with -o") from error


def _refused(
    refusal: OverrideArchMismatch, arguments: argparse.Namespace, known: Mapping[str, Any] | None = None
) -> int:
    if arguments.json:
        told = {**(known or {"file": str(refusal.file)}), "verdict": "refused", "reason": type(refusal).__name__}
        told |= {"message": str(refusal), "problem": refusal.problem, "remedy": refusal.remedy}
        print(json.dumps(told, indent=2))
    else:
        print(f"refused: {printable(str(refusal))}", file=sys.stderr)
    return REFUSED
