# open: DATA_DIR
python3 -m verl.trainer.main_ppo data.train_files=$DATA_DIR/train.parquet "data.val_files=['${DATA_DIR}/test.parquet']" \
    trainer.default_local_dir=${OUTPUT_DIR:-outputs}/run
