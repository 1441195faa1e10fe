"""`pathway train SETTINGS.toml`: progress, loss curve, checkpoints, resuming, a sample of what was learned."""

from __future__ import annotations

import argparse
import collections
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import pathway as pw
from pathway.programs.llm.curve import draw_curves
from pathway.programs.llm.settings import Settings, read_settings

STEPS_IN_FLIGHT = 4
"""So many steps are started before the loss of the first is read."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="pathway train",
        description="Train a language model on a text, as pipelines on islands. Goes on from the latest checkpoint "
        "in the settings' directory.",
        epilog="example: pathway train examples/train_lm.toml",
    )
    parser.add_argument("settings", type=Path, help="a TOML file: docs/training.md says what is in it")
    parser.add_argument(
        "--address", metavar="ADDRESS", help="a cluster (default: one on this machine, with an island for each stage)"
    )
    parser.add_argument("--sample", type=int, default=200, metavar="N", help="write N tokens at the end (%(default)s)")
    options = parser.parse_args(argv)
    settings = read_settings(options.settings)
    try:
        from pathway.programs.llm.training import Trainer, islands_for
    except ImportError as error:
        raise SystemExit(f"training needs {error.name}: pip install 'pathway-jax[train]'") from None
    console = Console()
    with pw.connect(options.address, islands=None if options.address else islands_for(settings)):
        trainer = Trainer(settings)
        if trainer.resume():
            console.print(f"going on from step {trainer.step_number}")
        run(trainer, settings, console)
        console.print(trainer.sample(b"\n", options.sample).decode(errors="replace"), markup=False)
    return 0


def run(trainer: Any, settings: Settings, console: Console) -> None:
    """Train to the last step, with all that is to happen on the way."""
    train, config = settings.train, settings.model
    losses: list[tuple[int, float]] = []
    held_out: list[tuple[int, float]] = []
    in_flight: collections.deque[tuple[int, Any]] = collections.deque()
    columns = [TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, TextColumn("{task.fields[shown]}"), console=console) as progress:
        task = progress.add_task("", total=train.steps, completed=trainer.step_number, shown="")
        began, first = time.monotonic(), trainer.step_number

        def read_until(left: int) -> None:
            while len(in_flight) > left:
                number, future = in_flight.popleft()
                losses.append((number, float(future)))
                rate = (number + 1 - first) * train.batch * config.context / (time.monotonic() - began)
                progress.update(task, completed=number + 1, shown=_shown(settings, losses, held_out, rate))

        while trainer.step_number < train.steps:
            in_flight.append((trainer.step_number, trainer.step()))
            done = trainer.step_number
            evaluates, saves = _is_due(done, train.evaluate_every, train), _is_due(done, train.save_every, train)
            read_until(0 if evaluates or saves else STEPS_IN_FLIGHT)
            if evaluates:
                held_out.append((done - 1, trainer.held_out_loss()))
                if not trainer.replicas_agree():
                    raise pw.PathwayError(f"after step {done} the replicas have different parameters")
            if saves:
                trainer.save()
    settings.directory.mkdir(parents=True, exist_ok=True)
    curve = settings.directory / "loss.svg"
    curve.write_text(
        draw_curves({"training": losses, "held out": held_out}, f"loss, in nats a {trainer.text.tokens.unit}")
    )
    if held_out:
        console.print(f"held-out loss {held_out[-1][1]:.4f}; wrote {curve}")


def _is_due(done: int, every: int, train: Any) -> bool:
    return done == train.steps or bool(every and done % every == 0)


def _shown(settings: Settings, losses: list[tuple[int, float]], held_out: list[Any], tokens_per_s: float) -> str:
    flops = tokens_per_s * settings.model.flops_per_token()
    shown = f"loss {losses[-1][1]:.4f}  {tokens_per_s:,.0f} tokens/s  {flops / 1e9:,.1f} GFLOP/s"
    shown += f"  MFU {flops / settings.train.peak_flops:.1%}" if settings.train.peak_flops else ""
    return shown + (f"  held out {held_out[-1][1]:.4f}" if held_out else "")


if __name__ == "__main__":
    sys.exit(main())
