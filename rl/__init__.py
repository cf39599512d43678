"""Learning: advantages, losses, packed batches, the DeepSpeed learner and weight publication."""
