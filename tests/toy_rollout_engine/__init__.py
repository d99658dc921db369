"""A rollout engine outside of verl: importing this package registers it as "toy".

`actor_rollout_ref.model.external_lib=tests.toy_rollout_engine actor_rollout_ref.rollout.name=toy` uses it in a run.
"""

from verl.config.rollout_engines import RolloutCapabilities, RolloutEngineSpec, register_rollout_engine

register_rollout_engine(
    RolloutEngineSpec(
        name="toy",
        title="the toy engine",
        engine="tests.toy_rollout_engine.engine:ToyEngine",
        settings="tests.toy_rollout_engine.engine:ToySettings",
        capabilities=RolloutCapabilities(
            settings=frozenset({"max_num_seqs", "engine_kwargs.external"}),
            deterministic_devices=("cpu",),
            has_truncated_logprobs=False,
        ),
    )
)
