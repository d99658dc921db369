name=$'tab\there'
python3 -m verl.trainer.main_ppo trainer.project_name='Übung λ' "trainer.experiment_name=$name" data.note='a
b'
