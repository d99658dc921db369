"""Thin Ray actors that bind engines and episodes to the cluster, and the clients through which the trainer calls them.
The logic is one layer down (training, rollout, agents); here is only what crosses processes. Imported by trainer."""
