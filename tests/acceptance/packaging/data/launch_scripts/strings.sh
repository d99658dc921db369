model=/models/Qwen2.5-7B-Instruct.ckpt
name=${model##*/}
base=${name%.ckpt}
lower=${base,,}
python3 -m verl.trainer.main_ppo "trainer.experiment_name=${lower//-/_}" trainer.project_name=${base:0:4} \
    trainer.default_local_dir=${model%/*}/${#base} 'data.prompt_key="my prompt"' data.system="say \"\$5\" \`now\`"
