# part of source_env.sh
COMMON=(algorithm.adv_estimator=rloo data.seed=3)
describe() { echo "trainer.experiment_name=run-$1"; }
