"""Train a small language model on a text, as two replicas of a pipeline of two stages, on islands of this machine.

Run it with `python examples/train_lm.py [TEXT]`. `pathway train` is the same with a settings file, checkpoints and a
loss curve; the model is in pathway/programs/llm/model.py, and what happens in a step in training.py beside it.
"""

import sys
import tempfile
from pathlib import Path

import pathway as pw
from pathway.programs.llm.model import Config
from pathway.programs.llm.settings import Parallel, Settings, Train
from pathway.programs.llm.training import Trainer, in_one_process, islands_for


def main(text: Path, steps: int = 30) -> None:
    settings = Settings(
        text=text,
        directory=Path(tempfile.mkdtemp()),
        model=Config(layers=4, width=64, heads=4, kv_heads=2, hidden=176, context=64),
        parallel=Parallel(replicas=2, stages=2, microbatches=2),
        train=Train(steps=steps, batch=16, warmup=5),
    )
    with pw.connect(islands=islands_for(settings)):
        trainer = Trainer(settings)
        losses = [trainer.step() for _ in range(steps)]  # futures: nothing is waited for
        print(f"loss {float(losses[0]):.3f} -> {float(losses[-1]):.3f}, held out {trainer.held_out_loss():.3f}")
        print("the replicas are the same to the last bit:", trainer.replicas_agree())
        print(trainer.sample(b"The ", 60).decode(errors="replace"))
    print(f"in one process, plain JAX: -> {in_one_process(settings, steps)[-1]:.3f}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1] / "LICENSE"))
