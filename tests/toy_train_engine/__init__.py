"""A training engine outside verl/: plain PyTorch, a copy of the model on every rank, one sequence at a time.

Importing this package registers the engine as `toy`. A run uses it with
`actor_rollout_ref.model.external_lib=tests.toy_train_engine actor_rollout_ref.actor.strategy=toy`.
"""

from verl.config.train_engines import TrainEngineSpec, register_train_engine

register_train_engine(
    TrainEngineSpec(
        "toy",
        "tests.toy_train_engine.engine:ToyEngine",
        "tests.toy_train_engine.settings:ToySettings",
        frozenset({"many_ranks"}),
    )
)
