#!/bin/bash
mkdir -p shards && touch shards/a.parquet shards/b.parquet
shopt -s nullglob
files=(shards/*.parquet)
joined=$(IFS=,; echo "${files[*]}")
python3 -m verl.trainer.main_ppo "data.train_files=[${joined}]" data.val_files=[$(echo {x,y}.parquet | tr ' ' ',')] \
    data.seed={1..1} trainer.nnodes=${#files[@]} data.other="*.parquet"
