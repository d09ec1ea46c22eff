"""Runs of train_lm.py's model in local steps, each a process of its own, for sync_training.py.

python benchmarks/_local_training.py RUNS NAME CONFIG OPTIMIZER OUTER EVERY STEPS
"""

import json
import pathlib
import subprocess
import sys

import _results

REPLICAS = 8
SEED = 0


def summary_of(runs: pathlib.Path, name: str, *options: object) -> dict:
    """The summary of the run runs/name; it is trained with the options unless it is finished."""
    summary = runs / name / "summary.json"
    if not summary.exists():
        command = [sys.executable, __file__, str(runs), name, *map(str, options)]
        subprocess.run(command, check=True)
    return json.loads(summary.read_text())


def train(folder: pathlib.Path, config: str, optimizer: str, outer: str, every: int, steps: int):
    """Trains replicas that meet every so many steps; writes metrics.jsonl and summary.json.

    ``outer`` is ``"none"`` for ordinary steps, ``"mean"`` (local SGD) or ``"nesterov"`` (DiLoCo).
    """
    import jax

    jax.config.update("jax_num_cpu_devices", REPLICAS)
    sys.path.insert(0, str(_results.ROOT / "examples"))
    import jax.numpy as jnp
    import numpy as np
    import optax
    import train_lm

    import sharding as shd

    shape = train_lm.CONFIGS[config]
    corpus = train_lm.Corpus(None, shape.context)
    model = train_lm.TransformerLM(shape)
    peak = train_lm.OPTIMIZERS[optimizer][1] * shape.learning_rate_scale
    tx, _ = train_lm.make_optimizer(optimizer, peak, steps)

    def loss_fn(params, windows):
        logits = train_lm.apply_model(model, params, windows[:, :-1])
        return train_lm.token_losses(logits, windows).mean()

    def make_state(key):
        params = model.init(key, jnp.zeros((1, corpus.context), jnp.int32))["params"]
        return params, tx.init(params)

    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((REPLICAS, 1), ("replica", "data"), auto)
    zero = shd.Zero(mesh, 1, replica_axis="replica")
    held_out = np.split(corpus.validation(16 * shape.batch_size), 16)
    evaluate = zero.eval_step(loss_fn)
    if outer == "none":
        trainer = zero
    else:
        of_outer = optax.sgd(1.0) if outer == "mean" else None
        trainer = shd.LocalSteps(zero, of_outer, every=every)
    state = trainer.init(make_state, jax.random.key(SEED), tx=tx)
    step = trainer.train_step(loss_fn, tx=tx)

    def validate() -> float:
        whole = state if trainer is zero else trainer.merged(state)
        return float(np.mean([evaluate(whole, zero.put(x)) for x in held_out]))

    wire = 0.0
    if trainer is not zero:
        wire = shd.wire_bytes(trainer.lower_sync(state).compile()) / every
    else:
        like = zero.put(corpus.batch(SEED, 1, shape.batch_size))
        wire = shd.wire_bytes(step.lower(state, like).compile())
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for i in range(1, steps + 1):
        state, found = step(state, trainer.put(corpus.batch(SEED, i, shape.batch_size)))
        found = found if isinstance(found, tuple) else (found,)
        rows.append({"step": i, "loss": float(np.mean([x["loss"] for x in found]))})
        if i % max(1, steps // 5) == 0:  # replicas have met in each of these steps
            rows[-1]["val_loss"] = validate()
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    (folder / "metrics.jsonl").write_text(lines)
    summary = {"val_loss": rows[-1]["val_loss"], "wire_bytes": wire}
    (folder / "summary.json").write_text(json.dumps(summary))


if __name__ == "__main__":
    of_runs, run_name, of_config, of_optimizer, of_steps, number, total = sys.argv[1:]
    own = pathlib.Path(of_runs) / run_name
    train(own, of_config, of_optimizer, of_steps, int(number), int(total))
