"""`scripts/predict.py`: what the entropy loss would take at a size that was not measured."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tpbench.predict import render
from tpbench.predict.cells import ITEM_BYTES, Measured, Size, measured
from tpbench.predict.memory import ASSUMPTION, MODELS, free_gib
from tpbench.predict.model import VariantModel, models
from tpbench.report.rows import read_rows
from tpbench.settings import JobError, unknown

LOSSES = ("cross_entropy", "soft_cross_entropy", "reverse_kl", "forward_kl")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; exits 1 when a validation misses its aims, 2 for what cannot be answered."""
    asked = _parser().parse_args(arguments)
    try:
        found = measured(read_rows(asked.rows), asked.gpu)
        made = models(found, errors=not asked.picture)
        if not made:
            raise JobError(f"no variant was measured in enough cells on {found.gpu} to predict from")
        if asked.picture:
            _picture(found, made, asked)
            return 0
        if asked.validate:
            said, reached = render.validation(made, found)
            print(said, end="")
            return 0 if reached else 1
        print(_answer(found, made, asked), end="")
    except (JobError, OSError) as error:
        print(f"predict: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="predict.py",
        description="Time, communication and memory of the entropy loss at any size, from a model fitted to rows.",
        epilog=f"What a model leaves free is an assumption: {ASSUMPTION}.",
    )
    parser.add_argument("--vocab", type=_positive, default=131072, help="columns of logits (131072)")
    parser.add_argument("--tp", type=_positive, default=8, help="tensor-parallel ranks (8)")
    parser.add_argument("--tokens", type=_positive, default=4096, help="rows of logits per replica (4096)")
    parser.add_argument("--loss", default="cross_entropy", choices=LOSSES)
    parser.add_argument("--dtype", default="bfloat16", choices=ITEM_BYTES)
    parser.add_argument(
        "--gpu-memory",
        type=float,
        default=80.0,
        metavar="GIB",
        help="memory of a GPU: an 80 GB one has 80 GiB, a 141 GB one 140 (80)",
    )
    parser.add_argument("--beside", choices=MODELS, help="a model in training that takes its share of that memory")
    parser.add_argument("--variant", metavar="A,B", help="only these variants")
    parser.add_argument("--rows", nargs="+", default=["outputs"], metavar="PLACE", help="rows to fit to (outputs)")
    parser.add_argument("--gpu", metavar="NAME", help="fit to rows of this GPU (the one with most)")
    parser.add_argument("--format", default="text", choices=("text", "json"))
    parser.add_argument(
        "--validate", action="store_true", help="predict each measured cell from the others, show the errors"
    )
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw where the gather becomes infeasible (.png, .svg)"
    )
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def _answer(found: Measured, made: Mapping[str, VariantModel], asked: argparse.Namespace) -> str:
    if asked.vocab < asked.tp:
        raise JobError(f"--vocab {asked.vocab} cannot be sharded over --tp {asked.tp}")
    size = Size(asked.tokens, asked.vocab, asked.tp, asked.loss, asked.dtype)
    able = {head: model for head, model in made.items() if size.loss in model.fits["peak_gib"].losses}
    for name in asked.variant.split(",") if asked.variant else ():
        if name not in able:
            raise JobError(unknown("variant with enough cells", name, able))
    if asked.variant:
        able = {head: able[head] for head in asked.variant.split(",")}
    if not able:
        raise JobError(f"loss={size.loss} was not measured on {found.gpu}")
    free = free_gib(asked.gpu_memory, size, MODELS.get(asked.beside))
    form = render.as_json if asked.format == "json" else render.text
    return form([model(size) for model in able.values()], able, size, free, found.gpu)


def _picture(found: Measured, made: Mapping[str, VariantModel], asked: argparse.Namespace) -> None:
    from tpbench.predict.picture import draw
    from tpbench.report.plots import style

    style.require()
    if "pytorch_gather" not in made:
        raise JobError("pytorch_gather was not measured in enough cells")
    form = asked.picture.suffix.removeprefix(".")
    if form not in ("png", "svg"):
        raise JobError(f"--picture {asked.picture} must end in .png or .svg")
    with style.drawing("feasible"):
        figure = draw(made["pytorch_gather"], made.get("triton_tp"), found.cells, asked.loss)
        asked.picture.write_bytes(style.png(figure) if form == "png" else style.svg(figure))
    print(f"predict: wrote {asked.picture}", file=sys.stderr)
