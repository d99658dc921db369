#!/bin/bash
# python3 -m verl.trainer.main_ppo data.seed=0
ARGS="
    data.seed=1
    data.shuffle=False
"   # not a comment of the array
python3 -m verl.trainer.main_ppo $ARGS \
    `# data.seed=3` \
    trainer.experiment_name=a#b \
    trainer.total_epochs=2 # trainer.total_epochs=99
