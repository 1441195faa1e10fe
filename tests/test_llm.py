"""The language model: cut into stages, split over devices and replicated, it is the same model."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathway as pw
from pathway.programs import data_parallel, pipeline
from pathway.programs.llm import model, text

SMALL = model.Config(vocabulary=32, layers=3, width=16, heads=4, kv_heads=2, hidden=24, context=12)


def tokens(rows: int = 8) -> tuple[Any, Any]:
    drawn = np.random.default_rng(0).integers(0, SMALL.vocabulary, (rows, SMALL.context + 1)).astype(np.int32)
    return drawn[:, :-1], drawn[:, 1:]


def loss(params: Any, x: Any, t: Any, config: model.Config = SMALL) -> Any:
    return model.cross_entropy(model.logits(params, x, config), t)


def test_no_position_sees_what_comes_after_it() -> None:
    params, (x, _) = model.init(SMALL), tokens(1)
    changed = x.copy()
    changed[:, 7] = (changed[:, 7] + 1) % SMALL.vocabulary
    before, after = model.logits(params, x, SMALL), model.logits(params, changed, SMALL)
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert not np.allclose(before[:, 7:], after[:, 7:])


def test_attention_depends_on_distance_alone() -> None:
    x = np.random.default_rng(0).normal(size=(1, 6, 2, 8)).astype(np.float32)
    rotated = model.rotated(jnp.broadcast_to(x[:, :1], x.shape), 10_000.0)
    scores = np.einsum("bqhd,bshd->hqs", rotated, rotated)
    np.testing.assert_allclose(scores[:, 1, 0], scores[:, 4, 3], rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(rotated, axis=-1)[0, 5], np.linalg.norm(x[0, 0], axis=-1), rtol=1e-6)


def test_a_new_model_knows_nothing_and_counts_itself() -> None:
    for tied in (True, False):
        config = model.Config(vocabulary=32, layers=2, width=16, heads=4, kv_heads=2, hidden=24, context=12, tied=tied)
        params, (x, t) = model.init(config), tokens()
        assert float(loss(params, x, t, config)) == pytest.approx(np.log(32), rel=0.05)
        assert config.parameters() == sum(leaf.size for leaf in jax.tree.leaves(params))
        assert jax.tree.structure(params) == jax.tree.structure(
            model.specs(config), is_leaf=lambda leaf: isinstance(leaf, P)
        )


@pytest.mark.parametrize("tied", [True, False])
def test_stages_are_the_model(tied: bool) -> None:
    config = model.Config(vocabulary=32, layers=3, width=16, heads=4, kv_heads=2, hidden=24, context=12, tied=tied)
    params, (x, _) = model.init(config), tokens()
    for cut in ([[0, 1, 2]], [[0], [1, 2]], [[], [0, 1, 2], []]):
        y: Any = x
        for stage in model.stages(config, cut):
            y = stage.run(stage.pick(params), y)
        np.testing.assert_allclose(y, model.logits(params, x, config), rtol=1e-5, atol=1e-6)


def put(params: Any, specs: Any, parts: Any, slices: Any) -> Any:
    """Every parameter on the slice of the first stage that picks it."""
    home: dict[int, pw.Slice] = {}
    for part, slice in zip(parts, slices, strict=True):
        for leaf in jax.tree.leaves(part.pick(params)):
            home.setdefault(id(leaf), slice)
    return jax.tree.map(lambda leaf, spec: pw.put(leaf, home[id(leaf)], spec), params, specs)


def test_pipelines_in_two_islands_with_split_layers_train_the_same_model(client: Any) -> None:
    params, (x, t) = model.init(SMALL), tokens()
    parts = model.stages(SMALL, [[0, 1], [2]])
    every = model.specs(SMALL)
    pipes, placed = [], []
    for island in ("east", "west"):
        slices = [pw.slice(2, mesh={"model": 2}, island=island) for _ in parts]
        stages = [
            pw.jit(slice, in_specs=(part.pick(every), P()), name=f"stage{number}")(part.run)
            for number, (slice, part) in enumerate(zip(slices, parts, strict=True))
        ]
        pipes.append(pipeline(stages, model.cross_entropy, microbatches=2, params_of=[part.pick for part in parts]))
        placed.append(put(params, every, parts, slices))
    step = data_parallel(pipes)
    value, gradients = step(placed, x, t)
    expected, expected_gradients = jax.value_and_grad(loss)(params, x, t)
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    assert len(set(step.checksums(gradients))) == 1
    for a, b in zip(jax.tree.leaves(pw.get(gradients[1])), jax.tree.leaves(expected_gradients), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


def test_what_is_no_model() -> None:
    with pytest.raises(pw.ConfigError, match="heads divide the width"):
        model.Config(width=10, heads=4)
    with pytest.raises(pw.ConfigError, match="not the 3 layers in order"):
        model.stages(SMALL, [[0], [2]])


def test_batches_follow_from_the_step(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(256)) * 8)
    read = text.read(tmp_path / "text", 16)
    inputs, targets = text.batch(read.train, 4, 16, seed=1, step=5)
    again, _ = text.batch(read.train, 4, 16, seed=1, step=5)
    other, _ = text.batch(read.train, 4, 16, seed=1, step=6)
    np.testing.assert_array_equal(inputs, again)
    assert not np.array_equal(inputs, other)
    np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
    assert inputs.shape == targets.shape == (4, 16)
    with pytest.raises(pw.ConfigError, match="too few for a context of 200"):
        text.read(tmp_path / "text", 200)
    with pytest.raises(pw.ConfigError, match="cannot be read"):
        text.read(tmp_path / "nothing", 16)


def test_byte_pairs(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    sentence = "So long as men can breathe or eyes can see, naïve ☕, so long lives this.\n"
    (tmp_path / "text").write_text(sentence * 200, encoding="utf-8")
    read = text.read(tmp_path / "text", 16, 300, tmp_path / "run" / "tokenizer.json")
    content = (sentence * 200).encode()
    train = read.tokens.decode(read.train.tolist())
    assert train + read.tokens.decode(read.held_out.tolist()) == content
    assert train.endswith(b"\n")
    assert 256 <= read.train.max() < 300
    assert len(read.train) < len(train) / 2
    assert read.tokens.decode(read.tokens.encode("not in it: żółw".encode()).tolist()) == "not in it: żółw".encode()
    again = text.read(tmp_path / "text", 16, 300)
    np.testing.assert_array_equal(read.train, again.train)  # the same text, the same tokens
    (tmp_path / "text").write_text(sentence * 100 + "Or not.\n" * 500, encoding="utf-8")
    saved = text.read(tmp_path / "text", 16, 300, tmp_path / "run" / "tokenizer.json")
    np.testing.assert_array_equal(saved.tokens.encode(content), read.tokens.encode(content))
    with pytest.raises(pw.ConfigError, match="cannot have all 256 bytes"):
        text.read(tmp_path / "text", 16, 100)
    (tmp_path / "text").write_bytes(b"\xff\xfe" * 1000)
    with pytest.raises(pw.ConfigError, match="UTF-8"):
        text.read(tmp_path / "text", 16, 300)


# -- training ---------------------------------------------------------------------------------------------------------

optax = pytest.importorskip("optax")

from pathway.programs.llm.settings import Parallel, Settings, Train, read_settings  # noqa: E402
from pathway.programs.llm.training import Trainer, in_one_process  # noqa: E402


def settings_in(folder: Path, **parallel: Any) -> Settings:
    (folder / "text").write_bytes(b"to be, or not to be, that is the question: " * 60)
    return Settings(
        text=folder / "text",
        directory=folder / "run",
        model=model.Config(layers=2, width=16, heads=4, kv_heads=2, hidden=24, context=12),
        parallel=Parallel(**{"stages": 2, "microbatches": 2, **parallel}),
        train=Train(steps=8, batch=8, warmup=2, learning_rate=1e-2, evaluate_batches=1),
    )


@pytest.mark.parametrize(
    "parallel", [{"replicas": 1, "tensor": 2}, {"replicas": 2, "schedule": "zero_bubble"}], ids=["tensor", "replicas"]
)
def test_training_on_islands_is_training_in_one_process(client: Any, tmp_path: Path, parallel: Any) -> None:
    settings = settings_in(tmp_path, **parallel)
    trainer = Trainer(settings)
    losses = [float(trainer.step()) for _ in range(6)]
    np.testing.assert_allclose(losses, in_one_process(settings, 6), rtol=2e-4)
    assert losses[-1] < losses[0]
    assert trainer.replicas_agree()
    assert trainer.held_out_loss() < losses[0]
    assert len(trainer.sample(b"to be", 3)) == 8
    trainer.release()


def test_a_resumed_training_is_the_same_to_the_last_bit(client: Any, tmp_path: Path) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    trainer = Trainer(settings_in(tmp_path, replicas=1))
    assert not trainer.resume()
    for _ in range(3):
        trainer.step()
    folder = trainer.save()
    expected = [float(trainer.step()) for _ in range(3)]
    trainer.release()

    again = Trainer(settings_in(tmp_path, replicas=2))  # onto other slices
    assert again.resume()
    assert again.step_number == 3
    again.release()

    same = Trainer(settings_in(tmp_path, replicas=1))
    assert same.resume()
    assert [float(same.step()) for _ in range(3)] == expected
    same.release()

    with ocp.PyTreeCheckpointer() as checkpointer:  # plain Orbax
        found = checkpointer.restore(folder)
    assert found["params"]["embedding"].shape == (256, 16)


def test_checkpoints_that_do_not_fit(client: Any, tmp_path: Path) -> None:
    pytest.importorskip("orbax.checkpoint")
    trainer = Trainer(settings_in(tmp_path, replicas=1))
    folder = trainer.save()
    trainer.release()
    import dataclasses

    other = settings_in(tmp_path, replicas=1)
    wider = Trainer(dataclasses.replace(other, model=dataclasses.replace(other.model, width=32)))
    with pytest.raises(pw.ConfigError, match=r"of another model: .* is \(256, 16\), and \(256, 32\) in the model"):
        wider.resume()
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_file() and "d" in path.parent.name:
            path.write_bytes(b"")
    with pytest.raises(pw.ConfigError, match="cannot be read"):
        wider.resume()
    wider.release()


def test_the_example_trains(client: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from examples import train_lm

    monkeypatch.setattr(pw, "connect", lambda *_, **__: contextlib.nullcontext(client))
    train_lm.main(Path(__file__).parents[1] / "LICENSE", steps=3)
    shown = capsys.readouterr().out
    assert "the replicas are the same to the last bit: True" in shown
    [ours, twins] = re.findall(r"-> ([\d.]+)", shown)
    assert float(ours) == pytest.approx(float(twins), abs=2e-3)


def test_the_command_trains_saves_goes_on_and_draws(
    cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("orbax.checkpoint")
    from pathway.cli import main

    small = settings_in(tmp_path)
    toml = tmp_path / "train.toml"
    shape = "layers = 2\nwidth = 16\nheads = 4\nkv_heads = 2\nhidden = 24\ncontext = 12\n"
    for steps in (3, 5):
        toml.write_text(
            f'text = "text"\ndirectory = "run"\n[model]\n{shape}[parallel]\nstages = 2\nmicrobatches = 2\n'
            f"[train]\nsteps = {steps}\nbatch = 8\nwarmup = 2\nevaluate_batches = 1\npeak_flops = 1e9\n"
        )
        assert main(["train", str(toml), "--address", cluster.address, "--sample", "4"]) == 0
        pw.disconnect()
    shown = capsys.readouterr().out
    assert "going on from step 3" in shown
    assert shown.count("held-out loss") == 2
    assert sorted(path.name for path in small.directory.iterdir()) == ["loss.svg", "step_3", "step_5"]
    assert "</svg>" in (small.directory / "loss.svg").read_text()
    assert read_settings(toml).model == small.model
    assert main(["train", str(tmp_path / "nothing.toml")]) == 2


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ('text = "x"\n[model]\nwidht = 3', "no 'widht' here"),
        ('text = "x"\n[train]\nsteps = "many"', "steps is of type int, not 'many'"),
        ("[model]\nwidth = 64", "text is missing"),
        ('text = "x"\n[train]\nbatch = 6', "cannot be dealt out"),
        ('text = "x"\n[parallel]\nstages = 9', "cannot be cut into 9 stages"),
        ('text = "x"\n[parallel]\ntensor = 3', "split over 3 devices"),
        ("text", "train.toml"),
    ],
)
def test_settings_that_make_no_sense(tmp_path: Path, toml: str, message: str) -> None:
    (tmp_path / "train.toml").write_text(toml)
    with pytest.raises(pw.ConfigError, match=message):
        read_settings(tmp_path / "train.toml")
