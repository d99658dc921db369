cd /workspace/verl || exit 1
/opt/conda/bin/python -m verl.trainer.main_ppo data.seed=1 trainer.default_local_dir=$(pwd)/ckpt
/usr/bin/env python3 -m verl.trainer.main_ppo data.seed=2
export PATH=/opt/conda/bin:$PATH
python -m verl.trainer.main_ppo data.seed=3
