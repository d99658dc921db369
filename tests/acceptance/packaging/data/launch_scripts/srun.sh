#!/bin/bash
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
# given: SLURM_JOB_NUM_NODES=2
module load cuda/12.4
source /opt/venv/bin/activate
srun --nodes=1 --ntasks=1 bash -c "ray start --head && python3 -m verl.trainer.main_ppo trainer.nnodes=$SLURM_JOB_NUM_NODES trainer.experiment_name='a b'"
srun --overlap python3 -m verl.trainer.main_ppo trainer.nnodes=1
