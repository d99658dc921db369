mkdir -p conf
cat > conf/overrides.txt <<END
data.train_batch_size=64
trainer.experiment_name=from_file
END
python3 -m verl.trainer.main_ppo $(cat conf/overrides.txt) $(grep -c . conf/overrides.txt | sed 's/^/trainer.nnodes=/')
