"""Trainer ranks: megatron-core GPTModel, tree attention, the loss, checkpoints, the loop that claims micro-steps."""
