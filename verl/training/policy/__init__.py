"""The part of a training step that a rank computes from samples: log-probs, advantages, updates; and the teacher."""
