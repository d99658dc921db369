"""`main_ppo`: the next batch is generated while a batch is trained."""
