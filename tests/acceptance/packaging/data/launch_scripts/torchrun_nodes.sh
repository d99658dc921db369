# given: NODE_RANK=1 MASTER_ADDR=10.0.0.1
torchrun --nnodes ${NNODES:-2} --node-rank $NODE_RANK --nproc-per-node 8 --master_addr="$MASTER_ADDR" --master_port=29500 \
    -m verl.trainer.sft_trainer model.partial_pretrain=Qwen/Qwen2.5-0.5B data.micro_batch_size_per_gpu=4
